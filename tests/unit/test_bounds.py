"""Bounds: right results lie inside on hard data, wrong ones outside, and what cannot be bounded is not called wrong."""

from __future__ import annotations

import numpy as np
import pytest
from kvproof import fast, reference
from kvproof.oracle import bounds, interval
from kvproof.oracle.interval import Interval
from kvproof.reference import TEXT, TINY, KeyLists
from streams import make_cache, make_weights, normal

KEYS = 700


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


@pytest.mark.parametrize("kind", ["normal", "equal", "dominant", "cancelling", "ramp", "tiny", "zero"])
def test_our_attention_is_within_its_bound_on_hard_data(engine, kind):
    cache = make_cache(TINY, KEYS, page=16, layer=1)
    q, keys, values = (reference.numerics.bf16(x) for x in attention_data(kind))
    cache.write("keys", np.arange(KEYS), keys)
    cache.write("values", np.arange(KEYS), values)
    lists = KeyLists.dense([KEYS])
    partials = fast.chunks(TINY, cache, q, lists, engine=engine)
    bound = bounds.chunks(TINY, cache, q, lists)
    for name in "oml":
        assert getattr(bound, name).fraction(getattr(partials, name)).max() <= 1, name
    out = fast.merge(TINY, partials, engine=engine)
    row = bounds.attention(TINY, bound)
    assert (row.low <= row.high).all()
    assert row.fraction(out).max() <= 1


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


@pytest.mark.parametrize("scale", [1.0, 1e-6, 2.0**40], ids=str)
def test_our_norms_are_within_their_bound(engine, scale):
    weights, cache = make_weights(TINY), make_cache(TINY, 8, layer=1)
    projection = reference.numerics.bf16(normal(3, 8, TINY.projection_width).astype(np.float64) * scale)
    prepared = fast.prep(TINY, weights, cache, projection, 0, TEXT, engine=engine)
    bound = bounds.prep(TINY, weights, projection, 0, TEXT)
    assert bound.q.fraction(prepared.q).max() <= 1
    assert bound.iq.fraction(prepared.iq).max() <= 1
    assert bound.keys.fraction(cache.read("keys", np.arange(8))).max() <= 1


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
