"""Every kernel of the reference against its scalar form."""

import numpy as np
import pytest
import scalar_forms
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof import reference
from kvproof.reference import TINY, KeyLists, Partials
from kvproof.reference.numerics import bf16
from kvproof.reference.prep import angles, split
from streams import GEOMETRIES, ODD, assert_bits, floats, make_cache, make_rope, make_weights, normal

POS0, ROWS = 29, 15
"""Rows on both sides of the end of the media prompt (40 positions)."""

geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
modes = pytest.mark.parametrize("mode", ["text", "delta", "media"])


def scalar_angles(geometry, weights, rope, position):
    """Each pair's angle: one fp32 product."""
    result = []
    for pair in range(geometry.rotary_half):
        at = scalar_forms.rotary_position(
            position, pair, rope.mode, rope.delta, rope.triples.tolist(), geometry.mrope_sections
        )
        result.append(float(np.float32(at) * weights.inv_freq[pair]))
    return result


@geometries
@modes
def test_prep(geometry, mode):
    weights, rope, cache = make_weights(geometry), make_rope(mode), make_cache(geometry, POS0 + ROWS)
    projection = normal(3, ROWS, geometry.projection_width)
    prepared = reference.prep(geometry, weights, cache, projection, POS0, rope)
    stored = np.arange(POS0, POS0 + ROWS)

    def prepare(heads, scale):
        return [scalar_forms.rotate(scalar_forms.norm(head, floats(scale), geometry.eps), angle) for head in heads]

    want = {"q": [], "iq": [], "keys": [], "values": [], "index_keys": []}
    for row in range(ROWS):
        angle = scalar_angles(geometry, weights, rope, POS0 + row)
        rest = floats(projection[row])

        def take(count, width, rest=rest):
            heads = [rest[i * width : (i + 1) * width] for i in range(count)]
            del rest[: count * width]
            return heads

        queries_and_gates = take(2 * geometry.query_heads, geometry.head_dim)
        want["q"].append(prepare(queries_and_gates[::2], weights.q_scale))
        want["keys"].append(prepare(take(geometry.kv_heads, geometry.head_dim), weights.k_scale))
        want["values"].append(take(geometry.kv_heads, geometry.head_dim))
        want["iq"].append(prepare(take(geometry.index_heads, geometry.index_dim), weights.i_scale))
        want["index_keys"].append(take(1, geometry.index_dim))
        assert rest == []
    got = {"q": prepared.q, "iq": prepared.iq}
    got |= {part: cache.read(part, stored) for part in ("keys", "values", "index_keys")}
    for name, array in got.items():
        assert_bits(array, bf16(want[name]), name)


@geometries
@modes
def test_pool(geometry, mode):
    weights, rope, cache = make_weights(geometry), make_rope(mode), make_cache(geometry, POS0 + ROWS)
    keys = normal(4, POS0 + ROWS, 1, geometry.index_dim)
    first = POS0 // geometry.block * geometry.block
    cache.write("index_keys", np.arange(first, POS0 + ROWS), keys[first:])
    reference.pool(geometry, weights, cache, POS0, ROWS, rope)
    blocks = range(POS0 // geometry.block, (POS0 + ROWS) // geometry.block)
    want = []
    for block in blocks:
        mean = []
        for d in range(geometry.index_dim):
            total = 0.0
            for position in range(block * geometry.block, (block + 1) * geometry.block):
                total += float(keys[position, 0, d])
            mean.append(scalar_forms.round_bf16(total / geometry.block))
        normed = scalar_forms.norm(mean, floats(weights.pool_scale), geometry.eps)
        want.append([scalar_forms.rotate(normed, scalar_angles(geometry, weights, rope, block * geometry.block))])
    assert_bits(cache.read("pooled", np.array(blocks)), bf16(want), "pooled")


@geometries
def test_scores(geometry):
    pos0, rows = geometry.budget - 3, 20
    cache = make_cache(geometry, pos0 + rows)
    pooled = normal(5, (pos0 + rows) // geometry.block, 1, geometry.index_dim)
    cache.write("pooled", np.arange(len(pooled)), pooled)
    iq = normal(6, rows, geometry.index_heads, geometry.index_dim)
    got = reference.scores(geometry, cache, iq, pos0)
    assert got.shape == (rows, (pos0 + rows) // geometry.block)
    assert got.dtype == np.float64
    kinds = set()
    for row in range(rows):
        complete = (pos0 + row + 1) // geometry.block
        want = scalar_forms.scores(floats(iq[row]), floats(pooled[:, 0]), complete, geometry.top_blocks)
        kinds.add(bool(want))
        assert np.isnan(got[row, len(want) :]).all(), f"row {row} has scores that are never computed"
        np.testing.assert_allclose(got[row, : len(want)], want, rtol=1e-13, atol=1e-14)
    assert kinds == {False, True}, "the window must cross the dense/sparse boundary"


edge_scores = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2**-149, -(2**-149), np.inf, -np.inf, 1.5, 3.0])
near_scores = st.integers(0, 8).map(lambda n: 1.0 + n * 2.0**-26)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["fp32", "float64"])
def test_select(dtype, data):
    geometry = data.draw(st.sampled_from(GEOMETRIES), "geometry")
    pos0 = data.draw(st.integers(0, 60), "pos0")
    rows = data.draw(st.integers(1, 10), "rows")
    width = max(1, (pos0 + rows) // geometry.block)
    drawn = st.lists(edge_scores | near_scores, min_size=rows * width, max_size=rows * width)
    scores = np.array(data.draw(drawn, "scores"), dtype).reshape(rows, width)
    lists = reference.select(geometry, scores, pos0)
    for row in range(rows):
        want = scalar_forms.select(
            floats(scores[row].astype(np.float32)), pos0 + row, geometry.block, geometry.top_blocks
        )
        sparse = (pos0 + row + 1) // geometry.block > geometry.top_blocks
        written = want if sparse else []
        assert lists.nk[row] == len(want)
        assert lists.sparse[row] == sparse
        assert lists.ids[row].tolist() == written + [-1] * (geometry.list_capacity - len(written))
    assert all(array.dtype == np.int32 for array in (lists.ids, lists.nk, lists.sparse))


def test_select_takes_plus_zero_before_minus_zero_and_then_the_lower_block():
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, -0.0]], np.float32)
    lists = reference.select(TINY, scores, 27)
    assert lists.ids[0, :16:4].tolist() == [4 * block for block in (0, 1, 3, 4)]
    lists = reference.select(TINY, -scores, 27)
    assert lists.ids[0, :16:4].tolist() == [4 * block for block in (0, 2, 5, 6)]


