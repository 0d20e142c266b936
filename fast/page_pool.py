"""The page pool: one arena of bf16 pages that streams take and give back (SPEC section 4).

    pool = PagePool(geometry, streams=4, context=40960, page_size=16)

With `page_size=None` the caches are contiguous: a page is then one stream's whole context, read without a table.
Set KVPROOF_PAGE_TEST=n to run any program through tables of n-position pages, handed out from the last to the first.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..reference.arrays import require_array
from ..reference.geometry import Geometry
from ..reference.layout import BF16, Layout
from .backend import Fence
from .capture import CaptureError, active_capture
from .engine import Engine, default_engine

PAGE_TEST = "KVPROOF_PAGE_TEST"
"""Environment variable of the page test: positions of a page."""


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


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """A pool's pages at one moment.

    Attributes:
        pages: all of them; each is free or used.
        free, used: pages.
        draining: free pages whose last work has not ended; what takes them runs behind it.
        high_water: the most that were ever used at once.
        positions: that the used pages hold rows of.
        fragmentation: share of the used pages' positions that hold no row, 0 where none is used.
    """

    pages: int
    free: int
    used: int
    draining: int
    high_water: int
    positions: int
    fragmentation: float


class PagePool:
    """One arena, in the backend's memory, and who holds which of its pages.

    Pages are handed out lowest number first (highest in the page test), whatever the order in which they came back, so
    that tables do not depend on timing. A page is zero-filled after it is taken, behind the work that last used it.

    Args:
        geometry: of the caches.
        streams, context: the arena has room for this many streams of this many positions at once; a stream holds at
            most `context`.
        page_size: positions of a page, a multiple of the block; None for contiguous caches.
        engine: where the arena lies and the kernels run; the default engine when None.
        arena: bf16 [elements] to use as the arena, in the engine's memory; a fresh one when None. `arena_layout`
            tells how many.

    Attributes:
        layout: of the arena.
        page_test: whether $KVPROOF_PAGE_TEST chose the page size.

    Raises:
        ValueError: a size is out of its range, or $KVPROOF_PAGE_TEST is.
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
        self.context = context
        test = page_test_size()
        self.page_test = test is not None
        self.contiguous = page_size is None and test is None
        self.layout = arena_layout(geometry, streams=streams, context=context, page_size=page_size)
        self.arena = self.engine.empty((self.layout.elements,), BF16) if arena is None else arena
        require_array("arena", self.arena, BF16, (self.layout.elements,), self.engine.place)
        self._holders: list[Owner | None] = [None] * self.layout.pages
        self._fences: list[Fence | None] = [None] * self.layout.pages
        self._sign = -1 if self.page_test else 1
        self._free = sorted(self._sign * page for page in range(self.layout.pages))  # a heap
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

        Raises:
            PoolExhaustedError: there are fewer.
            PageError: the free list is damaged.
            CaptureError: a step is being captured, which would zero the pages at every replay.
        """
        if active_capture() is not None:
            raise CaptureError("pages are taken inside a capture; reserve them before it (Stream.reserve)")
        if count < 0:
            raise ValueError(f"{count} pages are to be taken; give 0 or more")
        with self._lock:
            pages = self._pop(count)
            for page in pages:
                self._holders[page] = owner
        try:
            for page in pages:
                fence = self._fences[page]
                if fence is not None:
                    fence.order()
                self.engine.backend.zero(self.page(page))
        except BaseException:
            with self._lock:
                self._push(pages)
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
        """
        given = tuple(pages)
        with self._lock:
            self._require_held(owner, given)
            fence = self.engine.backend.fence() if given else None
            for page in given:
                self._fences[page] = fence
            self._push(given)

    def holder(self, page: int) -> Owner | None:
        """Who holds a page; None where it is free."""
        return self._holders[page]

    def page(self, page: int) -> Any:
        """A page of the arena: a view, bf16 [page_elements]."""
        size = self.layout.page_elements
        return self.arena[page * size : (page + 1) * size]

    def statistics(self) -> PoolStatistics:
        """Free and used pages, the most used so far, and what of the used ones is filled."""
        with self._lock:
            owners = {id(owner): owner for owner in self._holders if owner is not None}
            used = self.layout.pages - len(self._free)
            fences = [self._fences[abs(entry)] for entry in self._free]
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
            listed = np.bincount([abs(entry) for entry in self._free], minlength=self.layout.pages)
            held = [holder is not None for holder in self._holders]
        found = []
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
        pages = tuple(abs(entry) for entry in entries)
        for i, page in enumerate(pages):
            if page in pages[:i] or self._holders[page] is not None:
                for entry in entries:
                    heapq.heappush(self._free, entry)
                where = "twice" if page in pages[:i] else f"while {self._holders[page]} holds it"
                raise PageError(f"page {page} is in the free list {where}: the pool is damaged; nothing was taken")
        return pages

    def _push(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            self._holders[page] = None
            heapq.heappush(self._free, self._sign * page)

    def _require_held(self, owner: Owner, pages: tuple[int, ...]) -> None:
        for i, page in enumerate(pages):
            if not 0 <= page < self.layout.pages:
                problem = f"it is not of this arena, which has pages 0 to {self.layout.pages - 1}"
            elif page in pages[:i]:
                problem = "it is named twice"
            elif self._holders[page] is None:
                problem = "it is free already"
            elif self._holders[page] is not owner:
                problem = f"{self._holders[page]} holds it, not {owner}"
            else:
                continue
            raise PageError(f"page {page} cannot be given back: {problem}; nothing was given back")


def arena_layout(geometry: Geometry, *, streams: int, context: int, page_size: int | None = None) -> Layout:
    """The layout of a pool's arena, for these arguments of `PagePool`; $KVPROOF_PAGE_TEST has its say.

    Raises:
        ValueError: a size is out of its range.
    """
    for name, value in (("streams", streams), ("context", context)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a pool has room for at least 1")
    size = page_test_size() or page_size or Layout.contiguous(geometry, context).page_size
    return Layout(geometry=geometry, page_size=size, pages=streams * -(-context // size))


def page_test_size() -> int | None:
    """Positions of a page in the page test; None where it is off.

    Raises:
        ValueError: $KVPROOF_PAGE_TEST is no number above 0.
    """
    given = os.environ.get(PAGE_TEST, "")
    if not given:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"${PAGE_TEST} is {given!r}; it must be the positions of a page, a multiple of the block")
    return int(given)
