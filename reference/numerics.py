"""The two conversions of the reference: rounding float64 to bf16, once, and widening bf16 to float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .geometry import FloatArray
from .layout import BF16
from .results import Bf16Array

_SIGN = np.uint32(0x8000_0000)
_QUIET_NAN = np.uint32(0x7FC0_0000)


def bf16(x: npt.ArrayLike) -> Bf16Array:
    """Round float64 to bf16, to nearest even, for every value: subnormals, overflow to inf, -0 and NaN too.

    A cast through fp32 rounds twice (1 + 2**-8 + 2**-40 would give 1). Rounded to *odd* in fp32 first, a value keeps
    on which side of a bf16 midpoint it lies, so the second rounding is the only one: Boldo and Melquiond, "Emulation
    of FMA and correctly rounded sums: proved algorithms using rounding to odd" (2008), theorem 2.

    Args:
        x: any shape, any dtype that float64 holds exactly.

    Returns:
        bf16, same shape; NaN becomes the quiet NaN of its sign.
    """
    exact = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = exact.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    truncated = bits - (np.abs(back) > np.abs(exact))
    odd = truncated | (back != exact)
    rounded = odd + np.uint32(0x7FFF) + ((odd >> np.uint32(16)) & np.uint32(1))
    rounded = np.where(np.isnan(exact), (bits & _SIGN) | _QUIET_NAN, rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16).view(BF16)


def widen(x: npt.NDArray[np.generic]) -> FloatArray:
    """bf16, fp32 or float64 as float64, same shape; exact."""
    if x.dtype == BF16:  # the upper half of an fp32: faster than its cast
        whole = np.ascontiguousarray(x).reshape(x.shape)  # which an array without axes loses
        x = (whole.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN in a cache is data like any other
        return x.astype(np.float64)
