"""Where rows lie: SPEC section 3's address, coverage of the arena, and the tables that are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproof.reference.geometry import FLASH_NEXT, TINY
from kvproof.reference.layout import BF16, PARTS, LayerCache, Layout, RowMap

PAGED = Layout(geometry=TINY, page_size=8, pages=5)


def make_cache(table, layout=PAGED, layer=0):
    table = None if table is None else np.array(table, np.int32)
    return LayerCache(buffer=layout.zeros(), layout=layout, layer=layer, table=table)


@pytest.mark.parametrize(
    ("size", "pages", "message"),
    [
        (6, 1, "page size 6 does not hold whole blocks; .* multiple of the block, 4 .for example 8"),
        (0, 1, "page size 0 .*for example 4"),
        (-4, 1, "page size -4"),
        (8, 0, "an arena of 0 pages"),
    ],
)
def test_a_page_holds_whole_blocks(size, pages, message):
    with pytest.raises(ValueError, match=message):
        Layout(geometry=TINY, page_size=size, pages=pages)


@pytest.mark.parametrize(("capacity", "size"), [(1, 4), (4, 4), (5, 8), (61, 64)])
def test_contiguous_rounds_up_to_whole_blocks(capacity, size):
    layout = Layout.contiguous(TINY, capacity)
    assert (layout.page_size, layout.pages) == (size, 1)


def test_a_page_holds_every_layer():
    """Per position: keys and values of the heads and an indexer key; per block: a pooled row."""
    per_layer = 8 * (2 * 2 * 32 + 32) + 2 * 32
    assert (PAGED.layer_elements, PAGED.page_elements, PAGED.elements) == (per_layer, 2 * per_layer, 10 * per_layer)


def test_parts_cover_the_arena_once():
    seen = np.zeros(PAGED.elements, int)
    for layer in range(TINY.layers):
        for part in PARTS:
            where = PAGED.part(layer, part)
            rows = np.arange(PAGED.pages * where.rows_per_page)
            offsets = where.offsets(rows, np.arange(PAGED.pages, dtype=np.int32))
            np.add.at(seen, offsets[..., None] + np.arange(where.width), 1)
    assert (seen == 1).all()


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


def test_without_a_table_the_address_is_plain():
    cache = make_cache(None, Layout.contiguous(TINY, 40), layer=1)
    assert cache.offsets("keys", [0, 3, 39])[:, 0].tolist() == [
        cache.layout.layer_elements + 64 * p for p in (0, 3, 39)
    ]


def test_locate_knows_what_is_not_its_own():
    keys, values = PAGED.part(1, "keys"), PAGED.part(1, "values")
    assert keys.locate(values.base) is None
    assert keys.locate(keys.base - 1) is None
    assert values.locate(values.base + PAGED.page_elements) == (1, 0, 0, 0)


def test_offsets_are_64_bit():
    where = RowMap(base=0, page_stride=2**27, row_stride=64, head_stride=32, rows_per_page=4, heads=2, width=32)
    assert where.offsets([7], np.array([0, 200], np.int32)).tolist() == [[200 * 2**27 + 192, 200 * 2**27 + 224]]


@given(st.permutations(range(5)), st.integers(0, 1), st.sampled_from(PARTS), st.data())
def test_what_is_written_is_read_and_nothing_else_changes(table, layer, part, data):
    cache = make_cache(table, layer=layer)
    where = PAGED.part(layer, part)
    rows = data.draw(st.lists(st.integers(0, 5 * where.rows_per_page - 1), unique=True), "rows")
    values = np.arange(1, 1 + len(rows) * where.heads * 32).reshape(-1, where.heads, 32).astype(BF16)
    cache.write(part, np.array(rows, int), values)
    assert (cache.read(part, np.array(rows, int)) == values).all()
    assert np.count_nonzero(cache.buffer.astype(float)) == values.size


@pytest.mark.parametrize(
    ("table", "end", "message"),
    [
        ([0, 1], 17, "position 16 needs 3 pages of 8 positions, but the page table has 2 entries; grow the table to 3"),
        ([0, 5], 9, "entry 1 names page 5; the arena has pages 0 to 4"),
        ([-1, 2], 8, "entry 0 names page -1"),
        ([3, 1, 3], 24, "entries 0 and 2 both name page 3"),
        (None, 41, "position 40 does not fit a contiguous cache of 40 positions"),
    ],
    ids=["short", "outside", "negative", "twice", "contiguous"],
)
def test_positions_that_do_not_fit(table, end, message):
    cache = make_cache(table, Layout.contiguous(TINY, 40) if table is None else PAGED)
    with pytest.raises(ValueError, match=message):
        cache.require(end)


def test_table_entries_past_the_stream_may_hold_anything():
    make_cache([4, 2, -7, 99, 4]).require(16)
    make_cache([]).require(0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"buffer": np.zeros(8, BF16)}, ValueError, r"cache buffer has shape \[8\]"),
        ({"buffer": PAGED.zeros().astype(np.float32)}, ValueError, "cache buffer has dtype float32"),
        ({"buffer": [0.0]}, TypeError, "cache buffer is a list"),
        ({"table": None}, ValueError, "an arena of 5 pages is read through a page table"),
        ({"table": np.arange(5)}, ValueError, "page table has dtype int64"),
        ({"layer": 2}, ValueError, "layer 2 does not exist; geometry 'tiny' has layers 0 to 1"),
    ],
    ids=["size", "dtype", "list", "no-table", "table-dtype", "layer"],
)
def test_a_cache_that_does_not_fit_its_layout(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(make_cache([0]), **changes)


def test_a_flash_next_page_of_16():
    layout = Layout(geometry=FLASH_NEXT, page_size=16, pages=2)
    assert layout.page_elements == 13 * (16 * (2 * 512 + 128) + 4 * 128)
