"""A stream: its pages, its page table, the positions that each layer holds, and its media positions."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..reference.arrays import Place
from ..reference.geometry import TEXT, Geometry, Rope, Weights
from ..reference.layout import PARTS, LayerCache, Layout
from ..reference.results import Bf16Array, Window
from .backend import Fence
from .capture import CaptureError, active_capture
from .page_pool import PagePool
from .page_runs import part_rows, runs
from .page_sizes import as_count, as_integer

NO_PAGE = -1
"""In a table on the host where a page was given back: what still reads the table is refused."""


class StreamError(RuntimeError):
    """A stream cannot do this; the message says why, and nothing was changed."""


def require_weights(weights: Sequence[Weights], geometry: Geometry, place: Place) -> None:
    """Raise unless there are weights for each layer, of the geometry's shapes, in `place`."""
    if len(weights) != geometry.layers:
        raise ValueError(f"weights of {len(weights)} layers are given; the geometry has {geometry.layers} layers")
    for layer_weights in weights:
        layer_weights.require(geometry, place)


class Stream:
    """One stream of a pool; close it, or use it in a `with` block, to give its pages back.

    Its page table is one array for as long as it lives, changed in place only, so that captured launches may read it.
    Rows past a layer's length are zeros in every page that it holds, as if they had never been written. Each call runs
    behind the ones before, whatever queue is current; a round's own calls must all go to one queue.

    Args:
        pool: where its pages come from.
        weights: of each layer, in the engine's memory.
        rope: rotary positions of all its rows: those of a media prompt are told here.

    Attributes:
        lengths: positions that each layer holds; a draft head's may differ from the others'.
        busy: whether a round is at work on it.
        unfinished: whether a failure has interrupted its tidying, so that it may hold more pages than it needs.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the weights are not one for each layer, or do not fit the geometry.
        CaptureError: a step is being captured.
    """

    def __init__(self, pool: PagePool, weights: Sequence[Weights], *, rope: Rope = TEXT) -> None:
        require_no_capture("a stream is made")
        geometry, place = pool.geometry, pool.engine.place
        if not isinstance(rope, Rope):
            raise TypeError(f"rope is a {type(rope).__name__}; it must be a Rope, for example geometry.TEXT")
        require_weights(weights, geometry, place)
        rope.require(place)
        self.pool = pool
        self.weights = tuple(weights)
        self.rope = rope
        self.number = pool.next_number()
        self.closed = False
        self.busy = False
        self.unfinished = False
        self._lengths = [0] * geometry.layers
        self._written = [0] * geometry.layers  # rows from a layer's length up to here may not be zeros
        self._reserved = 0
        self._pages: list[int] = []
        self._work: Fence | None = None
        self._caches: tuple[LayerCache, ...] = ()
        self._table: Any = None
        if not pool.contiguous:
            backend = pool.engine.backend
            self._table = backend.empty((pool.pages_for(pool.context),), np.int32)
            backend.zero(self._table)
            self._caches = self._make_caches(pool.arena, pool.layout)
            self.mark()

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
    def reserved(self) -> int:
        """Positions that its pages are kept for, beyond those that it holds."""
        return self._reserved

    @property
    def written(self) -> tuple[int, ...]:
        """For each layer a position up to which rows may not be zeros; beyond its length only after a failure."""
        return tuple(self._written)

    @property
    def pages(self) -> tuple[int, ...]:
        """Physical page of each logical page."""
        return tuple(self._pages)

    @property
    def table(self) -> Any:
        """Its page table, int32 [pages of the pool's context]; None where it is contiguous."""
        return self._table

    def cache(self, layer: int) -> LayerCache:
        """One layer of its cache, for the functions of `kvproof.fast`; a contiguous stream has one once it has a page.

        Raises:
            StreamError: it is closed, or contiguous and without a page.
        """
        self.require_open()
        self.require_layers([layer])
        if not self._caches:
            raise StreamError(f"{self} is contiguous and holds no page yet; reserve one (Stream.reserve)")
        return self._caches[layer]

    def append(self, projections: Sequence[Bf16Array]) -> list[Window]:
        """Append a window to every layer; see `append`, which takes several streams."""
        from .round import append  # which knows streams

        return append([(self, projections)])[0]

    def reserve(self, positions: int) -> None:
        """Take the pages that `positions` positions need, and keep them until it is rolled back or closed.

        Raises:
            StreamError: that is more than a stream of this pool may hold.
            PoolExhaustedError: the pool has not enough free pages; nothing was taken.
            CaptureError: a step is being captured.
        """
        self.grow(positions)
        self._reserved = max(self._reserved, int(positions))

    def roll_back(self, length: int, *, layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Forget the positions from `length` on, and the pooled rows of blocks that are no longer complete.

        An error of the backend shows when the positions are forgotten already: what is left to be zeroed or given back
        then is at the next call.

        Args:
            layers: on which; all when None.

        Returns:
            Positions forgotten on each of these layers.

        Raises:
            StreamError: a layer holds fewer, so that it cannot be what the caller thinks, or there is no such layer, or
                it is named twice; nothing was changed.
            TypeError: the length or a layer is no integer; nothing was changed.
            CaptureError: a step is being captured; nothing was changed.
        """
        self.require_idle()
        require_no_capture(f"{self} is rolled back")
        length = as_integer("length", length)
        chosen = self.require_layers(layers)
        for layer in chosen:
            if not 0 <= length <= self._lengths[layer]:
                raise StreamError(
                    f"{self} cannot be rolled back to {length} positions: layer {layer} holds {self._lengths[layer]}; "
                    "nothing was rolled back"
                )
        removed = tuple(self._lengths[layer] - length for layer in chosen)
        for layer in chosen:
            self._lengths[layer] = length
        self._reserved = 0
        self.tidy()
        return removed

    def close(self) -> None:
        """Give all pages back; closing again does nothing.

        Raises:
            StreamError: a round is at work on it.
            CaptureError: a step is being captured.
        """
        if self.closed:
            return
        self.require_idle()
        require_no_capture(f"{self} is closed")
        self.order()  # the pages' next owner runs behind this queue, which may not be the stream's last
        self.pool.give_back(self, self.pool.pages_of(self))
        given_back, self._pages, self._caches, self.closed = len(self._pages), [], (), True
        self._lengths = [0] * len(self._lengths)
        self._written = [0] * len(self._lengths)
        self._reserved = 0
        self._disown(0, given_back)

    def require_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Layers of the geometry, each named once; all when None.

        Raises:
            StreamError: there is none, no such one, or one is named twice.
            TypeError: one is no integer.
        """
        count = len(self._lengths)
        if layers is None:
            return tuple(range(count))
        chosen = tuple(as_integer("layer", layer) for layer in layers)
        for i, layer in enumerate(chosen):
            if not 0 <= layer < count:
                raise StreamError(f"layer {layer} does not exist; {self} has layers 0 to {count - 1}")
            if layer in chosen[:i]:
                raise StreamError(f"layer {layer} is named twice; name each layer once")
        if not chosen:
            raise StreamError("no layer is named; name at least one, or give None for all")
        return chosen

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

    def grow(self, positions: int) -> None:
        """Take the pages that `positions` positions need, until `tidy` finds that it holds fewer; see `reserve`."""
        self.require_open()
        positions = as_count("positions", positions)
        if positions > self.pool.context:
            raise StreamError(
                f"{self} would hold {positions} positions; a stream of this pool holds at most {self.pool.context}: "
                "make the pool with a larger context="
            )
        have = len(self._pages)
        missing = self.pool.pages_for(positions) - have
        if missing <= 0:
            return
        require_no_capture(f"{self} takes pages")
        self.order()
        try:
            if self.unfinished:
                self._return_strays()
            taken = self.pool.take(self, missing)
            self._enter(have, taken)
            self.mark()
        except BaseException:
            before, self.unfinished = self.unfinished, True
            self._return_strays()
            self.unfinished = before
            raise
        self._pages += taken

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
        try:
            self._work = self.pool.engine.backend.fence()
        except BaseException:
            self._work = self.pool.engine.backend.fence()  # what is on its way must be covered all the same
            raise

    @property
    def untidy(self) -> bool:
        """Whether a failure has left rows to be zeroed or pages to be given back."""
        return self.unfinished or self._written != self._lengths or len(self._pages) > self._kept_pages

    def tidy(self) -> None:
        """Give back pages that hold no position and are not reserved, and zero the rows past each layer's length.

        What fails here is done again the next time: lengths and pages are right all along.
        """
        was_unfinished, self.unfinished = self.unfinished, True
        self.order()
        try:
            if was_unfinished:
                self._return_strays()
            surplus = self._pages[self._kept_pages :]
            if surplus:
                self.pool.give_back(self, surplus)
                del self._pages[self._kept_pages :]
                if self.pool.contiguous:
                    self._caches = ()
                self._disown(len(self._pages), len(surplus))
            for layer in range(len(self._lengths)):
                self._zero_past_end(layer)
        finally:
            self.mark()
        self.unfinished = False

    def _return_strays(self) -> None:
        """Give back what the pool says it holds, and it does not know of: it was interrupted."""
        strays = set(self.pool.pages_of(self)).difference(self._pages)
        if strays:
            self.pool.give_back(self, strays)
            self.mark()

    @property
    def _kept_pages(self) -> int:
        return self.pool.pages_for(max(self.length, self._reserved))

    def _disown(self, first: int, count: int) -> None:
        """Take logical pages that were given back out of a table on the host.

        A captured step or a cache that outlives them is then refused. On a device nobody would look at the entries.
        """
        if self._table is not None and self.pool.engine.backend.device is None and count:
            self.pool.engine.backend.write(self._table[first : first + count], np.full(count, NO_PAGE, np.int32))

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
            where = self._table[first : first + len(pages)]
            self.pool.engine.backend.write(where, np.array(pages, np.int32))

    def _make_caches(self, buffer: Any, layout: Layout) -> tuple[LayerCache, ...]:
        return tuple(
            LayerCache(buffer=buffer, layout=layout, layer=layer, table=self._table, table_is_stable=True)
            for layer in range(self.pool.geometry.layers)
        )


def require_no_capture(what: str) -> None:
    """Raise CaptureError while a step is being captured: only kernels can be."""
    if active_capture() is not None:
        raise CaptureError(f"{what} inside a capture, which takes down kernels only; do it before the capture")
