"""What holds of softmax whatever way a key list is cut: chunks merge to the whole, empty parts change nothing."""

import numpy as np
import pytest
import scalar_forms
from kvproof import reference
from kvproof.reference import KeyLists, Partials
from kvproof.reference.attention import attention
from kvproof.reference.numerics import bf16, widen
from scalar_forms import mp, scalars
from streams import GEOMETRIES, SLIM, UNIT, assert_bits, make_cache, normal, roundings

pytestmark = pytest.mark.filterwarnings("error")


def dense(count, rows=1, scale=3.0, geometry=SLIM):
    """The partials of `rows` equal-length dense rows over `count` random keys, and q, keys and values in float64."""
    cache = make_cache(geometry, count)
    shape = (count, geometry.kv_heads, geometry.head_dim)
    keys, values = bf16(scale * normal(60, *shape).astype(float)), normal(61, *shape)
    for part, data in (("keys", keys), ("values", values)):
        cache.write(part, np.arange(count), data)
    q = normal(62, rows, geometry.query_heads, geometry.head_dim)
    return reference.chunks(geometry, cache, q, KeyLists.dense([count] * rows)), widen(q), widen(keys), widen(values)


def exact_scores(q, keys):
    """Scores of one head, exact to 120 bits, and the largest sum of their products' sizes."""
    found = [scalar_forms.score(scalars(q), key) for key in scalars(keys)]
    return [s for s, _ in found], float(max(size for _, size in found))


