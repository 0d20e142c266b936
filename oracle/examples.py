"""Drawn examples for the contract: short streams near every edge, and rows whose key counts differ.

The six cases of `cases` are few and long, for a user's own run. A fault has to be found among many small ones: this is
the stream of inputs that the fault catalogue and the mutants are held against, the same one for each seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..fast import CompileError, LaunchError
from ..reference.geometry import CHUNK, TILE, Geometry
from ..reference.layout import BF16, LayerCache, Layout
from ..reference.results import Bf16Array, KeyLists
from . import bounds
from .cases import CHECK_LAYERS, Case, Profile, RopeMode, StreamCase
from .compare import Site, compare_bits, compare_bound
from .contract import Plan, check
from .operations import AXES, Array, Kernels
from .report import Failure, Report
from .variants import Variant

ROWS = "rows"
"""How reports call rows whose key counts differ."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw.

    Attributes:
        number: of the draw.
        case: two streams; its name, which seeds the data, holds the number.
        page_size: of the paged runs.
        lengths: key counts of rows that are attended together, one of them 0.
        replay: the command line that comes back to it.
    """

    number: int
    case: Case
    page_size: int
    lengths: tuple[int, ...]
    replay: str


def draw(geometry: Geometry, *, seed: int, replay: str = "") -> Iterator[Draw]:
    """Examples without end, the first on an edge of everything; the same seed gives the same ones."""
    rng = np.random.Generator(np.random.PCG64([seed, 0x6578]))
    yield _edges(geometry, replay)
    for number in itertools.count(2):
        yield _example(geometry, rng, number, replay)


def run_example(geometry: Geometry, example: Draw, variants: Sequence[Variant], report: Report, *, seed: int) -> None:
    """Run one example through every gate: the contract's, and the rows of `check_rows`.

    Args:
        variants: at least one; the first gives the truth.
    """
    plan = Plan(
        geometry=geometry,
        cases=(example.case,),
        page_sizes=(example.page_size,),
        seed=seed,
        replay=example.replay,
        captured=False,
    )
    check(plan, variants, report)
    check_rows(geometry, example, variants, report, seed=seed)


def _edges(geometry: Geometry, replay: str) -> Draw:
    """A first window, one that turns from dense to sparse inside a media prompt, one that crosses a chunk with ties."""
    first = StreamCase(cached=0, rows=geometry.block + 1)
    turning = StreamCase(cached=geometry.budget - 2, rows=2 * geometry.block + 3, rope="media")
    crossing = StreamCase(cached=2 * CHUNK - 2, rows=5, profile="tied")
    return Draw(
        number=1,
        case=Case(name="drawn-1", edge="both", streams=(first, turning, crossing), dense_rows=3),
        page_size=4 * geometry.block,
        lengths=(TILE + 1, 0, 2 * CHUNK + 1, CHUNK),
        replay=replay,
    )


def _example(geometry: Geometry, rng: np.random.Generator, number: int, replay: str) -> Draw:
    block = geometry.block
    case = Case(
        name=f"drawn-{number}",
        edge="drawn",
        streams=(_stream(geometry, rng, long=False), _stream(geometry, rng, long=True)),
        dense_rows=int(rng.integers(1, 4)),
    )
    page_size = block * int(rng.choice([1, 2, 3, 4, 12, 16]))
    lengths = (0, *(_length(rng, (1, TILE, CHUNK, 2 * CHUNK)) for _ in range(3)))
    return Draw(
        number=number,
        case=case,
        page_size=page_size,
        lengths=tuple(int(x) for x in rng.permutation(lengths)),
        replay=replay,
    )


_PROFILES: tuple[Profile, ...] = ("normal", "normal", "tied", "tied", "zeros", "heavy", "tiny", "huge")


def _length(rng: np.random.Generator, edges: Sequence[int]) -> int:
    """A length at most 3 away from one of the edges."""
    return max(0, int(rng.choice(edges)) + int(rng.integers(-3, 4)))


def _stream(geometry: Geometry, rng: np.random.Generator, *, long: bool) -> StreamCase:
    """A stream of any length, or a long one: controls need a stream that has something to swap."""
    sparse_from = geometry.budget + geometry.block
    edges = (2 * sparse_from, TILE, CHUNK, 2 * CHUNK, 4 * CHUNK) if long else (0, geometry.block, sparse_from, TILE)
    cached = _length(rng, edges)
    rows = int(rng.choice([1, 2, 3, 5, 9]))
    modes: tuple[RopeMode, ...] = ("text", "delta", "media")
    return StreamCase(
        cached=cached,
        rows=rows,
        rope=modes[int(rng.integers(3))],
        profile=_PROFILES[int(rng.integers(len(_PROFILES)))],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Queries of rows that attend different numbers of keys, over one cache."""

    q: Bf16Array
    lists: KeyLists
    cache: LayerCache

    def row(self, number: int) -> _Rows:
        """One of them alone."""
        return _Rows(
            q=self.q[number : number + 1], lists=KeyLists.dense(self.lists.nk[number : number + 1]), cache=self.cache
        )


