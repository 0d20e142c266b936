"""An account of a page pool: whose each page is, and what every byte of it may be.

    pool = guarded_pool(geometry, streams=3, context=100, page_size=16, engine=engine)
    ...
    assert audit(pool, [a, b]) == []

A guarded pool's arena lies between guard bytes, and its free pages hold NaN, so that a page that is read before it is
zeroed, or written after it is given back, shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...fast import Engine, PagePool, Stream
from ...fast.engine import default_engine
from ...fast.page_pool import Owner
from ...fast.page_runs import part_rows
from ...fast.page_sizes import arena_layout
from ...fast.page_table import NO_PAGE
from ...reference.arrays import describe
from ...reference.geometry import Geometry
from ...reference.layout import BF16, PARTS, Layout, Part
from ..memory import GUARD, GUARD_BYTES

POISON_BITS = int(np.full(1, np.nan, BF16).view(np.uint16)[0])
"""Of a free page's elements: NaN."""


class GuardedPool(PagePool):
    """A page pool on the host, its arena between guard bytes and poisoned where it is free; see `guarded_pool`."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        streams: int,
        context: int,
        page_size: int | None = None,
        engine: Engine | None = None,
        poison: bool = True,
    ) -> None:
        chosen = engine or default_engine()
        if chosen.backend.device is not None:
            raise TypeError(f"a guarded pool lies on the host, but the engine runs on {chosen.describe()}")
        layout = arena_layout(geometry, streams=streams, context=context, page_size=page_size)
        size = layout.elements * BF16.itemsize
        self._raw = np.full(size + 2 * GUARD_BYTES, GUARD, np.uint8)
        inside = self._raw[GUARD_BYTES : GUARD_BYTES + size].view(BF16)
        inside[...] = np.nan
        self.poison = poison
        super().__init__(geometry, streams=streams, context=context, page_size=page_size, engine=chosen, arena=inside)

    def give_back(self, owner: Owner, pages: Iterable[int]) -> None:
        """Poison pages, and give them back; see `PagePool.give_back`."""
        given = self.as_pages(pages)
        self.require_held(owner, given)
        saved = self._poison(given)
        try:
            super().give_back(owner, given)
        except BaseException:
            self._in_queue(functools.partial(self._unpoison, saved))
            raise

    def broken_guards(self) -> list[str]:
        """What was written outside the arena."""
        found = []
        for side, guard in (("before", self._raw[:GUARD_BYTES]), ("behind", self._raw[-GUARD_BYTES:])):
            changed = np.flatnonzero(guard != GUARD)
            if len(changed):
                away = GUARD_BYTES - int(changed[-1]) if side == "before" else int(changed[0]) + 1
                found.append(f"{len(changed)} guard bytes {side} the arena changed, the nearest {away} bytes from it")
        return found

    def _return_taken(self, pages: tuple[int, ...], touched: list[int]) -> None:
        self._poison(touched)
        super()._return_taken(pages, touched)

    def _poison(self, pages: Sequence[int]) -> dict[int, npt.NDArray[Any]]:
        """Fill pages with NaN, behind the work that used them; gives what they will have held."""
        saved: dict[int, npt.NDArray[Any]] = {}
        for page in pages if self.poison else ():
            self._in_queue(functools.partial(self._poison_page, page, saved))
        return saved

    def _poison_page(self, page: int, saved: dict[int, npt.NDArray[Any]]) -> None:
        saved[page] = self.page(page).copy()
        self.page(page)[...] = np.nan

    def _unpoison(self, saved: dict[int, npt.NDArray[Any]]) -> None:
        for page, held in saved.items():
            self.page(page)[...] = held

    def _in_queue(self, task: Callable[[], None]) -> None:
        """Run a task behind the current queue's, where there are queues."""
        submit = getattr(self.engine.backend, "submit", None)
        if submit is None:
            task()
        else:
            submit(task)


