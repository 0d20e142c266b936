"""Bounds: right results lie inside on hard data, wrong ones outside, and what cannot be bounded is not called wrong."""

from __future__ import annotations

import numpy as np
import pytest
from kvproof import fast, reference
from kvproof.oracle import bounds, interval
from kvproof.oracle.arithmetic import FP32, OURS, Arithmetic
from kvproof.oracle.interval import Interval
from kvproof.reference import TEXT, TINY, KeyLists, Partials
from kvproof.reference.layout import BF16
from kvproof.reference.numerics import bf16, widen
from streams import GEOMETRIES, ODD, make_cache, make_rope, make_weights, normal

KEYS = 700

geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
arithmetics = pytest.mark.parametrize("arithmetic", [OURS, FP32], ids=["ours", "fp32"])


def attention_data(kind):
    """q [1, QH, D], keys and values [n, KH, D], float64."""
    rng = np.random.default_rng(len(kind))
    q = rng.standard_normal((1, TINY.query_heads, TINY.head_dim))
    keys, values = (rng.standard_normal((KEYS, TINY.kv_heads, TINY.head_dim)) for _ in range(2))
    if kind == "equal":
        keys[:] = keys[0]
    elif kind == "dominant":
        keys[300] *= 50.0
    elif kind == "cancelling":
        keys, q = keys * 200.0, q * 200.0
        keys[..., ::2] = -keys[..., 1::2]
        q[..., ::2] = q[..., 1::2]
    elif kind == "ramp":
        keys *= np.linspace(0, 1e4, KEYS)[:, None, None]
    elif kind == "tiny":
        keys, values = keys * 1e-30, values * 1e-30
    elif kind == "zero":
        keys[:], values[:] = 0.0, -0.0
    return q, keys, values


@arithmetics
@pytest.mark.parametrize("kind", ["normal", "equal", "dominant", "cancelling", "ramp", "tiny", "zero"])
def test_our_attention_is_within_its_bound_on_hard_data(engine, kind, arithmetic):
    cache = make_cache(TINY, KEYS, page=16, layer=1)
    q, keys, values = (reference.numerics.bf16(x) for x in attention_data(kind))
    cache.write("keys", np.arange(KEYS), keys)
    cache.write("values", np.arange(KEYS), values)
    lists = KeyLists.dense([KEYS])
    partials = fast.chunks(TINY, cache, q, lists, engine=engine)
    bound = bounds.chunks(TINY, cache, q, lists, arithmetic)
    for name in "oml":
        assert getattr(bound, name).fraction(getattr(partials, name)).max() <= 1, name
    out = fast.merge(TINY, partials, engine=engine)
    row = bounds.attention(TINY, bound, arithmetic)
    assert (row.low <= row.high).all()
    assert row.fraction(out).max() <= 1
    assert bounds.merge(TINY, partials, arithmetic).fraction(out).max() <= 1


LENGTHS = [0, 1, 63, 64, 65, 512, 513, KEYS]


@geometries
@arithmetics
def test_our_rows_of_any_length_are_within_their_bounds(engine, geometry, arithmetic):
    """Tiles and chunks that are not full, and chunks of short rows that are empty."""
    cache = make_cache(geometry, KEYS, page=16, layer=1)
    for part in ("keys", "values"):
        cache.write(part, np.arange(KEYS), normal(len(part), KEYS, geometry.kv_heads, geometry.head_dim))
    q, lists = normal(7, len(LENGTHS), geometry.query_heads, geometry.head_dim), KeyLists.dense(LENGTHS)
    partials = fast.chunks(geometry, cache, q, lists, engine=engine)
    bound = bounds.chunks(geometry, cache, q, lists, arithmetic)
    for name in "oml":
        assert getattr(bound, name).fraction(getattr(partials, name)).max() <= 1, name
        assert (getattr(bound, name).reach[partials.l == 0] == 0).all()
    out = fast.merge(geometry, partials, engine=engine)
    assert bounds.attention(geometry, bound, arithmetic).fraction(out).max() <= 1


def test_an_empty_chunk_has_one_right_partial():
    lists = KeyLists.dense([0, 513])
    cache = make_cache(TINY, 513, poison=1.0)
    bound = bounds.chunks(TINY, cache, normal(1, 2, TINY.query_heads, TINY.head_dim), lists)
    for part, value in ((bound.o, 0.0), (bound.m, -np.inf), (bound.l, 0.0)):
        assert (part.low[0] == value).all()
        assert (part.high[0] == value).all()
    row = bounds.attention(TINY, bound)[0]
    assert (row.low == 0).all()
    assert (row.high == 0).all()


