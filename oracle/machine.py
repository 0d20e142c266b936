"""A rule-based state machine over one arena: its model is contiguous caches, one per stream.

    ArenaMachine.TestCase            our kernels
    arena_machine(kernels).TestCase  anyone's, with some or all of the functions of `operations.Kernels`

Streams arrive, append windows, end and give their pages to others; pages are handed out in any order. After every
step each stream's rows in the arena have the bits of its contiguous model, and no page has two owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..fast import Engine
from ..reference.geometry import TEXT, TINY, Geometry, Weights
from ..reference.layout import BF16, PARTS, LayerCache, Layout
from .cases import at_check, weights_of
from .compare import Site, compare_bits
from .memory import FastKernels
from .operations import AXES, Kernels

PAGES = 24
LAYER = 1
MOST = 96
"""Positions that one stream may hold: its contiguous model's size."""


@dataclass(eq=False)
class Stream:
    """One stream: its pages in the arena, and its contiguous model."""

    number: int
    model: LayerCache
    pages: list[int] = field(default_factory=list)
    length: int = 0


class ArenaMachine(RuleBasedStateMachine):
    """Streams over one paged arena, each beside a contiguous cache that must agree with it to the bit."""

    kernels: Kernels
    geometry: Geometry = at_check(TINY)
    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Stream] = []
        self.count = 0

    @initialize(page_blocks=st.integers(1, 5), seed=st.integers(0, 2**16))
    def start(self, page_blocks: int, seed: int) -> None:
        """An arena of stale rows: what it held before is plausible, so reading it shows."""
        g = self.geometry
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.weights: Weights = weights_of(g, rng)
        self.layout = Layout(geometry=g, page_size=page_blocks * g.block, pages=PAGES)
        self.arena = rng.standard_normal(self.layout.elements, dtype=np.float32).astype(BF16)
        self.free = list(range(PAGES))

    @rule(target=streams)
    def add(self) -> Stream:
        """A stream that holds nothing yet."""
        layout = Layout.contiguous(self.geometry, MOST)
        self.count += 1
        stream = Stream(self.count, LayerCache(buffer=layout.zeros(), layout=layout, layer=LAYER))
        self.live.append(stream)
        return stream

    @rule(stream=streams, rows=st.integers(1, 9), where=st.integers(0, PAGES))
    def append(self, stream: Stream, rows: int, where: int) -> None:
        """Run a window over the stream, in the arena and in its model; `where` chooses the pages it takes."""
        if stream not in self.live or stream.length + rows > MOST or not self._grow(stream, rows, where):
            return
        projection = self.rng.standard_normal((rows, self.geometry.projection_width), dtype=np.float32).astype(BF16)
        got = self._window(self._cache(stream), projection, stream.length)
        want = self._window(stream.model, projection, stream.length)
        site = Site(stream=stream.number, pos0=stream.length, cache=self._cache(stream))
        for name, array in want.items():
            difference = compare_bits(name, got[name], array, AXES[name], site)
            assert difference is None, str(difference)
        stream.length += rows

    @rule(stream=streams)
    def end(self, stream: Stream) -> None:
        """Give a stream's pages back; what they hold stays, stale."""
        if stream in self.live:
            self.live.remove(stream)
            self.free += stream.pages

    @precondition(lambda self: len(self.live) > 1)
    @rule(seed=st.integers(0, 2**16))
    def shuffle(self, seed: int) -> None:
        """Move every stream to other pages, contents and all."""
        order = np.random.default_rng(seed).permutation(PAGES)
        pages = self.arena.reshape(PAGES, -1)
        moved = np.empty_like(pages)
        moved[order] = pages
        self.arena = moved.reshape(-1)
        self.free = [int(order[page]) for page in self.free]
        for stream in self.live:
            stream.pages = [int(order[page]) for page in stream.pages]

    @invariant()
    def every_stream_has_its_models_bits(self) -> None:
        """Keys, values, indexer keys and pooled rows, of both layers' arena, against the contiguous model."""
        for stream in self.live:
            for part in PARTS:
                rows = np.arange(stream.length // (self.geometry.block if part == "pooled" else 1))
                site = Site(stream=stream.number, pos0=0, cache=self._cache(stream))
                got, want = (cache.read(part, rows) for cache in (self._cache(stream), stream.model))
                difference = compare_bits(f"cache.{part}", got, want, ("position", "head", "element"), site)
                assert difference is None, str(difference)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        """Pages in use and free pages together are all pages, once each."""
        if hasattr(self, "free"):
            owned = [page for stream in self.live for page in stream.pages]
            assert sorted(owned + self.free) == list(range(PAGES)), f"pages {owned} and free {self.free}"

    def _grow(self, stream: Stream, rows: int, where: int) -> bool:
        """Take the pages that the window needs; False, and nothing taken, where there are too few."""
        needed = -(-(stream.length + rows) // self.layout.page_size) - len(stream.pages)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            stream.pages.append(self.free.pop(where % len(self.free)))
        return True

    def _cache(self, stream: Stream) -> LayerCache:
        """The stream through its table, behind which stand pages that are not its own."""
        foreign = [page for page in range(PAGES) if page not in stream.pages][:2]
        table = np.array(stream.pages + foreign, np.int32)
        return LayerCache(buffer=self.arena, layout=self.layout, layer=LAYER, table=table)

    def _window(self, cache: LayerCache, projection: npt.NDArray[Any], pos0: int) -> dict[str, npt.NDArray[Any]]:
        """Every kernel's result over a window."""
        g, k, rows = self.geometry, self.kernels, len(projection)
        prepared = k.prep(g, self.weights, cache, projection, pos0, TEXT)
        k.pool(g, self.weights, cache, pos0, rows, TEXT)
        scores = k.scores(g, cache, prepared.iq, pos0)
        lists = k.select(g, scores, pos0)
        partials = k.chunks(g, cache, prepared.q, lists)
        out = k.merge(g, partials)
        return {
            "prep.q": prepared.q,
            "prep.iq": prepared.iq,
            "scores.scores": scores,
            "select.ids": lists.ids,
            "chunks.o": partials.o,
            "chunks.l": partials.l,
            "merge.out": out,
            "gate.gated": k.gate(g, out, projection),
        }


class _Filled:
    """Someone's kernels, with ours where a function is missing."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels
        self._ours = FastKernels(Engine())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name, None) or getattr(self._ours, name)


def arena_machine(kernels: Any = None, *, geometry: Geometry = TINY) -> type[ArenaMachine]:
    """The machine for some kernels, ours on the CPU when None; run its `TestCase`.

    Functions that the kernels do not have are ours, and so not judged.
    """
    chosen = FastKernels(Engine()) if kernels is None else _Filled(kernels)
    return type("ArenaMachine", (ArenaMachine,), {"kernels": chosen, "geometry": at_check(geometry)})
