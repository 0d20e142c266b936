"""select: the key list of each row (SPEC section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import Geometry, IntArray
from .results import KeyLists, complete_blocks, require_select

_SIGN = np.uint32(0x8000_0000)


def select(geometry: Geometry, scores: npt.NDArray[Any], pos0: int) -> KeyLists:
    """List each row's keys: all of them in a dense row, else its best blocks and the unfinished tail.

    Scores are compared as fp32 by their bits (-0 below +0), ties to the lower block id, so the list is exact.

    Args:
        scores: fp32 or float64 [R, max(1, (pos0 + R) // block)], from scores; float64 is rounded to fp32 first.

    Returns:
        ids int32 [R, list_capacity], -1 where unwritten (all over a dense row); nk, sparse int32 [R].

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_select`).
    """
    rows = require_select(geometry, scores, pos0)
    complete = complete_blocks(geometry, pos0, rows)
    with np.errstate(over="ignore"):
        keys = _ordered_bits(scores.astype(np.float32))
    ids = np.full((rows, geometry.list_capacity), -1, np.int32)
    nk = (pos0 + 1 + np.arange(rows)).astype(np.int32)
    sparse = (complete > geometry.top_blocks).astype(np.int32)
    for row in np.flatnonzero(sparse):
        blocks = _best(keys[row, : complete[row]], geometry.top_blocks)
        listed = (blocks[:, None] * geometry.block + np.arange(geometry.block)).reshape(-1)
        tail = np.arange(geometry.block * complete[row], pos0 + row + 1)
        nk[row] = len(listed) + len(tail)
        ids[row, : nk[row]] = np.concatenate([listed, tail])
    return KeyLists(ids=ids, nk=nk, sparse=sparse)


def _ordered_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """fp32 as unsigned integers in the same order; -0 comes just below +0."""
    bits = x.view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _best(keys: npt.NDArray[np.uint32], count: int) -> IntArray:
    """Indices of the `count` largest keys, ties to the lower index, in index order."""
    return np.sort(np.argsort(~keys, kind="stable")[:count])
