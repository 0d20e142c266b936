"""Our own exp, sin and cos stay within the errors that the bounds declare, and are exact where they must be."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from kvproof.fast import HostBackend, KernelSources, Pointer, Source
from kvproof.fast.sources import defines
from kvproof.oracle.bounds import FP32
from kvproof.reference import FLASH_NEXT, TINY
from kvproof.reference.layout import BF16

TEXT = """
#include "arithmetic.cuh"
extern "C" __global__ void exps(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += 8) store8(y + i, exp8(load8(x + i)));
}
extern "C" __global__ void turns(const float* x, float* s, float* c, int n) {
    for (int i = 0; i < n; ++i) { SinCos t = sincos_of(x[i]); s[i] = t.sin; c[i] = t.cos; }
}
extern "C" __global__ void sigmoids(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += 8) store8(y + i, sigmoid8(load8(x + i)));
}
extern "C" __global__ void roundings(const float* x, float* y, float* lanes, int n) {
    for (int i = 0; i < n; ++i) y[i] = rounded_bf16(x[i]);
    for (int i = 0; i < n; i += 8) store8(lanes + i, round8(load8(x + i)));
}
"""


@pytest.fixture(scope="module")
def functions():
    headers = {name: text for name, text in KernelSources().texts.items() if not name.endswith(".cu")}
    return HostBackend().load(Source("arithmetic", TEXT, headers, defines(TINY, 32)))


def call(functions, entry, x, outputs=1):
    x = np.ascontiguousarray(x, np.float32)
    found = [np.zeros_like(x) for _ in range(outputs)]
    functions.launch(entry, grid=1, block=1, args=[Pointer(x), *map(Pointer, found), np.int32(len(x))])
    return found[0] if outputs == 1 else found


def floats_between(low, high, count):
    """fp32 spread evenly over the bit patterns from low to high, both negative or zero; a multiple of 8."""
    first, last = (int(np.float32(x).view(np.uint32)) for x in (high, low))
    return np.linspace(first, last, count // 8 * 8).astype(np.uint32).view(np.float32)


def test_exp_is_within_its_declared_error(functions):
    x = floats_between(-87.33654, -1e-30, 400_000)
    want = np.exp(x.astype(np.float64))
    worst = np.abs(call(functions, "exps", x) / want - 1).max()
    assert worst <= FP32.exp
    assert worst < 2.0**-23, "the implementation is about one ulp; a larger error is a change"


def test_exp_against_mpmath(functions):
    x = floats_between(-87.33654, -1e-8, 400)
    got = call(functions, "exps", x)
    with mpmath.workprec(120):
        errors = [abs(mpmath.mpf(float(y)) / mpmath.exp(mpmath.mpf(float(v))) - 1) for v, y in zip(x, got, strict=True)]
    assert max(errors) <= FP32.exp


def test_exp_at_its_edges(functions):
    x = np.array([0.0, -0.0, -87.33655, -100.0, -1e30, -np.inf, np.nan, -1e-40], np.float32)
    got = call(functions, "exps", x)
    np.testing.assert_array_equal(got[:6], [1, 1, 0, 0, 0, 0])
    assert np.isnan(got[6])
    assert got[7] == 1
    below = np.float32(-87.33655)
    assert np.exp(np.float64(below)) < FP32.exp_floor


@pytest.mark.parametrize("geometry", [FLASH_NEXT, TINY], ids=lambda g: g.name)
def test_turns_are_within_their_declared_error(functions, geometry):
    positions = np.unique(np.concatenate([np.arange(4096), np.linspace(0, 2**20, 5000).astype(np.int64)]))
    angle = np.multiply.outer(positions.astype(np.float32), geometry.inv_freq()).ravel()
    angle = np.concatenate([angle, -angle[:1000]])
    sin, cos = call(functions, "turns", angle, outputs=2)
    exact = angle.astype(np.float64)
    worst = max(np.abs(sin - np.sin(exact)).max(), np.abs(cos - np.cos(exact)).max())
    assert worst <= 2.0**-25 * 1.0001, "correctly rounded but for ties: half an ulp of 1"
    assert worst <= FP32.turn


def test_turns_against_mpmath(functions):
    angle = np.array([0.0, 1.0, 355.0, 710.0, 103993.0, 1e6, 1048575.0, 3.1415927, 1.5707964], np.float32)
    sin, cos = call(functions, "turns", angle, outputs=2)
    with mpmath.workprec(200):
        for x, s, c in zip(angle, sin, cos, strict=True):
            assert abs(mpmath.sin(mpmath.mpf(float(x))) - float(s)) <= 2.0**-25
            assert abs(mpmath.cos(mpmath.mpf(float(x))) - float(c)) <= 2.0**-25


def test_sigmoid_saturates_and_is_symmetric(functions):
    x = np.array([0, 1, -1, 200, -200, np.inf, -np.inf, 20], np.float32)
    got = call(functions, "sigmoids", x)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6, atol=1e-37)


def test_bf16_rounding_is_ml_dtypes_rounding(functions):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 80_000, dtype=np.uint32).view(np.float32)
    x[:8] = [np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45, np.nan]
    with np.errstate(invalid="ignore"):
        want = x.astype(BF16).astype(np.float32)
    for got in call(functions, "roundings", x, outputs=2):
        number = ~np.isnan(want)
        np.testing.assert_array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])
        assert np.isnan(got[~number]).all()
