"""What a kernel's fp32 arithmetic promises: the parameter of every error bound.

A sum is described by its lanes: term i joins chain i mod lanes, and the chains' ends are added pairwise. One lane is a
chain in order, as many lanes as terms a pairwise tree; None says nothing, so that any order is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.geometry import TILE, FloatArray
from .elementary import EXP_ERROR, EXP_FLOOR, TURN_ERROR

PAIRWISE = 2**31
"""As many lanes as a sum has terms: a pairwise tree."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What a kernel's arithmetic promises; the defaults fit any careful fp32 kernel.

    Attributes:
        unit: unit roundoff of the accumulator.
        tiny: absolute error of one operation whose result is subnormal.
        exp: relative error of exp where its result is normal.
        exp_floor: absolute error of exp below that.
        turn: relative error of cos and sin.
        probability: unit roundoff of the weights as the value product takes them; 2**-8 for bf16, 0 where they stay in
            the accumulator's format. The block-sparse form rounds them to bf16 by definition, which is carried exactly.
        probability_floor: absolute error of a weight whose rounding makes it subnormal, as fp16 does early.
        fused: products are added by fused multiply-adds, so that they have no rounding of their own.
        dot_lanes: of a dot product over head_dim or index_dim.
        square_lanes: of the sum of squares of a norm.
        value_lanes: of the value product, over the keys of a tile.
        weight_lanes: of the normaliser, over the keys of a tile.
        tile: keys between two rescalings of a plain attention kernel, which adds up tile by tile; None: any number.
            The block-sparse form rescales every 64 keys by definition.

    Raises:
        ValueError: an error below 0 or infinite, or lanes or a tile that are no whole number from 1.
    """

    unit: float = 2.0**-24
    tiny: float = 2.0**-149
    exp: float = 2.0**-22
    exp_floor: float = 2.0**-126
    turn: float = 2.0**-22
    probability: float = 2.0**-8
    probability_floor: float = 2.0**-25
    fused: bool = False
    dot_lanes: int | None = None
    square_lanes: int | None = None
    value_lanes: int | None = None
    weight_lanes: int | None = None
    tile: int | None = None

    def __post_init__(self) -> None:
        for name in ("unit", "tiny", "exp", "exp_floor", "turn", "probability", "probability_floor"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"arithmetic: {name} is {getattr(self, name)}; an error must be a number from 0")
        for name in ("dot_lanes", "square_lanes", "value_lanes", "weight_lanes", "tile"):
            count = getattr(self, name)
            if count is not None and not (type(count) is int and count >= 1):
                raise ValueError(
                    f"arithmetic: {name} is {count!r}; it must be a whole number from 1, or None where it is not known"
                )

    def gamma(self, n: npt.ArrayLike) -> Any:
        """Relative error of n roundings on top of each other, elementwise: n u / (1 - n u), inf where n u reaches 1."""
        nu = np.multiply(n, self.unit)
        return np.where(nu < 1.0, nu / np.where(nu < 1.0, 1.0 - nu, 1.0), np.inf)

    def sum_depths(self, n: int, lanes: int | None) -> FloatArray:
        """Additions that round on the way of each of n terms to their sum: float64 [n].

        Adding the first term of a chain to 0 rounds nothing.
        """
        if lanes is None:
            return np.full(n, float(max(n - 1, 0)))
        passed = np.maximum(np.arange(n, dtype=np.float64) // lanes, 1.0)
        return self._chain(n, lanes) + self._ends(n, lanes) - passed

    def product_depths(self, n: int, lanes: int | None) -> FloatArray:
        """Roundings of each of n products on the way to their sum, its own included: float64 [n]."""
        if lanes is not None and self.fused:
            return self._chain(n, lanes) + self._ends(n, lanes) - np.arange(n, dtype=np.float64) // lanes
        return 1.0 + self.sum_depths(n, lanes)

    @staticmethod
    def _chain(n: int, lanes: int) -> float:
        return float(max(-(-n // lanes), 1))

    @staticmethod
    def _ends(n: int, lanes: int) -> float:
        """Depth of the pairwise tree over the chains' ends."""
        return float(max(min(n, lanes) - 1, 0).bit_length())

    @property
    def join(self) -> int:
        """Roundings of a * x + y: scaling what came before and adding to it."""
        return 1 if self.fused else 2


FP32 = Arithmetic()
"""Any fp32 kernel: sums in any order, every product rounded."""

OURS = Arithmetic(
    tiny=2.0**-150,
    exp=EXP_ERROR,
    exp_floor=EXP_FLOOR,
    turn=TURN_ERROR,
    fused=True,
    dot_lanes=8,
    square_lanes=PAIRWISE,
    value_lanes=1,
    weight_lanes=PAIRWISE,
    tile=TILE,
)
"""The kernels of `fast/cuda`: tile.cuh, arithmetic.cuh and chunks.cu say the same in words."""


def arithmetic_of(kernels: object) -> Arithmetic:
    """What an implementation declares as its `arithmetic`, else `FP32`."""
    declared = getattr(kernels, "arithmetic", FP32)
    if not isinstance(declared, Arithmetic):
        raise TypeError(f"the kernels' arithmetic is a {type(declared).__name__}; it must be an Arithmetic")
    return declared
