"""What a geometry, its weights and a rope accept."""

import dataclasses

import numpy as np
import pytest
from kvproof.reference.geometry import FLASH_NEXT, PRESETS, TINY, Rope, Weights, require_array


def make_weights(**changes):
    arrays = {name: np.ones(32, np.float32) for name in ("q_scale", "k_scale", "i_scale", "pool_scale")}
    return Weights(**{**arrays, "inv_freq": TINY.inv_freq(), **changes})


def test_flash_next_is_the_published_geometry():
    g = FLASH_NEXT
    assert (g.group, g.budget, g.list_capacity, g.projection_width) == (12, 2048, 2052, 13952)


def test_presets_are_found_by_name():
    assert {name: g.name for name, g in PRESETS.items()} == {"flash_next": "flash_next", "tiny": "tiny"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 0}, "block is 0; it must be a positive integer"),
        ({"layers": 1.5}, "layers is 1.5; it must be a positive integer"),
        ({"query_heads": 5}, "5 query heads do not divide among 2 key/value heads"),
        ({"head_dim": 36}, "head_dim is 36; .* multiple of 8"),
        ({"index_dim": 8}, "16 rotated dims do not fit index_dim 8; rotary_half may be at most 4"),
        ({"mrope_sections": (3, 3, 3)}, r"\(3, 3, 3\) add up to 9; they must add up to rotary_half, 8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_geometry_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_rotary_frequencies():
    got = TINY.inv_freq()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array([1e7 ** (-i / 8) for i in range(8)], np.float32))


def test_weights_that_fit():
    make_weights().require(TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_scale": np.ones(32)}, "weights.q_scale has dtype float64; it must be float32"),
        ({"inv_freq": np.ones(7, np.float32)}, r"weights.inv_freq has shape \[7\]; it must be \[8\]"),
        ({"k_scale": np.ones(64, np.float32)[::2]}, "weights.k_scale has strides"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_weights_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        make_weights(**changes).require(TINY)


TRIPLES = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "image"}, "rope mode is 'image'; it must be"),
        ({"delta": 1}, "'text' takes no delta"),
        ({"mode": "media"}, "needs the prompt's"),
        ({"mode": "delta", "triples": TRIPLES}, "takes no triples, but 2 are given"),
        ({"mode": "media", "triples": TRIPLES.astype(np.int64)}, "rope triples has dtype int64; it must be int32"),
        ({"mode": "media", "triples": np.repeat(TRIPLES, 2, axis=1)[:, ::2]}, "it must be C-contiguous"),
        ({"mode": "delta", "delta": 2**40}, "rope delta is 1099511627776; it must fit int32"),
        ({"mode": "media", "triples": TRIPLES[:, :2]}, r"rope triples has shape \[2, 2\]; it must be \[any, 3\]"),
    ],
    ids=["mode", "text-delta", "no-triples", "unwanted-triples", "dtype", "strides", "delta", "shape"],
)
def test_a_rope_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rope(**arguments)


def test_only_arrays_are_arrays():
    with pytest.raises(TypeError, match="x is a list; it must be a NumPy array"):
        require_array("x", [1.0], np.float32, (1,))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3\]; it must be \[any, 4\]"):
        require_array("x", np.zeros((2, 3), np.float32), np.float32, (None, 4))
