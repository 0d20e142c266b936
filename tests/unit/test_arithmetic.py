"""Our own exp, sin and cos stay within the errors that the bounds use, and are exact where they must be."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from kvproof.oracle import elementary
from kvproof.oracle.elementary import EXP_ERROR, EXP_FLOOR, EXP_SPAN, TURN_ERROR
from kvproof.reference import FLASH_NEXT, TINY
from kvproof.reference.layout import BF16

LEAST = np.float32(EXP_SPAN.last)
"""Below it exp gives 0."""


@pytest.fixture(scope="module")
def functions():
    return elementary.load()


def floats_between(low, high, count):
    """fp32 spread evenly over the bit patterns from low to high, both negative."""
    first, last = (int(np.float32(x).view(np.uint32)) for x in (high, low))
    return np.linspace(first, last, count).astype(np.uint32).view(np.float32)


def largest_error(computed, x, true):
    """The largest |computed / true(x) - 1|, at 120 bits."""
    with mpmath.workprec(120):
        return max(abs(mpmath.mpf(float(y)) / true(mpmath.mpf(float(v))) - 1) for v, y in zip(x, computed, strict=True))


def test_exp_is_within_its_published_error(functions):
    x = floats_between(LEAST, -0.0, 4_000_000)
    (got,) = functions("exps", x)
    worst = np.abs(got / np.exp(x.astype(np.float64)) - 1).max()
    assert 0.9 * EXP_ERROR <= worst <= EXP_ERROR
    assert got.max() == 1


def test_exp_against_mpmath(functions):
    x = floats_between(LEAST, -1e-8, 400)
    (got,) = functions("exps", x)
    assert largest_error(got, x, mpmath.exp) <= EXP_ERROR


def test_exp_at_its_edges(functions):
    below = np.nextafter(LEAST, np.float32(-np.inf))
    (got,) = functions("exps", [0.0, -0.0, -1e-45, -1e-40, below, -100.0, -1e30, -np.inf, np.nan])
    np.testing.assert_array_equal(got[:8], [1, 1, 1, 1, 0, 0, 0, 0])
    assert np.isnan(got[8])


def test_exp_ends_at_the_least_float_above_minus_126_ln_2(functions):
    below = np.nextafter(LEAST, np.float32(-np.inf))
    with mpmath.workprec(120):
        end = -126 * mpmath.log(2)
        assert mpmath.mpf(float(below)) < end <= mpmath.mpf(float(LEAST))
        assert mpmath.exp(mpmath.mpf(float(below))) < EXP_FLOOR
    (got,) = functions("exps", [LEAST])
    assert largest_error(got, [LEAST], mpmath.exp) <= EXP_ERROR


@pytest.mark.parametrize("geometry", [FLASH_NEXT, TINY], ids=lambda g: g.name)
def test_turns_are_within_their_published_error(functions, geometry):
    positions = np.unique(np.concatenate([np.arange(4096), np.linspace(0, 2**20, 20_000).astype(np.int64)]))
    angle = np.multiply.outer(positions.astype(np.float32), geometry.inv_freq()).ravel()
    angle = np.concatenate([angle, -angle])
    sin, cos = functions("turns", angle)
    for got, true in ((sin, np.sin(angle.astype(np.float64))), (cos, np.cos(angle.astype(np.float64)))):
        assert (np.abs(got - true) <= TURN_ERROR * np.abs(true)).all()


def test_turns_against_mpmath(functions):
    near_quarter_turns = [1.5707964, 4.712389, 252.8982, 505.79642, 42781604.0, 85563208.0, 620046656.0]
    angle = np.array([1.0, 1e6, 1048575.0, 2.0**31, 1e-45, 1e-38, *near_quarter_turns], np.float32)
    sin, cos = functions("turns", angle)
    assert largest_error(sin, angle, mpmath.sin) <= TURN_ERROR
    assert largest_error(cos, angle, mpmath.cos) <= TURN_ERROR


def test_no_turn_at_angle_zero(functions):
    sin, cos = functions("turns", [0.0, -0.0])
    np.testing.assert_array_equal(sin, [0, 0])
    np.testing.assert_array_equal(cos, [1, 1])


def test_sigmoid_saturates_and_is_symmetric(functions):
    x = np.array([0, 1, -1, 200, -200, np.inf, -np.inf, 20], np.float32)
    (got,) = functions("sigmoids", x)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6, atol=1e-37)


def test_bf16_rounding_is_ml_dtypes_rounding(functions):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 80_000, dtype=np.uint32).view(np.float32)
    x[:8] = [np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45, np.nan]
    with np.errstate(invalid="ignore"):
        want = x.astype(BF16).astype(np.float32)
    for got in functions("roundings", x):
        number = ~np.isnan(want)
        np.testing.assert_array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])
        assert np.isnan(got[~number]).all()
