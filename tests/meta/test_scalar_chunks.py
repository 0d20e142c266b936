"""chunks against its scalar form, and merge of what it gives, to the bit."""

import dataclasses

import numpy as np
import pytest
import scalar_forms
from kvproof import reference
from kvproof.reference import TINY, KeyLists
from kvproof.reference.numerics import bf16
from scalar_forms import scalars
from streams import ODD, SLIM, UNIT, assert_bits, make_cache, narrow, normal, roundings

pytestmark = pytest.mark.filterwarnings("error")


def assert_partials(partials, row, heads, width, values):
    """One row's partials against its scalar form; chunks without keys must hold the identity."""
    largest = np.abs(values.astype(float)).max(initial=0.0)
    for head, parts in enumerate(heads):
        for c, (o, m, total, size) in enumerate(parts):
            allowed = roundings(scalar_forms.CHUNK, width, size) * UNIT * total
            assert abs(float(partials.m[row, c, head]) - m) <= (width + 2) * UNIT * size
            assert abs(float(partials.l[row, c, head]) - total) <= allowed
            for got, want in zip(partials.o[row, c, head].tolist(), o, strict=True):
                assert abs(got - want) <= allowed * largest
    idle = slice(len(heads[0]), None)
    assert (partials.o[row, idle] == 0).all()
    assert (partials.l[row, idle] == 0).all()
    assert (partials.m[row, idle] == -np.inf).all()


def filled(geometry, positions, scale=3):
    """A cache with random keys and values at these positions, NaN elsewhere; and those rows."""
    cache = make_cache(geometry, 1100)
    shape = (len(positions), geometry.kv_heads, geometry.head_dim)
    keys, values = bf16(scale * normal(8, *shape).astype(float)), normal(9, *shape)
    cache.write("keys", positions, keys)
    cache.write("values", positions, values)
    return cache, keys, values


def check_list(geometry, listed, form):
    """chunks and merge of one row over this list of positions."""
    count = len(listed)
    cache, keys, values = filled(geometry, listed)
    lists = KeyLists.dense([count])
    if form == "sparse":
        lists = KeyLists(listed[None].astype(np.int32), lists.nk, np.ones(1, np.int32))
    q = normal(10, 1, geometry.query_heads, geometry.head_dim)
    partials = reference.chunks(geometry, cache, q, lists)
    heads = scalar_forms.chunks(scalars(q[0]), scalars(keys), scalars(values))
    assert partials.m.shape == (1, max(1, -(-count // 512)), geometry.query_heads)
    assert_partials(partials, 0, heads, geometry.head_dim, values)
    assert_bits(reference.merge(geometry, partials), narrow([scalar_forms.out(heads, geometry.head_dim)]), "out")


@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda g: g.name)
@pytest.mark.parametrize("count", [1, 66])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_chunks_and_merge(geometry, count, form):
    listed = np.arange(count) if form == "dense" else np.random.default_rng(7).permutation(200)[:count]
    check_list(geometry, listed, form)


def test_one_head_may_have_more_chunks_than_heads():
    check_list(dataclasses.replace(SLIM, query_heads=1, kv_heads=1), np.arange(513), "dense")


def test_a_call_without_rows_or_keys():
    cache, _, _ = filled(SLIM, np.arange(3))
    none = reference.chunks(SLIM, cache, normal(10, 0, 4, 8), KeyLists.dense(np.zeros(0, int)))
    assert none.o.shape == (0, 1, 4, 8)
    empty = reference.chunks(SLIM, cache, normal(10, 2, 4, 8), KeyLists.dense([0, 0]))
    assert_bits(empty.m, np.full((2, 1, 4), -np.inf), "m")
    assert_bits(reference.merge(SLIM, empty), bf16(np.zeros((2, 4, 8))), "out")


def test_chunks_of_rows_with_different_lists():
    """Dense, sparse and empty rows of many lengths in one call, some of equal lengths."""
    counts, sparse = np.array([0, 5, 70, 70, 64, 130, 520, 7, 0]), np.array([0, 0, 0, 0, 1, 1, 0, 1, 1])
    cache, keys, values = filled(SLIM, np.arange(1100), scale=1)
    rng = np.random.default_rng(13)
    ids = np.stack([rng.permutation(1100)[:600] for _ in counts]).astype(np.int32)
    q = normal(14, len(counts), SLIM.query_heads, SLIM.head_dim)
    lists = KeyLists(ids, counts.astype(np.int32), sparse.astype(np.int32))
    partials = reference.chunks(SLIM, cache, q, lists)
    out = reference.merge(SLIM, partials)
    for row, count in enumerate(counts):
        listed = ids[row, :count] if sparse[row] else np.arange(count)
        heads = scalar_forms.chunks(scalars(q[row]), scalars(keys[listed]), scalars(values[listed]))
        assert_partials(partials, row, heads, SLIM.head_dim, values[listed])
        assert_bits(out[row], narrow(scalar_forms.out(heads, SLIM.head_dim)), f"out of row {row}, {count} keys")


LONG = [("dense", count) for count in (0, 63, 64, 65, 512, 513)] + [("sparse", count) for count in (0, 65, 511, 1030)]


@pytest.mark.parametrize(("form", "count"), LONG)
def test_chunks_and_merge_of_long_lists(form, count):
    listed = np.arange(count) if form == "dense" else np.random.default_rng(7).permutation(1100)[:count]
    check_list(SLIM, listed, form)
