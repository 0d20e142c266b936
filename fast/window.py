"""window on a backend: every kernel of one layer, in order; see `kvproof.reference.window`."""

from __future__ import annotations

from ..reference.geometry import Geometry, Rope, Weights
from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, Window
from .chunks import chunks
from .engine import Engine, default_engine
from .gate import gate
from .merge import merge
from .pool import pool
from .prep import prep
from .scores import scores
from .select import select


def window(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    projection: Bf16Array,
    pos0: int,
    rope: Rope,
    *,
    engine: Engine | None = None,
) -> Window:
    """prep, pool, scores, select, chunks, merge and gate; see `kvproof.reference.window`.

    Raises:
        LaunchError: a kernel failed.
    """
    engine = engine or default_engine()
    engine.prepare(geometry)  # a compiler that fails does so before anything is stored
    prepared = prep(geometry, weights, cache, projection, pos0, rope, engine=engine)
    pool(geometry, weights, cache, pos0, prepared.q.shape[0], rope, engine=engine)
    block_scores = scores(geometry, cache, prepared.iq, pos0, engine=engine)
    lists = select(geometry, block_scores, pos0, engine=engine)
    partials = chunks(geometry, cache, prepared.q, lists, engine=engine)
    out = merge(geometry, partials, engine=engine)
    return Window(
        q=prepared.q,
        iq=prepared.iq,
        scores=block_scores,
        lists=lists,
        partials=partials,
        out=out,
        gated=gate(geometry, out, projection, engine=engine),
    )
