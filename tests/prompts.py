"""Streams to save and restore: random windows, and pages compared byte for byte."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from kvproof import fast
from kvproof.reference.layout import BF16, PARTS
from streams import assert_bits, bits, make_rope, make_weights, normal

CONTEXT = 100


@functools.cache
def weights_of(geometry, seed=1):
    return tuple(make_weights(geometry, seed + layer) for layer in range(geometry.layers))


@functools.cache
def projections(geometry, rows=CONTEXT):
    """Of each layer, bf16 [rows, projection_width]; row p is position p's."""
    return tuple(normal(100 + layer, rows, geometry.projection_width) for layer in range(geometry.layers))


def rope_of(mode):
    return make_rope(mode, length=40)


def make_pool(geometry, page, engine, *, streams=3, context=CONTEXT):
    """A pool whose free pages hold NaN."""
    pool = fast.PagePool(geometry, streams=streams, context=context, page_size=page, engine=engine)
    pool.engine.backend.write(pool.arena, np.full(pool.layout.elements, np.nan, BF16))
    return pool


def extend(stream, end):
    """Append the rows up to position end - 1; what the kernels gave, layer by layer."""
    geometry, begin = stream.pool.geometry, stream.length
    rows = [np.ascontiguousarray(layer[begin:end]) for layer in projections(geometry)]
    return stream.append([stream.pool.engine.upload(layer) for layer in rows])


def there(pool):
    """The weights, where the pool's kernels read them."""
    return [pool.engine.upload(layer) for layer in weights_of(pool.geometry)]


def computed(pool, mode, end):
    """A stream that computed `end` positions itself."""
    rope = rope_of(mode)
    stream = fast.Stream(pool, there(pool), rope=pool.engine.upload(rope) if mode == "media" else rope)
    extend(stream, end)
    return stream


def page_bits(stream):
    """The bits of its pages in logical order: uint16 [pages, page_elements]."""
    pool = stream.pool
    return np.array([bits(pool.engine.download(pool.page(page))) for page in stream.pages])


def assert_same_prompt(got, want):
    """Fail at the first thing in which two saved prompts differ."""
    __tracebackhide__ = True
    for name in ("geometry", "positions", "weights_digest"):
        assert getattr(got, name) == getattr(want, name), name
    assert (got.rope.mode, got.rope.delta) == (want.rope.mode, want.rope.delta)
    assert_bits(got.rope.triples, want.rope.triples, "triples")
    for i, (mine, other) in enumerate(zip(got.layers, want.layers, strict=True)):
        for part in PARTS:
            assert_bits(mine.part(part), other.part(part), f"layer {i} {part}")


def changed_part(saved, layer, part, change):
    """A saved prompt with another part: `change` is given a copy of the rows and writes into it."""
    rows = saved.layers[layer].part(part).copy()
    change(rows)
    layers = list(saved.layers)
    layers[layer] = dataclasses.replace(layers[layer], **{part: rows})
    return dataclasses.replace(saved, layers=tuple(layers))
