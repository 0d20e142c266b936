"""Arguments that the kernels refuse, in which words, and that the last value before each edge is still taken."""

import dataclasses

import numpy as np
import pytest
from kvproof import reference
from kvproof.reference import TEXT, TINY, KeyLists, LayerCache, Layout, Partials, Rope
from kvproof.reference.results import (
    complete_blocks,
    require_cache,
    require_chunks,
    require_merge,
    require_rows,
    require_store,
)
from streams import assert_bits, make_cache, make_weights, normal, refused

pytestmark = pytest.mark.filterwarnings("error")

LAST = 2**31 - 1
"""The last int32."""


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([-1], f"key counts reach from -1 to -1; allowed is 0 to {LAST}"),
        ([3, -1, 5], f"key counts reach from -1 to 5; allowed is 0 to {LAST}"),
        ([0, LAST + 1], f"key counts reach from 0 to {LAST + 1}; allowed is 0 to {LAST}"),
        ([1.5], "key counts are float64 [1]; they must be integers [rows]"),
        ([[1]], "key counts are int64 [1, 1]; they must be integers [rows]"),
        ([True], "key counts are bool [1]; they must be integers [rows]"),
    ],
    ids=["negative", "one-negative", "too-many", "float", "two-axes", "bool"],
)
def test_counts_that_are_none(counts, message):
    with refused(ValueError, message):
        KeyLists.dense(counts)


@pytest.mark.parametrize("counts", [[], [0], [5, 0, LAST], np.array([3], np.uint8), 7], ids=str)
def test_dense_lists(counts):
    counts = np.zeros(0, int) if isinstance(counts, list) and not counts else counts
    lists = KeyLists.dense(counts)
    want = np.atleast_1d(counts)
    assert_bits(lists.nk, want.astype(np.int32), "nk")
    assert_bits(lists.sparse, np.zeros(len(want), np.int32), "sparse")
    assert_bits(lists.ids, np.zeros((len(want), 0), np.int32), "ids")