def guarded_pool(
    geometry: Geometry,
    *,
    streams: int,
    context: int,
    page_size: int | None = None,
    engine: Engine | None = None,
    poison: bool = True,
) -> GuardedPool:
    """A page pool whose arena lies between guard bytes and starts poisoned with NaN.

    Args:
        geometry, streams, context, page_size, engine: as `PagePool`.
        poison: pages that are given back are poisoned again, behind the work that used them.

    Raises:
        TypeError: the engine does not run on the host.
        ValueError: as `PagePool`.
    """
    return GuardedPool(geometry, streams=streams, context=context, page_size=page_size, engine=engine, poison=poison)


def audit(pool: PagePool, streams: Sequence[Stream]) -> list[str]:
    """What is wrong with a pool whose streams these are; [] where all is well. It waits for all work.

    Each page is free, once, or held, once, by one of the streams, whose `pages` name it once; a table's entries are the
    stream's pages, and behind them, where the host may look, no page; a contiguous stream's caches are its page;
    lengths fit the pages, and there are no more than lengths and reservations need; rows past a layer's length are zero
    bytes; guards are intact, and free pages poisoned. What a failure has left to be tidied is allowed while the stream
    says so (`Stream.written`, `Stream.unfinished`).
    """
    wait = getattr(pool.engine.backend, "synchronize", None)
    if wait is not None:
        wait()
    arena = _bits(pool.arena if pool.engine.backend.device is None else pool.engine.download(pool.arena))
    live = [stream for stream in streams if not stream.closed and stream.pool is pool]
    found = [f"{stream} is of another pool" for stream in streams if stream.pool is not pool]
    found += [f"{stream} is closed, but names pages {stream.pages}" for stream in streams if _closed_with_pages(stream)]
    found += pool.audit()
    found += _holders(pool, live)
    for stream in live:
        found += [*_own_pages(pool, stream), *_table(stream), *_sizes(pool, stream), *_rows_past_end(arena, stream)]
    if isinstance(pool, GuardedPool):
        found += pool.broken_guards()
        found += _free_pages(arena, pool) if pool.poison else []
    return found


def _closed_with_pages(stream: Stream) -> bool:
    return stream.closed and bool(stream.pages)


def _holders(pool: PagePool, live: Sequence[Stream]) -> Iterator[str]:
    """Pages that are held, but by no stream that names them; pages that several streams name."""
    for page in range(pool.layout.pages):
        holder = pool.holder(page)
        naming = [stream for stream in live if page in stream.pages]
        if holder is not None and not any(stream is holder for stream in live):
            yield f"page {page} is held by {holder}, which is not an open stream of those given"
        elif isinstance(holder, Stream) and not holder.unfinished and not any(stream is holder for stream in naming):
            yield f"page {page} is held by {holder}, whose pages do not name it"
        if len(naming) > 1:
            yield f"page {page} is shared: {' and '.join(map(str, naming))} name it"


def _own_pages(pool: PagePool, stream: Stream) -> Iterator[str]:
    for logical, page in enumerate(stream.pages):
        if not 0 <= page < pool.layout.pages:
            yield f"{stream}, logical page {logical}: page {page} is not of this arena"
        elif page in stream.pages[:logical]:
            yield f"{stream}, logical page {logical}: page {page} is its logical page {stream.pages.index(page)} too"
        elif pool.holder(page) is None:
            yield f"{stream}, logical page {logical}: page {page} is free"
        elif pool.holder(page) is not stream:
            yield f"{stream}, logical page {logical}: page {page} is held by {pool.holder(page)}"


def _table(stream: Stream) -> Iterator[str]:
    table = stream.table
    if table is None:
        yield from _contiguous(stream)
        return
    entries = stream.pool.engine.download(table)
    for logical, page in enumerate(stream.pages):
        if logical >= len(entries):
            yield f"{stream}, logical page {logical}: its table has {len(entries)} entries"
        elif entries[logical] != page:
            yield f"{stream}, logical page {logical}: its table says page {entries[logical]}, its pages page {page}"
    if not stream.pool.engine.place.may_read or stream.unfinished:
        return
    for logical, entry in enumerate(entries[len(stream.pages) :].tolist(), len(stream.pages)):
        if entry != NO_PAGE:
            yield f"{stream}, logical page {logical}: its table says page {entry}, but it holds no such logical page"