def test_what_a_kernel_declares_narrows_its_bound():
    cache = make_cache(ODD, KEYS)
    for part in ("keys", "values"):
        cache.write(part, np.arange(KEYS), normal(len(part), KEYS, ODD.kv_heads, ODD.head_dim))
    q, lists = normal(7, 1, ODD.query_heads, ODD.head_dim), KeyLists.dense([KEYS])
    ours, any_fp32 = (bounds.chunks(ODD, cache, q, lists, arithmetic) for arithmetic in (OURS, FP32))
    for name in "oml":
        assert (getattr(ours, name).reach < getattr(any_fp32, name).reach).all(), name


def test_one_chunk_merged_is_a_quotient():
    """One rounding, whatever the arithmetic of what is not done."""
    o, l = np.full((1, 1, 4, 32), 3.0, np.float32), np.full((1, 1, 4), 7.0, np.float32)
    got = bounds.merge(TINY, Partials(o=o, m=np.zeros_like(l), l=l))
    assert (got.low == widen(bf16(3 / 7))).all()
    assert (got.high == widen(bf16(3 / 7))).all()


def test_one_wrong_key_of_seven_hundred_is_outside(engine):
    cache = make_cache(TINY, KEYS, page=16, layer=1)
    q, keys, values = (reference.numerics.bf16(x) for x in attention_data("normal"))
    cache.write("keys", np.arange(KEYS), keys)
    cache.write("values", np.arange(KEYS), values)
    lists = KeyLists.dense([KEYS])
    bound = bounds.chunks(TINY, cache, q, lists)
    cache.write("values", [350], values[:1])
    partials = fast.chunks(TINY, cache, q, lists, engine=engine)
    assert bound.o.fraction(partials.o).max() > 1


@arithmetics
@pytest.mark.parametrize("scale", [1.0, 1e-6, 2.0**40], ids=str)
def test_our_norms_are_within_their_bound(engine, scale, arithmetic):
    weights, cache = make_weights(TINY), make_cache(TINY, 8, layer=1)
    projection = reference.numerics.bf16(normal(3, 8, TINY.projection_width).astype(np.float64) * scale)
    prepared = fast.prep(TINY, weights, cache, projection, 0, TEXT, engine=engine)
    bound = bounds.prep(TINY, weights, projection, 0, TEXT, arithmetic)
    assert bound.q.fraction(prepared.q).max() <= 1
    assert bound.iq.fraction(prepared.iq).max() <= 1
    assert bound.keys.fraction(cache.read("keys", np.arange(8))).max() <= 1


@geometries
@arithmetics
@pytest.mark.parametrize("mode", ["text", "delta", "media"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**40], ids=str)
def test_our_pooled_rows_are_within_their_bound(engine, geometry, arithmetic, mode, scale):
    rows, weights, rope, cache = 5 * geometry.block, make_weights(geometry), make_rope(mode, 12), None
    cache = make_cache(geometry, rows)
    raw = bf16(widen(normal(8, rows, 1, geometry.index_dim)) * scale)
    raw[1] = bf16(-widen(raw[0]))
    cache.write("index_keys", np.arange(rows), raw)
    fast.pool(geometry, weights, cache, 0, rows, rope, engine=engine)
    got = cache.read("pooled", np.arange(5))
    assert bounds.pool(geometry, weights, cache, 0, rows, rope, arithmetic).fraction(got).max() <= 1


@geometries
@arithmetics
@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**40], ids=str)
def test_our_block_scores_are_within_their_bound(engine, geometry, arithmetic, scale):
    pos0, rows = geometry.block * (geometry.top_blocks + 3), 2 * geometry.block
    cache = make_cache(geometry, pos0 + rows)
    blocks = (pos0 + rows) // geometry.block
    cache.write("pooled", np.arange(blocks), bf16(widen(normal(9, blocks, 1, geometry.index_dim)) * scale))
    iq = bf16(widen(normal(10, rows, geometry.index_heads, geometry.index_dim)) * scale)
    got = fast.scores(geometry, cache, iq, pos0, engine=engine)
    bound = bounds.scores(geometry, cache, iq, pos0, arithmetic)
    computed = ~np.isnan(bound.value)
    assert computed.any()
    assert bound.map(lambda x: x[computed]).fraction(got[computed]).max() <= 1


@geometries
@arithmetics
@pytest.mark.parametrize("scale", [1.0, 30.0, 2.0**100], ids=str)
def test_our_gates_are_within_their_bound(engine, geometry, arithmetic, scale):
    projection = bf16(widen(normal(11, 3, geometry.projection_width)) * scale)
    out = normal(12, 3, geometry.query_heads, geometry.head_dim)
    got = fast.gate(geometry, out, projection, engine=engine)
    assert bounds.gate(geometry, out, projection, arithmetic).fraction(got).max() <= 1


def test_an_accumulator_too_narrow_for_its_sums_has_no_bound():
    q, keys = np.ones((1, 8)), np.ones((300, 1, 8))
    bound = bounds.plain_attention(q, keys, keys, 1.0, Arithmetic(unit=2.0**-8))
    assert np.isneginf(bound.low).all()
    assert np.isposinf(bound.high).all()


