"""Intervals around the reference's values, and how roundings widen them.

A rounding to bf16 is monotone: a value known to lie in [a, b] rounds into [bf16(a), bf16(b)]. That is how every bf16
step is carried, so that nothing is added where no value in reach changes its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.geometry import FloatArray
from ..reference.numerics import bf16, widen

SLACK = 1.0 + 2.0**-20
"""Covers the float64 rounding of the reference and of the bounds' own evaluation: a few thousand operations, whose
errors are smaller than the bounds' fp32 errors by 2**-24 or more (tests/meta/test_certification.py)."""


@dataclass(frozen=True, eq=False)
class Interval:
    """Where an output must lie; every array float64, of the output's shape.

    Attributes:
        value: the reference's value, before the output's own rounding to bf16 where it has one.
        low, high: the least and the largest right output; value lies between them unless that rounding moved both.
        reach: bound of |output - value|: the farther end before the rounding, and half an ulp of bf16 for it.
    """

    value: FloatArray
    low: FloatArray
    high: FloatArray
    reach: FloatArray

    def fraction(self, got: npt.NDArray[Any]) -> FloatArray:
        """|got - value| over the bound, elementwise: at most 1 inside, above 1 outside, inf there if nearer."""
        wide = widen(got)
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.abs(wide - self.value)
            ratio = np.where(error == 0, 0.0, error / self.reach)
            inside = (self.low <= wide) & (wide <= self.high)
            ratio = np.where(inside, np.minimum(ratio, 1.0), np.where(ratio > 1, ratio, np.inf))
        same = inside & (wide == self.value) | (np.isnan(self.value) & np.isnan(wide))
        return np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    def map(self, change: Callable[[FloatArray], FloatArray]) -> Interval:
        """The same choice of elements of each array."""
        return Interval(*(change(x) for x in (self.value, self.low, self.high, self.reach)))

    def __getitem__(self, index: Any) -> Interval:
        return self.map(lambda x: x[index])


def exact(x: npt.NDArray[Any]) -> Interval:
    """The interval of an output that must be this value: a copy, or a list that follows from its inputs."""
    value = widen(x)
    return Interval(value, value, value, np.zeros_like(value))


def stacked(parts: list[Interval]) -> Interval:
    """Intervals along a new first axis."""
    return Interval(*(np.stack([getattr(x, name) for x in parts]) for name in ("value", "low", "high", "reach")))


def joined(parts: list[Interval]) -> Interval:
    """Intervals one behind the other along the last axis."""
    names = ("value", "low", "high", "reach")
    return Interval(*(np.concatenate([getattr(x, name) for x in parts], axis=-1) for name in names))


def between(value: FloatArray, low: FloatArray, high: FloatArray) -> Interval:
    """value, somewhere in [low, high]."""
    with np.errstate(invalid="ignore"):
        reach = np.maximum(high - value, value - low)
    return Interval(value, low, high, np.where(low == high, 0.0, reach))


def around(value: FloatArray, error: FloatArray) -> Interval:
    """value +- error; an error that overflowed, or is unknown because something did, allows everything."""
    reach = np.where(np.isnan(error) & ~np.isnan(value), np.inf, error * SLACK)
    return Interval(value, value - reach, value + reach, reach)


def times(x: Interval, low: FloatArray, high: FloatArray, value: FloatArray) -> Interval:
    """x times a factor in [low, high]."""
    ends = (x.low * low, x.low * high, x.high * low, x.high * high)
    return between(x.value * value, np.minimum.reduce(ends), np.maximum.reduce(ends))


def widened(x: Interval, relative: FloatArray | float, absolute: FloatArray | float) -> Interval:
    """x with further rounding errors on top."""
    low = x.low - (np.abs(x.low) * relative + absolute) * SLACK
    high = x.high + (np.abs(x.high) * relative + absolute) * SLACK
    return between(x.value, low, high)


def rounded(x: Interval) -> Interval:
    """x after a rounding to bf16 that the reference makes too."""
    return between(*(widen(bf16(end)) for end in (x.value, x.low, x.high)))


def stored(x: Interval) -> Interval:
    """x as a bf16 output, which keeps the value that was rounded."""
    low, high = (widen(bf16(end)) for end in (x.low, x.high))
    farthest = np.maximum(np.abs(x.low), np.abs(x.high))
    return Interval(x.value, low, high, x.reach + half_ulp(farthest))


def half_ulp(x: FloatArray) -> FloatArray:
    """Half the spacing of bf16 above |x|: what a rounding of anything as large may move; 0 moves by nothing."""
    with np.errstate(invalid="ignore"):
        exponent = np.frexp(x)[1]
    spacing = np.where(np.isfinite(x), np.ldexp(1.0, np.maximum(exponent - 9, -134)), np.inf)
    return np.where(x == 0, 0.0, spacing)
