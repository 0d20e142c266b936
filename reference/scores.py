"""scores: how much each row's indexer wants each complete block (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from .geometry import FloatArray, Geometry
from .layout import LayerCache
from .numerics import widen
from .results import Bf16Array, complete_blocks, require_scores, score_blocks


def scores(geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> FloatArray:
    """Score the blocks that each sparse row sees whole: max(iq_h . pooled_b, 0) summed over index heads, / sqrt(DI).

    Args:
        iq: bf16 [R, IH, DI], from prep.

    Returns:
        float64 [R, blocks], blocks = max(1, (pos0 + R) // block); NaN where nothing is computed: dense rows, and
        blocks that the row does not see whole. Only pooled rows that some row scores are read.

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_scores`).
    """
    rows = require_scores(geometry, cache, iq, pos0)
    complete = complete_blocks(geometry, pos0, rows)
    result = np.full((rows, score_blocks(geometry, pos0, rows)), np.nan)
    sparse = np.flatnonzero(complete > geometry.top_blocks)
    if not len(sparse):
        return result
    pooled = widen(cache.read("pooled", np.arange(complete[-1])))[:, 0]
    for row in sparse:
        dots = np.einsum("hd,bd->hb", widen(iq[row]), pooled[: complete[row]])
        result[row, : complete[row]] = np.maximum(dots, 0.0).sum(axis=0) / np.sqrt(geometry.index_dim)
    return result
