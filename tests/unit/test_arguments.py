"""Bad projections get a specific error, and nothing is written; what else is refused stands in tests/meta."""

import dataclasses

import numpy as np
import pytest
from kvproof import reference
from kvproof.reference import FLASH_NEXT, TEXT, TINY, LayerCache, Layout, Weights
from kvproof.reference.layout import BF16

LAYOUT = Layout.contiguous(TINY, 40)
WEIGHTS = Weights(
    **{name: np.ones(32, np.float32) for name in ("q_scale", "k_scale", "i_scale", "pool_scale")},
    inv_freq=TINY.inv_freq(),
)
PROJECTION = np.ones((3, TINY.projection_width), BF16)

WINDOWS = {
    "fp32-projection": ({"projection": PROJECTION.astype(np.float32)}, ValueError, "projection has dtype float32"),
    "strided-projection": ({"projection": np.ones((6, 480), BF16)[::2]}, ValueError, "projection has strides"),
    "list-projection": ({"projection": [[1.0]]}, TypeError, "projection is a list"),
    "foreign-weights": ({"geometry": FLASH_NEXT}, ValueError, "projection has shape"),
}


@pytest.mark.parametrize("kernel", [reference.prep, reference.window], ids=["prep", "window"])
@pytest.mark.parametrize(("changes", "error", "message"), WINDOWS.values(), ids=WINDOWS)
def test_prep_and_window(kernel, changes, error, message):
    cache = LayerCache(buffer=LAYOUT.zeros(), layout=LAYOUT)
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


def test_weights_with_gaps_are_refused():
    scales = np.ones(64, np.float32)[::2]
    with pytest.raises(ValueError, match=r"weights\.k_scale has strides"):
        dataclasses.replace(WEIGHTS, k_scale=scales).require(TINY)


def test_triples_with_gaps_are_refused():
    triples = np.zeros((2, 6), np.int32)[:, ::2]
    with pytest.raises(ValueError, match=r"rope triples has strides .*; it must be C-contiguous"):
        reference.Rope(mode="media", triples=triples)
