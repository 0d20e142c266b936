"""How often a kernel reads each entry of the page table, counted on the CPU while the kernel runs.

The one place where the sources read the table also adds to a counter behind the table's end. With pages of one block,
a look-up more or less for any key of any tile shows in the count of its page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ... import fast
from ...fast import Engine, HostBackend, KernelSources
from ...reference.geometry import TEXT, Geometry
from ...reference.layout import BF16, LayerCache, Layout
from ...reference.results import KeyLists
from ..cases import weights_of

_FILE = "pages.cuh"
_READ = "pages.table[page]"
_COMMENT, _USE = re.compile(r"//[^\n]*"), re.compile(r"\.table\b|->table\b")
_COUNTERS = 1 << 12
"""Entries from the table's start to its counters; a table may have so many pages."""
_COUNTED = f"(__atomic_fetch_add(const_cast<int*>(pages.table) + page + {_COUNTERS}, 1, __ATOMIC_RELAXED), {_READ})"

THREADS = 20
"""Of a block, no divisor of a tile."""

Counts = npt.NDArray[np.int64]
"""Look-ups of each logical page."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookups:
    """Of one kernel: what was counted, and what one look-up a key and tile makes; both of each page.

    Attributes:
        found, due: the counts.
    """

    found: Counts
    due: Counts

    @property
    def agree(self) -> bool:
        """Whether every page was looked up as often as is due."""
        return bool(np.array_equal(self.found, self.due))


def counting(sources: KernelSources) -> KernelSources:
    """These kernels with every read of the page table counted.

    Raises:
        ValueError: the sources read the table in another place, too, or nowhere.
    """
    uses = {file: len(_USE.findall(_COMMENT.sub("", text))) for file, text in sources.texts.items()}
    found = {file: count for file, count in uses.items() if count}
    if found != {_FILE: 2}:  # one look whether there is a table, one read
        raise ValueError(f"the kernels use the page table in {found}; only {_READ!r} of {_FILE} is counted")
    return sources.edit(_FILE, _READ, _COUNTED)


def lookups(
    geometry: Geometry, *, positions: int, rows: int, sources: KernelSources | None = None, gpu_split: bool = True
) -> Mapping[str, Lookups]:
    """Run the kernels that take a page table over a window, each look-up counted.

    `chunks` runs over the lists that `select` makes: of every row one block of threads for each key/value head and
    chunk looks up each listed key once. `scores` looks up each complete block of a sparse row once. In `prep` and
    `pool` every thread of a block looks up the block's one row of a cache part.

    Args:
        positions: that the stream holds after the window.
        rows: of the window.
        gpu_split: share work among a block's threads as a GPU does.

    Raises:
        ValueError: there are more positions than counters, or the sources read the table in two places.
    """
    pages = -(-positions // geometry.block)
    if pages > _COUNTERS:
        raise ValueError(f"positions is {positions}; there are counters for {_COUNTERS * geometry.block}")
    backend = HostBackend(workers=1)
    engine = Engine(backend, sources=counting(sources or KernelSources()), threads=THREADS, gpu_split=gpu_split)
    return _Counting(engine, replace(geometry, layers=1), positions, rows, pages).all()


class _Counting:
    """One stream whose pages are its blocks, through a table with counters behind it."""

    def __init__(self, engine: Engine, geometry: Geometry, positions: int, rows: int, pages: int) -> None:
        self._engine, self._geometry, self._pages = engine, geometry, pages
        self._pos0, self._rows = positions - rows, rows
        self._rng = np.random.Generator(np.random.PCG64(positions))
        self._table = np.zeros(2 * _COUNTERS, np.int32)
        self._table[:pages] = self._rng.permutation(pages)
        layout = Layout(geometry=geometry, page_size=geometry.block, pages=pages)
        self._cache = LayerCache(buffer=self._normal(layout.elements), layout=layout, table=self._table)
        self._weights = weights_of(geometry, self._rng)

    def all(self) -> dict[str, Lookups]:
        """The counts of every kernel that takes a page table, by name."""
        g, cache, engine, weights, pos0, rows = (
            self._geometry,
            self._cache,
            self._engine,
            self._weights,
            self._pos0,
            self._rows,
        )
        made = fast.prep(g, weights, cache, self._normal(rows, g.projection_width), pos0, TEXT, engine=engine)
        found = {"prep": Lookups(found=self._taken(), due=THREADS * (2 * g.kv_heads + 1) * self._of(self._window()))}
        fast.pool(g, weights, cache, pos0, rows, TEXT, engine=engine)
        found["pool"] = Lookups(found=self._taken(), due=THREADS * 2 * self._completed())
        scores = fast.scores(g, cache, made.iq, pos0, engine=engine)
        found["scores"] = Lookups(found=self._taken(), due=self._scored())
        lists = fast.select(g, scores, pos0, engine=engine)
        for name, run in (("chunks", fast.chunks), ("chunks_ahead", fast.chunks_ahead)):
            run(g, cache, made.q, lists, engine=engine)
            found[name] = Lookups(found=self._taken(), due=g.kv_heads * self._listed(lists))
        return found

    def _normal(self, *shape: int) -> npt.NDArray[np.generic]:
        return self._rng.standard_normal(shape, dtype=np.float32).astype(BF16)

    def _taken(self) -> Counts:
        """The counts since the last time."""
        counters = self._table[_COUNTERS : _COUNTERS + self._pages]
        found = counters.astype(np.int64)
        counters[:] = 0
        return found

    def _window(self) -> npt.NDArray[np.int64]:
        return np.arange(self._pos0, self._pos0 + self._rows, dtype=np.int64)

    def _of(self, positions: npt.NDArray[np.int64]) -> Counts:
        """How many of these positions each page holds."""
        return np.bincount(positions // self._geometry.block, minlength=self._pages).astype(np.int64)

    def _completed(self) -> Counts:
        """1 for each block that the window completes."""
        ends = self._window()
        return self._of(ends[(ends + 1) % self._geometry.block == 0])

    def _scored(self) -> Counts:
        """For each block, the sparse rows that score it."""
        complete = (self._window() + 1) // self._geometry.block
        sparse = complete[complete > self._geometry.top_blocks]
        counts: Counts = (np.arange(self._pages)[:, None] < sparse).sum(axis=1, dtype=np.int64)
        return counts

    def _listed(self, lists: KeyLists) -> Counts:
        """How many keys of each page the rows list."""
        counts = np.zeros(self._pages, np.int64)
        for ids, keys, sparse in zip(lists.ids, lists.nk, lists.sparse, strict=True):
            counts += self._of(ids[:keys].astype(np.int64) if sparse else np.arange(keys, dtype=np.int64))
        return counts
