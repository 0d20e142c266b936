"""bf16 rounding against exact rational arithmetic, and its way back."""

import numpy as np
import pytest
import scalar_forms
from hypothesis import given
from hypothesis import strategies as st
from kvproof.reference.layout import BF16
from kvproof.reference.numerics import bf16, widen
from scalar_forms import scalars
from streams import assert_bits, bits

pytestmark = pytest.mark.filterwarnings("error")


def check_rounding(values):
    got = bf16(np.array(values))
    for value, rounded in zip(values, got.astype(float).tolist(), strict=True):
        want = float(scalar_forms.round_bf16(scalars(np.float64(value)))) if value == value else value
        assert rounded == want or value != value, f"bf16({value.hex()}) = {rounded.hex()}, should be {want.hex()}"
        assert np.signbit(rounded) == np.signbit(value)


def test_rounding_at_every_midpoint_of_some_binades():
    """Each midpoint between neighbours, and float64's values on both sides of it, from subnormals to overflow."""
    patterns = np.concatenate([np.arange(0, 260), np.arange(0x3F70, 0x3F90), np.arange(0x7F60, 0x7F80)])
    low = patterns.astype(np.uint16).view(BF16).astype(float)
    high = (patterns + 1).astype(np.uint16).view(BF16).astype(float)
    middle = (low + np.where(np.isinf(high), 2.0**128, high)) / 2
    near = np.concatenate([np.nextafter(middle, 0), middle, np.nextafter(middle, np.inf), low])
    check_rounding([*near.tolist(), *(-near).tolist()])


def test_rounding_of_extremes():
    check_rounding([0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308, np.inf, -np.inf, 1 + 2.0**-8 + 2.0**-40])


@given(st.lists(st.floats(width=64, allow_nan=False), min_size=1))
def test_rounding_of_any_float64(values):
    check_rounding(values)


@pytest.mark.parametrize("pattern", [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0_0000_0000_0001, 0xFFFF_FFFF_FFFF_FFFF])
def test_nan_stays_a_quiet_nan_of_its_sign(pattern):
    got = bf16(np.array([pattern], np.uint64).view(np.float64))
    assert bits(got)[0] == (0xFFC0 if pattern >> 63 else 0x7FC0)


def test_widening_is_exact():
    """Every bf16 value, NaN patterns too, and fp32 and float64 as they are."""
    patterns = np.arange(2**16, dtype=np.uint16)
    numbers = (patterns & 0x7FFF) <= 0x7F80
    got = widen(patterns.view(BF16))
    want = (patterns.astype(np.uint32) << 16).view(np.float32)
    assert got.dtype == np.float64
    assert np.isnan(got[~numbers]).all()
    assert_bits(got[numbers], want[numbers].astype(np.float64), "widened")
    for dtype in (np.float32, np.float64):
        assert_bits(
            widen(np.array([0.1, -0.0, np.inf], dtype)), np.array([0.1, -0.0, np.inf], dtype).astype(float), "x"
        )


def test_conversions_are_silent_whatever_the_caller_lets_numpy_raise():
    """Overflow, underflow and signalling NaNs are data here."""
    signalling = np.array([0x7F81], np.uint16).view(BF16)
    with np.errstate(all="raise"):
        assert np.isinf(bf16([1e300]).astype(float)).all()
        assert (bf16([5e-324, 1e-50]) == 0).all()
        assert np.isnan(widen(signalling)).all()
        assert np.isnan(bf16(np.array([0x7FF0_0000_0000_0001], np.uint64).view(np.float64)).astype(np.float32)).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_shapes_are_kept(shape):
    rounded = bf16(np.ones(shape))
    assert (rounded.shape, rounded.dtype) == (shape, BF16)
    for given_ in (np.ones(shape), np.ones(shape, np.float32), np.ones(shape, BF16), rounded):
        assert (widen(given_).shape, widen(given_).dtype) == (shape, np.float64)


def test_rows_that_do_not_lie_together_are_converted():
    x = np.arange(24.0).reshape(4, 6)[::2, ::3]
    assert_bits(bf16(x), bf16(x.copy()), "bf16")
    assert_bits(widen(bf16(np.arange(24.0).reshape(4, 6))[::2, ::3]), x.copy(), "widened")
