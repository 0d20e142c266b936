"""What a stream holds: its pages, its page table, the positions of each layer, and its last work.

`Stream` is the rest of it. Rounds and the prompt cache use both.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..reference.layout import PARTS, LayerCache, Layout
from .page_pool import PagePool
from .page_runs import part_rows, runs
from .page_sizes import as_count
from .page_table import PageTable
from .stream_rules import StreamError, require_no_capture
from .stream_work import Work


class StreamPages:
    """Pages of a pool that one stream holds.

    Args:
        pool: where they come from.
        reads: arrays that the stream's work reads beside its pages and table.

    Attributes:
        number: of the stream in its pool.
        closed: whether it has given its pages back for good.
        busy: whether a round, or a `Stream.work` block, is at work on it.
        unfinished: whether a failure has interrupted its tidying, so that it may hold more pages than it needs.
    """

    def __init__(self, pool: PagePool, reads: Sequence[Any]) -> None:
        self.pool = pool
        self.number = pool.next_number()
        self.closed = False
        self.busy = False
        self.unfinished = False
        layers = pool.geometry.layers
        self._lengths = [0] * layers
        self._written = [0] * layers  # rows from a layer's length up to here may not be zeros
        self._reserved = 0
        self._pages: list[int] = []
        self._caches: tuple[LayerCache, ...] = ()
        self._page_table: PageTable | None = None
        pool.kept.release()
        if not pool.contiguous:
            self._page_table = PageTable(pool.engine, pool.pages_for(pool.context))
            self._caches = self._make_caches(pool.arena, pool.layout)
        self._work = Work(pool.engine.backend, [self._table, *reads])
        self._leave = weakref.finalize(self, pool.kept.add, self._work)
        self._leave.atexit = False
        if self._page_table is not None:
            self.mark()

    def __repr__(self) -> str:
        return f"stream {self.number}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions that each layer holds; a draft head's may differ from the others'."""
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

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Of each layer; () where it is contiguous and holds no page."""
        return self._caches

    @property
    def untidy(self) -> bool:
        """Whether a failure has left rows to be zeroed or pages to be given back."""
        return self.unfinished or self._written != self._lengths or len(self._pages) > self._kept_pages

    def require_open(self) -> None:
        """Raise StreamError if it is closed."""
        if self.closed:
            raise StreamError(f"{self} is closed; make another")

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
            self._take_back()
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
        self._work.order()

    def mark(self) -> None:
        """What is submitted by now is the stream's last work."""
        self._work.mark()

    def tidy(self) -> None:
        """Give back pages that hold no position and are not reserved, and zero the rows past each layer's length.

        What fails here is done again the next time: lengths and pages are right all along.
        """
        was_unfinished, self.unfinished = self.unfinished, True
        try:
            self.order()
            surplus = len(self._pages) > self._kept_pages
            del self._pages[self._kept_pages :]
            if surplus or was_unfinished:
                self._return_strays()
            for layer in range(len(self._lengths)):
                self._zero_past_end(layer)
        finally:
            self.mark()
        self.unfinished = False

    @property
    def _table(self) -> Any:
        return None if self._page_table is None else self._page_table.array

    @property
    def _kept_pages(self) -> int:
        return self.pool.pages_for(max(self.length, self._reserved))

    def _strays(self) -> set[int]:
        """Pages that the pool says it holds, and it does not name: they are to be given back."""
        return set(self.pool.pages_of(self)).difference(self._pages)

    def _return_strays(self) -> None:
        strays = self._strays()
        if strays:
            self._disown()
            self.pool.give_back(self, strays)

    def _take_back(self) -> None:
        """Give back what a failed `grow` took; what fails here too is done at the next call."""
        before, self.unfinished = self.unfinished, True
        if self._strays():
            try:
                self._return_strays()
            finally:
                self.mark()
        self.unfinished = before

    def _disown(self) -> None:
        """Neither table nor caches name a page any more that is not among its own."""
        if self._page_table is not None:
            self._page_table.disown(len(self._pages))
        elif not self._pages:
            self._caches = ()

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
        if self._page_table is None:
            layout = Layout(geometry=self.pool.geometry, page_size=self.pool.page_size)
            self._caches = self._make_caches(self.pool.page(pages[0]), layout)
        else:
            self._page_table.enter(first, pages)

    def _make_caches(self, buffer: Any, layout: Layout) -> tuple[LayerCache, ...]:
        return tuple(
            LayerCache(buffer=buffer, layout=layout, layer=layer, table=self._table, table_is_stable=True)
            for layer in range(self.pool.geometry.layers)
        )


def tidy_after_error(streams: Sequence[StreamPages]) -> None:
    """Take windows back while an error is on its way: what cannot be tidied now is at the stream's next step.

    Raises:
        BaseException: what is no Exception, such as a second KeyboardInterrupt; every stream has had its turn.
    """
    interruption: BaseException | None = None
    for stream in streams:
        try:
            stream.tidy()
        except Exception:
            continue
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