_TENSORS = {name: AXES[name] for name in ("dense.o", "dense.m", "dense.l", "dense.out")}
_Judge: TypeAlias = Callable[[str, str | None], None]


def check_rows(geometry: Geometry, example: Draw, variants: Sequence[Variant], report: Report, *, seed: int) -> None:
    """Attend rows of different key counts together, one of them without keys.

    bits: paged equals contiguous, the form that loads ahead equals the plain one, and each row alone equals the row
    among the others. bound: partials and merged rows against float64. memory: guards; rows past the longest are NaN.
    """
    flat, paged = _rows(geometry, example, seed=seed)
    where = f"rows of {', '.join(map(str, example.lengths))} keys, page {example.page_size}"

    def judge(gate: str, message: str | None) -> None:
        if message is None:
            report.passed(gate, ROWS)
        else:
            report.failed(Failure(gate=gate, kernel=ROWS, where=where, message=message, replay=example.replay))

    def compare(got: dict[str, Array], want: dict[str, Array], what: str) -> None:
        for name, array in got.items():
            found = compare_bits(name, array, want[name], _TENSORS[name], Site(stream=0, pos0=0))
            judge("bits", None if found is None else f"{what}: {found}")

    try:
        truth = _attend(geometry, variants[0].kernels, flat)
        _bound(geometry, flat, truth, judge)
        for variant in variants:
            for ahead in (False, True):
                compare(_attend(geometry, variant.kernels, paged, ahead=ahead), truth, f"paged, {variant.name}")
            broken = variant.broken_guards()
            judge("memory", "; ".join(broken) if broken else None)
        for number in range(len(flat.q)):
            alone = _attend(geometry, variants[0].kernels, flat.row(number))
            among = {name: x[number : number + 1, : alone[name].shape[1]] for name, x in truth.items()}
            compare(alone, among, f"row {number} alone")
        variants[0].broken_guards()
    except (LaunchError, CompileError) as error:
        judge("bits", str(error))


def _attend(geometry: Geometry, kernels: Kernels, rows: _Rows, *, ahead: bool = False) -> dict[str, Array]:
    launch = kernels.chunks_ahead if ahead else kernels.chunks
    partials = launch(geometry, rows.cache, rows.q, rows.lists)
    out = kernels.merge(geometry, partials)
    return {"dense.o": partials.o, "dense.m": partials.m, "dense.l": partials.l, "dense.out": out}


def _bound(geometry: Geometry, rows: _Rows, truth: dict[str, Array], judge: _Judge) -> None:
    partials = bounds.chunks(geometry, rows.cache, rows.q, rows.lists)
    intervals = {
        "dense.o": partials.o,
        "dense.m": partials.m,
        "dense.l": partials.l,
        "dense.out": bounds.attention(geometry, partials),
    }
    for name, interval in intervals.items():
        _, found = compare_bound(name, truth[name], interval, _TENSORS[name], Site(stream=0, pos0=0))
        judge("bound", None if found is None else str(found))


def _rows(geometry: Geometry, example: Draw, *, seed: int) -> tuple[_Rows, _Rows]:
    """The same rows over a contiguous cache and over a shuffled arena; everything else is NaN."""
    rng = np.random.Generator(np.random.PCG64([seed, example.number, 0x726F]))
    longest, page_size = max(example.lengths), example.page_size
    need = max(1, -(-longest // page_size))
    arena = Layout(geometry=geometry, page_size=page_size, pages=need + 2)
    table = rng.permutation(arena.pages)[:need].astype(np.int32)
    flat = _cache(Layout.contiguous(geometry, max(1, longest)), None)
    paged = _cache(arena, table)
    shape = (longest, geometry.kv_heads, geometry.head_dim)
    keys, values = _normal(rng, shape), _normal(rng, shape)
    for cache in (flat, paged):
        cache.write("keys", np.arange(longest), keys)
        cache.write("values", np.arange(longest), values)
    q = _normal(rng, (len(example.lengths), geometry.query_heads, geometry.head_dim))
    lists = KeyLists.dense(example.lengths)
    return _Rows(q=q, lists=lists, cache=flat), _Rows(q=q, lists=lists, cache=paged)


def _cache(layout: Layout, table: npt.NDArray[np.int32] | None) -> LayerCache:
    return LayerCache(buffer=np.full(layout.elements, np.nan, BF16), layout=layout, layer=CHECK_LAYERS - 1, table=table)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Bf16Array:
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)
