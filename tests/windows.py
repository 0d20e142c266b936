"""A stream with a history, a window that continues it, and what the window gives, compared bit by bit."""

from __future__ import annotations

import numpy as np
from kvproof import fast
from kvproof.reference.layout import PARTS
from streams import assert_bits, make_cache, make_rope, make_weights, normal

CACHED, ROWS = 75, 6


def history(geometry, page, mode="text", *, cached=CACHED, rows=ROWS):
    """Weights, a cache that holds `cached` positions and has room for `rows` more, the rows' projection, a rope."""
    cache = make_cache(geometry, cached + rows, page, layer=1, poison=0.0)
    for part, seed in (("keys", 1), ("values", 2), ("index_keys", 3)):
        shape = cache.layout.part(1, part)
        cache.write(part, np.arange(cached), normal(seed, cached, shape.heads, shape.width))
    weights, rope = make_weights(geometry), make_rope(mode, length=cached + 2)
    fast.pool(geometry, weights, cache, 0, cached, rope)
    return weights, cache, normal(4, rows, geometry.projection_width), rope


def assert_same_window(got, want):
    """Fail at the first element of a window's results whose bits differ."""
    __tracebackhide__ = True
    for name in ("q", "iq", "scores", "out", "gated"):
        assert_bits(getattr(got, name), getattr(want, name), name)
    for name in ("ids", "nk", "sparse"):
        assert_bits(getattr(got.lists, name), getattr(want.lists, name), name)
    for name in "oml":
        assert_bits(getattr(got.partials, name), getattr(want.partials, name), name)


def assert_same_rows(got, want, end):
    """Fail at the first element of a stream's `end` positions whose bits differ between two caches."""
    __tracebackhide__ = True
    for part in PARTS:
        rows = np.arange(end // want.layout.geometry.block if part == "pooled" else end)
        assert_bits(got.read(part, rows), want.read(part, rows), part)
