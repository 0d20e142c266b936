"""Where rows lie, counted out: every arena is walked element by element in the order of SPEC section 3."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproof.reference import KV_STYLES, TINY, KvLayout, LayerCache, Layout
from kvproof.reference.attention import paged_attention
from kvproof.reference.layout import BF16, PARTS, RowMap
from streams import ODD, SLIM, assert_bits, make_cache, normal

pytestmark = pytest.mark.filterwarnings("error")

TWO_LAYERS = dataclasses.replace(SLIM, name="two layers", layers=2)
PAGE, PAGES = 6, 3


def walked(geometry, page, pages):
    """The owner (page, layer, part, row in page, head, element) of each element of an arena, in order."""
    kv = (geometry.kv_heads, geometry.head_dim)
    shapes = {
        "keys": (page, *kv),
        "values": (page, *kv),
        "index_keys": (page, 1, geometry.index_dim),
        "pooled": (page // geometry.block, 1, geometry.index_dim),
    }
    owners = []
    for number in range(pages):
        for layer in range(geometry.layers):
            for part, shape in shapes.items():
                owners += [(number, layer, part, *place) for place in np.ndindex(shape)]
    return owners


def rows_of(geometry, page, part):
    return page // geometry.block if part == "pooled" else page


@pytest.mark.parametrize("geometry", [TWO_LAYERS, ODD], ids=lambda g: g.name)
def test_every_element_of_an_arena_has_the_address_that_the_spec_counts(geometry):
    page = 3 * geometry.block
    layout = Layout(geometry=geometry, page_size=page, pages=PAGES)
    owners = walked(geometry, page, PAGES)
    assert (layout.elements, layout.page_elements) == (len(owners), len(owners) // PAGES)
    assert layout.layer_elements * geometry.layers == layout.page_elements
    assert layout.zeros().shape == (len(owners),)
    assert layout.zeros().dtype == BF16
    assert not layout.zeros().any()
    table = np.array([2, 0, 1], np.int32)
    place = {owner: offset for offset, owner in enumerate(owners) if owner[-1] == 0}
    for layer, part in itertools.product(range(geometry.layers), PARTS):
        where, n = layout.part(layer, part), rows_of(geometry, page, part)
        offsets = where.offsets(np.arange(3 * n), table)
        assert offsets.dtype == np.int64
        heads = 1 if part in ("index_keys", "pooled") else geometry.kv_heads
        want = [[place[int(table[r // n]), layer, part, r % n, h, 0] for h in range(heads)] for r in range(3 * n)]
        assert offsets.tolist() == want, f"{part} of layer {layer}"


def test_every_offset_is_traced_to_its_owner_and_to_no_other():
    layout = Layout(geometry=TWO_LAYERS, page_size=PAGE, pages=PAGES)
    owners = walked(TWO_LAYERS, PAGE, PAGES)
    for layer, part in itertools.product(range(2), PARTS):
        where = layout.part(layer, part)
        for offset, (page, *owner, row, head, element) in enumerate(owners):
            want = (page, row, head, element) if owner == [layer, part] else None
            assert where.locate(offset) == want, f"offset {offset} in {part} of layer {layer}"


def test_a_row_map_with_gaps_traces_only_what_lies_in_rows():
    """Gaps behind heads, rows and pages belong to nobody; nor does what lies before the first row."""
    where = RowMap(base=5, page_stride=100, row_stride=30, head_stride=10, rows_per_page=3, heads=2, width=8)
    own = {
        5 + 100 * page + 30 * row + 10 * head + element: (page, row, head, element)
        for page, row, head, element in np.ndindex(2, 3, 2, 8)
    }
    assert {offset: where.locate(offset) for offset in range(-100, 205)} == {
        offset: own.get(offset) for offset in range(-100, 205)
    }


def test_without_a_table_rows_follow_each_other():
    layout = Layout(geometry=TWO_LAYERS, page_size=PAGE)
    place = {owner: offset for offset, owner in enumerate(walked(TWO_LAYERS, PAGE, 1)) if owner[-1] == 0}
    for layer, part in itertools.product(range(2), PARTS):
        where, n = layout.part(layer, part), rows_of(TWO_LAYERS, PAGE, part)
        want = [[place[0, layer, part, r, h, 0] for h in range(where.heads)] for r in range(n)]
        assert where.offsets(np.arange(n), None).tolist() == want
        assert where.offsets(n - 1, None).tolist() == want[-1:]
        assert where.width == (8 if part != "pooled" else SLIM.index_dim)


def test_offsets_are_64_bit_from_any_rows():
    """Row numbers, tables and strides of 32 bits still give offsets past 2**31."""
    where = RowMap(
        base=2**33, page_stride=2**27, row_stride=2**25, head_stride=2**24, rows_per_page=4, heads=2, width=32
    )
    rows, table = np.array([7, 2], np.int32), np.array([3, 200], np.int32)
    want = [2**33 + 200 * 2**27 + 3 * 2**25, 2**33 + 3 * 2**27 + 2 * 2**25]
    assert where.offsets(rows, table).tolist() == [[at, at + 2**24] for at in want]
    assert where.offsets(np.array([100], np.int32), None)[0, 0] == 2**33 + 100 * 2**25
    many = dataclasses.replace(where, head_stride=2**29, heads=9)
    assert many.offsets([0], None)[0].tolist() == [2**33 + h * 2**29 for h in range(9)]


@pytest.mark.parametrize(("capacity", "page"), [(1, 4), (4, 4), (5, 8), (61, 64), (64, 64)])
def test_a_contiguous_cache_holds_whole_blocks(capacity, page):
    layout = Layout.contiguous(TINY, capacity)
    assert (layout.page_size, layout.pages) == (page, 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read_and_nothing_else_changes(part, layer):
    layout = Layout(geometry=TWO_LAYERS, page_size=PAGE, pages=PAGES)
    cache = LayerCache(buffer=layout.zeros(), layout=layout, layer=layer, table=np.array([1, 2, 0], np.int32))
    rows = np.array([7, 0, 3, 5]) if part != "pooled" else np.array([7, 0, 3])
    where = layout.part(layer, part)
    values = np.arange(1, 1 + len(rows) * where.heads * where.width).reshape(-1, where.heads, where.width).astype(BF16)
    cache.write(part, rows, values)
    assert_bits(cache.read(part, rows), values, "what was read")
    want = layout.zeros()
    owners = {owner: offset for offset, owner in enumerate(walked(TWO_LAYERS, PAGE, PAGES))}
    n = rows_of(TWO_LAYERS, PAGE, part)
    for (r, head, element), value in np.ndenumerate(values):
        page = int(cache.table[rows[r] // n])
        want[owners[page, layer, part, int(rows[r]) % n, head, element]] = value
    assert_bits(cache.buffer, want, "buffer")


def test_what_is_read_is_a_copy():
    cache = make_cache(TINY, 8, poison=1.0)
    cache.read("keys", [0])[:] = 7
    assert (cache.buffer == 1).all()


# ---- layouts of other engines ----


def counted(style, pages, page, heads, width, padding):
    """The owner (part, page, position, head, element) of each element of the arrays, keys' then values'; None: padding.

    Interleaved styles have one array, in which each page holds its keys, then its values.
    """
    places = np.ndindex(page, heads, width) if style.endswith("nhd") else np.ndindex(heads, page, width)
    order = [(a, b, c) if style.endswith("nhd") else (b, a, c) for a, b, c in places]
    runs = [["keys", "values"]] if style.startswith("interleaved") else [["keys"], ["values"]]
    arrays = []
    for parts in runs:
        owners = []
        for number in range(pages):
            for part in parts:
                owners += [(part, number, *place) for place in order]
            owners += [None] * padding
        arrays.append(owners)
    return arrays


def engine_arrays(layout, keys, values, table):
    """Positions 0 to n - 1 stored where `counted` says, NaN elsewhere; the views of keys and values."""
    owners = counted(layout.style, layout.pages, layout.page_size, layout.kv_heads, layout.head_dim, layout.padding)
    rows = {"keys": keys, "values": values}
    position_of = {int(page): logical for logical, page in enumerate(table)}
    arrays = []
    for array_owners in owners:
        array = np.full(len(array_owners), np.nan)
        for offset, owner in enumerate(array_owners):
            if owner is None or owner[1] not in position_of:
                continue
            part, page, row, head, element = owner
            position = position_of[page] * layout.page_size + row
            if position < len(keys):
                array[offset] = rows[part][position, head, element]
        arrays.append(array)
    return layout.view(arrays[0], "keys"), layout.view(arrays[-1], "values")


layouts = pytest.mark.parametrize(
    "layout",
    [
        KvLayout(style=style, pages=4, page_size=3, kv_heads=2, head_dim=5, padding=padding)
        for style in KV_STYLES
        for padding in (0, 7)
    ],
    ids=lambda layout: f"{layout.style}-{layout.padding}",
)


@layouts
def test_other_layouts_have_the_addresses_that_their_shapes_count(layout):
    arrays = counted(layout.style, 4, 3, 2, 5, layout.padding)
    assert layout.elements == len(arrays[0]) == 4 * layout.page_elements
    assert layout.interleaved == (len(arrays) == 1)
    table = np.array([2, 0, 3, 1], np.int32)
    for part, owners in zip(("keys", "values"), (arrays[0], arrays[-1]), strict=True):
        place = {owner: offset for offset, owner in enumerate(owners) if owner}
        offsets = layout.part(part).offsets(np.arange(12), table)
        want = [[place[part, int(table[p // 3]), p % 3, head, 0] for head in range(2)] for p in range(12)]
        assert offsets.tolist() == want
        view = layout.view(np.arange(layout.elements, dtype=np.float32), part)
        nhd = layout.style.endswith("nhd")
        assert view.shape == ((4, 3, 2, 5) if nhd else (4, 2, 3, 5))
        for page, row, head, element in np.ndindex(4, 3, 2, 5):
            at = (page, row, head, element) if nhd else (page, head, row, element)
            assert view[at] == place[part, page, row, head, element]


@layouts
def test_every_offset_of_another_layout_is_traced_to_its_owner_and_to_no_other(layout):
    """Padding and the other half of an interleaved array belong to nobody."""
    arrays = counted(layout.style, 4, 3, 2, 5, layout.padding)
    for part, owners in zip(("keys", "values"), (arrays[0], arrays[-1]), strict=True):
        for offset, owner in enumerate(owners):
            want = owner[1:] if owner is not None and owner[0] == part else None
            assert layout.part(part).locate(offset) == want, f"offset {offset} of {part}"


@st.composite
def row_maps(draw):
    """A part of any layout, and its pages."""
    pages, blocks, heads, width = draw(st.tuples(*[st.integers(1, 4)] * 4))
    if draw(st.booleans()):
        geometry = dataclasses.replace(
            TWO_LAYERS,
            query_heads=heads,
            kv_heads=heads,
            head_dim=8 * width,
            index_dim=8,
            block=draw(st.integers(1, 3)),
        )
        layout = Layout(geometry=geometry, page_size=blocks * geometry.block, pages=pages)
        return layout.part(draw(st.integers(0, 1)), draw(st.sampled_from(PARTS))), pages
    layout = KvLayout(
        style=draw(st.sampled_from(KV_STYLES)),
        pages=pages,
        page_size=blocks,
        kv_heads=heads,
        head_dim=width,
        padding=draw(st.integers(0, 9)),
    )
    return layout.part(draw(st.sampled_from(["keys", "values"]))), pages


@given(row_maps())
def test_tracing_an_offset_inverts_it(case):
    """In any layout: the address of each element leads back to it, and every other offset to nobody."""
    where, pages = case
    starts = where.offsets(np.arange(pages * where.rows_per_page), np.arange(pages, dtype=np.int32))
    owners = {
        int(start) + element: (*divmod(row, where.rows_per_page), head, element)
        for (row, head), start in np.ndenumerate(starts)
        for element in range(where.width)
    }
    assert len(owners) == starts.size * where.width
    for offset in range(-2, pages * where.page_stride):
        assert where.locate(offset) == owners.get(offset), f"offset {offset}"


@layouts
def test_a_view_writes_through(layout):
    array = np.zeros(layout.elements)
    layout.view(array, "values")[:] = 1.0
    assert np.count_nonzero(array) == 4 * 3 * 2 * 5


@layouts
@pytest.mark.parametrize("length", [1, 3, 8, 12])
def test_every_layout_gives_the_contiguous_attention(layout, length):
    """Plain paged attention, to the bit, against one page that holds all rows in order."""
    q = normal(80, 2, 4, 5).astype(float)
    keys, values = normal(81, length, 2, 5).astype(float), normal(82, length, 2, 5).astype(float)
    table = np.array([2, 0, 3, 1])[: -(-length // 3)]
    views = engine_arrays(layout, keys, values, table)
    rows = min(2, length)
    starts, lengths = np.array([0, rows]), np.array([length])
    got = paged_attention(q[:rows], *views, table[None], lengths, starts, hnd=layout.style.endswith("hnd"))
    want = paged_attention(q[:rows], keys[None], values[None], np.array([[0]]), lengths, starts)
    assert_bits(got, want, f"attention over {layout.style}")
