"""gate: scale a window's attention output by its output gates (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from .geometry import Geometry
from .numerics import bf16, widen
from .prep import split
from .results import Bf16Array, require_gate


def gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> Bf16Array:
    """bf16(out * sigmoid(gate)), the gates taken from the projection rows.

    Args:
        out: bf16 [R, QH, D], from merge.
        projection: bf16 [R, projection_width].

    Returns:
        bf16 [R, QH, D].

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_gate`).
    """
    require_gate(geometry, out, projection)
    with np.errstate(over="ignore"):
        sigmoid = 1.0 / (1.0 + np.exp(-widen(split(geometry, projection).gate)))
    return bf16(widen(out) * sigmoid)
