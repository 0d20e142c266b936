"""pool: one indexer row for each block that a window completes (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from .geometry import Geometry, Rope, Weights
from .layout import LayerCache
from .numerics import bf16, widen
from .prep import angles, norm, rotate
from .results import require_store


def pool(geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope) -> None:
    """Write the pooled row of every block whose last position is one of pos0 to pos0 + rows - 1.

    A pooled row is the mean of the block's raw indexer keys (bf16), normed (bf16), and rotated by the angles of the
    block's first position (bf16). Reads the indexer keys of those blocks and nothing else.

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_store`); nothing was written.
    """
    require_store(geometry, weights, cache, pos0, rows, rope)
    block = geometry.block
    blocks = np.arange(pos0 // block, (pos0 + rows) // block, dtype=np.int64)
    positions = (blocks[:, None] * block + np.arange(block)).reshape(-1)
    keys = widen(cache.read("index_keys", positions)).reshape(len(blocks), block, 1, geometry.index_dim)
    mean = widen(bf16(keys.sum(axis=1) / block))
    angle = angles(geometry, weights.inv_freq, blocks * block, rope)
    cache.write("pooled", blocks, rotate(norm(mean, weights.pool_scale, geometry.eps), angle))
