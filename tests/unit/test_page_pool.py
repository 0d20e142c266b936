"""The page pool: who holds which page, and what happens to those who take or give back against the rules."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys

import numpy as np
import pytest
from kvproof import fast
from kvproof.fast import LaunchError, PageError, PagePool, PoolExhaustedError
from kvproof.fast.page_sizes import PAGE_TEST, arena_layout
from kvproof.oracle.serving.delayed import DelayedEngine
from kvproof.reference import TINY
from kvproof.reference.layout import BF16
from pools import PAGE, WEIGHTS, grown
from streams import bits, refused


class Holder:
    """Something that holds pages."""

    def __init__(self, name, length=0):
        self.name = name
        self.length = length

    def __repr__(self):
        return self.name


@pytest.fixture(autouse=True)
def _no_page_test(monkeypatch):
    monkeypatch.delenv(PAGE_TEST, raising=False)


@pytest.fixture
def pool(engine):
    """Six pages of 8 positions."""
    return PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=engine)


def state(pool):
    """All that an error must leave alone."""
    return (
        [pool.holder(page) for page in range(pool.layout.pages)],
        sorted(pool._free),
        list(pool._fences),
        bits(pool.arena).tobytes(),
    )


def unchanged(pool, error, message, call):
    """The call is refused with this message, and nothing has changed."""
    before = state(pool)
    with refused(error, message):
        call()
    assert state(pool) == before


A, B = Holder("A"), Holder("B")


# ---- taking and giving back ----


def test_pages_are_taken_lowest_first_and_zeroed(pool):
    pool.arena[...] = np.nan
    assert pool.take(A, 2) == (0, 1)
    assert pool.take(B) == (2,)
    assert not bits(pool.arena[: 3 * pool.layout.page_elements]).any()
    assert np.isnan(pool.arena[3 * pool.layout.page_elements :].astype(np.float32)).all()
    assert [pool.holder(page) for page in range(6)] == [A, A, B, None, None, None]


def test_page_numbers_do_not_depend_on_the_order_of_giving_back(pool):
    pool.take(A, 6)
    for page in (4, 1, 5, 0):
        pool.give_back(A, [page])
    assert pool.take(B, 3) == (0, 1, 4)
    assert pool.audit() == []


def test_no_page_is_taken_where_none_is_asked_for(pool):
    assert pool.take(A, 0) == ()
    pool.give_back(A, [])
    assert pool.free == 6


def test_numbers_of_numpy_are_numbers(pool):
    assert pool.take(A, np.int64(2)) == (0, 1)
    pool.give_back(A, np.array([1, 0]))
    assert pool.take(A, 1) == (0,)
    assert all(type(entry) is int for entry in pool._free)


def test_a_used_page_is_zeroed_when_it_is_taken_again(pool):
    (page,) = pool.take(A)
    pool.page(page)[...] = 3
    pool.give_back(A, [page])
    assert pool.take(B) == (page,)
    assert not bits(pool.page(page)).any()


def test_exhaustion_takes_nothing(pool):
    pool.take(A, 4)
    message = (
        "3 pages are needed, but 2 of 6 are free: nothing was taken. Close or roll back a stream, or make the pool "
        "larger (streams=, context=)"
    )
    unchanged(pool, PoolExhaustedError, message, lambda: pool.take(B, 3))
    with pytest.raises(PoolExhaustedError) as caught:
        pool.take(B, 3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert pool.take(B, 2) == (4, 5)


@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        ([0, 2], "page 2 cannot be given back: B holds it, not A; nothing was given back"),
        ([0, 3], "page 3 cannot be given back: it is free already; nothing was given back"),
        ([0, 1, 0], "page 0 cannot be given back: it is named twice; nothing was given back"),
        (
            [0, 6],
            "page 6 cannot be given back: it is not of this arena, which has pages 0 to 5; nothing was given back",
        ),
        (
            [0, -1],
            "page -1 cannot be given back: it is not of this arena, which has pages 0 to 5; nothing was given back",
        ),
    ],
    ids=["foreign", "double free", "named twice", "past the arena", "negative"],
)
def test_giving_back_against_the_rules(pool, pages, problem):
    pool.take(A, 2)
    pool.take(B, 1)
    unchanged(pool, PageError, problem, lambda: pool.give_back(A, pages))


def test_a_page_that_is_given_back_twice(pool):
    pages = pool.take(A, 2)
    pool.give_back(A, pages)
    message = "page 0 cannot be given back: it is free already; nothing was given back"
    unchanged(pool, PageError, message, lambda: pool.give_back(A, pages))


@pytest.mark.parametrize("page", [True, 1.0, "1", None, np.True_, np.float32(1)])
def test_a_page_number_is_an_integer(pool, page):
    pool.take(A, 2)
    unchanged(pool, TypeError, f"page is {page!r}; it must be an integer", lambda: pool.give_back(A, [page]))


@pytest.mark.parametrize("count", [True, 1.5, "1", None])
def test_a_count_is_an_integer(pool, count):
    unchanged(pool, TypeError, f"count of pages is {count!r}; it must be an integer", lambda: pool.take(A, count))


def test_pages_are_a_collection(pool):
    pool.take(A, 2)
    message = "pages is 1; it must be a collection of page numbers, for example [1]"
    unchanged(pool, TypeError, message, lambda: pool.give_back(A, 1))


def test_a_negative_count(pool):
    unchanged(pool, ValueError, "count of pages is -1; it must be 0 or more", lambda: pool.take(A, -1))


def test_nobody_takes_no_page(pool):
    message = "pages are taken for None; give the owner that will give them back"
    unchanged(pool, TypeError, message, lambda: pool.take(None, 1))


@pytest.mark.parametrize("page", [-1, 6])
def test_a_page_outside_the_arena_has_no_view(pool, page):
    with refused(PageError, f"page {page} is not of this arena, which has pages 0 to 5"):
        pool.page(page)


# ---- a backend that fails ----


def failing(backend, monkeypatch, name, calls):
    """These calls of a backend's operation fail, counted from 0."""
    count = iter(range(10**9))
    original = getattr(backend, name)

    def operation(*args):
        if next(count) in calls:
            raise LaunchError(name, None, None, "injected")
        return original(*args)

    monkeypatch.setattr(backend, name, operation)


