"""scores and select against their scalar forms.

A sum of n products differs from the exact one by at most n roundings of the sum of the products' sizes.
"""

import numpy as np
import pytest
import scalar_forms
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof import reference
from kvproof.reference import TINY
from scalar_forms import scalars
from streams import GEOMETRIES, UNIT, floats, make_cache, normal

pytestmark = pytest.mark.filterwarnings("error")

geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)


@geometries
def test_scores(geometry):
    pos0, rows = geometry.block * geometry.top_blocks - 3, 2 * geometry.block + 4
    cache = make_cache(geometry, pos0 + rows)
    pooled = normal(5, (pos0 + rows) // geometry.block, 1, geometry.index_dim)
    cache.write("pooled", np.arange(len(pooled)), pooled)
    iq = normal(6, rows, geometry.index_heads, geometry.index_dim)
    got = reference.scores(geometry, cache, iq, pos0)
    assert got.shape == (rows, (pos0 + rows) // geometry.block)
    assert got.dtype == np.float64
    terms = geometry.index_dim + geometry.index_heads + 2
    kinds = set()
    for row in range(rows):
        complete = (pos0 + row + 1) // geometry.block
        want = scalar_forms.scores(scalars(iq[row]), scalars(pooled[:, 0]), complete, geometry.top_blocks)
        kinds.add(bool(want))
        assert np.isnan(got[row, len(want) :]).all(), f"row {row} has scores that are never computed"
        for block, (value, size) in enumerate(want):
            assert abs(float(got[row, block]) - value) <= terms * UNIT * size, f"score of row {row}, block {block}"
    assert kinds == {False, True}, "the window must cross the dense/sparse boundary"


edge_scores = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2**-149, -(2**-149), np.inf, -np.inf, 1.5, 3.0])
near_scores = st.integers(0, 8).map(lambda n: 1.0 + n * 2.0**-26)


def assert_selects(geometry, scores, pos0):
    lists = reference.select(geometry, scores, pos0)
    capacity = geometry.block * geometry.top_blocks + geometry.block
    for row in range(len(scores)):
        want = scalar_forms.select(
            floats(scores[row].astype(np.float32)), pos0 + row, geometry.block, geometry.top_blocks
        )
        sparse = (pos0 + row + 1) // geometry.block > geometry.top_blocks
        written = want if sparse else []
        assert lists.nk[row] == len(want)
        assert lists.sparse[row] == sparse
        assert lists.ids[row].tolist() == written + [-1] * (capacity - len(written))
    assert all(array.dtype == np.int32 for array in (lists.ids, lists.nk, lists.sparse))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["fp32", "float64"])
def test_select(dtype, data):
    geometry = data.draw(st.sampled_from(GEOMETRIES), "geometry")
    pos0 = data.draw(st.integers(0, 60), "pos0")
    rows = data.draw(st.integers(1, 10), "rows")
    width = max(1, (pos0 + rows) // geometry.block)
    drawn = st.lists(edge_scores | near_scores, min_size=rows * width, max_size=rows * width)
    assert_selects(geometry, np.array(data.draw(drawn, "scores"), dtype).reshape(rows, width), pos0)


@geometries
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["fp32", "float64"])
def test_select_of_a_window_that_turns_sparse(geometry, dtype):
    rows = 3 * geometry.block + 2
    pos0 = geometry.block * geometry.top_blocks - 2
    rng = np.random.default_rng(26)
    assert_selects(geometry, rng.integers(-3, 4, size=(rows, (pos0 + rows) // geometry.block)).astype(dtype), pos0)


def test_scores_too_large_for_fp32_are_infinite_and_silent():
    scores = np.array([[1e300, 1.0, -1e300, 2e300, 3.0, 4.0, 0.0]])
    lists = reference.select(TINY, scores, 27)
    assert lists.ids[0, :16:4].tolist() == [4 * block for block in (0, 3, 4, 5)]


def test_select_takes_plus_zero_before_minus_zero_and_then_the_lower_block():
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, -0.0]], np.float32)
    lists = reference.select(TINY, scores, 27)
    assert lists.ids[0, :16:4].tolist() == [4 * block for block in (0, 1, 3, 4)]
    lists = reference.select(TINY, -scores, 27)
    assert lists.ids[0, :16:4].tolist() == [4 * block for block in (0, 2, 5, 6)]
