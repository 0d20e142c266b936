"""merge on a backend; see `kvproof.reference.merge` and cuda/merge.cu."""

from __future__ import annotations

from ..reference.geometry import Geometry
from ..reference.layout import BF16
from ..reference.results import Bf16Array, Partials, require_fp32, require_merge
from .backend import Pointer
from .engine import Engine, default_engine, int32


def merge(geometry: Geometry, partials: Partials, *, engine: Engine | None = None) -> Bf16Array:
    """Merge chunk partials; arguments, results and errors are those of `kvproof.reference.merge`.

    Raises:
        ValueError: the partials are not fp32.
        LaunchError: the kernel failed.
    """
    engine = engine or default_engine()
    rows = require_merge(geometry, partials, engine.place)
    for name in ("o", "m", "l"):
        require_fp32(f"partials.{name}", getattr(partials, name))
    out = engine.empty((rows, geometry.query_heads, geometry.head_dim), BF16)
    engine.launch(
        geometry,
        "merge",
        "fn_attn_merge",
        grid=(geometry.query_heads, rows, 1),
        args=[
            Pointer(partials.o),
            Pointer(partials.m),
            Pointer(partials.l),
            int32(partials.chunks),
            Pointer(out),
        ],
    )
    return out
