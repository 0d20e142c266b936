"""The page pool: one arena of bf16 pages that streams take and give back (SPEC section 4).

    pool = PagePool(geometry, streams=4, context=40960, page_size=16)

With `page_size=None` the caches are contiguous: a page is then one stream's whole context, read without a table.
Set KVPROOF_PAGE_TEST=n to run any program through tables of n-position pages, handed out from the last to the first.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ..reference.arrays import require_array
from ..reference.geometry import Geometry
from ..reference.layout import BF16
from .backend import Fence
from .capture import CaptureError, active_capture
from .engine import Engine, default_engine
from .page_sizes import arena_layout, as_count, as_integer, page_test_size
from .page_statistics import PoolStatistics as PoolStatistics
from .stream_work import Keep


class PageError(RuntimeError):
    """A page was taken or given back against the rules; the message says which, and nothing was changed."""


class PoolExhaustedError(PageError):
    """There are fewer free pages than are needed; nothing was taken.

    Attributes:
        needed, free: pages.
    """

    def __init__(self, needed: int, free: int, pages: int) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"{needed} pages are needed, but {free} of {pages} are free: nothing was taken. Close or roll back a "
            "stream, or make the pool larger (streams=, context=)"
        )


class Owner(Protocol):
    """Who holds pages."""

    @property
    def length(self) -> int:
        """Positions that its pages hold."""
        ...


class PagePool:
    """One arena, in the backend's memory, and who holds which of its pages.

    Pages are handed out lowest number first (highest in the page test), whatever the order in which they came back, so
    that tables do not depend on timing. A page is zero-filled after it is taken, behind the work that last used it.

    The pool must outlive the work on its pages: an arena that is dropped earlier is the allocator's to hand on.

    Args:
        geometry: of the caches.
        streams, context: the arena has room for this many streams of this many positions at once; a stream holds at
            most `context`.
        page_size: positions of a page, a multiple of the block; None for contiguous caches.
        engine: where the arena lies and the kernels run; the default engine when None.
        arena: bf16 [elements] to use as the arena, in the engine's memory; a fresh one when None.
            `page_sizes.arena_layout` tells how many.

    Attributes:
        layout: of the arena.
        page_test: whether $KVPROOF_PAGE_TEST chose the page size.
        kept: what streams that are gone have left to be read by work that has not ended.

    Raises:
        TypeError: a size is no integer, or the arena no array of the engine's memory.
        ValueError: a size is out of its range, $KVPROOF_PAGE_TEST is, or the arena does not fit.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        streams: int,
        context: int,
        page_size: int | None = None,
        engine: Engine | None = None,
        arena: Any = None,
    ) -> None:
        self.engine = engine or default_engine()
        self.geometry = geometry
        self.context = as_count("context", context, least=1)
        self.page_test = page_test_size() is not None
        self.contiguous = page_size is None and not self.page_test
        self.layout = arena_layout(geometry, streams=streams, context=context, page_size=page_size)
        self.arena = self.engine.empty((self.layout.elements,), BF16) if arena is None else arena
        require_array("arena", self.arena, BF16, (self.layout.elements,), self.engine.place)
        self._holders: list[Owner | None] = [None] * self.layout.pages
        # An allocator may hand on memory that work on the current queue has still to leave.
        self._fences: list[Fence | None] = [self.engine.backend.fence()] * self.layout.pages
        self._sign = -1 if self.page_test else 1
        self._free = sorted(self._sign * page for page in range(self.layout.pages))  # a heap
        self.kept = Keep()
        self._high_water = 0
        self._numbered = 0
        self._lock = threading.RLock()

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.layout.page_size

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-positions // self.page_size)

    def take(self, owner: Owner, count: int = 1) -> tuple[int, ...]:
        """Take pages, and zero-fill them behind the work that last used them.

        Should the backend fail while they are zeroed, and then in fencing that too, those that it may be writing stay
        the owner's (`pages_of`), to be given back once it works again.

        Raises:
            PoolExhaustedError: there are fewer.
            PageError: the free list is damaged.
            CaptureError: a step is being captured, which would zero the pages at every replay.
            LaunchError: the backend has failed.
        """
        if active_capture() is not None:
            raise CaptureError("pages are taken inside a capture; reserve them before it (Stream.reserve)")
        if owner is None:
            raise TypeError("pages are taken for None; give the owner that will give them back")
        count = as_count("count of pages", count)
        with self._lock:
            pages = self._pop(count)
            for page in pages:
                self._holders[page] = owner
        touched: list[int] = []
        try:
            for page in pages:
                fence = self._fences[page]
                if fence is not None:
                    fence.order()
                touched.append(page)
                self.engine.backend.zero(self.page(page))
        except BaseException:
            self._return_taken(pages, touched)
            raise
        with self._lock:
            for page in pages:
                self._fences[page] = None
            self._high_water = max(self._high_water, self.layout.pages - len(self._free))
        return pages

    def give_back(self, owner: Owner, pages: Iterable[int]) -> None:
        """Give pages back; whoever takes them runs behind the work that is submitted by now.

        Raises:
            PageError: a page is not of this arena, is free already, is another owner's, or is named twice.
            TypeError: a page is no integer, or there is no collection of them.
        """
        given = self.as_pages(pages)
        with self._lock:
            self.require_held(owner, given)
            fence = self.engine.backend.fence() if given else None
            for page in given:
                self._fences[page] = fence
            self._push(given)

    def holder(self, page: int) -> Owner | None:
        """Who holds a page; None where it is free."""
        return self._holders[page]

    def pages_of(self, owner: Owner) -> tuple[int, ...]:
        """Pages that an owner holds, in order of their numbers."""
        with self._lock:
            return tuple(page for page, holder in enumerate(self._holders) if holder is owner)

    def page(self, page: int) -> Any:
        """A page of the arena: a view, bf16 [page_elements].

        Raises:
            PageError: it is not of this arena.
        """
        size = self.layout.page_elements
        if not 0 <= page < self.layout.pages:
            raise PageError(f"page {page} is not of this arena, which has pages 0 to {self.layout.pages - 1}")
        return self.arena[page * size : (page + 1) * size]

    def statistics(self) -> PoolStatistics:
        """Free and used pages, the most used so far, and what of the used ones is filled."""
        with self._lock:
            owners = {id(owner): owner for owner in self._holders if owner is not None}
            used = self.layout.pages - len(self._free)
            fences = [self._fences[self._sign * entry] for entry in self._free]
        positions = sum(owner.length for owner in owners.values())
        return PoolStatistics(
            pages=self.layout.pages,
            free=self.layout.pages - used,
            used=used,
            draining=sum(fence is not None and not fence.done() for fence in fences),
            high_water=self._high_water,
            positions=positions,
            fragmentation=1 - positions / (used * self.page_size) if used else 0.0,
        )

    def audit(self) -> list[str]:
        """What is wrong with the account of pages: each is either free, once, or held; [] where all is well."""
        with self._lock:
            entries = [self._sign * entry for entry in self._free]
            held = [holder is not None for holder in self._holders]
        foreign = sorted(page for page in entries if not 0 <= page < self.layout.pages)
        own = np.array([page for page in entries if 0 <= page < self.layout.pages], np.int64)
        listed = np.bincount(own, minlength=self.layout.pages)
        found = [f"page {page} is in the free list, but not of this arena" for page in foreign]
        for page in range(self.layout.pages):
            if listed[page] > 1:
                found.append(f"page {page} is in the free list {listed[page]} times")
            if listed[page] and held[page]:
                found.append(f"page {page} is in the free list while {self._holders[page]} holds it")
            if not listed[page] and not held[page]:
                found.append(f"page {page} is lost: it is neither free nor held")
        return found

    def next_number(self) -> int:
        """A number for a new stream, for messages."""
        with self._lock:
            self._numbered += 1
            return self._numbered - 1

    def _pop(self, count: int) -> tuple[int, ...]:
        if count > len(self._free):
            raise PoolExhaustedError(count, len(self._free), self.layout.pages)
        entries = [heapq.heappop(self._free) for _ in range(count)]
        pages = tuple(self._sign * entry for entry in entries)
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < self.layout.pages:
                problem = "and not of this arena"
            elif page in seen or (self._free and self._sign * self._free[0] == page):
                problem = "twice"
            elif self._holders[page] is not None:
                problem = f"while {self._holders[page]} holds it"
            else:
                seen.add(page)
                continue
            for entry in entries:
                heapq.heappush(self._free, entry)
            raise PageError(f"page {page} is in the free list {problem}: the pool is damaged; nothing was taken")
        return pages

    def _return_taken(self, pages: tuple[int, ...], touched: list[int]) -> None:
        """Give back what could not be zeroed; whoever takes it next runs behind the zeros that are on their way.

        Where the backend cannot even fence these, the pages stay their owner's, as nothing tells when they end.
        """
        with self._lock:
            self._push(tuple(page for page in pages if page not in touched))
        fence = self.engine.backend.fence() if touched else None
        with self._lock:
            for page in touched:
                self._fences[page] = fence
            self._push(tuple(touched))

    def _push(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            self._holders[page] = None
            heapq.heappush(self._free, self._sign * page)

    def as_pages(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Page numbers as Python's own.

        Raises:
            TypeError: one is no integer, or there is no collection of them.
        """
        if not isinstance(pages, Iterable):
            raise TypeError(f"pages is {pages!r}; it must be a collection of page numbers, for example [{pages!r}]")
        return tuple(as_integer("page", page) for page in pages)

    def require_held(self, owner: Owner, pages: Iterable[int]) -> None:
        """Raise PageError unless an owner holds these pages, each named once."""
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < self.layout.pages:
                problem = f"it is not of this arena, which has pages 0 to {self.layout.pages - 1}"
            elif page in seen:
                problem = "it is named twice"
            elif self._holders[page] is None:
                problem = "it is free already"
            elif self._holders[page] is not owner:
                problem = f"{self._holders[page]} holds it, not {owner}"
            else:
                seen.add(page)
                continue
            raise PageError(f"page {page} cannot be given back: {problem}; nothing was given back")