def _contiguous(stream: Stream) -> Iterator[str]:
    """A contiguous stream's caches are its page; it has none without one."""
    if stream.caches and not stream.pages and not stream.unfinished:
        yield f"{stream} holds no page, but has caches"
    if not stream.caches and stream.pages:
        yield f"{stream} holds page {stream.pages[0]}, but has no caches"
    if not stream.caches or not stream.pages or not 0 <= stream.pages[0] < stream.pool.layout.pages:
        return
    page = _address(stream.pool.page(stream.pages[0]))
    for layer, cache in enumerate(stream.caches):
        if _address(cache.buffer) != page:
            yield f"{stream}, layer {layer}: its cache does not lie on its page {stream.pages[0]}"


def _address(array: Any) -> int | None:
    facts = describe(array)
    return None if facts is None else facts.address


def _sizes(pool: PagePool, stream: Stream) -> Iterator[str]:
    room = len(stream.pages) * pool.page_size
    for layer, length in enumerate(stream.lengths):
        if not 0 <= length <= min(room, pool.context):
            yield (
                f"{stream}, layer {layer}: {length} positions do not fit its {len(stream.pages)} pages of "
                f"{pool.page_size}, or the context of {pool.context}"
            )
    needed = pool.pages_for(max(stream.length, stream.reserved))
    if len(stream.pages) > needed and not stream.busy and not stream.unfinished:
        yield (
            f"{stream} holds {len(stream.pages)} pages, the surplus {stream.pages[needed:]}: its {stream.length} "
            f"positions and the {stream.reserved} that it has reserved need {needed}"
        )


def _rows_past_end(arena: npt.NDArray[np.uint16], stream: Stream) -> Iterator[str]:
    layout = stream.pool.layout
    for layer, (length, written) in enumerate(zip(stream.lengths, stream.written, strict=True)):
        for part in PARTS:
            clean = part_rows(layout, part, max(length, written))
            for logical, page in enumerate(stream.pages):
                yield from _rows_of_page(arena, layout, stream, layer, part, logical, page, clean)


def _rows_of_page(
    arena: npt.NDArray[np.uint16],
    layout: Layout,
    stream: Stream,
    layer: int,
    part: Part,
    logical: int,
    page: int,
    clean: int,
) -> Iterator[str]:
    """Rows of one page from row `clean` of the part on."""
    rows = layout.part(layer, part)
    first = max(0, clean - logical * rows.rows_per_page)
    if first >= rows.rows_per_page or not 0 <= page < layout.pages:
        return
    start = page * rows.page_stride + rows.base
    given = arena[start : start + rows.rows_per_page * rows.row_stride].reshape(rows.rows_per_page, -1)
    dirty = np.flatnonzero(given[first:].any(axis=1)) + first
    if len(dirty):
        row = int(dirty[0])
        yield (
            f"{stream}, page {page}, layer {layer}, {part}, row {row}: not zero, but past the end ({part} row "
            f"{logical * rows.rows_per_page + row} of the stream, whose layer holds {stream.lengths[layer]} "
            f"positions); {len(dirty)} such rows"
        )


def _free_pages(arena: npt.NDArray[np.uint16], pool: PagePool) -> Iterator[str]:
    layout = pool.layout
    for page, given in enumerate(arena.reshape(layout.pages, -1)):
        changed = np.flatnonzero(given != POISON_BITS)
        if len(changed) and pool.holder(page) is None:
            layer, part, row = _where(layout, int(changed[0]))
            yield (
                f"page {page}, layer {layer}, {part}, row {row}: written while the page is free; {len(changed)} "
                "elements changed"
            )


def _where(layout: Layout, element: int) -> tuple[int, Part, int]:
    """The layer, part and row of an element of a page."""
    for layer in range(layout.geometry.layers):
        for part in PARTS:
            rows = layout.part(layer, part)
            row = (element - rows.base) // rows.row_stride
            if 0 <= row < rows.rows_per_page:
                return layer, part, row
    raise ValueError(f"element {element} is not of a page of {layout.page_elements}")


def _bits(arena: Any) -> npt.NDArray[np.uint16]:
    bits: npt.NDArray[np.uint16] = arena.view(np.uint16)
    return bits
