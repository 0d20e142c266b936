"""Rounds: several streams in one step, each with its own window; all of it happens or none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvproof import fast
from kvproof.fast import LaunchError, PoolExhaustedError, Round, Stream, StreamError
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.reference import TINY
from pools import PAGE, WEIGHTS, extended, grown, page_bits, rows_of
from streams import assert_bits, bits, make_rope, make_weights, refused

ENGINE = fast.Engine(fast.HostBackend(workers=1))


def make_pool(page_size=PAGE, *, streams=3, context=24):
    return guarded_pool(TINY, streams=streams, context=context, page_size=page_size, engine=ENGINE)


@pytest.fixture
def pool():
    return make_pool()


@pytest.fixture
def pair(pool):
    """Two streams of nine and five positions."""
    return grown(pool, 1, 9)[0], grown(pool, 2, 5)[0]


def state(*streams):
    return [
        (s.lengths, s.pages, s.busy, s.reserved, [bits(s.pool.page(page)).tobytes() for page in s.pages])
        for s in streams
    ]


def in_order(*streams):
    """The audit is clean, and nothing is left to be tidied."""
    return audit(streams[0].pool, streams) == [] and not any(s.untidy or s.busy for s in streams)


def run(step, rows):
    """Run every layer of a round; the gated rows of each stream, layer by layer."""
    results = [step.attend(layer, [given[layer] for given in rows]) for layer in step.layers]
    return [[windows[i].gated for windows in results] for i in range(len(rows))]


# ---- all of it ----


@pytest.mark.parametrize("page_size", [None, 4, 8, 24], ids=str)
def test_streams_of_a_round_get_what_they_get_alone(page_size):
    pool = make_pool(page_size)
    ropes = [make_rope(mode, length=12) for mode in ("text", "delta", "media")]
    streams = [Stream(pool, WEIGHTS, rope=rope) for rope in ropes]
    got = [[], [], []]
    for counts in ((9, 1, 4), (1, 8, 3), (14, 1, 17)):
        rows = [rows_of(seed, s.length, n) for seed, (s, n) in enumerate(zip(streams, counts, strict=True))]
        with Round(list(zip(streams, counts, strict=True))) as step:
            for seed, gated in enumerate(run(step, rows)):
                got[seed].append(gated)
    for seed, (stream, rope) in enumerate(zip(streams, ropes, strict=True)):
        alone, want = grown(make_pool(page_size), seed, stream.length, rope=rope)
        for layer in range(TINY.layers):
            assert_bits(np.concatenate([g[layer] for g in got[seed]]), want[layer], f"stream {seed}, layer {layer}")
        assert_bits(page_bits(stream), page_bits(alone), f"pages of stream {seed}")
    assert in_order(*streams)


def test_append_takes_several_streams(pool, pair):
    windows = fast.append([(pair[0], rows_of(1, 9, 2)), (pair[1], rows_of(2, 5, 7))])
    assert [[len(w.gated) for w in results] for results in windows] == [[2, 2], [7, 7]]
    for seed, length, stream, results in ((1, 9, pair[0], windows[0]), (2, 5, pair[1], windows[1])):
        _, want = grown(make_pool(), seed, stream.length)
        for layer in range(2):
            assert_bits(results[layer].gated, want[layer][length:], f"stream {seed}, layer {layer}")
    assert in_order(*pair)


def test_layers_may_run_in_any_order(pool, pair):
    rows = rows_of(1, 9, 3)
    with Round([(pair[0], 3)]) as step:
        late = step.attend(1, [rows[1]])[0]
        step.attend(0, [rows[0]])
    _, want = grown(make_pool(), 1, 12)
    assert_bits(late.gated, want[1][9:], "layer 1 gated")
    assert in_order(*pair)


def test_layers_may_run_in_rounds_of_their_own(pool, pair):
    stream = pair[0]
    with Round([(stream, 3)], layers=[0]) as step:
        step.attend(0, [rows_of(1, 9, 3)[0]])
    assert stream.lengths == (12, 9)
    message = (
        f"the round's layers of {stream} hold different numbers of positions ({{0: 12, 1: 9}}); run those that agree "
        "in a round of their own, or roll back"
    )
    with refused(StreamError, message):
        Round([(stream, 1)])
    with Round([(stream, 3)], layers=(1,)) as step:
        step.attend(1, [rows_of(1, 9, 3)[1]])
    assert_bits(page_bits(stream), page_bits(grown(make_pool(), 1, 12)[0]), "pages")
    assert in_order(*pair)


def test_a_round_starts_where_its_streams_end_when_it_is_entered(pool, pair):
    step = Round([(pair[0], 2)])
    extended(pair[0], 1, 3)
    with step:
        run(step, [rows_of(1, 12, 2)])
    assert step.positions == [12]
    assert_bits(page_bits(pair[0]), page_bits(grown(make_pool(), 1, 14)[0]), "pages")


def test_numbers_of_numpy_are_numbers(pool, pair):
    with Round([(pair[0], np.uint8(2))], layers=np.array([0, 1])) as step:
        for layer in step.layers:
            step.attend(np.int64(layer), [rows_of(1, 9, 2)[layer]])
    assert [type(length) for length in pair[0].lengths] == [int, int]


# ---- none of it ----


def test_pages_for_all_or_none():
    pool = make_pool(streams=1, context=40)
    a, b = grown(pool, 1, 9)[0], grown(pool, 2, 5)[0]
    before = state(a, b)
    with pytest.raises(PoolExhaustedError), Round([(a, 8), (b, 12)]):
        raise AssertionError("entered")
    assert state(a, b) == before
    assert in_order(a, b)
    extended(a, 1, 8)


def test_a_stream_past_its_context(pool, pair):
    before = state(*pair)
    message = (
        f"{pair[1]} would hold 25 positions; a stream of this pool holds at most 24: make the pool with a larger "
        "context="
    )
    with refused(StreamError, message), Round([(pair[0], 8), (pair[1], 20)]):
        raise AssertionError("entered")
    assert state(*pair) == before
    assert in_order(*pair)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("page_size", [None, 4, 8], ids=str)
def test_what_raises_inside_takes_every_window_back(error, done, page_size):
    pool = make_pool(page_size)
    pair = grown(pool, 1, 9)[0], grown(pool, 2, 5)[0]
    before = state(*pair)
    rows = [rows_of(1, 9, 9), rows_of(2, 5, 7)]
    with pytest.raises(error):
        interrupted([(pair[0], 9), (pair[1], 7)], rows, range(done), error)
    assert state(*pair) == before
    assert in_order(*pair)
    with Round([(pair[0], 9), (pair[1], 7)]) as step:
        got = run(step, rows)
    for seed, (stream, gated) in enumerate(zip(pair, got, strict=True), 1):
        _, want = grown(make_pool(page_size), seed, stream.length)
        assert_bits(gated[1], want[1][-len(gated[1]) :], f"stream {seed}, layer 1")


def test_the_first_window_of_a_stream_is_taken_back(pool):
    for page_size in (None, PAGE):
        stream = Stream(make_pool(page_size), WEIGHTS)
        with pytest.raises(LaunchError):
            interrupted([(stream, 9)], [rows_of(1, 0, 9)], [0], failure)
        assert (stream.lengths, stream.pages) == ((0, 0), ())
        assert in_order(stream)


@pytest.mark.parametrize("forgotten", [[0], [1], [0, 1]])
def test_a_forgotten_layer(pool, pair, forgotten):
    before = state(*pair)
    message = f"layers {forgotten} of the round were not run; its windows are taken back"
    with refused(StreamError, message), Round([(pair[0], 9), (pair[1], 7)]) as step:
        for layer in set(step.layers) - set(forgotten):
            step.attend(layer, [rows_of(1, 9, 9)[layer], rows_of(2, 5, 7)[layer]])
    assert state(*pair) == before
    assert in_order(*pair)


def test_a_kernel_that_fails_for_the_second_stream(pool, pair, monkeypatch):
    before = state(*pair)
    calls = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise LaunchError("fn_attn_prep", None, None, "injected")
        return fast.window(*args, **options)

    monkeypatch.setattr("kvproof.fast.round.window", failing)
    rows = [rows_of(1, 9, 9), rows_of(2, 5, 7)]
    with pytest.raises(LaunchError), Round([(pair[0], 9), (pair[1], 7)]) as step:
        run(step, rows)
    assert state(*pair) == before
    calls[:] = []
    with Round([(pair[0], 9), (pair[1], 7)]) as step:  # a caller that goes on inside runs the layer again
        with pytest.raises(LaunchError):
            step.attend(0, [given[0] for given in rows])
        got = run(step, rows)
    for seed, gated in enumerate(got, 1):
        _, want = grown(make_pool(), seed, pair[seed - 1].length)
        assert_bits(gated[0], want[0][-len(gated[0]) :], f"stream {seed}, layer 0")
    assert in_order(*pair)


def test_a_round_runs_no_layer_inside_a_capture(pool, pair):
    """No kernel would run, and the round would count rows that are zeros."""
    rows, before = rows_of(1, 9, 5), state(*pair)
    message = (
        "a round runs a layer inside a capture, where no kernel runs, so that it would count rows that nobody has "
        "written; capture `fast.window` over Stream.cache, and replay it in a Stream.work block"
    )
    with refused(fast.CaptureError, message), Round([(pair[0], 5)]) as step, fast.capture(ENGINE):
        step.attend(0, [rows[0]])
    assert state(*pair) == before
    assert in_order(*pair)


def test_a_second_interruption_leaves_no_stream_out(pool, pair, monkeypatch):
    """Of two streams the first is interrupted again while its window is taken back; the other's is taken back."""
    tidy = Stream.tidy
    calls = []

    def interrupted_again(stream):
        calls.append(stream)
        if len(calls) == 1:
            raise KeyboardInterrupt
        tidy(stream)

    monkeypatch.setattr(Stream, "tidy", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        interrupted([(pair[0], 9), (pair[1], 7)], [rows_of(1, 9, 9), rows_of(2, 5, 7)], [0], RuntimeError)
    assert calls == [*pair]
    assert (pair[0].untidy, pair[1].untidy) == (True, False)
    pair[0].tidy()
    assert in_order(*pair)


def test_rows_that_could_not_be_tidied_are_tidied_before_the_next_round(pool, pair, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Stream, "_zero_past_end", failure)
        with pytest.raises(KeyboardInterrupt):
            interrupted([(pair[0], 9)], [rows_of(7, 9, 9)], [0], KeyboardInterrupt)
    assert pair[0].untidy
    assert audit(pool, pair) == []
    extended(pair[0], 1, 1)
    assert_bits(page_bits(pair[0]), page_bits(grown(make_pool(), 1, 10)[0]), "pages")
    assert in_order(*pair)


# ---- projections ----


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:1], "1 projections are given; the round has 2 streams"),
        (lambda rows: [rows[0], rows[1][:4]], "the projection of stream 1 has 4 rows; its window has 7"),
        (lambda rows: [rows[0], rows[1][:0]], "a window of 0 rows; it must have at least one"),
    ],
    ids=["too few", "other rows", "no rows"],
)
def test_projections_are_looked_at_before_any_kernel_runs(pool, pair, spoil, message, monkeypatch):
    monkeypatch.setattr("kvproof.fast.round.window", lambda *args, **options: [].pop())
    before = state(*pair)
    rows = [rows_of(1, 9, 9)[0], rows_of(2, 5, 7)[0]]
    with refused(ValueError, message), Round([(pair[0], 9), (pair[1], 7)]) as step:
        step.attend(0, spoil(rows))
    assert state(*pair) == before


