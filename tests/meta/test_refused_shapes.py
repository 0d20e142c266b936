"""Shapes that are refused, in which words, and that the last value before each edge is still taken."""

import dataclasses

import numpy as np
import pytest
from kvproof import reference
from kvproof.reference import FLASH_NEXT, PRESETS, TINY, KeyLists, KvLayout, LayerCache, Layout, Partials, Rope
from kvproof.reference import geometry as shapes
from kvproof.reference.geometry import Geometry, require_array
from kvproof.reference.layout import BF16, RowMap
from kvproof.reference.prep import Fields
from streams import ODD, SLIM, make_cache, make_weights, refused

pytestmark = pytest.mark.filterwarnings("error")

LAST = 2**31 - 1
"""The last int32."""

# ---- arrays ----

ARRAYS = {
    "list": ([1.0], TypeError, "x is a list; it must be a NumPy array"),
    "dtype": (np.zeros((2, 4)), ValueError, "x has dtype float64; it must be float32 [any, 4]"),
    "shape": (np.zeros((2, 3), np.float32), ValueError, "x has shape [2, 3]; it must be [any, 4]"),
    "no-axis": (np.zeros(4, np.float32), ValueError, "x has shape [4]; it must be [any, 4]"),
    "strides": (
        np.zeros((2, 8), np.float32)[:, ::2],
        ValueError,
        "x has strides (32, 8); it must be C-contiguous: pass np.ascontiguousarray(x)",
    ),
}


@pytest.mark.parametrize(("array", "error", "message"), ARRAYS.values(), ids=ARRAYS)
def test_an_array_that_does_not_fit(array, error, message):
    with refused(error, message):
        require_array("x", array, np.float32, (None, 4))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_an_array_that_fits(rows):
    require_array("x", np.zeros((rows, 4), np.float32), np.float32, (None, 4))


# ---- geometry ----

SPEC_TABLE = [
    Geometry(
        name="flash_next",
        query_heads=24,
        kv_heads=2,
        head_dim=256,
        index_heads=4,
        index_dim=128,
        block=4,
        top_blocks=512,
        rotary_half=32,
        mrope_sections=(11, 11, 10),
        layers=13,
        rope_theta=1e7,
        eps=1e-6,
    ),
    Geometry(
        name="tiny",
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        index_heads=2,
        index_dim=32,
        block=4,
        top_blocks=4,
        rotary_half=8,
        mrope_sections=(3, 3, 2),
        layers=2,
        rope_theta=1e7,
        eps=1e-6,
    ),
]
"""SPEC section 1."""
COUNTS = [field.name for field in dataclasses.fields(Geometry) if field.type == "int"]
LEAST = Geometry(
    name="least",
    query_heads=1,
    kv_heads=1,
    head_dim=8,
    index_heads=1,
    index_dim=8,
    block=1,
    top_blocks=1,
    rotary_half=1,
    mrope_sections=(1, 0, 0),
    layers=1,
    rope_theta=1e-300,
    eps=1e-300,
)
"""The smallest value of each field that is allowed."""


def test_the_presets_are_the_specs_table():
    assert {g.name: g for g in SPEC_TABLE} == PRESETS


def test_the_constants_are_the_specs():
    assert (shapes.CHUNK, shapes.TILE, shapes.MAX_POSITION) == (512, 64, LAST)


def test_what_follows_from_a_geometry():
    g = FLASH_NEXT
    assert (g.group, g.budget, g.list_capacity) == (12, 2048, 2052)
    assert g.projection_width == 2 * 24 * 256 + 2 * 2 * 256 + 5 * 128
    assert SLIM.projection_width == 2 * 4 * 8 + 2 * 2 * 8 + 3 * 8


def test_nine_fields_are_counts():
    assert len(COUNTS) == 9


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "4"])
def test_a_count_is_a_positive_integer(name, value):
    with refused(ValueError, f"geometry 'tiny': {name} is {value!r}; it must be a positive integer"):
        dataclasses.replace(TINY, **{name: value})


