"""Bytes that a kernel must move for one stream's window, counted from the shapes (SPEC sections 1 and 2).

What each row reads is counted for that row, also where several rows of a window read the same keys: their fraction of
the bandwidth may then exceed 1. Fills before a kernel are counted with it. Norm weights and page tables are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ...reference.geometry import CHUNK, Geometry
from ...reference.results import complete_blocks, longest_list, score_blocks

BF16_BYTES = 2
WORD_BYTES = 4
"""An fp32 or an int32."""


def _keys_of(g: Geometry, pos0: int, rows: int) -> npt.NDArray[np.int64]:
    """Keys of each row's list, int64 [rows]."""
    end = pos0 + 1 + np.arange(rows, dtype=np.int64)
    return np.where(_sparse(g, pos0, rows), g.budget + end % g.block, end)


def _sparse(g: Geometry, pos0: int, rows: int) -> npt.NDArray[np.bool_]:
    return complete_blocks(g, pos0, rows) > g.top_blocks


def _prep(g: Geometry, pos0: int, rows: int) -> int:
    """Everything of a projection row but the gates, once read and once written."""
    return 2 * rows * (g.projection_width - g.query_heads * g.head_dim) * BF16_BYTES


def _pool(g: Geometry, pos0: int, rows: int) -> int:
    completed = (pos0 + rows) // g.block - pos0 // g.block
    return completed * (g.block + 1) * g.index_dim * BF16_BYTES


def _scores(g: Geometry, pos0: int, rows: int) -> int:
    sparse = _sparse(g, pos0, rows)
    blocks = int(complete_blocks(g, pos0, rows)[sparse].sum())
    read = (blocks + int(sparse.sum()) * g.index_heads) * g.index_dim * BF16_BYTES
    filled = rows * score_blocks(g, pos0, rows)
    return read + (blocks + filled) * WORD_BYTES


def _select(g: Geometry, pos0: int, rows: int) -> int:
    sparse = _sparse(g, pos0, rows)
    blocks = int(complete_blocks(g, pos0, rows)[sparse].sum())
    listed = int(_keys_of(g, pos0, rows)[sparse].sum())
    return (blocks + listed + rows * (g.list_capacity + 2)) * WORD_BYTES


def _chunks(g: Geometry, pos0: int, rows: int) -> int:
    """Keys and values once for all query heads that share them; lists once for each of their heads."""
    keys = _keys_of(g, pos0, rows)
    listed = int(keys[_sparse(g, pos0, rows)].sum()) * g.kv_heads * WORD_BYTES
    rows_read = int(keys.sum()) * 2 * g.kv_heads * g.head_dim * BF16_BYTES
    return rows_read + rows * g.query_heads * g.head_dim * BF16_BYTES + listed + _partials(g, pos0, rows)


def _partials(g: Geometry, pos0: int, rows: int) -> int:
    chunks = max(1, -(-longest_list(g, pos0, rows) // CHUNK))
    return rows * chunks * g.query_heads * (g.head_dim + 2) * WORD_BYTES


def _merge(g: Geometry, pos0: int, rows: int) -> int:
    return _partials(g, pos0, rows) + rows * g.query_heads * g.head_dim * BF16_BYTES


def _gate(g: Geometry, pos0: int, rows: int) -> int:
    return 3 * rows * g.query_heads * g.head_dim * BF16_BYTES


_COUNTS: Mapping[str, Callable[[Geometry, int, int], int]] = {
    "prep": _prep,
    "pool": _pool,
    "scores": _scores,
    "select": _select,
    "chunks": _chunks,
    "chunks_ahead": _chunks,
    "merge": _merge,
    "gate": _gate,
}

WHOLE: Mapping[str, tuple[str, ...]] = {
    "attention": ("chunks", "merge"),
    "window": ("prep", "pool", "scores", "select", "chunks", "merge", "gate"),
}
"""What several kernels do together: attention over lists that are there, and a layer end to end."""

KERNELS = (*_COUNTS, *WHOLE)


def bytes_of(kernel: str, geometry: Geometry, *, rows: int, keys: int) -> int:
    """Bytes that a kernel reads and writes for the last `rows` of `keys` positions.

    Args:
        kernel: one of `KERNELS`.

    Raises:
        ValueError: there is no such kernel, or the rows do not fit the positions.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; it must be one of {', '.join(KERNELS)}")
    if not 1 <= rows <= keys:
        raise ValueError(f"{rows} rows of {keys} positions; there must be at least one row, and no more than positions")
    return sum(_COUNTS[part](geometry, keys - rows, rows) for part in WHOLE.get(kernel, (kernel,)))
