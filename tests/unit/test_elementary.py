"""The sweep of exp, cos and sin sees errors where they are, and bears out the constants that the bounds use."""

from __future__ import annotations

import numpy as np
import pytest
from kvproof.fast import KernelSources
from kvproof.oracle import elementary
from kvproof.oracle.elementary import (
    EXP_ERROR,
    EXP_SPAN,
    EXP_ULPS,
    RUN,
    TURN_ERROR,
    TURN_SPAN,
    TURN_ULPS,
    Claim,
    Span,
    Sweep,
    sweep,
    sweep_exp,
    sweep_turns,
)
from kvproof.reference import FLASH_NEXT, TINY

MOST_FROM_THE_LIBRARY = 2.0**-29
"""Ulps of fp32 in one ulp of a double: more than the double library may err by."""

EXP_WORST = {"relative and ulps": 0xC0BC8416, "absolute": 0xBEB0A8DF}
TURN_WORST = {
    "sin, relative": 0x480DA852,
    "sin, absolute and ulps": 0x4E88E8BA,
    "cos, relative": 0x4B1CE876,
    "cos, absolute and ulps": 0x426BA088,
}
"""Words of the floats where the whole sweep found the largest errors."""


def as_float(word):
    return float(np.uint32(word).view(np.float32))


def around(word):
    """A million floats with this one in their midst."""
    return Span(first=as_float(word - 2 * RUN), last=as_float(word + 2 * RUN))


EXP_EDGES = {
    "from -0": Span(first=-0.0, last=as_float(0x80000000 + 2 * RUN)),
    "to -126 ln 2": Span(first=as_float(np.float32(EXP_SPAN.last).view(np.uint32) - 2 * RUN), last=EXP_SPAN.last),
}
TURN_EDGES = {
    "from the least subnormal": Span(first=TURN_SPAN.first, last=as_float(2 * RUN)),
    "to 2**31": Span(first=as_float(np.float32(TURN_SPAN.last).view(np.uint32) - 2 * RUN), last=TURN_SPAN.last),
}


@pytest.mark.parametrize("span", EXP_EDGES.values(), ids=EXP_EDGES)
def test_exp_at_the_ends_of_its_span(span):
    found = sweep_exp(span)
    assert found.count == span.count
    assert found.errors.relative.error <= EXP_ERROR
    assert found.errors.ulps.error <= EXP_ULPS
    assert found.errors.library < MOST_FROM_THE_LIBRARY
    assert found.highest <= 1


@pytest.mark.parametrize("word", EXP_WORST.values(), ids=EXP_WORST)
def test_exp_where_it_is_worst(word):
    found = sweep_exp(around(word))
    assert found.errors.relative.error <= EXP_ERROR
    assert found.errors.ulps.error <= EXP_ULPS
    assert found.errors.library < MOST_FROM_THE_LIBRARY
    assert as_float(word) in (found.errors.relative.at, found.errors.absolute.at)


@pytest.mark.parametrize("span", TURN_EDGES.values(), ids=TURN_EDGES)
def test_turns_at_the_ends_of_their_span(span):
    found = sweep_turns(span)
    assert found.count == span.count
    assert found.uneven == 0
    for errors in (found.sin, found.cos):
        assert errors.relative.error <= TURN_ERROR
        assert errors.ulps.error <= TURN_ULPS
        assert errors.library < MOST_FROM_THE_LIBRARY


@pytest.mark.parametrize("word", TURN_WORST.values(), ids=TURN_WORST)
def test_turns_where_they_are_worst(word):
    found = sweep_turns(around(word))
    for errors in (found.sin, found.cos):
        assert errors.relative.error <= TURN_ERROR
        assert errors.ulps.error <= TURN_ULPS
        assert errors.library < MOST_FROM_THE_LIBRARY
    assert as_float(word) in {kind.at for e in (found.sin, found.cos) for kind in (e.relative, e.absolute)}


