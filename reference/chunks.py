"""chunks: softmax attention over each chunk of each row's key list (SPEC section 2).

A chunk is 512 entries of the list, walked in tiles of 64 with an online softmax. With m_t the running maximum after
tile t, every key of tile t gets p = exp(s - m_t), and moving on to tile t + 1 scales o and l by exp(m_t - m_(t+1)).
These factors telescope, so tile t reaches the chunk's result scaled by exp(m_t - m_last): the form computed here. Only
bf16(p), which the value product takes, depends on the tiles at all.

Products of one tile are small enough that BLAS keeps them on one thread, so its thread count cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .geometry import CHUNK, TILE, FloatArray, Geometry, IntArray
from .layout import LayerCache
from .numerics import bf16, widen
from .results import Bf16Array, KeyLists, Partials, chunk_count, require_chunks


def chunks(geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
    """Attend each row's keys, chunk by chunk.

    Args:
        q: bf16 [R, QH, D], from prep.
        lists: each row's keys; a dense row may have any number, also none.

    Returns:
        float64 o [R, chunks, QH, D], m and l [R, chunks, QH], chunks = max over rows of ceil(nk / 512), at least 1;
        chunks without keys hold (0, -inf, 0). Only listed rows are read.

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_chunks`).
    """
    rows = require_chunks(geometry, cache, q, lists)
    shape = (rows, chunk_count(lists.nk), geometry.query_heads)
    partials = Partials(o=np.zeros((*shape, geometry.head_dim)), m=np.full(shape, -np.inf), l=np.zeros(shape))
    wide = widen(q).reshape(rows, geometry.kv_heads, geometry.group, geometry.head_dim)
    for chunk in range(shape[1]):
        for group, positions in runs(lists, chunk):
            keys, values = widen(cache.read("keys", positions)), widen(cache.read("values", positions))
            o, m, total = attend(wide[group], keys, values)
            partials.o[group, chunk] = o.reshape(len(group), *shape[2:], geometry.head_dim)
            partials.m[group, chunk] = m.reshape(len(group), *shape[2:])
            partials.l[group, chunk] = total.reshape(len(group), *shape[2:])
    return partials


def runs(lists: KeyLists, chunk: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Rows and the positions they read in this chunk of their lists; dense rows with equal positions come together."""
    count = np.clip(lists.nk - chunk * CHUNK, 0, CHUNK)
    dense = lists.sparse == 0
    for n in np.unique(count[dense & (count > 0)]):
        yield np.flatnonzero(dense & (count == n)), chunk * CHUNK + np.arange(n)
    for row in np.flatnonzero(~dense & (count > 0)):
        yield np.array([row]), lists.ids[row, chunk * CHUNK :][: count[row]].astype(np.int64)


def attend(q: FloatArray, keys: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One chunk: q [R, KH, group, D] over keys, values [n, KH, D]; o [R, KH, group, D], m and l [R, KH, group]."""
    s = (q[:, None] @ _tiles(keys).transpose(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    s[:, -1, ..., (len(keys) - 1) % TILE + 1 :] = -np.inf
    running = np.maximum.accumulate(s.max(axis=-1), axis=1)
    last = running[:, -1]
    rescale = np.exp(running - last[:, None])
    p = np.exp(s - running[..., None])
    total = (p.sum(axis=-1) * rescale).sum(axis=1)
    o = ((widen(bf16(p)) @ _tiles(values).transpose(0, 2, 1, 3)) * rescale[..., None]).sum(axis=1)
    return o, last, total


def _tiles(rows: FloatArray) -> FloatArray:
    """Rows [n, KH, D] as whole tiles [tiles, 64, KH, D], filled up with zeros."""
    missing = -len(rows) % TILE
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]))])
    return rows.reshape(-1, TILE, *rows.shape[1:])