def test_a_projection_of_another_dtype(pool, pair):
    with pytest.raises(ValueError, match=r"^projection has dtype float32"), Round([(pair[0], 9)]) as step:
        step.attend(0, [rows_of(1, 9, 9)[0].astype(np.float32)])
    with pytest.raises(TypeError, match=r"^projection is a list"), Round([(pair[0], 9)]) as step:
        step.attend(0, [[1.0]])
    assert in_order(*pair)


@pytest.mark.parametrize("count", [1, 3])
def test_append_takes_a_projection_for_each_layer(pool, pair, count):
    message = f"projections of {count} layers are given for {pair[0]}, which has 2"
    with refused(ValueError, message):
        pair[0].append([rows_of(1, 9, 1)[0]] * count)


def test_append_of_no_array(pool, pair):
    with refused(StreamError, f"the window of {pair[0]} has 0 rows; it must have at least one"):
        pair[0].append([None, None])


# ---- arguments ----


def test_a_round_of_nothing(pool, pair):
    for call in (lambda: Round([]), lambda: fast.append([])):
        with refused(StreamError, "a round of no stream; give at least one (stream, rows)"):
            call()


def test_a_stream_that_is_named_twice(pool, pair):
    with refused(StreamError, f"{pair[0]} is in the round twice; give it one window"):
        Round([(pair[0], 1), (pair[1], 1), (pair[0], 1)])