@pytest.mark.filterwarnings("error")
def test_scores_whose_errors_overflow_allow_everything_in_silence():
    cache = make_cache(TINY, 100)
    cache.write("keys", np.arange(100), bf16(2.0**40 * widen(normal(13, 100, TINY.kv_heads, TINY.head_dim))))
    cache.write("values", np.arange(100), normal(14, 100, TINY.kv_heads, TINY.head_dim))
    bound = bounds.chunks(TINY, cache, normal(15, 1, TINY.query_heads, TINY.head_dim), KeyLists.dense([100]))
    row = bounds.attention(TINY, bound)
    assert np.isposinf(bound.l.reach).all()
    assert np.isneginf(row.low).all()
    assert np.isposinf(row.high).all()


# ---- intervals ----


def test_products_of_intervals_with_any_signs():
    low, high = np.array([-3.0, -2.0, 1.0]), np.array([-1.0, 5.0, 4.0])
    x = interval.between((low + high) / 2, low, high)
    for factor in ((2.0, 3.0), (-3.0, 2.0), (-3.0, -2.0)):
        least, most = (np.full(3, end) for end in factor)
        got = interval.times(x, least, most, (least + most) / 2)
        corners = np.array([end * by for end in (low, high) for by in factor])
        np.testing.assert_array_equal(got.low, corners.min(axis=0))
        np.testing.assert_array_equal(got.high, corners.max(axis=0))


def test_an_interval_widens_outwards_on_both_sides_of_zero():
    x = interval.between(np.zeros(1), np.array([-2.0]), np.array([4.0]))
    got = interval.widened(x, 0.25, 0.5)
    assert -3.0 * interval.SLACK <= got.low[0] <= -3.0
    assert 5.5 <= got.high[0] <= 5.5 * interval.SLACK
    assert got.reach[0] == got.high[0]


def test_a_rounding_moves_an_interval_only_where_an_end_crosses_a_midpoint():
    value = np.array([1.0, 1.0, 1.0])
    error = np.array([2.0**-10, 2.0**-9 * 1.01, 2.0**-8 * 1.01])  # below 1 bf16 is twice as dense
    got = interval.stored(interval.around(value, error))
    assert got.low.tolist() == [1.0, 1 - 2.0**-8, 1 - 2.0**-8]
    assert got.high.tolist() == [1.0, 1.0, 1 + 2.0**-7]
    assert got.value.tolist() == [1.0, 1.0, 1.0]
    assert (got.reach > error + 2.0**-8).all()


def test_the_reach_of_a_rounding_is_that_of_the_farther_end():
    error = np.array([2.0**-8])
    got = interval.stored(interval.around(np.array([2 - 2.0**-12]), error))
    assert got.reach == error * interval.SLACK + 2.0**-7


@pytest.mark.parametrize("x", [1.0, 1.999, 2.0, -3.5, 2.0**-126, 2.0**-130, 2.0**-133, 3.0e38], ids=str)
def test_half_an_ulp_is_half_the_spacing_above(x):
    near = np.array([abs(x)]).astype(BF16).view(np.uint16)
    below = near - (near.view(BF16).astype(float) > abs(x))
    spacing = (below + 1).view(BF16).astype(float) - below.view(BF16).astype(float)
    assert interval.half_ulp(np.array([x])) == spacing / 2


def test_zero_is_rounded_to_itself():
    assert interval.half_ulp(np.array([0.0, -0.0])).tolist() == [0.0, 0.0]
    assert (interval.stored(interval.exact(np.zeros(3))).reach == 0).all()


def test_an_unknown_error_allows_everything():
    value = np.array([1.0, 2.0])
    unknown = interval.around(value, np.array([np.nan, np.inf]))
    assert np.isneginf(unknown.low).all()
    assert np.isposinf(unknown.high).all()
    assert (unknown.fraction(np.array([1e30, -1e30])) == 0).all()


def test_nan_is_never_inside():
    value = np.zeros(1)
    assert Interval(value, value - np.inf, value + np.inf, value + np.inf).fraction(np.array([np.nan])) == np.inf


def test_plain_attention_allows_any_way_to_round_the_weights():
    rng = np.random.default_rng(0)
    q, keys, values = rng.standard_normal((4, 8)), rng.standard_normal((50, 2, 8)), rng.standard_normal((50, 2, 8))
    bound = bounds.plain_attention(q, keys, values, 8**-0.5)
    grouped = q.reshape(2, 2, 8)
    s = np.einsum("hgd,nhd->hgn", grouped, keys) * 8**-0.5
    for high in (s.max(), 0.0):
        p = np.exp(s - high)
        rounded = reference.numerics.bf16(p).astype(np.float64)
        for weights, total in ((p, p), (rounded, p), (rounded, rounded)):
            out = np.einsum("hgn,nhd->hgd", weights, values) / total.sum(-1, keepdims=True)
            assert bound.fraction(out.reshape(4, 8)).max() <= 1
