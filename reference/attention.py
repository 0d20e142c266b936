"""Plain softmax attention over rows of keys and values: what users of other engines call paged attention.

No rounding to bf16 between the steps, unlike `chunks`: engines differ there, and the bound of `oracle.bounds` says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import FloatArray


def attention(q: FloatArray, keys: FloatArray, values: FloatArray, *, scale: float | None = None) -> FloatArray:
    """softmax(scale * q . k) . v of one row.

    Args:
        q: float64 [QH, D].
        keys, values: float64 [n, KH, D]; query head h reads key/value head h // (QH / KH).
        scale: of the scores; D ** -0.5 when None.

    Returns:
        float64 [QH, D]; 0 where there are no keys.
    """
    heads, width = q.shape
    if not len(keys):
        return np.zeros((heads, width))
    grouped = q.reshape(keys.shape[1], -1, width)
    s = np.einsum("hgd,nhd->hgn", grouped, keys) * (width**-0.5 if scale is None else scale)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    out = np.einsum("hgn,nhd->hgd", p, values) / p.sum(axis=-1, keepdims=True)
    return np.asarray(out.reshape(heads, width), np.float64)


def paged_attention(
    q: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    page_table: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    query_start: npt.NDArray[np.integer[Any]] | None = None,
    *,
    hnd: bool = False,
) -> FloatArray:
    """Causal attention of each stream's last rows over its pages.

    Args:
        q: [rows, QH, D], streams one behind the other.
        keys, values: [pages, page, KH, D], or [pages, KH, page, D] where `hnd`.
        page_table: [streams, entries], physical page of each logical page.
        lengths: [streams], positions that each stream holds, its query rows included.
        query_start: [streams + 1], first row of each stream; one row each when None.

    Returns:
        float64 [rows, QH, D].
    """
    starts = np.arange(len(lengths) + 1) if query_start is None else query_start
    if hnd:
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    out = np.zeros(q.shape, np.float64)
    for stream, length in enumerate(lengths):
        table = page_table[stream, : -(-int(length) // keys.shape[1])]
        k, v = (x[table].reshape(-1, *x.shape[2:]).astype(np.float64) for x in (keys, values))
        rows = range(starts[stream], starts[stream + 1])
        for row in rows:
            count = length - len(rows) + (row - rows.start) + 1
            out[row] = attention(q[row].astype(np.float64), k[:count], v[:count])
    return out
