"""Streams over page pools for the tests: their weights, their rows, and what their pages hold."""

from __future__ import annotations

import functools

import numpy as np
from kvproof import fast
from kvproof.reference import TINY
from streams import bits, make_weights, normal

WEIGHTS = [make_weights(TINY, seed) for seed in (1, 2)]
BLOCK = TINY.block
PAGE = 8


def rows_of(seed, first, count, geometry=TINY):
    """The projections of a text's rows, layer by layer: row p is the same however the text is cut."""
    rows = range(first, first + count)
    return [np.stack([row_of(seed, layer, p, geometry) for p in rows]) for layer in range(geometry.layers)]


@functools.cache
def row_of(seed, layer, position, geometry):
    """One row's projection."""
    return normal([seed, layer, position], geometry.projection_width)


def grown(pool, seed, *windows, weights=WEIGHTS, **options):
    """A stream, and the gated rows of each layer of all its windows."""
    stream = fast.Stream(pool, weights, **options)
    return stream, extended(stream, seed, *windows)


def extended(stream, seed, *windows):
    """Append windows of a text; the gated rows of each layer."""
    results = [stream.append(rows_of(seed, stream.length, count, stream.pool.geometry)) for count in windows]
    return [np.concatenate([result[layer].gated for result in results]) for layer in range(len(results[0]))]


def page_bits(stream):
    """What its pages hold, in its own order: uint16 [pages, elements]."""
    pool = stream.pool
    return np.array([bits(pool.page(page)) for page in stream.pages]).reshape(-1, pool.layout.page_elements)
