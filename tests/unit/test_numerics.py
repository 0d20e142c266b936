"""bf16 rounding, on every bf16 value and both sides of every midpoint."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproof.reference.numerics import bf16, widen

ALL = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = np.arange(0x7F80, dtype=np.uint16)
"""Bits of every non-negative finite bf16, in order of value; the next, 0x7F80, is inf."""


def bits(x):
    return x.view(np.uint16)


def values(patterns):
    """Exact float64 values of non-negative bf16 bits; inf counts as 2**128, where the next value would be."""
    wide = patterns.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.where(np.isinf(wide), 2.0**128, wide)


def exact(x):
    """Nearest bf16 by rational arithmetic, ties to even."""
    if x == 0 or not math.isfinite(x):
        return x
    quantum = Fraction(2) ** max(math.frexp(x)[1] - 8, -133)
    nearest = round(Fraction(x) / quantum) * quantum
    return math.copysign(math.inf if abs(nearest) >= 2**128 else float(nearest), x)


def test_every_bf16_value_is_kept():
    numbers = ~np.isnan(widen(ALL))
    assert (bits(bf16(widen(ALL)))[numbers] == bits(ALL)[numbers]).all()


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("side", ["below", "at", "above"])
def test_midpoints(sign, side):
    """Between each two neighbours: float64's last value below the midpoint, the midpoint, and the first above."""
    low, high = values(FINITE), values(FINITE + 1)
    middle = (low + high) / 2
    assert ((middle - low) == (high - middle)).all(), "midpoints must be exact in float64"
    given_, want = {
        "below": (np.nextafter(middle, 0), FINITE),
        "at": (middle, FINITE + (FINITE & 1)),
        "above": (np.nextafter(middle, np.inf), FINITE + 1),
    }[side]
    got = bits(bf16(sign * given_))
    assert (got == want | (0x8000 if sign < 0 else 0)).all()


@given(st.integers(0, 0x7F7F), st.integers(-3, 3), st.sampled_from([2.0**-16, 2.0**-30, 2.0**-44]))
def test_near_a_value_or_a_midpoint(pattern, halves, nudge):
    """The neighbourhood where a sticky bit decides, from fp32's width to float64's."""
    low, high = values(np.array([pattern, pattern + 1]))
    x = float(low + (high - low) * (0.5 + halves * nudge))
    assert float(bf16(x)) == exact(x)