@pytest.mark.parametrize("count", [1, 512, 1100])
def test_chunks_combine_to_the_natural_log_sum_exp(count):
    """log(sum of exp(m) * l) over the chunks is the log of the sum of exp(s): m and l are of base e."""
    partials, q, keys, _ = dense(count)
    for head in range(SLIM.query_heads):
        scores, size = exact_scores(q[0, head], keys[:, head // 2])
        want = mp.log(sum(mp.exp(s) for s in scores))
        parts = partials.m[0, :, head] + np.log(partials.l[0, :, head])
        got = np.logaddexp.reduce(parts)
        allowed = (roundings(count, SLIM.head_dim, size) + 8 * abs(want)) * UNIT
        assert abs(float(got) - want) <= allowed, f"head {head}"


@pytest.mark.parametrize("count", [513, 1100])
def test_merged_chunks_are_one_softmax_over_the_whole_list(count):
    """The normaliser is as near as float64 allows; the values differ by the rounding of the weights to bf16 alone."""
    partials, q, keys, values = dense(count)
    scores = np.einsum("hgd,nhd->hgn", q[0].reshape(2, 2, 8), keys).reshape(4, count) * 8**-0.5
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    scale = np.exp(partials.m[0] - top)
    total, o = (partials.l[0] * scale).sum(axis=0), (partials.o[0] * scale[..., None]).sum(axis=0)
    sizes = np.abs(scores).max() * 8 + count
    np.testing.assert_allclose(total, weights.sum(axis=1), rtol=8 * sizes * UNIT)
    whole = attention(q[0], keys, values) * total[:, None]
    spread = np.einsum("hgn,nhd->hgd", weights.reshape(2, 2, count), np.abs(values)).reshape(4, 8)
    assert (np.abs(o - whole) <= 2.0**-9 * (1 + 2.0**-8) * spread).all()
    assert (np.abs(o - whole) > 2.0**-14 * spread).any(), "the weights were not rounded at all"


@pytest.mark.parametrize("count", [65, 512, 1100])
def test_chunks_are_exactly_one_softmax_where_each_starts_at_the_top(count):
    """Every chunk starts with the highest score, so all weights are exp(s - the same m), and rounding is the same."""
    cache, positions = make_cache(SLIM, count), np.arange(count)
    keys, values = widen(normal(63, count, 2, 8)), widen(normal(64, count, 2, 8))
    q = np.ones((1, 4, 8))
    keys[::512] = 8.0
    for part, data in (("keys", keys), ("values", values)):
        cache.write(part, positions, bf16(data))
    partials = reference.chunks(SLIM, cache, bf16(q), KeyLists.dense([count]))
    top = 64 * 8**-0.5
    np.testing.assert_allclose(partials.m, np.full(partials.m.shape, top), rtol=4 * UNIT)
    for head in range(4):
        kv = head // 2
        p = np.exp(keys[:, kv].sum(axis=1) * 8**-0.5 - top)
        want = (widen(bf16(p))[:, None] * values[:, kv]).sum(axis=0)
        allowed = (count + 64) * UNIT * (p[:, None] * np.abs(values[:, kv])).sum(axis=0)
        assert (np.abs(partials.o[0, :, head].sum(axis=0) - want) <= allowed).all()
        np.testing.assert_allclose(partials.l[0, :, head].sum(), p.sum(), rtol=(count + 64) * UNIT)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_rows_together_are_rows_alone(geometry):
    """Rows that share a call, and the keys of a chunk, have the bits of calls of their own."""
    counts = np.array([510, 511, 512, 512, 513, 600, 600])
    cache = make_cache(geometry, 600)
    for part, seed in (("keys", 65), ("values", 66)):
        cache.write(part, np.arange(600), normal(seed, 600, geometry.kv_heads, geometry.head_dim))
    q = normal(67, len(counts), geometry.query_heads, geometry.head_dim)
    together = reference.chunks(geometry, cache, q, KeyLists.dense(counts))
    for row, count in enumerate(counts):
        alone = reference.chunks(geometry, cache, q[row : row + 1], KeyLists.dense([count]))
        chunks = alone.m.shape[1]
        for name in ("o", "m", "l"):
            got = getattr(together, name)[row, :chunks]
            assert_bits(got, getattr(alone, name)[0], f"{name} of row {row}, {count} keys")


@pytest.mark.parametrize("count", [1, 64, 130, 600])
def test_a_dense_row_is_a_list_of_all_positions(count):
    cache = make_cache(SLIM, 600)
    for part in ("keys", "values"):
        cache.write(part, np.arange(count), normal(23, count, 2, 8))
    q = normal(24, 1, 4, 8)
    ids = np.arange(count, dtype=np.int32)[None]
    rows = reference.chunks(SLIM, cache, q, KeyLists.dense([count]))
    listed = reference.chunks(SLIM, cache, q, KeyLists(ids, np.array([count], np.int32), np.ones(1, np.int32)))
    for name in ("o", "m", "l"):
        assert_bits(getattr(listed, name), getattr(rows, name), name)


@pytest.mark.parametrize("at", range(4))
def test_an_empty_partial_anywhere_changes_no_bit(at):
    rng = np.random.default_rng(68)
    o, m, total = rng.normal(size=(2, 3, 4, 8)), 5 * rng.normal(size=(2, 3, 4)), 1 + rng.random((2, 3, 4))
    want = reference.merge(SLIM, Partials(o, m, total))
    for noise in (0.0, np.nan):
        wider = Partials(
            np.insert(o, at, noise, axis=1), np.insert(m, at, -np.inf, axis=1), np.insert(total, at, 0.0, axis=1)
        )
        assert_bits(reference.merge(SLIM, wider), want, f"merge with an empty partial at {at}")


def test_a_row_without_keys_gives_zero_beside_rows_with_keys():
    cache = make_cache(SLIM, 4)
    for part in ("keys", "values"):
        cache.write(part, np.arange(4), normal(69, 4, 2, 8))
    q = normal(70, 3, 4, 8)
    got = reference.merge(SLIM, reference.chunks(SLIM, cache, q, KeyLists.dense([0, 4, 0])))
    alone = reference.merge(SLIM, reference.chunks(SLIM, cache, q[1:2], KeyLists.dense([4])))
    assert_bits(got[1:2], alone, "the row with keys")
    assert_bits(got[::2], bf16(np.zeros((2, 4, 8))), "rows without keys")


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_one_key_has_all_the_weight(geometry):
    """exp(s - m) = 1: each head's output is the value itself, to the bit."""
    cache = make_cache(geometry, 1)
    values = normal(71, 1, geometry.kv_heads, geometry.head_dim)
    cache.write("keys", [0], normal(72, 1, geometry.kv_heads, geometry.head_dim))
    cache.write("values", [0], values)
    q = normal(73, 1, geometry.query_heads, geometry.head_dim)
    got = reference.merge(geometry, reference.chunks(geometry, cache, q, KeyLists.dense([1])))
    assert_bits(got, np.repeat(values, geometry.query_heads // geometry.kv_heads, axis=1), "out")