GEOMETRIES = {
    "heads": (
        {"query_heads": 5},
        "5 query heads do not divide among 2 key/value heads; query_heads must be a multiple of kv_heads",
    ),
    "head_dim": (
        {"head_dim": 36},
        "head_dim is 36; rows are read 16 bytes at a time, so it must be a multiple of 8",
    ),
    "index_dim": (
        {"index_dim": 60},
        "index_dim is 60; rows are read 16 bytes at a time, so it must be a multiple of 8",
    ),
    "rotary-head": (
        {"head_dim": 8},
        "16 rotated dims do not fit head_dim 8; rotary_half may be at most 4",
    ),
    "rotary-index": (
        {"index_dim": 8},
        "16 rotated dims do not fit index_dim 8; rotary_half may be at most 4",
    ),
    "rotary-one-more": (
        {"rotary_half": 17},
        "34 rotated dims do not fit head_dim 32; rotary_half may be at most 16",
    ),
    "eps": ({"eps": 0.0}, "eps is 0.0 and rope_theta 10000000.0; both must be above 0"),
    "theta": ({"rope_theta": 0.0}, "eps is 1e-06 and rope_theta 0.0; both must be above 0"),
    "nan": ({"eps": float("nan")}, "eps is nan and rope_theta 10000000.0; both must be above 0"),
    "two-sections": ({"mrope_sections": (4, 4)}, "mrope_sections is (4, 4); it must be three counts (t, h, w)"),
    "negative-section": (
        {"mrope_sections": (9, -1, 0)},
        "mrope_sections is (9, -1, 0); it must be three counts (t, h, w)",
    ),
    "sum": (
        {"mrope_sections": (3, 3, 3)},
        "mrope_sections (3, 3, 3) add up to 9; they must add up to rotary_half, 8",
    ),
}


