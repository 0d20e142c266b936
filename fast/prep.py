"""prep on a backend; see `kvproof.reference.prep` and cuda/prep.cu."""

from __future__ import annotations

from ..reference.geometry import Geometry, Rope, Weights
from ..reference.layout import BF16, LayerCache
from ..reference.results import Bf16Array, Prepared, require_window
from .backend import Argument, Pointer
from .engine import Engine, default_engine, int32, part_pointer


def prep(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    projection: Bf16Array,
    pos0: int,
    rope: Rope,
    *,
    engine: Engine | None = None,
) -> Prepared:
    """Prepare a window; arguments, results and errors are those of `kvproof.reference.prep`.

    Raises:
        LaunchError: the kernel failed.
    """
    g, engine = geometry, engine or default_engine()
    rows = require_window(g, weights, cache, projection, pos0, rope, engine.place)
    prepared = Prepared(
        q=engine.empty((rows, g.query_heads, g.head_dim), BF16),
        iq=engine.empty((rows, g.index_heads, g.index_dim), BF16),
    )
    scales = [Pointer(x) for x in (weights.q_scale, weights.k_scale, weights.i_scale, weights.inv_freq)]
    parts = [part_pointer(cache, part) for part in ("keys", "values", "index_keys")]
    engine.launch(
        g,
        "prep",
        "fn_attn_prep" if rope.mode == "text" else "fn_attn_prep_media",
        grid=(g.query_heads + 2 * g.kv_heads + g.index_heads + 1, rows, 1),
        args=[
            *scales,
            *parts,
            engine.pages(cache, pos0 + rows),
            Pointer(projection),
            int32(pos0),
            *rope_arguments(rope),
            Pointer(prepared.q),
            Pointer(prepared.iq),
        ],
    )
    return prepared


def rope_arguments(rope: Rope) -> list[Argument]:
    """What the media form of a kernel takes beside the text form: the delta, and a media prompt's triples."""
    if rope.mode == "text":
        return []
    if rope.mode == "delta":
        return [int32(rope.delta), Pointer(None), int32(0)]
    return [int32(rope.delta), Pointer(rope.triples), int32(rope.media_length)]
