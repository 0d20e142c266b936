"""Streams: what reserving, rolling back and closing do to pages, tables and bytes."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvproof import fast
from kvproof.fast import CaptureError, LaunchError, PagePool, PoolExhaustedError, Stream, StreamError
from kvproof.fast.engine import HOST_THREADS
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.reference import TINY
from pools import BLOCK, PAGE, WEIGHTS, extended, grown, page_bits, rows_of
from streams import assert_bits, bits, make_rope, make_weights, refused

HOST = fast.HostBackend(workers=1)
ENGINE = fast.Engine(HOST)
LAYOUTS = [None, 4, 8, 12, 48]


def make_pool(page_size=PAGE, *, streams=2, context=24):
    return guarded_pool(TINY, streams=streams, context=context, page_size=page_size, engine=ENGINE)


def state(stream):
    """What a refused call leaves alone."""
    pool = stream.pool
    table = None if stream.table is None else list(stream.table)
    return stream.lengths, stream.pages, stream.reserved, stream.written, table, pool.free, bits(pool.arena).tobytes()


def unchanged(stream, error, message, call):
    """The call is refused with this message, and nothing has changed."""
    before = state(stream)
    with refused(error, message):
        call()
    assert state(stream) == before
    assert audit(stream.pool, [] if stream.closed else [stream]) == []


# ---- growing ----


@pytest.mark.parametrize("page_size", LAYOUTS, ids=str)
def test_any_layout_gives_the_bits_of_one_window(page_size):
    pool = make_pool(page_size, context=48)
    stream, got = grown(pool, 1, 5, 1, 17, 1, 1, 20)
    _, want = grown(make_pool(None, context=48), 1, 45)
    for layer in range(TINY.layers):
        assert_bits(got[layer], want[layer], f"layer {layer} gated")
    assert stream.lengths == (45, 45)
    assert len(stream.pages) == pool.pages_for(45)
    assert audit(pool, [stream]) == []


@pytest.mark.parametrize("mode", ["text", "delta", "media"])
def test_rows_are_rotated_by_the_streams_rope(mode):
    rope = make_rope(mode, length=20)
    _, got = grown(make_pool(), 1, 9, 3, 12, rope=rope)
    _, want = grown(make_pool(None), 1, 24, rope=rope)
    _, text = grown(make_pool(None), 1, 24)
    for layer in range(TINY.layers):
        assert_bits(got[layer], want[layer], f"layer {layer} gated")
    assert (mode == "text") == np.array_equal(bits(got[0]), bits(text[0]))


def test_a_stream_takes_pages_as_it_needs_them():
    pool = make_pool()
    stream, _ = grown(pool, 1, 8)
    assert stream.pages == (0,)
    extended(stream, 1, 1)
    assert (stream.pages, list(stream.table[:2]), pool.free) == ((0, 1), [0, 1], 4)


def test_a_stream_may_fill_its_context_and_no_more():
    pool = make_pool(context=21)
    stream, _ = grown(pool, 1, 21)
    message = (
        f"{stream} would hold 22 positions; a stream of this pool holds at most 21: make the pool with a larger "
        "context="
    )
    unchanged(stream, StreamError, message, lambda: extended(stream, 1, 1))


def test_results_hold_no_page():
    pool = make_pool()
    stream = Stream(pool, WEIGHTS)
    (window, _) = stream.append(rows_of(1, 0, 9))
    arrays = [window.q, window.iq, window.scores, window.out, window.gated, window.partials.o, window.lists.ids]
    assert not any(np.shares_memory(array, pool.arena) for array in arrays)


# ---- reserving ----


@pytest.mark.parametrize("page_size", [None, PAGE], ids=str)
def test_a_reservation_lasts_until_a_rollback(page_size):
    pool = make_pool(page_size)
    stream = Stream(pool, WEIGHTS)
    stream.reserve(17)
    pages = stream.pages
    assert len(pages) == pool.pages_for(17)
    extended(stream, 1, 3)
    stream.reserve(5)
    with pytest.raises(ValueError, match="projection"):
        stream.append([rows_of(1, 3, 2)[0], rows_of(1, 3, 1)[1]])
    assert (stream.pages, stream.reserved) == (pages, 17)
    assert audit(pool, [stream]) == []
    stream.roll_back(3)
    assert stream.pages == pages[:1]
    assert audit(pool, [stream]) == []


def test_reserved_pages_are_zeroed_before_any_row_is_stored():
    pool = make_pool()
    stream = Stream(pool, WEIGHTS)
    stream.reserve(24)
    assert not page_bits(stream).any()


def test_a_reservation_that_the_pool_cannot_meet():
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    other, _ = grown(pool, 2, 24)
    pool.take(other, 1)
    with pytest.raises(PoolExhaustedError, match=r"^1 pages are needed, but 0 of 6 are free"):
        stream.reserve(24)
    assert (stream.pages, stream.reserved) == ((0, 1), 0)


@pytest.mark.parametrize("positions", [True, 2.0, "2", None])
def test_positions_are_an_integer(positions):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"positions is {positions!r}; it must be an integer"
    unchanged(stream, TypeError, message, lambda: stream.reserve(positions))


def test_a_negative_reservation():
    stream, _ = grown(make_pool(), 1, 9)
    unchanged(stream, ValueError, "positions is -1; it must be 0 or more", lambda: stream.reserve(-1))


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_numbers_of_numpy_are_numbers(kind):
    pool = make_pool(context=300)
    stream = Stream(pool, WEIGHTS)
    stream.reserve(kind(200))
    extended(stream, 1, 9)
    assert stream.roll_back(kind(5)) == (4, 4)
    assert [type(length) for length in (*stream.lengths, stream.reserved)] == [int] * 3


# ---- what names no page ----


def test_a_fresh_table_names_no_page():
    pool = make_pool()
    other, _ = grown(pool, 1, 9)
    stream = Stream(pool, WEIGHTS)
    before = page_bits(other)
    with pytest.raises(ValueError, match=r"^page table entry 0 names page -1; the arena has pages 0 to 5$"):
        fast.prep(TINY, WEIGHTS[0], stream.cache(0), rows_of(2, 0, 3)[0], 0, stream.rope, engine=ENGINE)
    assert_bits(page_bits(other), before, "pages of the other stream")
    assert audit(pool, [other, stream]) == []


def failing_once(monkeypatch, name):
    """The next call of the backend's operation fails."""
    original = getattr(HOST, name)

    def operation(*args):
        monkeypatch.setattr(HOST, name, original)
        raise LaunchError(name, None, None, "injected")

    monkeypatch.setattr(HOST, name, operation)