@pytest.mark.parametrize("rows", [0, -1])
def test_a_window_without_rows(pool, pair, rows):
    with refused(StreamError, f"the window of {pair[1]} has {rows} rows; it must have at least one"):
        Round([(pair[0], 1), (pair[1], rows)])


@pytest.mark.parametrize("rows", [True, 1.0, "1", None])
def test_rows_are_an_integer(pool, pair, rows):
    with refused(TypeError, f"rows of a window is {rows!r}; it must be an integer"):
        Round([(pair[0], rows)])


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([-1], "layer -1 does not exist; stream 0 has layers 0 to 1"),
        ([2], "layer 2 does not exist; stream 0 has layers 0 to 1"),
        ([0, 0], "layer 0 is named twice; name each layer once"),
        ([], "no layer is named; name at least one, or give None for all"),
    ],
)
def test_layers_that_are_none(pool, pair, layers, problem):
    with refused(StreamError, problem):
        Round([(pair[0], 1)], layers=layers)


@pytest.mark.parametrize("layer", [True, 0.0, "0"])
def test_a_layer_is_an_integer(pool, pair, layer):
    message = f"layer is {layer!r}; it must be an integer"
    with refused(TypeError, message):
        Round([(pair[0], 1)], layers=[layer])
    with refused(TypeError, message), Round([(pair[0], 1)]) as step:
        step.attend(layer, [rows_of(1, 9, 1)[0]])


