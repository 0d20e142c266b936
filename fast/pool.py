"""pool on a backend; see `kvproof.reference.pool` and cuda/pool.cu."""

from __future__ import annotations

from ..reference.geometry import Geometry, Rope, Weights
from ..reference.layout import LayerCache
from ..reference.results import require_store
from .backend import Pointer
from .engine import Engine, default_engine, int32, part_pointer
from .prep import rope_arguments


def pool(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    pos0: int,
    rows: int,
    rope: Rope,
    *,
    engine: Engine | None = None,
) -> None:
    """Pool the blocks that a window completes; arguments and errors are those of `kvproof.reference.pool`.

    Raises:
        LaunchError: the kernel failed.
    """
    engine = engine or default_engine()
    require_store(geometry, weights, cache, pos0, rows, rope, engine.place)
    completed = (pos0 + rows) // geometry.block - pos0 // geometry.block
    if not completed:
        return
    engine.launch(
        geometry,
        "pool",
        "fn_qsa_pool" if rope.mode == "text" else "fn_qsa_pool_media",
        grid=(completed, 1, 1),
        args=[
            Pointer(weights.pool_scale),
            Pointer(weights.inv_freq),
            part_pointer(cache, "index_keys"),
            part_pointer(cache, "pooled"),
            engine.pages(cache, pos0 + rows),
            int32(pos0),
            *rope_arguments(rope),
        ],
    )