@pytest.mark.parametrize("page_size", [None, PAGE], ids=str)
def test_what_could_not_be_reserved_is_named_by_nothing(page_size, monkeypatch):
    pool = make_pool(page_size)
    stream = Stream(pool, WEIGHTS)
    failing_once(monkeypatch, "fence")
    with pytest.raises(LaunchError):
        stream.reserve(5)
    assert (stream.pages, stream.untidy) == ((), False)
    assert audit(pool, [stream]) == []
    other, _ = grown(pool, 1, 9)
    before = page_bits(other)
    with pytest.raises((ValueError, StreamError), match=r"names page -1|holds no page yet"):
        fast.prep(TINY, WEIGHTS[0], stream.cache(0), rows_of(2, 0, 3)[0], 0, stream.rope, engine=ENGINE)
    assert_bits(page_bits(other), before, "pages of the other stream")
    other.close()
    extended(stream, 1, 3)
    assert_same_as_never_drafted(stream, 3)


# ---- rolling back ----

EDGES = sorted({edge + i for edge in (0, BLOCK, PAGE, 2 * PAGE, 12, 20) for i in (-1, 0, 1)} - {-1})


@pytest.mark.parametrize("page_size", [None, 4, 8], ids=str)
def test_a_rollback_to_every_edge_leaves_no_trace(page_size):
    pool = make_pool(page_size)
    for keep in EDGES:
        stream, _ = grown(pool, 1, 24)
        assert stream.roll_back(keep) == (24 - keep,) * 2
        assert_same_as_never_drafted(stream, keep)
        stream.close()


