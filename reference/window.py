"""window: every kernel of one layer over a window of rows, in order (SPEC section 2)."""

from __future__ import annotations

from .chunks import chunks
from .gate import gate
from .geometry import Geometry, Rope, Weights
from .layout import LayerCache
from .merge import merge
from .pool import pool
from .prep import prep
from .results import Bf16Array, Window
from .scores import scores
from .select import select


def window(
    geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
) -> Window:
    """prep, pool, scores, select, chunks, merge and gate over rows pos0 to pos0 + R - 1.

    Args:
        projection: bf16 [R, projection_width].
        rope: the rows' rotary positions.

    Returns:
        What each kernel gave. The cache has the window's rows, and the pooled rows of the blocks it completes.

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_window`); nothing was written.
    """
    prepared = prep(geometry, weights, cache, projection, pos0, rope)
    pool(geometry, weights, cache, pos0, len(projection), rope)
    block_scores = scores(geometry, cache, prepared.iq, pos0)
    lists = select(geometry, block_scores, pos0)
    partials = chunks(geometry, cache, prepared.q, lists)
    out = merge(geometry, partials)
    return Window(
        q=prepared.q,
        iq=prepared.iq,
        scores=block_scores,
        lists=lists,
        partials=partials,
        out=out,
        gated=gate(geometry, out, projection),
    )
