"""select on a backend; see `kvproof.reference.select` and cuda/select.cu."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..reference.geometry import Geometry
from ..reference.results import KeyLists, longest_list, require_fp32, require_select, score_blocks
from .backend import Pointer
from .engine import Engine, default_engine, int32


def select(geometry: Geometry, scores: npt.NDArray[np.float32], pos0: int, *, engine: Engine | None = None) -> KeyLists:
    """List each row's keys; arguments, results and errors are those of `kvproof.reference.select`.

    Raises:
        ValueError: the scores are not fp32.
        LaunchError: the kernel failed.
    """
    engine = engine or default_engine()
    rows = require_select(geometry, scores, pos0, engine.place)
    require_fp32("scores", scores)
    lists = KeyLists(
        ids=engine.full((rows, geometry.list_capacity), np.int32, -1),
        nk=engine.empty((rows,), np.int32),
        sparse=engine.empty((rows,), np.int32),
        longest=longest_list(geometry, pos0, rows),
        end=pos0 + rows,
    )
    engine.launch(
        geometry,
        "select",
        "fn_qsa_select",
        grid=(rows, 1, 1),
        args=[
            Pointer(scores),
            int32(score_blocks(geometry, pos0, rows)),
            int32(pos0),
            Pointer(lists.ids),
            Pointer(lists.nk),
            Pointer(lists.sparse),
        ],
    )
    return lists