def assert_same_as_never_drafted(stream, keep):
    """The pages are those of a stream that was given `keep` rows only, and so is what follows."""
    __tracebackhide__ = True
    pool = stream.pool
    assert audit(pool, [stream]) == []
    assert stream.lengths == (keep, keep)
    alone = make_pool(None if pool.contiguous else pool.page_size, streams=1, context=pool.context)
    want, _ = grown(alone, 1, keep) if keep else (Stream(alone, WEIGHTS), None)
    assert_bits(page_bits(stream), page_bits(want), f"pages after {keep} positions")
    count = min(7, pool.context - keep)
    if count:
        got, expected = extended(stream, 1, count), extended(want, 1, count)
        for layer in range(TINY.layers):
            assert_bits(got[layer], expected[layer], f"layer {layer} gated after {keep} positions")
        assert_bits(page_bits(stream), page_bits(want), f"pages after {keep} positions and {count} more")


@settings(max_examples=60)
@given(
    page_size=st.sampled_from(LAYOUTS),
    windows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
)
@example(page_size=4, windows=[(4, 4), (4, 3), (1, 1), (1, 4)])
def test_refuted_drafts_leave_no_trace(page_size, windows):
    """Each window: rows that stay, then drafts of another text that are rolled back."""
    pool = make_pool(page_size, streams=1, context=48)
    stream = Stream(pool, WEIGHTS)
    kept = 0
    for stay, drafts in windows:
        stay = min(stay, pool.context - kept)
        drafts = min(drafts, pool.context - kept - stay)
        if stay + drafts:
            rows = (
                [np.concatenate(both) for both in zip(rows_of(1, kept, stay), rows_of(9, 0, drafts), strict=True)]
                if stay and drafts
                else rows_of(1 if stay else 9, kept, stay + drafts)
            )
            stream.append(rows)
            kept += stay
            assert stream.roll_back(kept) == (drafts, drafts)
    assert_same_as_never_drafted(stream, kept)


def test_layers_roll_back_apart():
    pool = make_pool()
    stream, _ = grown(pool, 1, 10)
    assert stream.roll_back(3, layers=[1]) == (7,)
    assert (stream.lengths, stream.length, stream.pages) == ((10, 3), 10, (0, 1))
    assert audit(pool, [stream]) == []
    assert not bits(stream.cache(1).read("keys", [3, 9])).any()
    assert bits(stream.cache(0).read("keys", [3, 9])).any(axis=(1, 2)).all()
    assert stream.roll_back(3, layers=(0,)) == (7,)
    assert stream.pages == (0,)
    assert_same_as_never_drafted(stream, 3)


@pytest.mark.parametrize("length", [-1, 10])
def test_a_rollback_to_where_it_never_was(length):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"{stream} cannot be rolled back to {length} positions: layer 0 holds 9; nothing was rolled back"
    unchanged(stream, StreamError, message, lambda: stream.roll_back(length))


def test_a_rollback_that_one_layer_cannot_follow():
    stream, _ = grown(make_pool(), 1, 9)
    stream.roll_back(4, layers=[1])
    message = f"{stream} cannot be rolled back to 5 positions: layer 1 holds 4; nothing was rolled back"
    unchanged(stream, StreamError, message, lambda: stream.roll_back(5))


@pytest.mark.parametrize("length", [True, 3.0, "3", None])
def test_a_rollback_to_no_integer(length):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"length is {length!r}; it must be an integer"
    unchanged(stream, TypeError, message, lambda: stream.roll_back(length))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([-1], "layer -1 does not exist; stream 0 has layers 0 to 1"),
        ([0, 2], "layer 2 does not exist; stream 0 has layers 0 to 1"),
        ([1, 1], "layer 1 is named twice; name each layer once"),
        ([], "no layer is named; name at least one, or give None for all"),
    ],
)
def test_layers_that_are_none(layers, problem):
    stream, _ = grown(make_pool(), 1, 9)
    unchanged(stream, StreamError, problem, lambda: stream.roll_back(3, layers=layers))


