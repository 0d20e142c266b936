"""A stream: its pages, its page table, the positions that each layer holds, and its media positions."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..reference.geometry import TEXT, Rope, Weights
from ..reference.layout import PARTS, LayerCache, Layout
from ..reference.results import Bf16Array, Window
from .backend import Fence
from .page_pool import PagePool
from .page_runs import part_rows, runs


class StreamError(RuntimeError):
    """A stream cannot do this; the message says why, and nothing was changed."""


class Stream:
    """One stream of a pool; close it, or use it in a `with` block, to give its pages back.

    Its page table is one array for as long as it lives, changed in place only, so that captured launches may read it.
    Rows past a layer's length are zeros in every page that it holds, as if they had never been written.

    Args:
        pool: where its pages come from.
        weights: of each layer, in the engine's memory.
        rope: rotary positions of all its rows: those of a media prompt are told here.

    Attributes:
        lengths: positions that each layer holds; a draft head's may differ from the others'.

    Raises:
        ValueError: the weights are not one for each layer, or do not fit the geometry.
    """

    def __init__(self, pool: PagePool, weights: Sequence[Weights], *, rope: Rope = TEXT) -> None:
        geometry, place = pool.geometry, pool.engine.place
        if len(weights) != geometry.layers:
            raise ValueError(f"weights of {len(weights)} layers are given; the geometry has {geometry.layers} layers")
        for layer_weights in weights:
            layer_weights.require(geometry, place)
        rope.require(place)
        self.pool = pool
        self.weights = tuple(weights)
        self.rope = rope
        self.number = pool.next_number()
        self.closed = False
        self.busy = False
        self._lengths = [0] * geometry.layers
        self._written = [0] * geometry.layers  # rows from a layer's length up to here may not be zeros
        self._pages: list[int] = []
        self._work: Fence | None = None
        self._caches: tuple[LayerCache, ...] = ()
        self._table: Any = None
        if not pool.contiguous:
            backend = pool.engine.backend
            self._table = backend.empty((pool.pages_for(pool.context),), np.int32)
            backend.zero(self._table)
            self._caches = self._make_caches(pool.arena, pool.layout)

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions that each layer holds."""
        return tuple(self._lengths)

    @property
    def length(self) -> int:
        """Positions that its longest layer holds."""
        return max(self._lengths)

    @property
    def pages(self) -> tuple[int, ...]:
        """Physical page of each logical page."""
        return tuple(self._pages)

    def cache(self, layer: int) -> LayerCache:
        """One layer of its cache, for the functions of `kvproof.fast`; a contiguous stream has one once it has a page.

        Raises:
            StreamError: it is closed, or contiguous and without a page.
        """
        self.require_open()
        if not self._caches:
            raise StreamError(f"{self} is contiguous and holds no page yet; reserve one (Stream.reserve)")
        return self._caches[layer]

    def append(self, projections: Sequence[Bf16Array]) -> list[Window]:
        """Append a window to every layer; see `append`, which takes several streams."""
        from .round import append  # which knows streams

        return append([(self, projections)])[0]

    def reserve(self, positions: int) -> None:
        """Take the pages that `positions` positions need; what it has stays.

        Raises:
            StreamError: that is more than a stream of this pool may hold.
            PoolExhaustedError: the pool has not enough free pages.
        """
        self.require_open()
        if positions > self.pool.context:
            raise StreamError(
                f"{self} would hold {positions} positions; a stream of this pool holds at most {self.pool.context}: "
                "make the pool with a larger context="
            )
        have = len(self._pages)
        taken = self.pool.take(self, max(0, self.pool.pages_for(positions) - have))
        if not taken:
            return
        try:
            self._enter(have, taken)
        except BaseException:
            self.pool.give_back(self, taken)
            raise
        self._pages += taken

    def roll_back(self, length: int, *, layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Forget the positions from `length` on, and the pooled rows of blocks that are no longer complete.

        Args:
            layers: on which; all when None.

        Returns:
            Positions forgotten on each of these layers.

        Raises:
            StreamError: a layer holds fewer, so that it cannot be what the caller thinks; nothing was changed.
        """
        self.require_idle()
        chosen = range(len(self._lengths)) if layers is None else tuple(layers)
        for layer in chosen:
            if not 0 <= length <= self._lengths[layer]:
                raise StreamError(
                    f"{self} cannot be rolled back to {length} positions: layer {layer} holds {self._lengths[layer]}; "
                    "nothing was rolled back"
                )
        removed = tuple(self._lengths[layer] - length for layer in chosen)
        for layer in chosen:
            self._lengths[layer] = length
        self.tidy()
        return removed

    def close(self) -> None:
        """Give all pages back; closing again does nothing.

        Raises:
            StreamError: a round is at work on it.
        """
        if self.closed:
            return
        self.require_idle()
        self.pool.give_back(self, self._pages)
        self._pages, self._caches, self.closed = [], (), True
        self._lengths = [0] * len(self._lengths)
        self._written = [0] * len(self._lengths)

    def require_open(self) -> None:
        """Raise StreamError if it is closed."""
        if self.closed:
            raise StreamError(f"{self} is closed; make another")

    def require_idle(self) -> None:
        """Raise StreamError if it is closed or a round is at work on it."""
        self.require_open()
        if self.busy:
            raise StreamError(f"a round is at work on {self}; end its `with` block first")

    # ---- what rounds and the prompt cache do with it ----

    def begin_writing(self, layer: int, end: int) -> None:
        """Rows of a layer up to position end - 1 are about to be written."""
        self._written[layer] = max(self._written[layer], end)

    def advance(self, layers: Sequence[int], length: int) -> None:
        """Rows up to position length - 1 of these layers are the stream's now."""
        for layer in layers:
            self._lengths[layer] = length
            self._written[layer] = max(self._written[layer], length)

    def order(self) -> None:
        """Let what is submitted next run behind the stream's last work, on whatever queue that was."""
        if self._work is not None:
            self._work.order()

    def mark(self) -> None:
        """What is submitted by now is the stream's last work."""
        self._work = self.pool.engine.backend.fence()

    def tidy(self) -> None:
        """Give back pages that hold no position, and zero the rows past each layer's length.

        What fails here is done again the next time: lengths and pages are right all along.
        """
        keep = self.pool.pages_for(self.length)
        surplus = self._pages[keep:]
        self.order()
        if surplus:
            self.pool.give_back(self, surplus)
            del self._pages[keep:]
            if self.pool.contiguous:
                self._caches = ()
        for layer in range(len(self._lengths)):
            self._zero_past_end(layer)
        self.mark()

    def _zero_past_end(self, layer: int) -> None:
        length, end = self._lengths[layer], min(self._written[layer], len(self._pages) * self.pool.page_size)
        if end > length:
            for part in PARTS:
                first, last = (part_rows(self.pool.layout, part, n) for n in (length, end))
                for where, _, _ in runs(self.pool.layout, self._pages, layer, part, first, last):
                    self.pool.engine.backend.zero(self.pool.arena[where])
        self._written[layer] = length

    def _enter(self, first: int, pages: Sequence[int]) -> None:
        """Make pages its logical pages from `first` on."""
        if self.pool.contiguous:
            layout = Layout(geometry=self.pool.geometry, page_size=self.pool.page_size)
            self._caches = self._make_caches(self.pool.page(pages[0]), layout)
        else:
            self.order()
            where = self._table[first : first + len(pages)]
            self.pool.engine.backend.write(where, np.array(pages, np.int32))

    def _make_caches(self, buffer: Any, layout: Layout) -> tuple[LayerCache, ...]:
        return tuple(
            LayerCache(buffer=buffer, layout=layout, layer=layer, table=self._table, table_is_stable=True)
            for layer in range(self.pool.geometry.layers)
        )
