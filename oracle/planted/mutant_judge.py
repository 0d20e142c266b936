"""Judges changed kernels against the unchanged ones: what sees the change, if anything does.

contract      drawn examples through every gate (`examples`), at several geometries and thread counts
pinned bits   the unchanged kernels' own results, bit for bit, over the same draws and over edges of each function
sanitizer     the same once more, compiled so that an index past an array stops the launch
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ...fast import ORDERS, CompileError, HostBackend, KernelSources, LaunchError
from ...fast.host_backend import Order
from ...reference.geometry import TILE, TINY, Geometry
from ...reference.layout import BF16, LayerCache, Layout
from ...reference.results import KeyLists, Partials
from .. import elementary
from ..cases import at_check, fill
from ..compare import bits
from ..contract import LAYER
from ..examples import Draw, draw, run_example
from ..operations import OPERATIONS, Array, Call, Kernels
from ..report import Failure, Report
from ..scene import Workspace, contiguous, with_pooled
from ..variants import Variant, host_variants

Status: TypeAlias = Literal["killed", "survived", "equivalent", "invalid"]

LAUNCH_S = 5.0
"""CPU seconds of one launch; an unchanged one takes milliseconds."""

ODD = Geometry(
    name="odd",
    query_heads=18,
    kv_heads=2,
    head_dim=40,
    index_heads=3,
    index_dim=24,
    block=8,
    top_blocks=3,
    rotary_half=12,
    mrope_sections=(7, 2, 3),
    layers=2,
)
"""What TINY cannot tell apart: no powers of two that need not be, short sections, groups too large for one thread."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What kernels are compiled for and run over.

    Attributes:
        geometry: of the kernels.
        order: of the threads, the only one that is run; "shuffle" shares work out as a GPU does (`host_variants`).
        threads: of a block.
        draws: examples that are run.
    """

    geometry: Geometry
    order: Order
    threads: int
    draws: int

    def variant(self, sources: KernelSources, *flags: str) -> Variant:
        """The kernels as this setup runs them."""
        variants = host_variants(seed=0, sources=sources, backend=_backend(*flags), threads=self.threads)
        return variants[ORDERS.index(self.order)]

    def examples(self) -> tuple[Draw, ...]:
        """The draws, the same at each call."""
        return tuple(itertools.islice(draw(self.geometry, seed=1), self.draws))

    def __str__(self) -> str:
        return f"{self.geometry.name}, {self.threads} threads, {self.order}"


SETUPS = (
    Setup(geometry=at_check(TINY), order="shuffle", threads=20, draws=4),
    Setup(geometry=at_check(TINY), order="forward", threads=1, draws=2),
    Setup(geometry=ODD, order="shuffle", threads=20, draws=3),
)
"""20 threads: no divisor of a tile, no multiple of the lanes, more than a head has pieces. One: all loops go round."""

SANITIZER = (
    "-fsanitize=alignment,bounds,object-size,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)
"""Compiler flags that stop at an index past an array, a shift past a word, or 16 bytes that do not start at 16."""


def portable(sources: KernelSources | None = None) -> KernelSources:
    """The kernels with the lanes of `cuda/lanes.cuh` in place of the host's own: loads and stores as on a GPU."""
    return (sources or KernelSources()).edit("lanes.cuh", _HOST_LANES, "#if 0")


_HOST_LANES = "#ifdef KVP_HOST"


class _SeenError(Exception):
    """The first red check."""


class _FirstRed(Report):
    """A report that ends the run at its first failure."""

    def failed(self, failure: Failure) -> None:
        raise _SeenError(f"{failure.gate} of {failure.kernel}")


def judge(base: KernelSources, changed: KernelSources) -> tuple[Status, str]:
    """Run changed kernels until something sees the change: ("killed", by what), or ("survived", "").

    A change that does not compile is ("invalid", the compiler's message).
    """
    try:
        by = _by_contract(changed) or _by_pinned_bits(base, changed) or _by_sanitizer(changed)
    except CompileError as error:
        return "invalid", error.details.partition("\n")[0]
    return ("killed", by) if by else ("survived", "")


def _backend(*flags: str) -> HostBackend:
    return HostBackend(flags=("-O1", *flags), workers=1, timeout_s=LAUNCH_S)


def _by_contract(changed: KernelSources) -> str:
    for setup in SETUPS:
        variants = (setup.variant(changed),)
        for example in setup.examples():
            try:
                run_example(setup.geometry, example, variants, _FirstRed(), seed=0)
            except _SeenError as seen:
                return f"{seen}, {setup}"
            except ValueError as error:  # results that the next kernel refuses
                return f"validation, {setup}: {error}"
    return ""


def _by_pinned_bits(base: KernelSources, changed: KernelSources) -> str:
    for setup in SETUPS:
        want = _results(base, setup)
        try:
            got = _results(changed, setup)
        except (LaunchError, ValueError) as error:
            return f"pinned bits: {error}"
        for name, array in want.items():
            if array.shape != got[name].shape or not np.array_equal(bits(array), bits(got[name])):
                return f"pinned bits of {name}, {setup}"
    return ""


def _by_sanitizer(changed: KernelSources) -> str:
    changed = portable(changed) if _HOST_LANES in changed.texts["lanes.cuh"] else changed
    for setup in SETUPS:
        try:
            _results(changed, setup, *SANITIZER)
        except (LaunchError, ValueError) as error:
            return f"sanitizer: {error}"
    return ""