def test_streams_of_two_pools(pool, pair):
    other = Stream(make_pool(None), WEIGHTS)
    with refused(StreamError, f"{other} is of another pool than {pair[0]}; make a round for each pool"):
        Round([(pair[0], 1), (other, 1)])


def test_streams_of_two_geometries(pool, pair):
    deep = replace(TINY, layers=1)
    other = Stream(fast.PagePool(deep, streams=1, context=8, engine=ENGINE), [make_weights(deep)])
    with refused(StreamError, f"{pair[0]} is of another pool than {other}; make a round for each pool"):
        Round([(other, 1), (pair[0], 1)])


def test_a_layer_that_has_been_run(pool, pair):
    rows = rows_of(1, 9, 1)
    with refused(StreamError, "layer 0 is run already"), Round([(pair[0], 1)]) as step:
        step.attend(0, [rows[0]])
        step.attend(0, [rows[0]])


def test_a_layer_of_another_round(pool, pair):
    message = "layer 1 is not of this round, whose layers are (0,)"
    with refused(StreamError, message), Round([(pair[0], 1)], layers=[0]) as step:
        step.attend(1, [rows_of(1, 9, 1)[1]])


# ---- when a round is at work ----


def test_a_stream_is_in_one_round_at_a_time(pool, pair):
    message = f"a round or a `work` block is at work on {pair[0]}; end its `with` block first"
    with refused(StreamError, message), Round([(pair[0], 1)]), Round([(pair[1], 1), (pair[0], 1)]):
        raise AssertionError("entered")
    assert in_order(*pair)


