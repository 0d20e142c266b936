"""scores on a backend; see `kvproof.reference.scores` and cuda/scores.cu."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..reference.geometry import TILE, Geometry
from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, require_scores, score_blocks
from .backend import Pointer
from .engine import Engine, default_engine, int32, part_pointer


def scores(
    geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int, *, engine: Engine | None = None
) -> npt.NDArray[np.float32]:
    """Score the blocks of each sparse row, fp32; arguments and errors are those of `kvproof.reference.scores`.

    Raises:
        LaunchError: the kernel failed.
    """
    engine = engine or default_engine()
    rows = require_scores(geometry, cache, iq, pos0, engine.place)
    blocks = score_blocks(geometry, pos0, rows)
    result = engine.full((rows, blocks), np.float32, np.nan)
    if blocks <= geometry.top_blocks:  # every row is dense
        return result
    engine.launch(
        geometry,
        "scores",
        "fn_qsa_scores",
        grid=(-(-blocks // TILE), rows, 1),
        args=[
            part_pointer(cache, "pooled"),
            engine.pages(cache, pos0 + rows),
            Pointer(iq),
            int32(pos0),
            Pointer(result),
            int32(blocks),
        ],
    )
    return result
