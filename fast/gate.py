"""gate on a backend; see `kvproof.reference.gate` and cuda/gate.cu."""

from __future__ import annotations

from ..reference.geometry import Geometry
from ..reference.layout import BF16
from ..reference.results import Bf16Array, require_gate
from .backend import Pointer
from .engine import Engine, default_engine


def gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array, *, engine: Engine | None = None) -> Bf16Array:
    """Gate the merged rows; arguments, results and errors are those of `kvproof.reference.gate`.

    Raises:
        LaunchError: the kernel failed.
    """
    engine = engine or default_engine()
    rows = require_gate(geometry, out, projection, engine.place)
    gated = engine.empty((rows, geometry.query_heads, geometry.head_dim), BF16)
    engine.launch(
        geometry,
        "gate",
        "fn_attn_gate",
        grid=(geometry.query_heads, rows, 1),
        args=[Pointer(out), Pointer(projection), Pointer(gated)],
    )
    return gated