def test_the_published_constants_are_what_the_worst_floats_show():
    exp = sweep_exp(around(EXP_WORST["relative and ulps"])).errors
    sin = sweep_turns(around(TURN_WORST["sin, relative"])).sin
    cos = sweep_turns(around(TURN_WORST["cos, absolute and ulps"])).cos
    claims = [(EXP_ERROR, exp.relative), (EXP_ULPS, exp.ulps), (TURN_ERROR, sin.relative), (TURN_ULPS, cos.ulps)]
    for published, measured in claims:
        assert Claim(constant="", published=published, measured=measured.error).holds


@pytest.mark.parametrize(
    ("measured", "holds"), [(0.98, False), (0.995, True), (1.0, True), (1.001, False), (np.nan, False), (np.inf, False)]
)
def test_a_claim_covers_its_measurement_closely(measured, holds):
    assert Claim(constant="", published=1.0, measured=measured).holds == holds


EXP_RESULT = "return zero_below8(x, lowest, scale8(p, biased));"


def exp_with_one_result(x, result):
    """Kernels whose exp8 gives something else at one float."""
    spoilt = f"y[i] = x[i] == {x}f ? {result} : y[i];"
    return KernelSources().edit(
        "arithmetic.cuh", EXP_RESULT, f"Lanes y = scale8(p, biased); for (int i = 0; i < 8; ++i) {spoilt} return y;"
    )


def test_a_wrong_coefficient_of_exp_shows():
    planted = KernelSources().edit("arithmetic.cuh", "splat(1.0f / 120.0f)", "splat(1.0f / 119.0f)")
    span = Span(first=-0.3, last=-0.31)
    found = sweep_exp(span, sources=planted)
    assert sweep_exp(span).errors.relative.error <= EXP_ERROR < found.errors.relative.error
    assert found.errors.ulps.error > EXP_ULPS


def test_one_nan_among_a_million_shows():
    planted = exp_with_one_result(-0.3, "0.0f / 0.0f")
    errors = sweep_exp(Span(first=-0.29, last=-0.31), sources=planted).errors
    for kind in (errors.absolute, errors.relative, errors.ulps):
        assert not kind.error <= 1
        assert kind.at == np.float32(-0.3)


def test_a_step_up_of_exp_is_counted_where_a_block_starts():
    planted = exp_with_one_result(-0.3, "1.5f")
    first = as_float(np.float32(-0.3).view(np.uint32) - RUN)
    span = Span(first=first, last=-0.301)
    before, after = sweep_exp(span), sweep_exp(span, sources=planted)
    assert (before.rises, after.rises) == (0, 1)
    assert after.rise > 2**20
    assert after.highest == 1.5


def test_an_uneven_turn_is_counted():
    planted = KernelSources().edit(
        "arithmetic.cuh", "double x = static_cast<double>(angle);", "double x = angle == -2.5f ? 2.5 : angle;"
    )
    span = Span(first=2.4, last=2.6)
    assert sweep_turns(span).uneven == 0
    assert sweep_turns(span, sources=planted).uneven == 1


def test_a_wrong_sign_of_sin_shows():
    planted = KernelSources().edit("arithmetic.cuh", "quadrant & 2 ? -sin_value", "quadrant & 1 ? -sin_value")
    found = sweep_turns(Span(first=2.4, last=2.6), sources=planted)
    assert found.sin.relative.error == pytest.approx(2)
    assert found.cos.relative.error <= TURN_ERROR


@pytest.mark.parametrize("result", ["sin", "cos"])
def test_a_nan_bears_out_no_constant(result):
    old = f"static_cast<float>({'quadrant' if result == 'sin' else '(quadrant + 1)'} & 2"
    planted = KernelSources().edit("arithmetic.cuh", old, old.replace("(", "(angle == 58.5f ? 0.0f / 0.0f : ", 1))
    exp = sweep_exp(around(EXP_WORST["relative and ulps"]))
    for sources, hold in ((None, True), (planted, False)):
        turns = sweep_turns(Span(first=57.0, last=60.0), sources=sources)
        assert [claim.holds for claim in Sweep(exp=exp, turns=turns).claims] == [True, True, hold, hold]


