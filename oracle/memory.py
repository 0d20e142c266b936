"""Memory checks: guard bytes around every output, and what may change in an arena."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import fast
from ..fast import Backend, Capture, Engine, KernelSources
from ..fast.capture import active_capture
from ..reference.geometry import Geometry, Rope, Weights
from ..reference.layout import PARTS, LayerCache
from ..reference.results import Bf16Array, KeyLists, Partials, Prepared
from .arithmetic import OURS
from .compare import bits
from .fenced import fenced
from .scene import Scene

GUARD_BYTES = 256
GUARD = 0xA5

_Bytes: TypeAlias = npt.NDArray[np.uint8]


class GuardedEngine(Engine):
    """An engine whose every output lies between guard bytes, those between fences, and starts poisoned.

    Outputs that are made while a step is captured belong to it: they are watched for as long as it lives, and their
    memory is never used again.

    Args:
        poison: the byte that fills an output before its kernel runs; 0xFF reads as NaN.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        sources: KernelSources | None = None,
        threads: int | None = None,
        gpu_split: bool = False,
        poison: int = 0xFF,
    ) -> None:
        super().__init__(backend, sources=sources, threads=threads, gpu_split=gpu_split)
        self.poison = poison
        self._guarded: list[_Bytes] = []
        self._captured: list[tuple[weakref.ref[Capture], _Bytes]] = []
        self._free: dict[int, list[_Bytes]] = {}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A poisoned array between guards, which `broken_guards` watches from now on."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = self._take(size + 2 * GUARD_BYTES)
        raw[:] = GUARD
        raw[GUARD_BYTES : GUARD_BYTES + size] = self.poison
        step = active_capture()
        if step is None:
            self._guarded.append(raw)
        else:
            self._captured.append((weakref.ref(step), raw))
        inside: npt.NDArray[Any] = raw[GUARD_BYTES : GUARD_BYTES + size].view(kind).reshape(tuple(shape))
        return inside

    def broken_guards(self) -> list[str]:
        """What was written since the last call outside the outputs made since then, and those of captured steps.

        The memory of the former is used again from now on.
        """
        watched = [*self._guarded, *(raw for _, raw in self._captured)]
        found = [told for raw in watched if (told := _broken_guard(raw)) is not None]
        for raw in self._guarded:
            self._free.setdefault(len(raw), []).append(raw)
        self._guarded.clear()
        self._captured = [(step, raw) for step, raw in self._captured if step() is not None]
        return found

    def _take(self, size: int) -> _Bytes:
        """Fenced memory, where it is the host's."""
        if self.backend.name != "host":
            raw: _Bytes = self.backend.empty((size,), np.uint8)
            return raw
        free = self._free.get(size)
        return free.pop() if free else fenced(size)


def _broken_guard(raw: _Bytes) -> str | None:
    """What was written before or behind an output, whose guards are whole again then; None where nothing was."""
    size = len(raw) - 2 * GUARD_BYTES
    before, behind = raw[:GUARD_BYTES], raw[GUARD_BYTES + size :]
    touched = np.flatnonzero(np.concatenate([before, behind]) != GUARD)
    if not len(touched):
        return None
    before[:] = behind[:] = GUARD
    first = int(touched[0])
    where = f"{GUARD_BYTES - first} bytes before" if first < GUARD_BYTES else f"byte {first - GUARD_BYTES} behind"
    return f"{len(touched)} guard bytes changed, the first {where} an output of {size} bytes"


class FastKernels:
    """The functions of `kvproof.fast` on one engine, as `operations.Kernels`."""

    arithmetic = OURS

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def prep(
        self, geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
    ) -> Prepared:
        return fast.prep(geometry, weights, cache, projection, pos0, rope, engine=self.engine)

    def pool(self, geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope) -> None:
        fast.pool(geometry, weights, cache, pos0, rows, rope, engine=self.engine)

    def scores(self, geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> npt.NDArray[np.float32]:
        return fast.scores(geometry, cache, iq, pos0, engine=self.engine)

    def select(self, geometry: Geometry, scores: npt.NDArray[np.float32], pos0: int) -> KeyLists:
        return fast.select(geometry, scores, pos0, engine=self.engine)

    def chunks(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        return fast.chunks(geometry, cache, q, lists, engine=self.engine)

    def chunks_ahead(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        return fast.chunks_ahead(geometry, cache, q, lists, engine=self.engine)

    def merge(self, geometry: Geometry, partials: Partials) -> Bf16Array:
        return fast.merge(geometry, partials, engine=self.engine)

    def gate(self, geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> Bf16Array:
        return fast.gate(geometry, out, projection, engine=self.engine)


def changed(scene: Scene, want: Scene) -> str | None:
    """The first element of the scene's buffers that is not what it should be, and how many are not; else None."""
    seen: set[int] = set()
    for stream, (got, expected) in enumerate(zip(scene.buffers, want.buffers, strict=True)):
        if id(got) in seen:
            continue
        seen.add(id(got))
        if np.array_equal(got.view(np.uint64), expected.view(np.uint64)):
            continue
        differs = bits(got) != bits(expected)
        first = int(differs.argmax())
        return (
            f"{int(differs.sum())} elements changed that no kernel may write, the first at element {first} "
            f"({_owner(scene, stream, first)}): 0x{int(bits(got)[first]):04x}, want 0x{int(bits(expected)[first]):04x}"
        )
    return None


def _owner(scene: Scene, stream: int, offset: int) -> str:
    """Whose element this is: the stream, logical page, layer, part, row, head and element."""
    layout = scene.layouts[stream]
    for layer in range(scene.geometry.layers):
        for part in PARTS:
            found = layout.part(layer, part).locate(offset)
            if found is None:
                continue
            page, row, head, element = found
            return f"{_page_owner(scene, stream, page)}layer {layer}, {part}, row {row}, head {head}, element {element}"
    return "no part of the layout"


def _page_owner(scene: Scene, stream: int, page: int) -> str:
    if scene.tables[stream] is None:
        return f"stream {stream}, "
    for number, table in enumerate(scene.owned):
        if table is not None and page in table:
            return f"page {page}: stream {number}, table entry {int(np.flatnonzero(table == page)[0])}, "
    return f"page {page}, of no stream: "