@pytest.fixture
def fragile(monkeypatch):
    """A pool that is never idle by itself, and its backend."""
    engine = DelayedEngine()
    return PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=engine), engine.backend


def test_pages_that_cannot_be_zeroed_are_free_again_behind_the_zeros_on_their_way(fragile, monkeypatch):
    pool, backend = fragile
    failing(backend, monkeypatch, "zero", [1])
    with pytest.raises(LaunchError):
        pool.take(A, 3)
    assert (pool.free, pool.audit(), pool.pages_of(A)) == (6, [], ())
    assert not pool._fences[0].done()
    backend.synchronize()
    assert pool._fences[0].done()


def test_pages_whose_zeros_cannot_be_fenced_stay_their_owners(fragile, monkeypatch):
    pool, backend = fragile
    failing(backend, monkeypatch, "zero", [1])
    failing(backend, monkeypatch, "fence", [0])
    with pytest.raises(LaunchError):
        pool.take(A, 3)
    assert (pool.free, pool.audit(), pool.pages_of(A)) == (4, [], (0, 1))
    pool.give_back(A, (0, 1))
    assert (pool.free, pool.audit()) == (6, [])
    assert not pool._fences[0].done()


def test_a_fresh_arena_waits_for_the_queue_that_it_was_made_on(fragile):
    pool, backend = fragile
    assert pool.statistics().draining == 0
    backend.submit(lambda: None)
    pool = PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=pool.engine)
    assert pool.statistics().draining == 6
    backend.synchronize()
    assert pool.statistics().draining == 0


# ---- a damaged free list ----


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_page_in_the_free_list_twice(pool, count):
    heapq.heappush(pool._free, 0)
    message = "page 0 is in the free list twice: the pool is damaged; nothing was taken"
    unchanged(pool, PageError, message, lambda: pool.take(A, count))
    assert pool.audit() == ["page 0 is in the free list 2 times"]


