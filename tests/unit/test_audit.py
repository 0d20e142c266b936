"""The audit sees each kind of damage that is planted, and names it."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from kvproof import fast
from kvproof.oracle.memory import GUARD_BYTES
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.oracle.serving.delayed import DelayedEngine
from kvproof.reference import TINY
from kvproof.reference.layout import BF16, PARTS
from pools import PAGE, WEIGHTS, grown, rows_of
from streams import bits


@pytest.fixture
def pool(engine):
    return guarded_pool(TINY, streams=2, context=24, page_size=PAGE, engine=engine)


@pytest.fixture
def streams(pool):
    """Stream 0 holds pages 0 and 1 (nine positions), stream 1 page 2 (five)."""
    return [grown(pool, 1, 9)[0], grown(pool, 2, 5)[0]]


def test_all_is_well(pool, streams):
    assert audit(pool, []) != []
    assert audit(pool, streams) == []
    streams[0].roll_back(3)
    assert audit(pool, streams) == []
    streams[0].close()
    assert audit(pool, streams) == []
    assert audit(pool, streams[1:]) == []


@pytest.mark.parametrize("page_size", [None, 4, 24], ids=str)
def test_all_is_well_in_any_layout(engine, page_size):
    pool = guarded_pool(TINY, streams=2, context=24, page_size=page_size, engine=engine)
    streams = [grown(pool, 1, 9)[0], grown(pool, 2, 5, 8)[0]]
    assert audit(pool, streams) == []
    pool.page(streams[0].pages[-1])[-1] = 1  # of a pooled row that is not complete
    assert audit(pool, streams) != []


def test_an_audit_waits_for_all_queues():
    engine = DelayedEngine()
    pool = guarded_pool(TINY, streams=1, context=24, page_size=PAGE, engine=engine)
    stream = fast.Stream(pool, WEIGHTS)
    with engine.backend.queue(1):
        stream.append(rows_of(1, 0, 3))
    assert audit(pool, [stream]) == []
    assert engine.backend.pending(1) == 0


def test_a_plain_pool_can_be_audited(engine):
    pool = fast.PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=engine)
    stream, _ = grown(pool, 1, 9)
    assert audit(pool, [stream]) == []
    stream.cache(0).write("values", [9], np.ones((1, 2, 32), BF16))
    assert len(audit(pool, [stream])) == 1


def test_free_pages_are_poison(pool, streams):
    assert np.isnan(pool.page(5).astype(np.float32)).all()
    streams[1].close()
    assert np.isnan(pool.page(2).astype(np.float32)).all()


def test_free_pages_without_poison(engine):
    pool = guarded_pool(TINY, streams=1, context=24, page_size=PAGE, engine=engine, poison=False)
    stream, _ = grown(pool, 1, 9)
    stream.close()
    assert not np.isnan(pool.page(0).astype(np.float32)).any()
    assert audit(pool, []) == []


def test_a_guarded_pool_poisons_nothing_that_is_refused(pool, streams):
    before = bits(pool.arena).copy()
    with pytest.raises(fast.PageError):
        pool.give_back(streams[0], [0, 2])
    assert np.array_equal(bits(pool.arena), before)


# ---- who holds what ----


def test_a_page_in_the_free_list_twice(pool, streams):
    heapq.heappush(pool._free, 4)
    assert audit(pool, streams) == ["page 4 is in the free list 2 times"]


def test_a_held_page_in_the_free_list(pool, streams):
    heapq.heappush(pool._free, 1)
    assert audit(pool, streams) == ["page 1 is in the free list while stream 0 holds it"]


def test_a_lost_page(pool, streams):
    heapq.heappop(pool._free)
    assert audit(pool, streams) == ["page 3 is lost: it is neither free nor held"]


def test_a_page_of_a_stream_that_is_not_given(pool, streams):
    assert audit(pool, streams[:1]) == ["page 2 is held by stream 1, which is not an open stream of those given"]


def test_a_page_that_its_stream_does_not_name(pool, streams):
    pool.take(streams[1])
    assert audit(pool, streams) == ["page 3 is held by stream 1, whose pages do not name it"]


def test_a_page_that_is_named_but_free(pool, streams):
    pool.give_back(streams[0], [1])
    found = audit(pool, streams)
    assert "stream 0, logical page 1: page 1 is free" in found


def test_a_shared_page(pool, streams):
    streams[1]._pages[0] = streams[1].table[0] = 1
    found = audit(pool, streams)
    assert "page 1 is shared: stream 0 and stream 1 name it" in found
    assert "stream 1, logical page 0: page 1 is held by stream 0" in found
    assert "page 2 is held by stream 1, whose pages do not name it" in found


def test_a_page_that_is_named_twice(pool, streams):
    streams[0]._pages[1] = streams[0].table[1] = 0
    found = audit(pool, streams)
    assert "stream 0, logical page 1: page 0 is its logical page 0 too" in found


@pytest.mark.parametrize("page", [-1, 6])
def test_a_page_of_no_arena(pool, streams, page):
    streams[0]._pages[1] = streams[0].table[1] = page
    assert f"stream 0, logical page 1: page {page} is not of this arena" in audit(pool, streams)


def test_a_table_that_says_something_else(pool, streams):
    streams[0].table[1] = 4
    assert audit(pool, streams) == ["stream 0, logical page 1: its table says page 4, its pages page 1"]


def test_entries_behind_the_pages_name_no_page(pool, streams):
    streams[0].table[2] = 1
    message = "stream 0, logical page 2: its table says page 1, but it holds no such logical page"
    assert audit(pool, streams) == [message]
    streams[0].unfinished = True
    assert audit(pool, streams) == []


def test_contiguous_caches_lie_on_the_streams_page(engine):
    pool = guarded_pool(TINY, streams=2, context=24, engine=engine)
    one, other = (grown(pool, seed, 9)[0] for seed in (1, 2))
    one._caches = other._caches
    assert audit(pool, [one, other]) == [
        f"stream 0, layer {layer}: its cache does not lie on its page 0" for layer in (0, 1)
    ]
    one._caches = ()
    assert audit(pool, [one, other]) == ["stream 0 holds page 0, but has no caches"]


def test_a_contiguous_stream_without_a_page_has_no_caches(engine):
    pool = guarded_pool(TINY, streams=2, context=24, engine=engine)
    stream, _ = grown(pool, 1, 9)
    caches = stream.caches
    stream.roll_back(0)
    assert audit(pool, [stream]) == []
    stream._caches = caches
    assert audit(pool, [stream]) == ["stream 0 holds no page, but has caches"]


def test_a_closed_stream_that_names_pages(pool, streams):
    streams[1].close()
    streams[1]._pages = [2]
    assert audit(pool, streams) == ["stream 1 is closed, but names pages (2,)"]


def test_a_stream_of_another_pool(engine, pool, streams):
    other = fast.Stream(fast.PagePool(TINY, streams=1, context=8, engine=engine), WEIGHTS)
    assert audit(pool, [*streams, other]) == ["stream 0 is of another pool"]


# ---- lengths ----


@pytest.mark.parametrize("length", [17, -1])
def test_a_length_that_does_not_fit(pool, streams, length):
    streams[0]._lengths[1] = length
    message = f"stream 0, layer 1: {length} positions do not fit its 2 pages of 8, or the context of 24"
    assert message in audit(pool, streams)


def test_a_length_past_the_context(engine):
    pool = guarded_pool(TINY, streams=1, context=6, page_size=PAGE, engine=engine)
    stream, _ = grown(pool, 1, 6)
    stream._lengths[:] = [7, 7]
    assert "stream 0, layer 0: 7 positions do not fit its 1 pages of 8, or the context of 6" in audit(pool, [stream])


def test_surplus_pages(pool, streams):
    streams[0].grow(17)
    assert audit(pool, streams) == [
        "stream 0 holds 3 pages, the surplus (3,): its 9 positions and the 0 that it has reserved need 2"
    ]
    streams[0].reserve(17)
    assert audit(pool, streams) == []


def test_a_round_at_work_may_hold_more(pool, streams):
    with fast.Round([(streams[0], 8)]) as step:
        assert audit(pool, streams) == []
        for layer in step.layers:
            step.attend(layer, [rows_of(1, 9, 8)[layer]])
            assert audit(pool, streams) == []
    assert audit(pool, streams) == []


# ---- bytes ----

PAST = {"keys": 9, "values": 9, "index_keys": 9, "pooled": 2}
"""The first row of each part past nine positions, and where it lies: on page 1."""


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", PARTS)
def test_a_row_past_the_end(pool, streams, layer, part):
    cache = streams[0].cache(layer)
    shape = cache.layout.part(layer, part)
    cache.write(part, [PAST[part]], np.full((1, shape.heads, shape.width), 1e-30, BF16))
    row = PAST[part] % shape.rows_per_page
    assert audit(pool, streams) == [
        f"stream 0, page 1, layer {layer}, {part}, row {row}: not zero, but past the end ({part} row {PAST[part]} of "
        "the stream, whose layer holds 9 positions); 1 such rows"
    ]


def test_a_negative_zero_past_the_end(pool, streams):
    streams[1].cache(1).write("keys", [7], np.full((1, 2, 32), -0.0, BF16))
    (found,) = audit(pool, streams)
    assert found.startswith("stream 1, page 2, layer 1, keys, row 7: not zero")


def test_rows_of_a_reserved_page(pool, streams):
    streams[0].reserve(24)
    pool.page(streams[0].pages[2])[:] = 1
    found = audit(pool, streams)
    assert len(found) == 8
    assert found[0].startswith("stream 0, page 3, layer 0, keys, row 0: not zero")
    assert found[0].endswith("8 such rows")


def test_rows_that_a_failure_left_are_allowed(pool, streams):
    cache = streams[0].cache(0)
    cache.write("keys", [9, 10], np.ones((2, 2, 32), BF16))
    streams[0].begin_writing(0, 10)
    assert [found[:44] for found in audit(pool, streams)] == ["stream 0, page 1, layer 0, keys, row 2: not "]
    streams[0].begin_writing(0, 11)
    assert audit(pool, streams) == []


def test_a_free_page_that_is_written(pool, streams):
    layout = pool.layout
    pool.page(4)[layout.layer_elements + layout.part(0, "pooled").base] = 0
    assert audit(pool, streams) == [
        "page 4, layer 1, pooled, row 0: written while the page is free; 1 elements changed"
    ]


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (GUARD_BYTES - 3, "1 guard bytes before the arena changed, the nearest 3 bytes from it"),
        (0, f"1 guard bytes before the arena changed, the nearest {GUARD_BYTES} bytes from it"),
        (-GUARD_BYTES, "1 guard bytes behind the arena changed, the nearest 1 bytes from it"),
        (-1, f"1 guard bytes behind the arena changed, the nearest {GUARD_BYTES} bytes from it"),
    ],
)
def test_a_guard_that_changed(pool, streams, at, found):
    pool._raw[at] ^= 1
    assert audit(pool, streams) == [found]


def test_a_guarded_pool_lies_on_the_host():
    class Elsewhere:
        name, device = "cuda", 0

        def describe(self):
            return "a GPU"

    with pytest.raises(TypeError, match=r"^a guarded pool lies on the host, but the engine runs on a GPU$"):
        guarded_pool(TINY, streams=1, context=8, engine=fast.Engine(Elsewhere()))