@pytest.mark.parametrize("layer", [True, 1.0, "1"])
def test_a_layer_is_an_integer(layer):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"layer is {layer!r}; it must be an integer"
    unchanged(stream, TypeError, message, lambda: stream.roll_back(3, layers=[layer]))
    unchanged(stream, TypeError, message, lambda: stream.cache(layer))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_cache_of_no_layer(layer):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"layer {layer} does not exist; {stream} has layers 0 to 1"
    unchanged(stream, StreamError, message, lambda: stream.cache(layer))


def test_a_contiguous_stream_without_a_page_has_no_cache():
    stream, _ = grown(make_pool(None), 1, 9)
    stream.roll_back(0)
    assert stream.pages == ()
    message = f"{stream} is contiguous and holds no page yet; reserve one (Stream.reserve)"
    unchanged(stream, StreamError, message, lambda: stream.cache(0))
    extended(stream, 1, 3)
    assert_same_as_never_drafted(stream, 3)


# ---- closing ----


@pytest.mark.parametrize("page_size", [None, PAGE], ids=str)
def test_a_closed_stream_gives_its_pages_back_and_does_nothing_more(page_size):
    pool = make_pool(page_size)
    with Stream(pool, WEIGHTS) as stream:
        extended(stream, 1, 9)
    assert (stream.closed, stream.pages, stream.lengths) == (True, (), (0, 0))
    assert pool.statistics().used == 0
    stream.close()
    message = f"{stream} is closed; make another"
    for call in (
        lambda: stream.append(rows_of(1, 0, 1)),
        lambda: stream.reserve(1),
        lambda: stream.roll_back(0),
        lambda: stream.cache(0),
        lambda: fast.settle(stream, [1], [1, 2]),
    ):
        unchanged(stream, StreamError, message, call)


def test_an_error_inside_closes_the_stream():
    pool = make_pool()
    stream = Stream(pool, WEIGHTS)

    def interrupted():
        with stream:
            extended(stream, 1, 9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.closed
    assert audit(pool, []) == []


def test_closing_gives_back_what_an_interruption_left():
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    pool.take(stream, 1)  # and interrupted before it knew
    stream.close()
    assert audit(pool, []) == []


def test_others_are_not_touched():
    pool = make_pool(streams=3)
    other, _ = grown(pool, 2, 13)
    before = page_bits(other)
    stream, _ = grown(pool, 1, 20)
    stream.roll_back(5)
    stream.append(rows_of(1, 5, 13))
    stream.close()
    assert_bits(page_bits(other), before, "pages of the other stream")


# ---- what a stream is made of ----


def test_weights_of_another_number_of_layers():
    message = "weights of 1 layers are given; the geometry has 2 layers"
    with refused(ValueError, message):
        Stream(make_pool(), WEIGHTS[:1])


def test_weights_that_are_no_sequence():
    message = "weights is a Weights; it must be a sequence of 2 Weights, one for each layer"
    with refused(TypeError, message):
        Stream(make_pool(), WEIGHTS[0])
    with refused(TypeError, "the weights of layer 1 are a str; give Weights"):
        Stream(make_pool(), [WEIGHTS[0], "weights"])


def test_weights_that_do_not_fit():
    wide = make_weights(replace(TINY, head_dim=40))
    with pytest.raises(ValueError, match=r"^weights\.q_scale has shape \[40\]"):
        Stream(make_pool(), [WEIGHTS[0], wide])


def test_a_rope_that_is_none():
    with refused(TypeError, "rope is a str; it must be a Rope, for example geometry.TEXT"):
        Stream(make_pool(), WEIGHTS, rope="text")


# ---- captured steps ----


def test_a_captured_step_follows_the_streams_table():
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    stream.reserve(10)
    rows = rows_of(1, 9, 1)
    with fast.capture(ENGINE) as step:
        windows = [
            fast.window(TINY, WEIGHTS[layer], stream.cache(layer), rows[layer], 9, stream.rope, engine=ENGINE)
            for layer in range(2)
        ]
    for layer in range(2):
        stream.begin_writing(layer, 10)
    step.replay()
    stream.advance(range(2), 10)
    _, want = grown(make_pool(), 1, 10)
    for layer in range(2):
        assert_bits(windows[layer].gated, want[layer][9:], f"layer {layer} gated")
    assert audit(pool, [stream]) == []


@pytest.mark.parametrize("end", ["close", "roll_back"])
def test_a_captured_step_is_refused_once_its_pages_are_given_back(end):
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    with fast.capture(ENGINE) as step:
        fast.window(TINY, WEIGHTS[0], stream.cache(0), rows_of(1, 9, 1)[0], 9, stream.rope, engine=ENGINE)
    stream.close() if end == "close" else stream.roll_back(8)
    other, _ = grown(pool, 2, 20)
    before = page_bits(other)
    with pytest.raises(ValueError, match=r"^page table entry \d names page -1"):
        step.replay()
    assert_bits(page_bits(other), before, "pages of the other stream")


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda stream: stream.close(), "stream 0 is closed"),
        (lambda stream: stream.roll_back(3), "stream 0 is rolled back"),
        (lambda stream: stream.reserve(17), "stream 0 takes pages"),
        (lambda stream: stream.append(rows_of(1, 9, 1)), "a round is entered"),
        (lambda stream: Stream(stream.pool, WEIGHTS), "a stream is made"),
        (lambda stream: stream.work().__enter__(), "work on stream 0 begins"),
    ],
    ids=["close", "roll_back", "reserve", "append", "Stream", "work"],
)
def test_only_kernels_are_captured(call, what):
    stream, _ = grown(make_pool(), 1, 9)
    message = f"{what} inside a capture, which takes down kernels only; do it before the capture"
    with fast.capture(ENGINE):
        unchanged(stream, CaptureError, message, lambda: call(stream))