def test_a_held_page_in_the_free_list(pool):
    pool.take(A, 1)
    heapq.heappush(pool._free, 0)
    message = "page 0 is in the free list while A holds it: the pool is damaged; nothing was taken"
    unchanged(pool, PageError, message, lambda: pool.take(B, 2))
    assert pool.audit() == ["page 0 is in the free list while A holds it"]


def test_a_foreign_page_in_the_free_list(pool):
    heapq.heappush(pool._free, -3)
    message = "page -3 is in the free list and not of this arena: the pool is damaged; nothing was taken"
    unchanged(pool, PageError, message, lambda: pool.take(A, 1))
    assert pool.audit() == ["page -3 is in the free list, but not of this arena"]


def test_a_lost_page(pool):
    heapq.heappop(pool._free)
    assert pool.audit() == ["page 0 is lost: it is neither free nor held"]


def test_an_exhausted_pool_is_in_order(pool):
    pool.take(A, 6)
    assert pool.audit() == []


# ---- statistics ----


def test_statistics(pool):
    a, b = Holder("a", length=9), Holder("b", length=8)
    pool.take(a, 2)
    pool.take(b, 1)
    pool.give_back(b, [2])
    given = pool.statistics()
    assert (given.pages, given.free, given.used, given.high_water, given.draining) == (6, 4, 2, 3, 0)
    assert given.positions == 9
    assert given.fragmentation == 1 - 9 / 16


def test_statistics_of_an_unused_pool(pool):
    given = pool.statistics()
    assert (given.free, given.used, given.high_water, given.positions, given.fragmentation) == (6, 0, 0, 0, 0.0)


def test_statistics_of_streams(pool):
    stream, _ = grown(pool, 1, 9)
    assert pool.statistics().positions == 9
    stream.roll_back(8)
    given = pool.statistics()
    assert (given.used, given.high_water, given.fragmentation) == (1, 2, 0.0)


# ---- sizes ----


@pytest.mark.parametrize("name", ["streams", "context", "page_size"])
@pytest.mark.parametrize("value", [True, 2.0, "8"])
def test_sizes_are_integers(engine, name, value):
    with refused(TypeError, f"{name} is {value!r}; it must be an integer"):
        PagePool(TINY, engine=engine, **({"streams": 1, "context": 16, "page_size": 8} | {name: value}))


@pytest.mark.parametrize("name", ["streams", "context", "page_size"])
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_are_above_zero(engine, name, value):
    with refused(ValueError, f"{name} is {value}; it must be 1 or more"):
        PagePool(TINY, engine=engine, **({"streams": 1, "context": 16, "page_size": 8} | {name: value}))


def test_a_page_size_that_cuts_blocks(engine):
    with pytest.raises(ValueError, match=r"^page size 6 does not hold whole blocks"):
        PagePool(TINY, streams=1, context=16, page_size=6, engine=engine)


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
def test_narrow_integers_do_not_wrap_around(engine, kind):
    pool = PagePool(TINY, streams=kind(3), context=kind(100), page_size=kind(8), engine=engine)
    assert (pool.layout.pages, pool.context, pool.page_size) == (39, 100, 8)


@pytest.mark.parametrize(("context", "pages"), [(16, 2), (17, 3), (23, 3), (24, 3)])
def test_a_context_that_fills_no_page(engine, context, pages):
    pool = PagePool(TINY, streams=1, context=context, page_size=PAGE, engine=engine)
    assert pool.layout.pages == pages
    stream, _ = grown(pool, 1, context)
    with refused(
        fast.StreamError,
        f"{stream} would hold {context + 1} positions; a stream of this pool holds at most {context}: make the pool "
        "with a larger context=",
    ):
        stream.reserve(context + 1)


def test_a_contiguous_pool_has_one_page_for_each_stream(engine):
    pool = PagePool(TINY, streams=3, context=17, engine=engine)
    assert (pool.contiguous, pool.layout.pages, pool.page_size, pool.pages_for(17)) == (True, 3, 20, 1)


