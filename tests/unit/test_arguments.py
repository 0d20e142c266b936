"""Bad arguments get a specific error, and nothing is written."""

import dataclasses

import numpy as np
import pytest
from kvproof import reference
from kvproof.reference import FLASH_NEXT, TEXT, TINY, KeyLists, LayerCache, Layout, Partials, Weights
from kvproof.reference.layout import BF16

LAYOUT = Layout.contiguous(TINY, 40)
WEIGHTS = Weights(
    **{name: np.ones(32, np.float32) for name in ("q_scale", "k_scale", "i_scale", "pool_scale")},
    inv_freq=TINY.inv_freq(),
)
PROJECTION = np.ones((3, TINY.projection_width), BF16)
Q, IQ = np.ones((3, 4, 32), BF16), np.ones((3, 2, 32), BF16)


def make_cache(layout=LAYOUT, **changes):
    return LayerCache(**{"buffer": layout.zeros(), "layout": layout, **changes})


def read_only():
    cache = make_cache()
    cache.buffer.flags.writeable = False
    return cache


FOREIGN = make_cache(Layout.contiguous(dataclasses.replace(TINY, top_blocks=3), 40))
WINDOWS = {
    "negative-position": ({"pos0": -1}, ValueError, "pos0 is -1; .* must be 0 or more"),
    "float-position": ({"pos0": 1.0}, TypeError, "pos0 is a float; it must be an integer"),
    "bool-position": ({"pos0": True}, TypeError, "pos0 is a bool"),
    "far-position": ({"pos0": 2**31 - 2}, ValueError, "position 2147483648 does not fit int32"),
    "past-the-cache": ({"pos0": 38}, ValueError, "position 40 does not fit a contiguous cache of 40 positions"),
    "wide-projection": (
        {"projection": np.ones((3, 481), BF16)},
        ValueError,
        r"projection has shape \[3, 481\]; it must be \[any, 480\]",
    ),
    "fp32-projection": ({"projection": PROJECTION.astype(np.float32)}, ValueError, "projection has dtype float32"),
    "strided-projection": ({"projection": np.ones((6, 480), BF16)[::2]}, ValueError, "projection has strides"),
    "list-projection": ({"projection": [[1.0]]}, TypeError, "projection is a list"),
    "no-rows": ({"projection": PROJECTION[:0]}, ValueError, "a window of 0 rows"),
    "foreign-cache": ({"cache": FOREIGN}, ValueError, "top_blocks=3.*both must be the same"),
    "no-cache": ({"cache": LAYOUT.zeros()}, TypeError, "cache is a ndarray; it must be a LayerCache"),
    "read-only-cache": ({"cache": read_only()}, ValueError, "buffer is read-only"),
    "foreign-weights": ({"geometry": FLASH_NEXT}, ValueError, "projection has shape"),
    "rope-name": ({"rope": "text"}, TypeError, "rope is a str; it must be a Rope"),
    "weights": (
        {"weights": dataclasses.replace(WEIGHTS, i_scale=np.ones(16, np.float32))},
        ValueError,
        r"weights.i_scale has shape \[16\]",
    ),
}


@pytest.mark.parametrize("kernel", [reference.prep, reference.window], ids=["prep", "window"])
@pytest.mark.parametrize(("changes", "error", "message"), WINDOWS.values(), ids=WINDOWS)
def test_prep_and_window(kernel, changes, error, message):
    cache = make_cache()
    arguments = {
        "geometry": TINY,
        "weights": WEIGHTS,
        "cache": cache,
        "projection": PROJECTION,
        "pos0": 0,
        "rope": TEXT,
    }
    with pytest.raises(error, match=message):
        kernel(**{**arguments, **changes})
    assert not cache.buffer.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rows": 0}, "a window of 0 rows"), ({"pos0": -4}, "pos0 is -4"), ({"rows": 41}, "position 40 does not fit")],
    ids=["no-rows", "negative", "past-the-cache"],
)
def test_pool(changes, message):
    cache = make_cache()
    with pytest.raises(ValueError, match=message):
        reference.pool(
            **{"geometry": TINY, "weights": WEIGHTS, "cache": cache, "pos0": 0, "rows": 8, "rope": TEXT, **changes}
        )
    assert not cache.buffer.any()