def test_what_is_reserved_already_may_be_reserved_inside_a_capture():
    stream, _ = grown(make_pool(), 1, 9)
    with fast.capture(ENGINE):
        stream.reserve(16)
    assert stream.reserved == 16


def captured(stream, rows, first):
    with fast.capture(ENGINE) as step:
        windows = [
            fast.window(TINY, WEIGHTS[layer], stream.cache(layer), rows[layer], first, stream.rope, engine=ENGINE)
            for layer in range(2)
        ]
    return step, windows


def test_work_counts_the_rows_that_a_captured_step_writes():
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    stream.reserve(12)
    step, windows = captured(stream, rows_of(1, 9, 3), 9)
    for _ in range(2):  # again behind a rollback that keeps the page
        with stream.work(12):
            assert stream.busy
            step.replay()
        assert (stream.lengths, stream.busy, stream.untidy) == ((12, 12), False, False)
        assert audit(pool, [stream]) == []
        _, want = grown(make_pool(), 1, 12)
        assert_bits(windows[1].gated, want[1][9:], "layer 1 gated")
        assert_bits(page_bits(stream), page_bits(grown(make_pool(), 1, 12)[0]), "pages")
        stream.roll_back(9)


@pytest.mark.parametrize("page_size", [None, PAGE], ids=str)
def test_work_takes_the_pages_that_its_rows_need(page_size):
    pool = make_pool(page_size)
    stream, _ = grown(pool, 1, 7)
    with stream.work(12, layers=[1]):
        fast.window(TINY, WEIGHTS[1], stream.cache(1), rows_of(1, 7, 5)[1], 7, stream.rope, engine=ENGINE)
    assert (stream.lengths, len(stream.pages)) == ((7, 12), pool.pages_for(12))
    assert audit(pool, [stream]) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_work_that_raises_takes_its_rows_back(error):
    pool = make_pool()
    stream, _ = grown(pool, 1, 7)
    before = state(stream)

    def interrupted():
        with stream.work(12):
            fast.window(TINY, WEIGHTS[0], stream.cache(0), rows_of(1, 7, 5)[0], 7, stream.rope, engine=ENGINE)
            raise error

    with pytest.raises(error):
        interrupted()
    assert state(stream)[:4] == before[:4]
    assert not stream.busy
    assert_same_as_never_drafted(stream, 7)


