"""merge: put a row's partials together (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from .geometry import Geometry
from .numerics import bf16, widen
from .results import Bf16Array, Partials, require_merge


def merge(geometry: Geometry, partials: Partials) -> Bf16Array:
    """Merge chunk partials, in chunk order: rescale to the running maximum, add; then o / l.

    An empty partial (l == 0) is the identity, whatever its o holds.

    Args:
        partials: o [R, chunks, QH, D], m and l [R, chunks, QH], fp32 or float64.

    Returns:
        bf16 [R, QH, D]; 0 in a row whose every partial is empty.

    Raises:
        TypeError, ValueError: the partials do not fit (`results.require_merge`).
    """
    require_merge(geometry, partials)
    total = _chunk(partials, 0)
    for chunk in range(1, partials.m.shape[1]):
        total = _add(total, _chunk(partials, chunk))
    empty = (total.l == 0)[..., None]
    return bf16(np.where(empty, 0.0, total.o) / np.where(empty, 1.0, total.l[..., None]))


def _chunk(partials: Partials, chunk: int) -> Partials:
    """One chunk's partials in float64: o [R, QH, D], m and l [R, QH]."""
    return Partials(*(widen(x[:, chunk]) for x in (partials.o, partials.m, partials.l)))


def _add(a: Partials, b: Partials) -> Partials:
    """Two partials as one; where one is empty, the other's bits."""
    m = np.maximum(a.m, b.m)
    with np.errstate(invalid="ignore"):
        scale_a, scale_b = np.exp(a.m - m), np.exp(b.m - m)
        o = a.o * scale_a[..., None] + b.o * scale_b[..., None]
        total = a.l * scale_a + b.l * scale_b
    both = Partials(o, m, total)
    return _where(b.l == 0, a, _where(a.l == 0, b, both))


def _where(condition: np.ndarray, a: Partials, b: Partials) -> Partials:
    return Partials(
        o=np.where(condition[..., None], a.o, b.o),
        m=np.where(condition, a.m, b.m),
        l=np.where(condition, a.l, b.l),
    )