@pytest.mark.parametrize(("changes", "message"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_geometry_that_fits_no_kernel(changes, message):
    with refused(ValueError, f"geometry 'tiny': {message}"):
        dataclasses.replace(TINY, **changes)


def test_the_least_geometry_is_allowed():
    assert (LEAST.group, LEAST.budget, LEAST.list_capacity) == (1, 1, 2)


def test_all_dims_may_be_rotated():
    whole = dataclasses.replace(TINY, rotary_half=16, mrope_sections=(16, 0, 0))
    assert 2 * whole.rotary_half == whole.head_dim == whole.index_dim


WEIGHTS = {
    "q_scale": ([24], "q_scale"),
    "k_scale": ([24], "k_scale"),
    "i_scale": ([16], "i_scale"),
    "pool_scale": ([16], "pool_scale"),
    "inv_freq": ([6], "inv_freq"),
}
"""Heads, indexer and rotary frequencies of ODD are of three widths."""


@pytest.mark.parametrize(("shape", "name"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_have_the_geometrys_widths(shape, name):
    weights = make_weights(ODD)
    weights.require(ODD)
    with refused(ValueError, f"weights.{name} has shape [3]; it must be {shape}"):
        dataclasses.replace(weights, **{name: np.ones(3, np.float32)}).require(ODD)
    with refused(ValueError, f"weights.{name} has dtype float64; it must be float32 {shape}"):
        dataclasses.replace(weights, **{name: np.ones(shape)}).require(ODD)


TRIPLES = np.zeros((2, 3), np.int32)
ROPES = {
    "mode": ({"mode": "image"}, ValueError, "rope mode is 'image'; it must be 'text', 'delta' or 'media'"),
    "float-delta": ({"mode": "delta", "delta": 1.0}, TypeError, "rope delta is a float; it must be an integer"),
    "bool-delta": ({"mode": "delta", "delta": True}, TypeError, "rope delta is a bool; it must be an integer"),
    "far-delta": ({"mode": "delta", "delta": LAST + 1}, ValueError, f"rope delta is {LAST + 1}; it must fit int32"),
    "far-back": ({"mode": "delta", "delta": -LAST - 1}, ValueError, f"rope delta is {-LAST - 1}; it must fit int32"),
    "text-delta": (
        {"delta": -1},
        ValueError,
        "rope mode 'text' takes no delta, but it is -1; use mode 'delta'",
    ),
    "triples-dtype": (
        {"mode": "media", "triples": TRIPLES.astype(np.int64)},
        ValueError,
        "rope triples has dtype int64; it must be int32 [any, 3]",
    ),
    "pairs": (
        {"mode": "media", "triples": np.zeros((2, 2), np.int32)},
        ValueError,
        "rope triples has shape [2, 2]; it must be [any, 3]",
    ),
    "no-triples": (
        {"mode": "media"},
        ValueError,
        "rope mode 'media' needs the prompt's (t, h, w) triples, but none are given",
    ),
    "unwanted-triples": (
        {"mode": "delta", "triples": TRIPLES},
        ValueError,
        "rope mode 'delta' takes no triples, but 2 are given; use 'media'",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), ROPES.values(), ids=ROPES)
def test_a_rope_that_makes_no_sense(arguments, error, message):
    with refused(error, message):
        Rope(**arguments)


@pytest.mark.parametrize("delta", [LAST, -LAST, 0, 1, np.int64(5)])
def test_any_int32_delta_is_taken(delta):
    assert Rope(mode="delta", delta=delta).delta == delta


def test_a_rope_is_text_without_delta_and_triples():
    assert (Rope().mode, Rope().delta, Rope().triples.shape) == ("text", 0, (0, 3))
    assert len(Rope(mode="media", triples=TRIPLES[:1]).triples) == 1


# ---- layouts and caches ----


@pytest.mark.parametrize(
    ("size", "example"), [(6, 8), (0, 4), (-4, 4), (-9, 4), (1, 4), (15, 16)], ids=lambda x: str(x)
)
def test_a_page_holds_whole_blocks(size, example):
    with refused(
        ValueError,
        f"page size {size} does not hold whole blocks; it must be a positive multiple of the block, 4 (for example "
        f"{example})",
    ):
        Layout(geometry=TINY, page_size=size)


LAYOUTS = {
    "pages": ({"pages": 0}, ValueError, "an arena of 0 pages; it must have at least one"),
    "float-size": ({"page_size": 4.0}, TypeError, "page_size is 4.0; it must be an integer"),
    "bool-size": ({"page_size": True}, TypeError, "page_size is True; it must be an integer"),
    "float-pages": ({"pages": 1.5}, TypeError, "pages is 1.5; it must be an integer"),
    "bool-pages": ({"pages": True}, TypeError, "pages is True; it must be an integer"),
}


@pytest.mark.parametrize(("changes", "error", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_an_arena_has_whole_pages(changes, error, message):
    with refused(error, message):
        Layout(**{"geometry": TINY, "page_size": 4, **changes})


def test_a_page_of_one_block_is_allowed():
    assert Layout(geometry=TINY, page_size=np.int64(4), pages=np.int64(1)).pages == 1
    assert Layout(geometry=LEAST, page_size=1).pages == 1


PAGED = Layout(geometry=TINY, page_size=8, pages=5)
CACHES = {
    "size": ({"buffer": np.zeros(8, BF16)}, ValueError, f"cache buffer has shape [8]; it must be [{PAGED.elements}]"),
    "list": ({"buffer": [0.0]}, TypeError, "cache buffer is a list; it must be a NumPy array"),
    "no-table": (
        {"table": None},
        ValueError,
        "an arena of 5 pages is read through a page table, but none is given; pass table=, or use Layout.contiguous",
    ),
    "table-dtype": ({"table": np.arange(5)}, ValueError, "page table has dtype int64; it must be int32 [any]"),
    "layer": ({"layer": 2}, ValueError, "layer 2 does not exist; geometry 'tiny' has layers 0 to 1"),
    "negative-layer": ({"layer": -1}, ValueError, "layer -1 does not exist; geometry 'tiny' has layers 0 to 1"),
}


@pytest.mark.parametrize(("changes", "error", "message"), CACHES.values(), ids=CACHES)
def test_a_cache_that_does_not_fit_its_layout(changes, error, message):
    cache = LayerCache(buffer=PAGED.zeros(), layout=PAGED, table=np.zeros(1, np.int32))
    with refused(error, message):
        dataclasses.replace(cache, **changes)


def test_a_cache_is_of_the_first_layer_unless_told():
    assert LayerCache(buffer=PAGED.zeros(), layout=PAGED, table=np.zeros(1, np.int32)).layer == 0
    assert LayerCache(buffer=PAGED.zeros(), layout=PAGED, table=np.zeros(1, np.int32), layer=1).layer == 1


def paged(*table):
    return LayerCache(buffer=PAGED.zeros(), layout=PAGED, table=np.array(table, np.int32))


TABLES = {
    "short": (
        (0, 1),
        17,
        "position 16 needs 3 pages of 8 positions, but the page table has 2 entries; grow the table to 3",
    ),
    "outside": ((0, 5), 9, "page table entry 1 names page 5; the arena has pages 0 to 4"),
    "negative": ((-1, 2), 8, "page table entry 0 names page -1; the arena has pages 0 to 4"),
    "negative-behind": ((2, -1), 9, "page table entry 1 names page -1; the arena has pages 0 to 4"),
    "both-outside": ((0, -1, 5), 24, "page table entry 1 names page -1; the arena has pages 0 to 4"),
    "twice": (
        (3, 1, 3),
        24,
        "page table entries 0 and 2 both name page 3; a page may hold one logical page of one stream",
    ),
    "thrice": (
        (3, 3, 3),
        24,
        "page table entries 0 and 1 both name page 3; a page may hold one logical page of one stream",
    ),
    "twice-of-two": (
        (0, 0),
        9,
        "page table entries 0 and 1 both name page 0; a page may hold one logical page of one stream",
    ),
    "other-twice": (
        (4, 1, 2, 2),
        32,
        "page table entries 2 and 3 both name page 2; a page may hold one logical page of one stream",
    ),
}


@pytest.mark.parametrize(("table", "end", "message"), TABLES.values(), ids=TABLES)
def test_a_table_that_does_not_hold_the_stream(table, end, message):
    with refused(ValueError, message):
        paged(*table).require(end)


@pytest.mark.parametrize(
    ("table", "end"),
    [((0, 1), 16), ((4, 0), 9), ((4,), 8), ((4, 2, -7, 99, 4), 16), ((3, 3), 8), ((), 0), ((9,), 0)],
    ids=str,
)
def test_only_a_streams_own_entries_count(table, end):
    paged(*table).require(end)


def test_a_contiguous_cache_ends_with_its_page():
    cache = make_cache(TINY, 40)
    cache.require(40)
    cache.require(0)
    with refused(ValueError, "position 40 does not fit a contiguous cache of 40 positions"):
        cache.require(41)


STYLE = "cache style is 'nhdx'; it must be one of nhd, hnd, interleaved_nhd, interleaved_hnd"
KV = {
    "style": ({"style": "nhdx"}, STYLE),
    "pages": ({"pages": 0}, "pages is 0; it must be at least 1"),
    "page_size": ({"page_size": 0}, "page_size is 0; it must be at least 1"),
    "kv_heads": ({"kv_heads": -1}, "kv_heads is -1; it must be at least 1"),
    "head_dim": ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
    "padding": ({"padding": -1}, "padding is -1; it must be 0 or more"),
}


@pytest.mark.parametrize(("changes", "message"), KV.values(), ids=KV)
def test_a_layout_of_another_engine_that_makes_no_sense(changes, message):
    with refused(ValueError, message):
        KvLayout(**{"style": "nhd", "pages": 1, "page_size": 1, "kv_heads": 1, "head_dim": 1, **changes})


def test_the_least_layout_of_another_engine():
    layout = KvLayout(style="nhd", pages=1, page_size=1, kv_heads=1, head_dim=1)
    assert (layout.padding, layout.elements) == (0, 1)


# ---- records ----


def test_records_are_frozen_and_named():
    """Records keep what was checked when they were made, and configurations are written with names."""
    results = (reference.Prepared, KeyLists, Partials, reference.Window)
    configurations = (Geometry, reference.Weights, Rope, Layout, LayerCache, KvLayout, RowMap)
    for kind in (*results, *configurations, Fields):
        assert kind.__dataclass_params__.frozen, kind
    for kind in configurations:
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind


def test_records_with_arrays_are_equal_to_themselves_alone():
    """Arrays have no one truth of equality: == would raise, and hashing too."""
    lists = KeyLists.dense([1])
    assert lists != KeyLists.dense([1])
    assert len({lists, lists, KeyLists.dense([1])}) == 2
    arrays = np.zeros((2, 3))
    for kind in (reference.Prepared, Partials, Fields, reference.Window):
        fields = [arrays] * len(dataclasses.fields(kind))
        assert kind(*fields) != kind(*fields)
    assert make_weights(TINY) != make_weights(TINY)
    assert Rope() != Rope()
    assert make_cache(TINY, 4) != make_cache(TINY, 4)
    assert Layout(geometry=TINY, page_size=4) == Layout(geometry=TINY, page_size=4)
