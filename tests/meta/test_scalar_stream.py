"""A whole stream, each row decoded on its own by the scalar forms, against one window of all kernels."""

import numpy as np
import pytest
import scalar_forms
from kvproof import reference
from scalar_forms import scalars
from streams import SLIM, UNIT, assert_bits, make_cache, make_rope, make_weights, narrow, normal

pytestmark = pytest.mark.filterwarnings("error")

modes = pytest.mark.parametrize("mode", ["text", "delta", "media"])


@modes
def test_a_stream_from_its_first_row_on(mode):
    """All kernels in order, over a window that starts with no row in the cache and ends in sparse rows."""
    length, weights, rope = 11, make_weights(SLIM), make_rope(mode, length=8)
    projection = normal(27, length, SLIM.projection_width)
    cache = make_cache(SLIM, length, page=4)
    got = reference.window(SLIM, weights, cache, projection, 0, rope)
    want = scalar_forms.stream(SLIM, weights, [scalars(row) for row in projection], rope)
    terms = SLIM.index_dim + SLIM.index_heads + 2
    for position, row in enumerate(want):
        for name in ("q", "iq", "out", "gated"):
            assert_bits(getattr(got, name)[position], narrow(row[name]), f"{name} of row {position}")
        for part in ("keys", "values", "index_keys"):
            assert_bits(cache.read(part, [position])[0], narrow(row[part]), f"{part} of row {position}")
        count = len(row["listed"])
        assert got.lists.nk[position] == count
        assert got.lists.ids[position, :count].tolist() == (row["listed"] if row["scores"] else [-1] * count)
        assert np.isnan(got.scores[position, len(row["scores"]) :]).all()
        for block, (exact, size) in enumerate(row["scores"]):
            assert abs(float(got.scores[position, block]) - exact) <= terms * UNIT * size
    assert_bits(cache.read("pooled", np.arange(length // 2))[:, 0], narrow(want[-1]["pooled"]), "pooled")
    assert got.lists.sparse.tolist() == [0] * 5 + [1] * 6
