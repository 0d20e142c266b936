"""Drafts: every acceptance pattern leaves exactly what stands, on every layer, whatever edge the rest crosses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kvproof import fast
from kvproof.fast import MOST_DRAFTS, LaunchError, Settled, Stream, StreamError, accepted, settle
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.reference import TINY
from pools import PAGE, WEIGHTS, extended, grown, page_bits, rows_of
from streams import assert_bits, bits, refused

ENGINE = fast.Engine(fast.HostBackend(workers=1))
REFUTED = 99
"""The text that refuted drafts are of."""


def make_pool(page_size=PAGE, context=24):
    return guarded_pool(TINY, streams=1, context=context, page_size=page_size, engine=ENGINE)


def window(first, stands, refuted):
    """The pending row, drafts that stand, and drafts that do not; and the tokens that say so."""
    true, false = rows_of(1, first, 1 + stands), rows_of(REFUTED, first, refuted) if refuted else None
    rows = [np.concatenate([true[i], false[i]]) if refuted else true[i] for i in range(TINY.layers)]
    tokens = list(range(100, 100 + stands + 1))
    drafts = tokens[:stands] + [-1] * refuted
    greedy = tokens + [7] * refuted
    return rows, drafts, greedy


def patterns():
    """(drafts, accepted) of every window."""
    return [(count, stands) for count in range(MOST_DRAFTS + 1) for stands in range(count + 1)]


@pytest.mark.parametrize(("count", "stands"), patterns())
@pytest.mark.parametrize("page_size", [None, 4, PAGE], ids=str)
def test_every_pattern_at_every_edge(page_size, count, stands):
    for cached in (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16):
        stream, _ = grown(make_pool(page_size), 1, cached) if cached else (Stream(make_pool(page_size), WEIGHTS), None)
        rows, drafts, greedy = window(cached, stands, count - stands)
        stream.append(rows)
        settled = settle(stream, drafts, greedy)
        assert settled == Settled(accepted=stands, tokens=tuple(greedy[: stands + 1]), removed=count - stands)
        want, _ = grown(make_pool(page_size), 1, cached + 1 + stands)
        assert stream.lengths == want.lengths
        assert_bits(page_bits(stream), page_bits(want), f"pages after {cached} positions")
        assert audit(stream.pool, [stream]) == []


def test_a_text_in_drafts_is_the_text():
    stream, kept, got = Stream(make_pool(4, context=48), WEIGHTS), 0, [[], []]
    for count, stands in [*patterns(), *reversed(patterns())]:
        rows, drafts, greedy = window(kept, stands, count - stands)
        windows = stream.append(rows)
        for layer in range(2):
            got[layer].append(windows[layer].gated[: 1 + stands])
        settle(stream, drafts, greedy)
        kept += 1 + stands
    alone, want = grown(make_pool(4, context=48), 1, kept)
    for layer in range(2):
        assert_bits(np.concatenate(got[layer]), want[layer], f"layer {layer} gated")
    assert_bits(page_bits(stream), page_bits(alone), "pages")


def test_the_draft_heads_cache_goes_its_own_way():
    """Layer 1 is the head: it runs ahead on its own guesses, and back, before it is given what stands."""
    pool = make_pool()
    stream, _ = grown(pool, 1, 7)
    for i in range(3):
        with fast.Round([(stream, 1)], layers=[1]) as step:
            step.attend(1, [rows_of(REFUTED, 7 + i, 1)[1]])
    assert stream.lengths == (7, 10)
    rows, drafts, greedy = window(7, 1, 2)
    with fast.Round([(stream, 4)], layers=[0]) as step:
        step.attend(0, [rows[0]])
    assert settle(stream, drafts, greedy, layers=[0]).removed == 2
    assert stream.lengths == (9, 10)
    stream.roll_back(7, layers=[1])
    assert stream.pages == (0, 1)
    with fast.Round([(stream, 2)], layers=[1]) as step:
        step.attend(1, [rows_of(1, 7, 2)[1]])
    assert_bits(page_bits(stream), page_bits(grown(make_pool(), 1, 9)[0]), "pages")
    assert audit(pool, [stream]) == []


# ---- which drafts stand ----


def test_drafts_stand_up_to_the_first_mismatch():
    for count in range(4):
        for drafts in itertools.product((0, 1), repeat=count):
            for greedy in itertools.product((0, 1), repeat=count + 1):
                agree = [draft == token for draft, token in zip(drafts, greedy, strict=False)]
                want = max(n for n in range(count + 1) if all(agree[:n]))
                assert accepted(drafts, greedy) == want


def test_tokens_may_be_arrays():
    stream, _ = grown(make_pool(), 1, 9)
    settled = settle(stream, np.array([5, 6]), np.array([5, 8, 9]))
    assert settled == Settled(accepted=1, tokens=(5, 8), removed=1)
    assert [type(token) for token in settled.tokens] == [int, int]
    assert stream.lengths == (8, 8)


# ---- what cannot be settled ----


def unchanged(stream, error, message, call):
    before = stream.lengths, stream.pages, bits(stream.pool.arena).tobytes()
    with refused(error, message):
        call()
    assert (stream.lengths, stream.pages, bits(stream.pool.arena).tobytes()) == before


@pytest.mark.parametrize(("drafts", "greedy"), [([1], [1]), ([], [1, 2]), ([1, 2], []), ([], [])])
def test_tokens_that_do_not_fit_the_drafts(drafts, greedy):
    stream, _ = grown(make_pool(), 1, 9)
    message = (
        f"{len(greedy)} tokens are given for {len(drafts)} drafts; there is one after each row of the window, "
        f"{len(drafts) + 1}"
    )
    unchanged(stream, ValueError, message, lambda: settle(stream, drafts, greedy))
    unchanged(stream, ValueError, message, lambda: accepted(drafts, greedy))


@pytest.mark.parametrize("token", [None, float("nan"), 4.0, "4", True])
def test_a_token_that_is_no_integer(token):
    """It is looked at before anything is rolled back."""
    stream, _ = grown(make_pool(), 1, 9)
    message = f"the token after row 0 is {token!r}; it must be an integer"
    unchanged(stream, TypeError, message, lambda: settle(stream, [1, 2], [token, 2, 3]))
    message = f"draft 1 is {token!r}; it must be an integer"
    unchanged(stream, TypeError, message, lambda: settle(stream, [1, token], [1, 2, 3]))


def test_a_window_that_the_stream_does_not_hold():
    stream, _ = grown(make_pool(), 1, 2)
    message = (
        f"a window of 3 rows cannot be settled on {stream}: its layers hold {{0: 2, 1: 2}} positions, which must be "
        "equal and hold the window; nothing was rolled back"
    )
    unchanged(stream, StreamError, message, lambda: settle(stream, [1, 2], [3, 4, 5]))


@pytest.mark.parametrize("tokens", [[1, 4], [3, 4]], ids=["stands", "refuted"])
def test_layers_that_hold_different_numbers(tokens):
    stream, _ = grown(make_pool(), 1, 9)
    stream.roll_back(8, layers=[0])
    message = (
        f"a window of 2 rows cannot be settled on {stream}: its layers hold {{0: 8, 1: 9}} positions, which must be "
        "equal and hold the window; nothing was rolled back"
    )
    unchanged(stream, StreamError, message, lambda: settle(stream, [1], tokens))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([-1], "layer -1 does not exist; stream 0 has layers 0 to 1"),
        ([0, 0], "layer 0 is named twice; name each layer once"),
        ([], "no layer is named; name at least one, or give None for all"),
    ],
)
def test_layers_that_are_none(layers, problem):
    stream, _ = grown(make_pool(), 1, 9)
    unchanged(stream, StreamError, problem, lambda: settle(stream, [1], [3, 4], layers=layers))


def test_a_rollback_that_returns_early_is_found(monkeypatch):
    """F28: a rollback that does less than it is asked for raises, and is not settled in silence."""
    stream, _ = grown(make_pool(), 1, 9)
    monkeypatch.setattr(Stream, "roll_back", lambda stream, length, *, layers: (1, 0))
    message = f"{stream} should have lost 1 positions on each of (0, 1), but lost (1, 0)"
    with refused(StreamError, message):
        settle(stream, [1], [3, 4])


def test_a_backend_that_fails_leaves_the_rollback_done_but_untidied(monkeypatch):
    stream, _ = grown(make_pool(), 1, 11)
    with monkeypatch.context() as broken:
        broken.setattr(ENGINE.backend, "zero", failing_zero)
        with pytest.raises(LaunchError):
            settle(stream, [1], [3, 4])
    assert stream.lengths == (10, 10)
    assert audit(stream.pool, [stream]) == []
    extended(stream, 1, 2)
    assert_bits(page_bits(stream), page_bits(grown(make_pool(), 1, 12)[0]), "pages")


def failing_zero(array):
    raise LaunchError("zero", None, None, "injected")