def test_work_that_writes_nothing_leaves_the_lengths():
    stream, _ = grown(make_pool(), 1, 9)
    before = state(stream)
    with stream.work():
        pass
    assert state(stream) == before


def test_only_one_is_at_work_on_a_stream():
    stream, _ = grown(make_pool(), 1, 9)
    message = f"a round or a `work` block is at work on {stream}; end its `with` block first"
    with stream.work():
        for call in (
            lambda: stream.close(),
            lambda: stream.roll_back(3),
            lambda: stream.append(rows_of(1, 9, 1)),
            lambda: stream.work().__enter__(),
            lambda: fast.save(stream, 3),
        ):
            unchanged(stream, StreamError, message, call)
    assert not stream.busy


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"positions": 8}, StreamError, "stream 0 cannot hold 8 positions behind this work: layer 0 holds 9 already"),
        ({"positions": 25}, StreamError, "stream 0 would hold 25 positions; a stream of this pool holds at most 24"),
        ({"positions": 1.5}, TypeError, "positions is 1.5; it must be an integer"),
        ({"positions": 9, "layers": [2]}, StreamError, "layer 2 does not exist; stream 0 has layers 0 to 1"),
    ],
)
def test_work_that_is_refused(options, error, message):
    stream, _ = grown(make_pool(), 1, 9)
    before = state(stream)
    with pytest.raises(error, match="^" + message):
        stream.work(**options).__enter__()
    assert state(stream) == before
    assert not stream.busy


def test_work_finds_no_pages():
    pool = make_pool()
    stream, _ = grown(pool, 1, 9)
    other, _ = grown(pool, 2, 24)
    pool.take(other, 1)
    with pytest.raises(PoolExhaustedError):
        stream.work(17).__enter__()
    assert (stream.lengths, stream.pages, stream.busy, stream.untidy) == ((9, 9), (0, 1), False, False)


# ---- a device ----


def test_streams_on_a_device_never_look_into_its_memory():
    engine = fast.Engine(fiber_backend(), threads=HOST_THREADS)
    pool = PagePool(TINY, streams=2, context=24, page_size=PAGE, engine=engine)
    weights = [engine.upload(layer) for layer in WEIGHTS]
    stream = Stream(pool, weights)
    drafted = [engine.upload(rows) for rows in rows_of(9, 0, 20)]
    stream.append(drafted)
    stream.roll_back(0)
    windows = [stream.append([engine.upload(rows) for rows in rows_of(1, first, n)]) for first, n in ((0, 9), (9, 3))]
    _, want = grown(make_pool(), 1, 9, 3)
    for layer in range(2):
        got = np.concatenate([engine.download(window[layer].gated) for window in windows])
        assert_bits(got, want[layer], f"layer {layer} gated")
    stream.close()
    assert pool.audit() == []


# ---- memory ----


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_stream_adds_less_than_a_kibibyte_for_each_page(page_size):
    pool = PagePool(TINY, streams=1, context=1024, page_size=page_size, engine=ENGINE)
    stream, _ = grown(pool, 1, 4)  # what is loaded once
    stream.close()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        stream = Stream(pool, WEIGHTS)
        stream.reserve(1024)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stream.pages) == 1024 // page_size
    assert (after - before) / len(stream.pages) < 1024


def test_an_arena_holds_what_it_says():
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pool = PagePool(TINY, streams=1, context=4096, page_size=16, engine=ENGINE)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    own = after - before - 2 * pool.layout.elements
    assert 0 <= own < 128 * pool.layout.pages


def test_an_append_keeps_nothing_once_its_results_are_gone():
    pool = PagePool(TINY, streams=1, context=1024, page_size=16, engine=ENGINE)
    stream, _ = grown(pool, 1, 64)
    stream.reserve(1024)
    rows = rows_of(1, 64, 64)
    size = sum(window.gated.nbytes + window.partials.o.nbytes for window in stream.append(rows))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(6):
            stream.append(rows)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < size / 8