def attend(geometry, q, keys, values):
    """Scalar partials and output of one row over a whole key list."""
    partials, out = [], []
    for head in range(geometry.query_heads):
        kv = head // (geometry.query_heads // geometry.kv_heads)
        head_keys, head_values = keys[:, kv], values[:, kv]
        parts = [
            scalar_forms.chunk(floats(q[head]), floats(head_keys[c : c + 512]), floats(head_values[c : c + 512]))
            for c in range(0, len(keys), 512)
        ]
        partials.append(parts)
        out.append(scalar_forms.merge(parts, geometry.head_dim))
    return partials, out


@geometries
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 511, 512, 513, 700])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_chunks_and_merge(geometry, count, form):
    capacity = 720
    cache = make_cache(geometry, capacity)
    listed = np.arange(count)
    if form == "sparse":
        listed = np.random.default_rng(7).permutation(capacity)[:count]
    shape = (count, geometry.kv_heads, geometry.head_dim)
    keys, values = bf16(3 * normal(8, *shape).astype(float)), normal(9, *shape)
    cache.write("keys", listed, keys)
    cache.write("values", listed, values)
    lists = KeyLists.dense([count])
    if form == "sparse":
        lists = KeyLists(listed[None].astype(np.int32), lists.nk, np.ones(1, np.int32))
    q = normal(10, 1, geometry.query_heads, geometry.head_dim)
    partials = reference.chunks(geometry, cache, q, lists)
    want, out = attend(geometry, q[0], keys, values)
    assert partials.m.shape == (1, max(1, -(-count // 512)), geometry.query_heads)
    for head, parts in enumerate(want):
        for c, (o, m, total) in enumerate(parts):
            np.testing.assert_allclose(partials.m[0, c, head], m, rtol=1e-13)
            np.testing.assert_allclose(partials.l[0, c, head], total, rtol=1e-13)
            np.testing.assert_allclose(partials.o[0, c, head], o, rtol=0, atol=1e-13 * total)
    assert_bits(reference.merge(geometry, partials), bf16([out]), "out")


def test_chunks_of_rows_with_different_lists():
    """Dense, sparse and empty rows of many lengths in one call; chunks without keys hold the identity."""
    counts, sparse = np.array([0, 5, 600, 600, 64, 512, 1030, 7]), np.array([0, 0, 0, 0, 1, 1, 0, 1])
    cache = make_cache(TINY, 1040)
    keys, values = normal(11, 1040, 2, 32), normal(12, 1040, 2, 32)
    for part, rows in (("keys", keys), ("values", values)):
        cache.write(part, np.arange(1040), rows)
    rng = np.random.default_rng(13)
    ids = np.stack([rng.permutation(1040)[:600] for _ in counts]).astype(np.int32)
    lists = KeyLists(ids, counts.astype(np.int32), sparse.astype(np.int32))
    q = normal(14, len(counts), 4, 32)
    partials = reference.chunks(TINY, cache, q, lists)
    out = reference.merge(TINY, partials)
    for row, count in enumerate(counts):
        listed = ids[row, :count] if sparse[row] else np.arange(count)
        _, want = attend(TINY, q[row], keys[listed], values[listed])
        assert_bits(out[row], bf16(want), f"out of row {row}, {count} keys")
        idle = slice(-(-count // 512), None)
        assert (partials.o[row, idle] == 0).all()
        assert (partials.l[row, idle] == 0).all()
        assert (partials.m[row, idle] == -np.inf).all()


def test_merge_keeps_an_only_partial_wherever_the_empty_ones_stand():
    """Empty partials change no bit, not even the sign of a zero, and their o is never used."""
    x = np.random.default_rng(15).normal(size=(4, 32))
    x[:, :2] = [0.0, -0.0]
    for at in range(3):
        o, m, total = np.full((1, 3, 4, 32), np.nan), np.full((1, 3, 4), -np.inf), np.zeros((1, 3, 4))
        o[0, at], m[0, at], total[0, at] = x, -3.0, 7.0
        assert_bits(reference.merge(TINY, Partials(o, m, total)), bf16(x[None] / 7.0), f"merge with chunk {at} only")


def test_merge_of_partials_too_far_apart_for_exp():
    """The far partial's weight underflows; only a running maximum keeps the other's from overflowing."""
    x = np.random.default_rng(15).normal(size=(3, 4, 32))
    for order in ([0, 1000, -1000], [1000, -1000, 0], [-1000, 0, 1000]):
        m = np.broadcast_to(np.array(order, float)[:, None], (3, 4))
        got = reference.merge(TINY, Partials(x[None], m[None].copy(), np.full((1, 3, 4), 2.0)))
        assert_bits(got, bf16(x[None, int(np.argmax(order))] / 2), f"merge of maxima {order}")


def test_merge_of_empty_partials_is_zero():
    empty = Partials(np.zeros((2, 3, 4, 32)), np.full((2, 3, 4), -np.inf), np.zeros((2, 3, 4)))
    assert_bits(reference.merge(TINY, empty), bf16(np.zeros((2, 4, 32))), "merge")


def test_merge_of_fp32_partials():
    rng = np.random.default_rng(16)
    o, m, total = rng.normal(size=(2, 4, 4, 32)), 30 * rng.normal(size=(2, 4, 4)), 1 + rng.random((2, 4, 4))
    narrow = Partials(*(x.astype(np.float32) for x in (o, m, total)))
    got = reference.merge(TINY, narrow)
    for row in range(2):
        for head in range(4):
            parts = [
                (floats(narrow.o[row, c, head]), *floats([narrow.m[row, c, head], narrow.l[row, c, head]]))
                for c in range(4)
            ]
            assert_bits(got[row, head], bf16(scalar_forms.merge(parts, 32)), f"out[{row}, {head}]")


@geometries
def test_gate(geometry):
    out = normal(17, 3, geometry.query_heads, geometry.head_dim)
    projection = bf16(8 * normal(18, 3, geometry.projection_width).astype(float))
    got = reference.gate(geometry, out, projection)
    for row in range(3):
        for head in range(geometry.query_heads):
            start = (2 * head + 1) * geometry.head_dim
            gates = floats(projection[row, start : start + geometry.head_dim])
            want = [scalar_forms.gate(o, g) for o, g in zip(floats(out[row, head]), gates, strict=True)]
            assert_bits(got[row, head], bf16(want), f"gated[{row}, {head}]")


def test_gate_is_open_or_shut_at_the_ends_of_the_range():
    projection = np.zeros((1, TINY.projection_width), bf16(0).dtype)
    gates = split(TINY, projection).gate
    gates[0, 0], gates[0, 1] = 3e38, -3e38
    got = reference.gate(TINY, normal(19, 1, 4, 32), projection)
    assert_bits(got[:, 0], normal(19, 1, 4, 32)[:, 0], "gated")
    assert (got[:, 1] == 0).all()


def test_angle_is_one_fp32_product():
    """A float64 product, or a float64 frequency, would turn far rows by another angle."""
    positions = np.array([1_000_003, 16_777_217])
    got = angles(ODD, ODD.inv_freq(), positions, make_rope("text"))
    want = [[np.float32(p) * f for f in ODD.inv_freq()] for p in positions]
    assert got.dtype == np.float32
    assert_bits(got, np.array(want, np.float32), "angle")
