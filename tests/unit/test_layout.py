"""Where rows lie, for any table; the rest of SPEC section 3 is counted out in tests/meta."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproof.reference.geometry import FLASH_NEXT, TINY
from kvproof.reference.layout import BF16, PARTS, LayerCache, Layout

PAGED = Layout(geometry=TINY, page_size=8, pages=5)


def make_cache(table, layout=PAGED, layer=0):
    table = None if table is None else np.array(table, np.int32)
    return LayerCache(buffer=layout.zeros(), layout=layout, layer=layer, table=table)


@given(st.integers(0, 31), st.permutations(range(5)), st.integers(0, 1), st.sampled_from(PARTS), st.integers(0, 31))
def test_the_address_is_the_specs(row, table, layer, part, element):
    """base + table[p // n] * page_elements + (p % n) * stride, with p and n in blocks for pooled rows."""
    cache = make_cache(table, layer=layer)
    base = layer * PAGED.layer_elements + {"keys": 0, "values": 512, "index_keys": 1024, "pooled": 1280}[part]
    stride, n = (32, 2) if part == "pooled" else (32, 8) if part == "index_keys" else (64, 8)
    row %= 5 * n
    got = cache.offsets(part, [row])
    want = base + table[row // n] * PAGED.page_elements + (row % n) * stride
    assert got.dtype == np.int64
    assert got.tolist() == [[want + 32 * h for h in range(got.shape[1])]]
    located = PAGED.part(layer, part).locate(int(got[0, -1]) + element)
    assert located == (table[row // n], row % n, got.shape[1] - 1, element)


@given(st.permutations(range(5)), st.integers(0, 1), st.sampled_from(PARTS), st.data())
def test_what_is_written_is_read_and_nothing_else_changes(table, layer, part, data):
    cache = make_cache(table, layer=layer)
    where = PAGED.part(layer, part)
    rows = data.draw(st.lists(st.integers(0, 5 * where.rows_per_page - 1), unique=True), "rows")
    values = np.arange(1, 1 + len(rows) * where.heads * 32).reshape(-1, where.heads, 32).astype(BF16)
    cache.write(part, np.array(rows, int), values)
    assert (cache.read(part, np.array(rows, int)) == values).all()
    assert np.count_nonzero(cache.buffer.astype(float)) == values.size


def test_a_buffer_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="cache buffer has dtype float32"):
        dataclasses.replace(make_cache([0]), buffer=PAGED.zeros().astype(np.float32))


def test_a_flash_next_page_of_16():
    layout = Layout(geometry=FLASH_NEXT, page_size=16, pages=2)
    assert layout.page_elements == 13 * (16 * (2 * 512 + 128) + 4 * 128)