def test_an_arena_of_ones_own(engine):
    layout = arena_layout(TINY, streams=2, context=24, page_size=PAGE)
    arena = np.empty(layout.elements, BF16)
    pool = PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=engine, arena=arena)
    assert pool.layout == layout
    assert np.shares_memory(pool.page(5), arena)
    with pytest.raises(ValueError, match=r"^arena has shape"):
        PagePool(TINY, streams=2, context=25, page_size=PAGE, engine=engine, arena=arena)


# ---- the page test ----


def test_the_page_test_hands_out_reversed_pages(engine, monkeypatch):
    monkeypatch.setenv(PAGE_TEST, "4")
    pool = PagePool(TINY, streams=1, context=20, engine=engine)
    assert (pool.page_test, pool.contiguous, pool.page_size) == (True, False, 4)
    stream, _ = grown(pool, 1, 9, 8)
    assert stream.pages == (4, 3, 2, 1, 0)
    assert list(stream.table[:5]) == [4, 3, 2, 1, 0]
    stream.roll_back(9)
    assert pool.take(A, 1) == (1,)
    assert pool.audit() == []


def test_the_page_test_overrides_a_page_size(engine, monkeypatch):
    monkeypatch.setenv(PAGE_TEST, "12")
    assert PagePool(TINY, streams=1, context=20, page_size=8, engine=engine).page_size == 12


def test_a_damaged_pool_in_the_page_test(engine, monkeypatch):
    monkeypatch.setenv(PAGE_TEST, "8")
    pool = PagePool(TINY, streams=1, context=24, engine=engine)
    heapq.heappush(pool._free, -2)
    with refused(PageError, "page 2 is in the free list twice: the pool is damaged; nothing was taken"):
        pool.take(A, 2)
    assert pool.audit() == ["page 2 is in the free list 2 times"]
    assert pool.statistics().free == 4


@pytest.mark.parametrize("value", ["0", "-8", "8.0", "eight", " 8", "8 ", "+8", "1e1", "²"])
def test_a_page_test_that_is_no_number(engine, monkeypatch, value):
    monkeypatch.setenv(PAGE_TEST, value)
    message = f"$KVPROOF_PAGE_TEST is {value!r}; it must be the positions of a page, a multiple of the block"
    with refused(ValueError, message):
        PagePool(TINY, streams=1, context=16, engine=engine)


def test_a_page_test_that_cuts_blocks(engine, monkeypatch):
    monkeypatch.setenv(PAGE_TEST, "6")
    message = "$KVPROOF_PAGE_TEST is 6, which does not hold whole blocks; give a multiple of the block, 4"
    with refused(ValueError, message):
        PagePool(TINY, streams=1, context=16, engine=engine)


def test_an_empty_page_test_is_none(engine, monkeypatch):
    monkeypatch.setenv(PAGE_TEST, "")
    assert PagePool(TINY, streams=1, context=16, engine=engine).contiguous


PROGRAM = """
from kvproof import fast
from pools import grown
from kvproof.reference import TINY
import hashlib, numpy as np
pool = fast.PagePool(TINY, streams=2, context=60)
stream, outputs = grown(pool, 5, 33, 1, 9)
print(pool.page_size, hashlib.sha256(np.concatenate(outputs).tobytes()).hexdigest())
"""


def test_a_program_that_knows_nothing_of_the_page_test_gives_the_same_bits():
    def run(**environment):
        where = os.path.dirname(os.path.dirname(__file__))
        given = {**os.environ, "PYTHONPATH": where, **environment}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True, check=True
        ).stdout.split()

    plain, test = run(), run(**{PAGE_TEST: "12"})
    assert (plain[0], test[0]) == ("60", "12")
    assert plain[1] == test[1]


# ---- captured steps ----


def test_no_page_is_taken_inside_a_capture(pool, engine):
    stream = fast.Stream(pool, WEIGHTS)
    message = "pages are taken inside a capture; reserve them before it (Stream.reserve)"
    with fast.capture(engine), refused(fast.CaptureError, message):
        pool.take(A, 1)
    assert pool.free == 6
    assert stream.pages == ()
