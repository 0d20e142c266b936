"""chunks on a backend, plain and with the next tile loaded ahead; see `kvproof.reference.chunks` and cuda/chunks.cu."""

from __future__ import annotations

import numpy as np

from ..reference.geometry import Geometry
from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, KeyLists, Partials, list_chunks, require_chunks
from .backend import Pointer
from .engine import Engine, default_engine, int32, part_pointer
from .sources import staged_bytes


def chunks(
    geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, *, engine: Engine | None = None
) -> Partials:
    """Attend each row's keys, chunk by chunk, fp32; arguments and errors are those of `kvproof.reference.chunks`.

    Raises:
        LaunchError: the kernel failed.
    """
    return _launch("fn_attn_chunks", geometry, cache, q, lists, engine or default_engine())


def chunks_ahead(
    geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, *, engine: Engine | None = None
) -> Partials:
    """`chunks` by the kernel that loads the next tile while one is summed: the same bits."""
    return _launch("fn_attn_chunks_ahead", geometry, cache, q, lists, engine or default_engine())


def _launch(
    entry: str, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, engine: Engine
) -> Partials:
    rows = require_chunks(geometry, cache, q, lists, engine.place)
    shape = (rows, list_chunks(lists), geometry.query_heads)
    partials = Partials(
        o=engine.empty((*shape, geometry.head_dim), np.float32),
        m=engine.empty(shape, np.float32),
        l=engine.empty(shape, np.float32),
    )
    engine.launch(
        geometry,
        "chunks",
        entry,
        grid=(shape[1], geometry.kv_heads, rows),
        args=[
            part_pointer(cache, "keys"),
            part_pointer(cache, "values"),
            engine.pages(cache, lists.end),
            Pointer(q),
            Pointer(lists.ids),
            int32(lists.capacity),
            Pointer(lists.nk),
            Pointer(lists.sparse),
            Pointer(partials.o),
            Pointer(partials.m),
            Pointer(partials.l),
            int32(shape[1]),
        ],
        shared=staged_bytes(geometry),
    )
    return partials
