"""Small streams for the tests: geometries, random inputs, and caches in any layout with poison around them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kvproof.reference import TINY, Geometry, LayerCache, Layout, Rope, Weights
from kvproof.reference.layout import BF16, PARTS
from kvproof.reference.numerics import bf16

ODD = Geometry(
    name="odd",
    query_heads=6,
    kv_heads=2,
    head_dim=24,
    index_heads=3,
    index_dim=16,
    block=8,
    top_blocks=2,
    rotary_half=6,
    mrope_sections=(3, 2, 1),
    layers=3,
)
"""Nothing a power of two that needs not be; mrope sections all different."""

GEOMETRIES = [TINY, ODD]

SLIM = Geometry(
    name="slim",
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    index_heads=2,
    index_dim=8,
    block=2,
    top_blocks=2,
    rotary_half=3,
    mrope_sections=(1, 1, 1),
    layers=1,
)
"""Small enough for long lists of scalars; sparse from six positions on."""


def normal(seed, *shape):
    """N(0, 1) in bf16."""
    return bf16(np.random.default_rng(seed).normal(size=shape))


def make_weights(geometry, seed=1):
    rng = np.random.default_rng(seed)
    d, di = geometry.head_dim, geometry.index_dim
    scales = [(1 + 0.3 * rng.normal(size=n)).astype(np.float32) for n in (d, d, di, di)]
    return Weights(
        q_scale=scales[0],
        k_scale=scales[1],
        i_scale=scales[2],
        pool_scale=scales[3],
        inv_freq=geometry.inv_freq(),
    )


def make_rope(mode, length=40, seed=2):
    """A rope of this mode; a media prompt has random triples for its first `length` positions."""
    if mode == "text":
        return Rope()
    if mode == "delta":
        return Rope(mode="delta", delta=-3)
    triples = np.random.default_rng(seed).integers(0, 50, size=(length, 3)).astype(np.int32)
    return Rope(mode="media", delta=-7, triples=triples)


def make_cache(geometry, capacity, page=None, layer=0, seed=0, poison=np.nan):
    """A cache whose every element is `poison`; with a page size, a shuffled table in an arena with slack pages."""
    if page is None:
        layout, table = Layout.contiguous(geometry, capacity), None
    else:
        need = -(-capacity // page)
        layout = Layout(geometry=geometry, page_size=page, pages=need + 3)
        table = np.random.default_rng(seed).permutation(need + 3)[:need].astype(np.int32)
    return LayerCache(buffer=np.full(layout.elements, poison, BF16), layout=layout, layer=layer, table=table)


def live_rows(geometry, end):
    """The rows of each part that a stream of `end` positions owns."""
    return {part: np.arange(end // geometry.block if part == "pooled" else end) for part in PARTS}


def read_all(cache, end):
    """The stream's rows, as bits."""
    rows = live_rows(cache.layout.geometry, end)
    return {part: bits(cache.read(part, rows[part])) for part in PARTS}


def bits(array):
    """An array's bit patterns, so that NaN equals NaN and -0 differs from +0."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_bits(got, want, what):
    """Fail at the first element whose bits differ."""
    __tracebackhide__ = True
    kinds = [f"{array.dtype} {list(array.shape)}" for array in (got, want)]
    assert kinds[0] == kinds[1], f"{what} = {kinds[0]}, but should be {kinds[1]}"
    wrong = np.argwhere(bits(got) != bits(want))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{what}{list(at)} = {got[at]}, but should be {want[at]} ({len(wrong)} of {got.size} differ)"
        )


def floats(array):
    """Nested lists of Python floats."""
    return np.asarray(array).astype(np.float64).tolist()


def narrow(nested):
    """Nested lists of numbers that bf16 holds, as a bf16 array."""
    return np.array([float(x) for x in np.ravel(np.array(nested, object))]).reshape(np.shape(nested)).astype(BF16)


def refused(error, message):
    """The call must raise this error, with this message in full."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


UNIT = 2.0**-53
"""The relative error of one float64 rounding."""


def roundings(count, width, size):
    """Relative error of sums over `count` weights exp(s - m), |s| <= size, in float64 roundings.

    A score is `width` products, as many sums, and a scale; two scores, their difference and the running maximum go
    into each weight, as often as it is scaled; then the weights are added.
    """
    return count + 8 + 4 * (2 * width + 3) * float(size)