def test_complete_blocks_of_the_last_positions():
    """Rows and positions are counted in 64 bits, as pos0 + rows may pass int32."""
    got = complete_blocks(TINY, LAST - 2, 4)
    assert_bits(got, np.array([(LAST - 1) // 4, LAST // 4, (LAST + 1) // 4, (LAST + 2) // 4]), "complete blocks")


# ---- arguments of the kernels ----


def window_arguments(**changes):
    """Arguments of prep and window: three rows at position 0 of a cache of 40."""
    given = {
        "geometry": TINY,
        "weights": make_weights(TINY),
        "cache": make_cache(TINY, 40, poison=0.0),
        "projection": normal(90, 3, TINY.projection_width),
        "pos0": 0,
        "rope": TEXT,
    }
    return {**given, **changes}


def read_only():
    cache = make_cache(TINY, 40, poison=0.0)
    cache.buffer.flags.writeable = False
    return cache


FOREIGN = dataclasses.replace(TINY, top_blocks=3)
WINDOWS = {
    "negative-position": ({"pos0": -1}, ValueError, "pos0 is -1; a window's first position must be 0 or more"),
    "float-position": ({"pos0": 1.0}, TypeError, "pos0 is a float; it must be an integer"),
    "bool-position": ({"pos0": True}, TypeError, "pos0 is a bool; it must be an integer"),
    "past-the-cache": ({"pos0": 38}, ValueError, "position 40 does not fit a contiguous cache of 40 positions"),
    "far-position": (
        {"pos0": LAST - 1},
        ValueError,
        f"position {LAST + 1} does not fit int32; the last position allowed is {LAST}",
    ),
    "wide-projection": (
        {"projection": normal(90, 3, 481)},
        ValueError,
        "projection has shape [3, 481]; it must be [any, 480]",
    ),
    "no-rows": ({"projection": normal(90, 0, 480)}, ValueError, "a window of 0 rows; it must have at least one"),
    "foreign-cache": (
        {"cache": make_cache(FOREIGN, 40, poison=0.0)},
        ValueError,
        f"the cache is laid out for geometry {FOREIGN}, but the call is for {TINY}; both must be the same",
    ),
    "no-cache": ({"cache": np.zeros(3)}, TypeError, "cache is a ndarray; it must be a LayerCache"),
    "read-only": (
        {"cache": read_only()},
        ValueError,
        "the cache buffer is read-only; this kernel stores rows, so pass a writable copy",
    ),
    "no-rope": ({"rope": "text"}, TypeError, "rope is a str; it must be a Rope, for example geometry.TEXT"),
    "weights": (
        {"weights": dataclasses.replace(make_weights(TINY), i_scale=np.ones(16, np.float32))},
        ValueError,
        "weights.i_scale has shape [16]; it must be [32]",
    ),
    "far-delta": (
        {"rope": Rope(mode="delta", delta=LAST)},
        ValueError,
        f"position 2 with rope delta {LAST} does not fit int32; give a smaller delta",
    ),
}


@pytest.mark.parametrize("kernel", [reference.prep, reference.window], ids=["prep", "window"])
@pytest.mark.parametrize(("changes", "error", "message"), WINDOWS.values(), ids=WINDOWS)
def test_prep_and_window(kernel, changes, error, message):
    given = window_arguments(**changes)
    with refused(error, message):
        kernel(**given)
    if isinstance(given["cache"], LayerCache):
        assert not given["cache"].buffer.any(), "a refused call has written"


POOLS = {
    name: WINDOWS[name]
    for name in ("negative-position", "float-position", "foreign-cache", "no-cache", "read-only", "no-rope", "weights")
} | {
    "no-rows": ({"rows": 0}, ValueError, "a window of 0 rows; it must have at least one"),
    "float-rows": ({"rows": 3.0}, TypeError, "rows is a float; it must be an integer"),
    "bool-rows": ({"rows": True}, TypeError, "rows is a bool; it must be an integer"),
    "past-the-cache": ({"rows": 41}, ValueError, "position 40 does not fit a contiguous cache of 40 positions"),
}


@pytest.mark.parametrize(("changes", "error", "message"), POOLS.values(), ids=POOLS)
def test_pool(changes, error, message):
    given = window_arguments(rows=8, **changes) if "rows" not in changes else window_arguments(**changes)
    del given["projection"]
    with refused(error, message):
        reference.pool(**given)
    if isinstance(given["cache"], LayerCache):
        assert not given["cache"].buffer.any(), "a refused call has written"


def test_the_last_window_of_a_cache_is_taken():
    given = window_arguments(pos0=37, rope=Rope(mode="delta", delta=np.int32(LAST - 39)))
    reference.prep(**given)
    del given["projection"]
    reference.pool(**given, rows=3)


@pytest.mark.parametrize(("pos0", "rows"), [(0, 1), (LAST, 1), (LAST - 1, 2), (np.int64(3), np.int32(2))])
def test_rows_that_are_positions(pos0, rows):
    require_rows(pos0, rows)


@pytest.mark.parametrize("delta", [LAST - 39, -LAST])
def test_the_last_deltas_that_fit(delta):
    require_store(TINY, make_weights(TINY), make_cache(TINY, 40), 39, 1, Rope(mode="delta", delta=delta))


@pytest.mark.parametrize("delta", [LAST - 38])
def test_the_first_delta_that_does_not_fit(delta):
    with refused(ValueError, f"position 39 with rope delta {delta} does not fit int32; give a smaller delta"):
        require_store(TINY, make_weights(TINY), make_cache(TINY, 40), 39, 1, Rope(mode="delta", delta=delta))


IQ = normal(91, 3, 2, 32)
SCORES = {
    "heads": ((IQ[:, :1].copy(), 0), ValueError, "iq has shape [3, 1, 32]; it must be [any, 2, 32]"),
    "width": ((IQ[..., :8].copy(), 0), ValueError, "iq has shape [3, 2, 8]; it must be [any, 2, 32]"),
    "dtype": ((IQ.astype(float), 0), ValueError, "iq has dtype float64; it must be bfloat16 [any, 2, 32]"),
    "negative": ((IQ, -1), ValueError, "pos0 is -1; a window's first position must be 0 or more"),
    "no-rows": ((IQ[:0], 0), ValueError, "a window of 0 rows; it must have at least one"),
    "past-the-cache": ((IQ, 38), ValueError, "position 40 does not fit a contiguous cache of 40 positions"),
}


@pytest.mark.parametrize(("given", "error", "message"), SCORES.values(), ids=SCORES)
def test_scores(given, error, message):
    with refused(error, message):
        reference.scores(TINY, make_cache(TINY, 40), *given)


SELECTS = {
    "width": (np.zeros((3, 6)), 17, ValueError, "scores has shape [3, 6]; it must be [3, 5]"),
    "dtype": (np.zeros((3, 5), np.float16), 17, ValueError, "scores has dtype float16; it must be float32 [3, 5]"),
    "strides": (
        np.zeros((3, 9))[:, :5],
        17,
        ValueError,
        "scores has strides (72, 8); it must be C-contiguous: pass np.ascontiguousarray(scores)",
    ),
    "negative": (np.zeros((3, 5)), -1, ValueError, "pos0 is -1; a window's first position must be 0 or more"),
    "no-rows": (np.zeros((0, 5)), 17, ValueError, "a window of 0 rows; it must have at least one"),
}


@pytest.mark.parametrize(("scores", "pos0", "error", "message"), SELECTS.values(), ids=SELECTS)
def test_select(scores, pos0, error, message):
    with refused(error, message):
        reference.select(TINY, scores, pos0)


NO_ROWS = {
    "list": ([[0.0]], TypeError, "scores is a list; it must be a float array [rows, blocks]"),
    "none": (None, TypeError, "scores is a NoneType; it must be a float array [rows, blocks]"),
    "no-axis": (np.zeros(()), ValueError, "scores has shape []; it must be [rows, blocks]"),
    "one-axis": (np.zeros(5), ValueError, "scores has shape [5]; it must be [rows, blocks]"),
    "three-axes": (np.zeros((3, 5, 1)), ValueError, "scores has shape [3, 5, 1]; it must be [rows, blocks]"),
}


@pytest.mark.parametrize(("scores", "error", "message"), NO_ROWS.values(), ids=NO_ROWS)
def test_scores_that_are_no_rows(scores, error, message):
    with refused(error, message):
        reference.select(TINY, scores, 17)


def lists(**changes):
    """Lists of three sparse rows of four keys, in 20 entries."""
    made = KeyLists(np.zeros((3, 20), np.int32), np.full(3, 4, np.int32), np.ones(3, np.int32))
    return dataclasses.replace(made, **changes)


def ids_with(entry, value):
    ids = np.zeros((3, 20), np.int32)
    ids[entry] = value
    return ids


Q = normal(92, 3, 4, 32)
LISTS = {
    "type": ([3, 3, 3], TypeError, "lists is a list; it must be a KeyLists, from select or KeyLists.dense"),
    "rows": (KeyLists.dense([1, 2]), ValueError, "lists.ids has shape [2, 0]; it must be [3, any]"),
    "nk-dtype": (lists(nk=np.full(3, 4)), ValueError, "lists.nk has dtype int64; it must be int32 [3]"),
    "nk-rows": (lists(nk=np.full(2, 4, np.int32)), ValueError, "lists.nk has shape [2]; it must be [3]"),
    "sparse-rows": (lists(sparse=np.ones(4, np.int32)), ValueError, "lists.sparse has shape [4]; it must be [3]"),
    "sparse-dtype": (lists(sparse=np.ones(3, bool)), ValueError, "lists.sparse has dtype bool; it must be int32 [3]"),
    "ids-dtype": (
        lists(ids=np.zeros((3, 20), int)),
        ValueError,
        "lists.ids has dtype int64; it must be int32 [3, any]",
    ),
    "flag": (lists(sparse=np.array([0, 2, 1], np.int32)), ValueError, "lists.sparse[1] is 2; it must be 0 or 1"),
    "negative-flag": (
        lists(sparse=np.array([1, 0, -1], np.int32)),
        ValueError,
        "lists.sparse[2] is -1; it must be 0 or 1",
    ),
    "negative-count": (
        lists(nk=np.array([0, 1, -1], np.int32)),
        ValueError,
        "lists.nk[2] is -1; it must be at most 20, the entries of a list",
    ),
    "negative-dense-count": (
        KeyLists(np.zeros((3, 0), np.int32), np.array([0, 1, -1], np.int32), np.zeros(3, np.int32)),
        ValueError,
        "lists.nk[2] is -1; it must be 0 or more",
    ),
    "negative-dense-count-behind-a-sparse-row": (
        lists(nk=np.array([4, -1, 4], np.int32), sparse=np.array([1, 0, 1], np.int32)),
        ValueError,
        "lists.nk[1] is -1; it must be 0 or more",
    ),
    "long-count": (
        lists(nk=np.array([20, 21, 0], np.int32)),
        ValueError,
        "lists.nk[1] is 21; it must be at most 20, the entries of a list",
    ),
    "unwritten-key": (
        lists(ids=ids_with((1, 3), -1)),
        ValueError,
        "lists.ids[1, 3] is -1; a listed key must be a position",
    ),
    "key-outside": (
        lists(ids=ids_with((2, 3), 40)),
        ValueError,
        "position 40 does not fit a contiguous cache of 40 positions",
    ),
    "longest": (
        dataclasses.replace(KeyLists.dense([3, 16, 1]), longest=15),
        ValueError,
        "lists.longest is 15; it must be at least 16, the largest of lists.nk",
    ),
    "dense-outside": (
        KeyLists.dense([0, 41, 3]),
        ValueError,
        "position 40 does not fit a contiguous cache of 40 positions",
    ),
    "dense-outside-among-sparse": (
        lists(nk=np.array([4, 42, 4], np.int32), sparse=np.array([1, 0, 1], np.int32)),
        ValueError,
        "position 41 does not fit a contiguous cache of 40 positions",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), LISTS.values(), ids=LISTS)
def test_chunks(given, error, message):
    with refused(error, message):
        reference.chunks(TINY, make_cache(TINY, 40), Q, given)


TAKEN = {
    "full": lists(nk=np.full(3, 20, np.int32)),
    "last-position": lists(ids=ids_with((2, 3), 39)),
    "past-the-count": lists(ids=ids_with((slice(None), slice(4, 20)), 10**6)),
    "dense-among-sparse": lists(
        nk=np.array([4, 40, 0], np.int32), sparse=np.array([1, 0, 1], np.int32), ids=ids_with((1, 0), -1)
    ),
    "dense-longer-than-lists": lists(nk=np.array([0, 40, 40], np.int32), sparse=np.array([1, 0, 0], np.int32)),
    "no-keys": lists(nk=np.zeros(3, np.int32)),
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_lists_that_end_within_the_cache(given):
    assert require_chunks(TINY, make_cache(TINY, 40), Q, given) == 3


@pytest.mark.parametrize("sparse", [(0, 0), (1, 1), (1, 0)], ids=["dense", "sparse", "both"])
def test_rows_without_keys_need_no_page(sparse):
    """The table of a stream of length 0 has no entry."""
    layout = Layout(geometry=TINY, page_size=4, pages=2)
    cache = LayerCache(buffer=layout.zeros(), layout=layout, table=np.zeros(0, np.int32))
    none = KeyLists(np.full((2, 20), -1, np.int32), np.zeros(2, np.int32), np.array(sparse, np.int32))
    got = reference.chunks(TINY, cache, Q[:2], none)
    assert_bits(got.l, np.zeros((2, 1, 4)), "l")


QUERIES = {
    "heads": (normal(92, 3, 2, 32), "q has shape [3, 2, 32]; it must be [any, 4, 32]"),
    "dtype": (Q.astype(np.float32), "q has dtype float32; it must be bfloat16 [any, 4, 32]"),
}


@pytest.mark.parametrize(("q", "message"), QUERIES.values(), ids=QUERIES)
def test_queries_of_chunks(q, message):
    with refused(ValueError, message):
        reference.chunks(TINY, make_cache(TINY, 40), q, lists())


PARTIALS = {
    "o-width": (
        [(3, 1, 4, 16), (3, 1, 4), (3, 1, 4)],
        "partials.o has shape [3, 1, 4, 16]; it must be [any, any, 4, 32]",
    ),
    "o-heads": (
        [(3, 1, 2, 32), (3, 1, 4), (3, 1, 4)],
        "partials.o has shape [3, 1, 2, 32]; it must be [any, any, 4, 32]",
    ),
    "m-chunks": ([(3, 2, 4, 32), (3, 1, 4), (3, 2, 4)], "partials.m has shape [3, 1, 4]; it must be [3, 2, 4]"),
    "l-rows": ([(3, 2, 4, 32), (3, 2, 4), (1, 2, 4)], "partials.l has shape [1, 2, 4]; it must be [3, 2, 4]"),
    "no-chunk": (
        [(3, 0, 4, 32), (3, 0, 4), (3, 0, 4)],
        "partials hold no chunk; they must hold at least one, the identity (0, -inf, 0) if it is empty",
    ),
}


@pytest.mark.parametrize(("shapes", "message"), PARTIALS.values(), ids=PARTIALS)
def test_merge(shapes, message):
    with refused(ValueError, message):
        reference.merge(TINY, Partials(*(np.zeros(shape) for shape in shapes)))


def test_merge_takes_partials_of_fp32_or_float64():
    with refused(TypeError, "partials is a tuple; it must be a Partials, from chunks"):
        reference.merge(TINY, (0, 0, 0))
    zeros = [np.zeros(shape) for shape in ((3, 2, 4, 32), (3, 2, 4), (3, 2, 4))]
    assert require_merge(TINY, Partials(*zeros)) == 3
    assert require_merge(TINY, Partials(*(x.astype(np.float32) for x in zeros))) == 3
    with refused(ValueError, "partials.l has dtype float16; it must be float32 [3, 2, 4]"):
        reference.merge(TINY, Partials(*zeros[:2], zeros[2].astype(np.float16)))


GATES = {
    "rows": (Q[:2], 480, "out has shape [2, 4, 32]; it must be [3, 4, 32]"),
    "heads": (normal(92, 3, 2, 32), 480, "out has shape [3, 2, 32]; it must be [3, 4, 32]"),
    "projection": (Q, 481, "projection has shape [3, 481]; it must be [any, 480]"),
}


@pytest.mark.parametrize(("out", "width", "message"), GATES.values(), ids=GATES)
def test_gate(out, width, message):
    with refused(ValueError, message):
        reference.gate(TINY, out, normal(93, 3, width))


def test_a_cache_of_the_geometry_with_room():
    require_cache(TINY, make_cache(TINY, 40), 40)
