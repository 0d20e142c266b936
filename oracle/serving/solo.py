"""A solo stream: contiguous, alone in its pool, appended the rows that a stream kept and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import fast
from ...fast import Engine, PagePool, Stream
from ...reference.geometry import Geometry, Rope, Weights
from ...reference.layout import BF16, LayerCache
from ..cases import weights_of

BANK = 509
"""Projection rows that all rows are taken from; a prime."""


@dataclass(frozen=True)
class Row:
    """One row of a conversation: which text it belongs to, and which version of the position it is."""

    seed: int
    version: int


class Model:
    """Weights, and the projection of any row, told by its text, layer, position and version."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = geometry
        self.weights: list[Weights] = [weights_of(geometry, rng) for _ in range(geometry.layers)]
        self._bank = rng.standard_normal((BANK, geometry.projection_width), dtype=np.float32).astype(BF16)

    def projection(self, rows: Sequence[Row], pos0: int, layer: int) -> npt.NDArray[Any]:
        """Of rows that stand at pos0 and on: bf16 [rows, projection_width]."""
        at = [(row.seed * 131 + (pos0 + i) * 37 + layer * 11 + row.version * 197) % BANK for i, row in enumerate(rows)]
        projection: npt.NDArray[Any] = self._bank[at]
        return projection


class Solo:
    """What a stream that keeps some rows must hold and give."""

    def __init__(self, model: Model, *, rope: Rope, context: int, engine: Engine) -> None:
        self._model = model
        self._rope = rope
        self._context = context
        self._engine = engine
        self._held: list[Row] = []
        self._stream = self._fresh()

    def outputs(self, rows: Sequence[Row], pos0: int) -> list[npt.NDArray[Any]]:
        """The gated rows from pos0 on, of each layer, where these are all rows so far."""
        self.hold(rows[:pos0])
        return self._append(rows[pos0:])

    def hold(self, rows: Sequence[Row]) -> None:
        """Hold these rows; a stream that cannot come to them by appending is made anew."""
        known = len(self._held)
        if self._held != list(rows[:known]):
            self._stream, self._held, known = self._fresh(), [], 0
        if len(rows) > known:
            self._append(rows[known:])

    def cache(self, layer: int) -> LayerCache:
        """One layer of its cache."""
        return self._stream.cache(layer)

    def _append(self, rows: Sequence[Row]) -> list[npt.NDArray[Any]]:
        layers = range(self._model.geometry.layers)
        projections = [self._model.projection(rows, len(self._held), layer) for layer in layers]
        windows = fast.append([(self._stream, projections)])[0]
        self._held += rows
        return [window.gated for window in windows]

    def _fresh(self) -> Stream:
        pool = PagePool(self._model.geometry, streams=1, context=self._context, engine=self._engine)
        return Stream(pool, self._model.weights, rope=self._rope)
