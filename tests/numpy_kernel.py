"""A plain paged attention kernel in NumPy fp32, as a user would bring it, and ways to break it."""

from __future__ import annotations

import numpy as np


def attend(q, keys, values, page_table, lengths, query_start=None, *, bug=None, hnd=False):
    """Attention over gathered pages; `bug` names a fault."""
    starts = np.arange(len(lengths) + 1) if query_start is None else query_start
    out = np.empty_like(q)
    n = keys.shape[2 if hnd else 1]
    for stream, length in enumerate(lengths):
        pages = -(-int(length) // n)
        table = {"table ignored": np.arange(len(page_table[stream])), "other table": page_table[stream - 1]}.get(
            bug, page_table[stream]
        )[:pages]
        k, v = (x[table].swapaxes(1, 2) if hnd else x[table] for x in (keys, values))
        if bug == "keys ignore the table":
            k = keys[: len(table)]
        if bug == "value page" and pages > 1:
            v = v.copy()
            v[1] = values[table[0]].swapaxes(0, 1) if hnd else values[table[0]]
        k, v = (x.reshape(-1, *x.shape[2:]).astype(np.float32) for x in (k, v))
        rows = range(starts[stream], starts[stream + 1])
        for row in rows:
            count = length - len(rows) + (row - rows.start) + 1
            count = {"stale tail": pages * n, "row past the end": count + 1, "last key dropped": max(1, count - 1),
                     "not causal": length}.get(bug, count)  # fmt: skip
            out[row] = _row(q[row], k[:count], v[:count], bug)
    if bug == "writes its input":
        keys[0] = 0
    return out


def _row(q, keys, values, bug):
    heads, width = keys.shape[1:]
    grouped = q.astype(np.float32).reshape(heads, -1, width)
    if bug == "heads dealt in turn":
        grouped = q.astype(np.float32).reshape(-1, heads, width).swapaxes(0, 1)
    s = np.einsum("hgd,nhd->hgn", grouped, keys) * np.float32(1.0 if bug == "scale left out" else width**-0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    total = p.sum(axis=-1, keepdims=True) * (1 + (bug == "wrong normaliser") / 16)
    o = np.einsum("hgn,nhd->hgd", p, values) / total
    return (o.swapaxes(0, 1) if bug == "heads dealt in turn" else o).reshape(q.shape).astype(q.dtype)