@pytest.mark.parametrize(
    ("iq", "pos0", "message"),
    [
        (IQ[:, :1].copy(), 0, r"iq has shape \[3, 1, 32\]; it must be \[any, 2, 32\]"),
        (IQ.astype(np.float64), 0, "iq has dtype float64"),
        (IQ, 38, "position 40 does not fit"),
    ],
    ids=["heads", "dtype", "past-the-cache"],
)
def test_scores(iq, pos0, message):
    with pytest.raises(ValueError, match=message):
        reference.scores(TINY, make_cache(), iq, pos0)


@pytest.mark.parametrize(
    ("scores", "pos0", "message"),
    [
        (np.zeros((3, 6)), 17, r"scores has shape \[3, 6\]; it must be \[3, 5\]"),
        (np.zeros((3, 5), np.float16), 17, "scores has dtype float16; it must be float32"),
        (np.zeros((3, 9))[:, :5], 17, "scores has strides"),
        (np.zeros((3, 5)), -1, "pos0 is -1"),
        (np.zeros((0, 5)), 17, "a window of 0 rows"),
    ],
    ids=["width", "dtype", "strides", "negative", "no-rows"],
)
def test_select(scores, pos0, message):
    with pytest.raises(ValueError, match=message):
        reference.select(TINY, scores, pos0)


def make_lists(**changes):
    return dataclasses.replace(
        KeyLists(np.zeros((3, 20), np.int32), np.full(3, 4, np.int32), np.ones(3, np.int32)), **changes
    )


LISTS = {
    "rows": (KeyLists.dense([1, 2]), r"lists.ids has shape \[2, 0\]; it must be \[3, any\]"),
    "dtype": (make_lists(nk=np.full(3, 4)), "lists.nk has dtype int64"),
    "flag": (make_lists(sparse=np.array([0, 2, 1], np.int32)), r"lists.sparse\[1\] is 2; it must be 0 or 1"),
    "negative-count": (make_lists(nk=np.array([0, 1, -1], np.int32)), r"lists.nk\[2\] is -1"),
    "long-count": (make_lists(nk=np.array([20, 21, 0], np.int32)), r"lists.nk\[1\] is 21; it must be at most 20"),
    "unwritten-key": (make_lists(ids=np.full((3, 20), -1, np.int32)), r"lists.ids\[0, 0\] is -1; a listed key"),
    "key-outside": (make_lists(ids=np.full((3, 20), 40, np.int32)), "position 40 does not fit"),
    "count-outside": (KeyLists.dense([0, 41, 3]), "position 40 does not fit"),
}


@pytest.mark.parametrize(("lists", "message"), LISTS.values(), ids=LISTS)
def test_chunks(lists, message):
    with pytest.raises(ValueError, match=message):
        reference.chunks(TINY, make_cache(), Q, lists)


def test_chunks_takes_key_lists_only():
    with pytest.raises(TypeError, match="lists is a list; it must be a KeyLists"):
        reference.chunks(TINY, make_cache(), Q, [3, 3, 3])


@pytest.mark.parametrize(
    ("counts", "message"),
    [([-1], "key counts reach from -1 to -1"), ([1.5], r"float64 \[1\]; they must be integers"), ([[1]], r"\[1, 1\]")],
    ids=["negative", "float", "shape"],
)
def test_dense_lists(counts, message):
    with pytest.raises(ValueError, match=message):
        KeyLists.dense(counts)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 1, 4, 16), (3, 1, 4), (3, 1, 4)], r"partials.o has shape \[3, 1, 4, 16\]"),
        ([(3, 2, 4, 32), (3, 1, 4), (3, 2, 4)], r"partials.m has shape \[3, 1, 4\]; it must be \[3, 2, 4\]"),
        ([(3, 0, 4, 32), (3, 0, 4), (3, 0, 4)], "partials hold no chunk"),
    ],
    ids=["width", "chunks", "no-chunk"],
)
def test_merge(shapes, message):
    with pytest.raises(ValueError, match=message):
        reference.merge(TINY, Partials(*(np.zeros(shape) for shape in shapes)))


def test_merge_takes_partials_only():
    with pytest.raises(TypeError, match="partials is a tuple"):
        reference.merge(TINY, (0, 0, 0))


def test_gate():
    with pytest.raises(ValueError, match=r"out has shape \[2, 4, 32\]; it must be \[3, 4, 32\]"):
        reference.gate(TINY, Q[:2], PROJECTION)