def _results(sources: KernelSources, setup: Setup, *flags: str) -> dict[str, Array]:
    """What the kernels give, whole: over the draws, and over edges that no draw reaches."""
    kernels = setup.variant(sources, *flags).kernels
    found: dict[str, Array] = {}
    for example in setup.examples():
        results = _window(kernels, setup.geometry, example)
        found |= {f"{example.case.name} {name}": array for name, array in results.items()}
    edges = (_lists, _merges, _gates, _zeros)
    for edge in edges:
        found |= edge(kernels, setup.geometry)
    return found | _functions(_backend(*flags), sources)


def _window(kernels: Kernels, geometry: Geometry, example: Draw) -> dict[str, Array]:
    data = with_pooled(fill(geometry, example.case, seed=0))
    scene = contiguous(data, Workspace())
    found: dict[str, Array] = {}
    for number, stream in enumerate(data.streams):
        call = Call(
            geometry=geometry,
            weights=data.weights,
            stream=number,
            pos0=stream.case.cached,
            projection=stream.projection,
            rope=stream.rope,
            dense_rows=example.case.dense_rows,
        )
        given: dict[str, Array] = {}
        for operation in OPERATIONS:
            cache = scene.cache(number, LAYER)
            given.update((name, x.copy()) for name, x in operation.run(kernels, call, given, cache, cache).items())
        found |= {f"{number} {name}": array for name, array in given.items()}
    return found


_WORDS = np.array(
    [0, 1 << 31, 1, 0x3F800000, 0x3F800001, 0x3F80FFFF, 0x40000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00001],
    np.uint32,
)
"""fp32 that order among each other: zeros, a subnormal, neighbours, infinities and NaN."""


def _lists(kernels: Kernels, geometry: Geometry) -> dict[str, Array]:
    """Key lists from scores of any bits."""
    rng = np.random.Generator(np.random.PCG64(5))
    found: dict[str, Array] = {}
    for pos0 in (geometry.budget + geometry.block - 1, 200, 1999):
        scores = rng.choice(_WORDS, (2, (pos0 + 2) // geometry.block)).view(np.float32)
        lists = kernels.select(geometry, scores, pos0)
        found |= {f"select {pos0} {name}": getattr(lists, name) for name in ("ids", "nk", "sparse")}
    return found


def _merges(kernels: Kernels, geometry: Geometry) -> dict[str, Array]:
    """Partials whose maxima lie far apart, empty ones that hold noise, and a row of -0."""
    rng = np.random.Generator(np.random.PCG64(6))
    shape = (9, 5, geometry.query_heads)
    m = (40 * rng.standard_normal(shape)).astype(np.float32)
    l = np.where(rng.random(shape) < 0.4, 0, rng.random(shape)).astype(np.float32)
    o = rng.standard_normal((*shape, geometry.head_dim)).astype(np.float32)
    o[0] = -0.0
    m[l == 0], o[l == 0] = -np.inf, np.nan
    return {"merge": kernels.merge(geometry, Partials(o, m, l))}


def _gates(kernels: Kernels, geometry: Geometry) -> dict[str, Array]:
    """Gates of all sizes."""
    rng = np.random.Generator(np.random.PCG64(7))
    wide = (rng.standard_normal((4, geometry.projection_width)) * [[1], [8], [60], [1e30]]).astype(BF16)
    out = rng.standard_normal((4, geometry.query_heads, geometry.head_dim)).astype(BF16)
    return {"gate": kernels.gate(geometry, out, wide)}


def _zeros(kernels: Kernels, geometry: Geometry) -> dict[str, Array]:
    """A tile whose scores are all -0, products that underflow, beside one whose scores are all +0; both ways round."""
    small = BF16.type(2.0**-100)
    found: dict[str, Array] = {}
    for first in (True, False):
        layout = Layout.contiguous(geometry, 2 * TILE)
        cache = LayerCache(buffer=layout.zeros(), layout=layout, layer=LAYER)
        tile = np.arange(TILE) + (0 if first else TILE)
        cache.write("keys", tile, np.full((TILE, geometry.kv_heads, geometry.head_dim), -small))
        q = np.full((1, geometry.query_heads, geometry.head_dim), small)
        partials = kernels.chunks(geometry, cache, q, KeyLists.dense([2 * TILE]))
        found |= {f"zeros {first} {name}": getattr(partials, name) for name in ("o", "m", "l")}
    return found


def _functions(backend: HostBackend, sources: KernelSources) -> dict[str, Array]:
    """The arithmetic by itself, over inputs that attention rarely meets."""
    functions = elementary.load(backend, sources)
    rng = np.random.Generator(np.random.PCG64(6))
    words = rng.integers(0, 2**32, 8192, dtype=np.uint32).view(np.float32)
    words[: len(_WORDS)] = _WORDS.view(np.float32)
    numbers = (rng.standard_normal(8192) * 10.0 ** rng.integers(-6, 7, 8192)).astype(np.float32)
    falling = -np.geomspace(1e-6, 200, 8192).astype(np.float32)
    falling[:3] = [-87.33654, -87.33653, -87.33655]  # on both sides of where exp ends
    zeros = np.where(rng.random(8192) < 0.5, rng.choice(_WORDS[:2], 8192).view(np.float32), numbers)
    angles = np.concatenate([numbers, np.linspace(0.7, 0.7853, 2**18, dtype=np.float32)])  # where the last terms count
    inputs = {
        "exps": falling,
        "turns": angles,
        "sigmoids": numbers,
        "roundings": words,
        "folds": zeros,
        "trees": numbers,
    }
    found: dict[str, Array] = {}
    for entry, x in inputs.items():
        found |= {f"{entry} {number}": array for number, array in enumerate(functions(entry, x))}
    return found
