"""Plain attention, contiguous and paged, against its scalar form, and paged against contiguous, to the bit."""

import numpy as np
import pytest
import scalar_forms
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof.reference.attention import attention, paged_attention
from scalar_forms import scalars
from streams import UNIT, assert_bits, normal, roundings

pytestmark = pytest.mark.filterwarnings("error")


def assert_attention(got, q, keys, values, scale=None):
    """One row's float64 output against its scalar form."""
    largest = np.abs(values.astype(float)).max(initial=0.0)
    want = scalar_forms.attention(scalars(q), scalars(keys), scalars(values), scale)
    assert got.dtype == np.float64
    for head, (out, size) in enumerate(want):
        allowed = 2 * roundings(len(keys), q.shape[1], size) * UNIT * largest
        for d, exact in enumerate(out):
            assert abs(float(got[head, d]) - exact) <= allowed, f"head {head}, element {d}"


@pytest.mark.parametrize("scale", [None, 0.3, 1.0], ids=["default-scale", "scale-0.3", "scale-1"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (3, 3)], ids=["one-head", "grouped", "ungrouped"])
def test_attention(heads, kv_heads, scale):
    q, keys, values = (
        normal(30 + i, *shape).astype(float) for i, shape in enumerate([(heads, 8), *[(9, kv_heads, 8)] * 2])
    )
    assert_attention(attention(q, keys, values, scale=scale), q, keys, values, scale)


def test_attention_of_no_keys_is_zero():
    none = np.zeros((0, 2, 8))
    assert_bits(attention(np.ones((4, 8)), none, none), np.zeros((4, 8)), "attention")


def test_attention_of_scores_too_far_apart_for_exp():
    """Only the difference to the head's own largest score may be exponentiated: one head's are all far below."""
    keys = np.full((3, 1, 8), 1e3) * np.array([1.0, 0.25, 0.5])[:, None, None]
    values = np.arange(24.0).reshape(3, 1, 8)
    q = np.array([[10.0], [-10.0]]) * np.ones((2, 8))
    assert_bits(attention(q, keys, values), values[[0, 1], 0], "attention")


TABLE = np.array([[5, 2, 0, 7], [3, 6, 1, 9]])
"""Two streams' pages, shuffled; the last entries name pages that hold nothing, or do not exist."""


def pages_of(rows, table, page, hnd):
    """[pages, page, KH, D] or, for HND, [pages, KH, page, D]: each stream's rows in its pages, NaN elsewhere."""
    arena = np.full((9, page, *rows[0].shape[1:]), np.nan)
    for stream, line in zip(rows, table, strict=True):
        for position, row in enumerate(stream):
            arena[line[position // page], position % page] = row
    return arena.swapaxes(1, 2).copy() if hnd else arena


STREAMS = {
    "decode": ((5, 9), None),
    "prefill": ((5, 9), (0, 2, 5)),
    "zero-length": ((3, 0), (0, 3, 3)),
    "first-zero": ((0, 4), (0, 0, 1)),
}
"""Lengths of the streams, and the first query row of each."""


@pytest.mark.parametrize("form", ["nhd", "hnd"])
@pytest.mark.parametrize(("lengths", "starts"), STREAMS.values(), ids=STREAMS)
def test_paged_attention(form, lengths, starts):
    rng = np.random.default_rng(40)  # float64 that neither bf16 nor fp32 holds
    keys, values = ([rng.normal(size=(n, 2, 8)) for n in lengths] for _ in range(2))
    edges = starts or (0, 1, 2)
    q = rng.normal(size=(edges[-1], 4, 8))
    arenas = [pages_of(rows, TABLE, 3, form == "hnd") for rows in (keys, values)]
    query_start = None if starts is None else np.array(starts)
    got = paged_attention(q, *arenas, TABLE, np.array(lengths), query_start, hnd=form == "hnd")
    for stream, length in enumerate(lengths):
        rows = edges[stream + 1] - edges[stream]
        for r in range(rows):
            count = length - rows + r + 1
            row = edges[stream] + r
            assert_attention(got[row], q[row], keys[stream][:count], values[stream][:count])


def test_paged_attention_of_bf16_is_that_of_its_values():
    q, keys, values = normal(51, 1, 4, 8), normal(52, 3, 4, 2, 8), normal(53, 3, 4, 2, 8)
    table, lengths = np.array([[2, 0, 1]]), np.array([11])
    got = paged_attention(q, keys, values, table, lengths)
    wide = paged_attention(*(x.astype(np.float64) for x in (q, keys, values)), table, lengths)
    assert_bits(got, wide, "paged attention")


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), page=st.integers(1, 9), seed=st.integers(0, 99))
def test_paged_attention_at_any_page_size_is_the_contiguous_one(count, page, seed):
    pages = -(-count // page)
    table = np.random.default_rng(seed).permutation(pages + 2)[None, :pages]
    q, keys, values = normal(seed, 2, 4, 8), normal(seed + 1, count + 1, 2, 8), normal(seed + 2, count + 1, 2, 8)
    arenas = []
    for rows in (keys, values):
        arena = np.full((pages + 2, page, 2, 8), np.nan, rows.dtype)
        for position in range(count):
            arena[table[0, position // page], position % page] = rows[position]
        arenas.append(arena)
    rows = min(2, count)
    starts = np.array([0, rows])
    got = paged_attention(q[:rows], *arenas, table, np.array([count]), starts)
    flat = paged_attention(q[:rows], keys[None], values[None], np.array([[0]]), np.array([count]), starts)
    assert_bits(got, flat, "paged attention")
