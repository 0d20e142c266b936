"""prep and pool against their scalar forms, to the bit."""

import dataclasses

import numpy as np
import pytest
import scalar_forms
from kvproof import reference
from kvproof.reference import FLASH_NEXT, TINY, Rope
from kvproof.reference.numerics import bf16
from kvproof.reference.prep import angles, norm, rotate, split
from scalar_forms import scalars
from streams import GEOMETRIES, ODD, assert_bits, make_cache, make_rope, make_weights, narrow, normal

pytestmark = pytest.mark.filterwarnings("error")

POS0, ROWS = 36, 9
"""Rows on both sides of the end of the media prompt (40 positions)."""

geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
modes = pytest.mark.parametrize("mode", ["text", "delta", "media"])


@geometries
@modes
def test_prep(geometry, mode):
    weights, rope, cache = make_weights(geometry), make_rope(mode), make_cache(geometry, POS0 + ROWS)
    projection = normal(3, ROWS, geometry.projection_width)
    prepared = reference.prep(geometry, weights, cache, projection, POS0, rope)
    stored = np.arange(POS0, POS0 + ROWS)
    got = {"q": prepared.q, "iq": prepared.iq, "gate": split(geometry, projection).gate}
    got |= {part: cache.read(part, stored) for part in ("keys", "values", "index_keys")}
    for row in range(ROWS):
        turn = scalar_forms.angles(geometry, weights, rope, POS0 + row)
        want = scalar_forms.prep(geometry, weights, scalars(projection[row]), turn)
        for name in got:
            assert_bits(got[name][row], narrow(want[name]), f"{name} of row {row}")


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm_where_epsilon_counts(eps):
    """Rows so small that epsilon decides their scale, and a row of zeros."""
    x = normal(25, 4, 16).astype(float) * np.array([2.0**-20, 2.0**-10, 1.0, 0.0])[:, None]
    weight = (1 + np.arange(16) / 16).astype(np.float32)
    for got, row in zip(norm(x, weight, eps), x, strict=True):
        assert_bits(np.abs(got), np.abs(narrow(scalar_forms.norm(scalars(row), scalars(weight), eps))), "norm")


@geometries
@modes
@pytest.mark.parametrize("size", [1.0, 2.0**-10], ids=["", "epsilon-counts"])
def test_pool(geometry, mode, size):
    weights, rope, cache = make_weights(geometry), make_rope(mode), make_cache(geometry, POS0 + ROWS)
    keys = bf16(size * normal(4, POS0 + ROWS, 1, geometry.index_dim).astype(float))
    first = POS0 // geometry.block * geometry.block
    cache.write("index_keys", np.arange(first, POS0 + ROWS), keys[first:])
    reference.pool(geometry, weights, cache, POS0, ROWS, rope)
    for block in range(POS0 // geometry.block, (POS0 + ROWS) // geometry.block):
        start = block * geometry.block
        raw = scalars(keys[start : start + geometry.block, 0])
        want = scalar_forms.pool(geometry, weights, raw, scalar_forms.angles(geometry, weights, rope, start))
        assert_bits(cache.read("pooled", [block])[0], narrow([want]), f"pooled row {block}")


def test_pool_adds_the_keys_in_position_order():
    """2**60 swallows the 1 that comes before it leaves, and not the one that comes after."""
    weights = make_weights(TINY)
    cache = make_cache(TINY, 8)
    keys = np.ones((8, 1, 32))
    keys[:4, 0, 0] = [2.0**60, 1, -(2.0**60), 0]
    keys[4:, 0, 0] = [2.0**60, -(2.0**60), 1, 0]
    cache.write("index_keys", np.arange(8), bf16(keys))
    reference.pool(TINY, weights, cache, 0, 8, Rope())
    means = np.ones((2, 1, 32))
    means[:, 0, 0] = [0, 0.25]
    positions = np.array([0, 4])
    want = rotate(norm(means, weights.pool_scale, TINY.eps), angles(TINY, weights.inv_freq, positions, Rope()))
    assert_bits(cache.read("pooled", [0, 1]), want, "pooled")


def test_angle_is_one_fp32_product():
    """A float64 product, or a float64 frequency, would turn far rows by another angle."""
    positions = np.array([1_000_003, 16_777_217])
    got = angles(ODD, ODD.inv_freq(), positions, make_rope("text"))
    want = [[np.float32(p) * f for f in ODD.inv_freq()] for p in positions]
    assert got.dtype == np.float32
    assert_bits(got, np.array(want, np.float32), "angle")


CUT = dataclasses.replace(ODD, name="cut", index_dim=24, rotary_half=12, mrope_sections=(7, 2, 3))
"""Its h and w sections end before the pairs do, each at a pair that it would have owned."""


@pytest.mark.parametrize("geometry", [*GEOMETRIES, CUT], ids=lambda g: g.name)
@modes
def test_angles_of_far_positions(geometry, mode):
    weights, rope = make_weights(geometry), make_rope(mode)
    positions = np.array([0, 39, 40, 12_345_678, 2**31 - 8])
    got = angles(geometry, weights.inv_freq, positions, rope)
    want = [scalar_forms.angles(geometry, weights, rope, int(position)) for position in positions]
    assert_bits(got, np.array([[float(x) for x in row] for row in want], np.float32), "angle")


@pytest.mark.parametrize("geometry", [*GEOMETRIES, FLASH_NEXT], ids=lambda g: g.name)
def test_rotary_frequencies(geometry):
    want = scalar_forms.inv_freq(geometry.rope_theta, geometry.rotary_half)
    assert_bits(geometry.inv_freq(), np.array([float(x) for x in want], np.float32), "inv_freq")
