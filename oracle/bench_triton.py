"""A plain paged chunk kernel in Triton, under Triton's interpreter. Needs triton and torch.

It stands for what kernels written in Triton cost to test without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton.jit is applied

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ..reference import merge
from ..reference.geometry import CHUNK, TILE
from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, Partials
from .bench import Contender


@triton.jit
def _chunk(
    arena, table, q, o, m, l, k_base, v_base, page_elements, positions, keys, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    d, h = tl.arange(0, D), tl.arange(0, ROWS)
    query = tl.load(q + (head * GROUP + h)[:, None] * D + d[None, :], mask=h[:, None] < GROUP, other=0.0).to(tl.float32)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, CHUNK, TILE):
        k = chunk * CHUNK + start + tl.arange(0, TILE)
        row = tl.load(table + k // positions).to(tl.int64) * page_elements + (k % positions) * KV_HEADS * D + head * D
        key = tl.load(arena + k_base + row[:, None] + d[None, :]).to(tl.float32)
        value = tl.load(arena + v_base + row[:, None] + d[None, :]).to(tl.float32)
        score = tl.dot(query, tl.trans(key)) * scale
        top = tl.maximum(high, tl.max(score, 1))
        p = tl.exp(score - top[:, None])
        rescale = tl.exp(high - top)
        sums = sums * rescale[:, None] + tl.dot(p, value)
        total = total * rescale + tl.sum(p, 1)
        high = top
    out = (chunk * KV_HEADS + head) * GROUP + h
    tl.store(o + out[:, None] * D + d[None, :], sums, mask=h[:, None] < GROUP)
    tl.store(m + out, high, mask=h < GROUP)
    tl.store(l + out, total, mask=h < GROUP)


def paged_row(cache: LayerCache, q: Bf16Array, keys: int) -> Contender:
    """One row over all keys: partials by the kernel, merged by the reference."""
    g, layout = cache.layout.geometry, cache.layout
    assert cache.table is not None
    arena = torch.from_numpy(cache.buffer.view(np.int16)).view(torch.bfloat16)
    query = torch.from_numpy(np.ascontiguousarray(q).view(np.int16)).view(torch.bfloat16)
    table = torch.from_numpy(cache.table)
    chunks = keys // CHUNK
    o = torch.empty(chunks, g.query_heads, g.head_dim)
    m, l = torch.empty(chunks, g.query_heads), torch.empty(chunks, g.query_heads)
    bases = [layout.part(cache.layer, part).base for part in ("keys", "values")]

    def run() -> npt.NDArray[Any]:
        _chunk[(chunks, g.kv_heads)](
            arena, table, query, o, m, l, *bases, layout.page_elements, layout.page_size, keys, g.head_dim**-0.5,
            KV_HEADS=g.kv_heads, GROUP=g.group, ROWS=16, D=g.head_dim, CHUNK=CHUNK, TILE=TILE,
        )  # fmt: skip
        return merge(g, Partials(*(x.numpy()[None] for x in (o, m, l))))

    return run