@pytest.mark.parametrize(
    "call",
    [
        lambda stream: stream.close(),
        lambda stream: stream.roll_back(3),
        lambda stream: stream.append(rows_of(1, 9, 1)),
        lambda stream: fast.settle(stream, [], [1]),
    ],
    ids=["close", "roll_back", "append", "settle"],
)
def test_a_stream_in_a_round_is_busy(pool, pair, call):
    message = f"a round or a `work` block is at work on {pair[0]}; end its `with` block first"
    with Round([(pair[0], 1)]) as step:
        with refused(StreamError, message):
            call(pair[0])
        run(step, [rows_of(1, 9, 1)])
    assert pair[0].lengths == (10, 10)
    assert in_order(*pair)


def test_pages_may_be_reserved_inside_a_round(pool, pair):
    with Round([(pair[0], 1)]) as step:
        pair[0].reserve(24)
        run(step, [rows_of(1, 9, 1)])
    assert (pair[0].lengths, len(pair[0].pages)) == ((10, 10), 3)
    assert in_order(*pair)


def test_a_round_that_is_not_entered(pool, pair):
    message = "this round is not entered, or is over; use it in a `with` block"
    step = Round([(pair[0], 1)])
    with refused(StreamError, message):
        step.attend(0, [rows_of(1, 9, 1)[0]])


def test_a_round_that_is_over(pool, pair):
    message = "this round is not entered, or is over; use it in a `with` block"
    old = Round([(pair[0], 1)])
    with refused(StreamError, "layers [0, 1] of the round were not run; its windows are taken back"), old:
        pass
    with Round([(pair[0], 1)]) as step:
        with refused(StreamError, message):
            old.attend(0, [rows_of(1, 9, 1)[0]])
        run(step, [rows_of(1, 9, 1)])
    assert in_order(*pair)


def test_a_round_is_entered_once(pool, pair):
    step = Round([(pair[0], 1)])
    with step:
        run(step, [rows_of(1, 9, 1)])
    pair[0].roll_back(3)
    message = "this round has been entered before; make another, which starts where its streams end now"
    with refused(StreamError, message), step:
        raise AssertionError("entered")
    assert pair[0].lengths == (3, 3)
    assert in_order(*pair)


def test_a_closed_stream(pool, pair):
    pair[1].close()
    with refused(StreamError, f"{pair[1]} is closed; make another"):
        Round([(pair[0], 1), (pair[1], 1)])
    step = Round([(pair[0], 1)])
    pair[0].close()
    with refused(StreamError, f"{pair[0]} is closed; make another"), step:
        raise AssertionError("entered")


def test_an_error_at_the_end_takes_the_windows_back(pool, pair, monkeypatch):
    before = state(*pair)
    marks = iter([Stream.mark, failure])

    def end():
        with Round([(pair[0], 9), (pair[1], 7)]) as step:
            run(step, [rows_of(1, 9, 9), rows_of(2, 5, 7)])
            mark = Stream.mark
            monkeypatch.setattr(Stream, "mark", lambda stream: next(marks, mark)(stream))

    with pytest.raises(LaunchError):
        end()
    assert state(*pair) == before
    assert in_order(*pair)


def interrupted(windows, rows, layers, error):
    """A round that raises when some of its layers have been run."""
    with Round(windows) as step:
        for layer in layers:
            step.attend(layer, [given[layer] for given in rows])
        raise error()


def failure(*args):
    raise LaunchError("injected", None, None, "injected")
