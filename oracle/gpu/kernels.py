"""The kernels on a GPU for checks that live on the host: NumPy arrays in, NumPy arrays out, guards around every output.

Everything a call is given is copied to the device and what it may have changed is copied back, so that the gates, which
compare on the host, see the device's bytes: those of the outputs, of the whole cache and of the projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import fast
from ...fast import Backend, Engine
from ...fast.arrays import T, map_arrays
from ...reference.arrays import describe
from ...reference.geometry import Geometry, Rope, Weights
from ...reference.layout import LayerCache
from ...reference.results import (
    Bf16Array,
    KeyLists,
    Partials,
    Prepared,
    require_chunks,
    require_scores,
    require_store,
    require_window,
)
from ..arithmetic import OURS
from ..memory import GUARD, GUARD_BYTES
from ..variants import Variant
from .memory import differ, spread

THREADS = (192, 64, 256)
"""Threads of a block, by variant; the first gives the truth."""

_POISON = (0xFF, 0x7F, 0x55)
"""What an output holds before its kernel runs, by variant: NaN, a huge value, a plausible one."""


class GuardedOutput:
    """An output on a device: the inside of an array of bytes, between guards.

    Args:
        raw: uint8 [size + 2 * GUARD_BYTES] on the device.
        device: its number.
    """

    def __init__(self, raw: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
        self.raw = raw
        self.shape = shape
        self.dtype = dtype
        self._device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        facts = describe(self.raw)
        if facts is None:
            raise TypeError(f"a {type(self.raw).__name__} is no array")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (facts.address + GUARD_BYTES, False),
            "strides": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device)


class GuardedDevice(Engine):
    """An engine on a device whose every output lies between guard bytes and starts poisoned.

    Args:
        poison: the byte that fills an output before its kernel runs.
    """

    def __init__(self, backend: Backend, *, threads: int, poison: int) -> None:
        super().__init__(backend, threads=threads)
        self.poison = poison
        self._broken: list[str] = []

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A poisoned array between guards, which `fetch` looks at."""
        kind, device = np.dtype(dtype), self.backend.device
        if device is None:
            raise ValueError(f"backend {self.backend.name!r} is no device; use memory.GuardedEngine there")
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = np.full(size + 2 * GUARD_BYTES, GUARD, np.uint8)
        raw[GUARD_BYTES : GUARD_BYTES + size] = self.poison
        return GuardedOutput(self.backend.upload(raw), tuple(shape), kind, device)

    def fetch(self, value: T) -> T:
        """NumPy copies of the outputs in a value; what their guards tell is kept for `broken_guards`."""
        return map_arrays(value, self._fetch)

    def broken_guards(self) -> list[str]:
        """What was written outside the outputs fetched since the last call."""
        found, self._broken = self._broken, []
        return found

    def _fetch(self, output: GuardedOutput) -> npt.NDArray[Any]:
        raw = self.backend.download(output.raw)
        inside = raw[GUARD_BYTES:-GUARD_BYTES]
        touched = np.flatnonzero(np.concatenate([raw[:GUARD_BYTES], raw[-GUARD_BYTES:]]) != GUARD)
        if len(touched):
            first = int(touched[0]) - GUARD_BYTES
            where = f"{-first} bytes before" if first < 0 else f"byte {first} behind"
            self._broken.append(
                f"{len(touched)} guard bytes changed, the first {where} an output of {len(inside)} bytes"
            )
        made: npt.NDArray[Any] = inside.view(output.dtype).reshape(output.shape)
        return made


class DeviceKernels:
    """`operations.Kernels` on a device: what the host's kernels would refuse is refused here too, before a launch."""

    arithmetic = OURS

    def __init__(self, engine: GuardedDevice) -> None:
        self.engine = engine

    def prep(
        self, geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
    ) -> Prepared:
        require_window(geometry, weights, cache, projection, pos0, rope)
        prepared: Prepared = self._run(fast.prep, geometry, weights, cache, projection, pos0, rope)
        return prepared

    def pool(self, geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope) -> None:
        require_store(geometry, weights, cache, pos0, rows, rope)
        self._run(fast.pool, geometry, weights, cache, pos0, rows, rope)

    def scores(self, geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> npt.NDArray[np.float32]:
        require_scores(geometry, cache, iq, pos0)
        scores: npt.NDArray[np.float32] = self._run(fast.scores, geometry, cache, iq, pos0)
        return scores

    def select(self, geometry: Geometry, scores: npt.NDArray[np.float32], pos0: int) -> KeyLists:
        lists: KeyLists = self._run(fast.select, geometry, scores, pos0)
        return lists

    def chunks(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        require_chunks(geometry, cache, q, lists)
        partials: Partials = self._run(fast.chunks, geometry, cache, q, _told(lists))
        return partials

    def chunks_ahead(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        require_chunks(geometry, cache, q, lists)
        partials: Partials = self._run(fast.chunks_ahead, geometry, cache, q, _told(lists))
        return partials

    def merge(self, geometry: Geometry, partials: Partials) -> Bf16Array:
        out: Bf16Array = self._run(fast.merge, geometry, partials)
        return out

    def gate(self, geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> Bf16Array:
        gated: Bf16Array = self._run(fast.gate, geometry, out, projection)
        return gated

    def _run(self, kernel: Callable[..., Any], *given: Any) -> Any:
        """Call a kernel with copies of what it is given; they live until its results are here."""
        backend = self.engine.backend
        mine = [self.engine.upload(value) for value in given]
        caches = [(host.buffer, device.buffer) for host, device in zip(given, mine, strict=True) if _is_cache(host)]
        before = [spread(backend, device, len(host)) for host, device in caches]
        made = self.engine.fetch(kernel(*mine, engine=self.engine))
        for (host, device), old in zip(caches, before, strict=True):
            if differ(backend, device, old):  # an arena is large, and most kernels leave it as it is
                self._take_over(host, device)
        for host, device in zip(given, mine, strict=True):
            if isinstance(host, np.ndarray):
                self._take_over(host, device)
        return made

    def _take_over(self, host: npt.NDArray[Any], device: Any) -> None:
        """Let the host's array hold what the device's copy holds now, as if the kernel had run on it."""
        np.copyto(host.view(np.uint8), self.engine.backend.download(device).view(np.uint8))


def _is_cache(value: object) -> bool:
    return isinstance(value, LayerCache)


def _told(lists: KeyLists) -> KeyLists:
    """Lists that tell of themselves what a device array does not let anyone look up."""
    longest = int(lists.nk.max(initial=0))
    return dataclasses.replace(lists, longest=longest, end=max(longest, int(lists.ids.max(initial=-1)) + 1))


def cuda_variants(backend: Backend) -> tuple[Variant, ...]:
    """A device with three numbers of threads to a block, each over other poison."""
    engines = [GuardedDevice(backend, threads=n, poison=poison) for n, poison in zip(THREADS, _POISON, strict=True)]
    return tuple(
        Variant(
            name=f"{engine.threads} threads",
            kernels=DeviceKernels(engine),
            broken_guards=engine.broken_guards,
            prepare=engine.prepare,
        )
        for engine in engines
    )
