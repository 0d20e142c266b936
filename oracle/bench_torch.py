"""What a PyTorch user would compare with: gather the pages, then scaled_dot_product_attention. Needs torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, KeyLists
from .bench import Contender


def sdpa_after_gather(cache: LayerCache, q: Bf16Array, keys: int) -> dict[str, Contender]:
    """One row over all keys, in bf16 and in fp32, on one thread."""
    g = cache.layout.geometry
    arena = torch.from_numpy(cache.buffer.view(np.int16)).view(torch.bfloat16)
    heads = torch.arange(g.kv_heads * g.head_dim)
    rows = [torch.from_numpy(cache.offsets(part, np.arange(keys))[:, :1]) + heads for part in ("keys", "values")]
    query = torch.from_numpy(np.ascontiguousarray(q).view(np.int16)).view(torch.bfloat16)
    query = query.reshape(1, g.query_heads, 1, g.head_dim)

    def attend(dtype: torch.dtype) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            k, v = (arena[at].reshape(1, keys, g.kv_heads, g.head_dim).transpose(1, 2).to(dtype) for at in rows)
            out = torch.nn.functional.scaled_dot_product_attention(query.to(dtype), k, v, enable_gqa=True)
            return out.float().numpy().reshape(1, g.query_heads, g.head_dim)
        finally:
            torch.set_num_threads(threads)

    return {
        "PyTorch bf16, gather + SDPA, 1 core": lambda: attend(torch.bfloat16),
        "PyTorch fp32, gather + SDPA, 1 core": lambda: attend(torch.float32),
    }


def sdpa_of_lists(cache: LayerCache, q: Bf16Array, lists: KeyLists) -> dict[str, Contender]:
    """Rows over their own keys, gathered and padded to the longest list, in bf16, on all threads; a row is a batch."""
    g, rows = cache.layout.geometry, len(q)
    arena = torch.from_numpy(cache.buffer.view(np.int16)).view(torch.bfloat16)
    heads = torch.arange(g.kv_heads * g.head_dim)
    count = int(lists.nk.max())
    listed = np.maximum(lists.ids[:, :count], 0)
    mask = torch.from_numpy(np.arange(count) < lists.nk[:, None])[:, None, None]
    at = [
        torch.from_numpy(cache.offsets(part, listed.ravel())[:, :1].reshape(rows, count, 1)) + heads
        for part in ("keys", "values")
    ]
    query = torch.from_numpy(np.ascontiguousarray(q).view(np.int16)).view(torch.bfloat16)
    query = query.reshape(rows, g.query_heads, 1, g.head_dim)

    def attend() -> Any:
        k, v = (arena[x].reshape(rows, count, g.kv_heads, g.head_dim).transpose(1, 2) for x in at)
        out = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
        return out.float().numpy().reshape(q.shape)

    return {"PyTorch bf16, gather + SDPA only, all cores": attend}