@pytest.mark.parametrize("geometry", [FLASH_NEXT, TINY], ids=lambda g: g.name)
def test_the_span_of_turns_holds_every_position(geometry):
    frequencies = geometry.inv_freq()
    assert frequencies.max() == 1
    assert np.float32(2**31 - 1) * frequencies.max() == TURN_SPAN.last
    assert frequencies.min() >= TURN_SPAN.first


@pytest.mark.parametrize(
    ("first", "last"),
    [(0.0, -1.0), (-2.0, -1.0), (1.0, np.inf), (np.nan, 1.0)],
    ids=["two signs", "towards zero", "infinite", "NaN"],
)
def test_a_span_that_is_no_run_of_floats_is_refused(first, last):
    with pytest.raises(ValueError, match=r"a span from .* is no run of floats; give finite ends of one sign"):
        Span(first=first, last=last)


@pytest.mark.parametrize(
    ("swept", "span"),
    [
        (sweep_exp, Span(first=0.0, last=1.0)),
        (sweep_exp, Span(first=-87.0, last=-88.0)),
        (sweep_turns, Span(first=0.0, last=1.0)),
        (sweep_turns, Span(first=-1.0, last=-2.0)),
        (sweep_turns, Span(first=1.0, last=2.0**32)),
    ],
    ids=["exp of positive", "exp past its end", "turn by zero", "negative turn", "turn past 2**31"],
)
def test_a_span_outside_of_what_is_swept_is_refused(swept, span):
    with pytest.raises(ValueError, match=r"the span from .* leaves what is swept; give floats from"):
        swept(span)


def test_an_unknown_function_is_refused():
    with pytest.raises(ValueError, match="there is no function 'exp'; name one of exps, turns, sigmoids"):
        elementary.load()("exp", [0.0])


def test_launches_share_a_sweep_out_without_changing_it(monkeypatch):
    spans = around(EXP_WORST["absolute"]), around(TURN_WORST["cos, relative"])
    whole = sweep_exp(spans[0]), sweep_turns(spans[1])
    monkeypatch.setattr(elementary, "LAUNCHED", 2)
    told = []
    assert (sweep_exp(spans[0], progress=told.append), sweep_turns(spans[1])) == whole
    assert told == [f"exp: {done:,} of 1,048,577 floats" for done in (2 * RUN, 4 * RUN, 4 * RUN + 1)]


def test_mpmath_is_given_the_worst_floats(monkeypatch):
    span = around(EXP_WORST["relative and ulps"])
    many = sweep_exp(span).errors
    monkeypatch.setattr(elementary, "LISTED", 1)
    one = sweep_exp(span).errors
    assert (one.absolute, one.relative, one.ulps) == (many.absolute, many.relative, many.ulps)


@pytest.mark.parametrize(("around_exp", "status"), [("relative and ulps", 0), ("absolute", 1)], ids=["holds", "not"])
def test_the_command_prints_a_table_and_judges_the_constants(monkeypatch, capsys, around_exp, status):
    found = Sweep(exp=sweep_exp(around(EXP_WORST[around_exp])), turns=sweep_turns(around(TURN_WORST["sin, relative"])))
    monkeypatch.setattr(elementary, "sweep", lambda **options: found)
    assert elementary.main() == status
    printed = capsys.readouterr().out
    assert f"{found.exp.errors.relative.error:.6e}" in printed
    assert ("DOES NOT HOLD" in printed) == bool(status)


def test_a_sweep_without_mpmath_says_what_to_install(monkeypatch):
    monkeypatch.setattr(elementary, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="run `pip install mpmath`"):
        sweep_exp(EXP_EDGES["from -0"])


@pytest.mark.slow
def test_the_whole_sweep_bears_out_the_constants():
    found = sweep()
    assert found.exp.count + found.turns.count == 2_444_143_696
    assert [claim for claim in found.claims if not claim.holds] == []
    assert found.exp.highest == 1
    assert (found.exp.rises, found.exp.rise) == (2878, 1)
    assert found.turns.uneven == 0
    for errors in (found.exp.errors, found.turns.sin, found.turns.cos):
        assert errors.library < MOST_FROM_THE_LIBRARY
