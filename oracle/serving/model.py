"""A small greedy language model whose attention layers are the kernels: what `kvproof serve-check` serves.

Its bits do not depend on which rows are computed together. All of it beside the kernels is integers held in floating
point, or one IEEE operation on each element: a matrix product sums integers whose partial sums, in any order, stay
within what the type holds exactly. That is checked when the model is made.

The last layer is the MTP draft head's. Its row p takes the main model's hidden row p and token p + 1, and predicts
token p + 2, as main row p + 1 does. Both see the same tables of word pairs, so that drafts are right now and then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...reference.geometry import Geometry, Weights
from ...reference.layout import BF16
from ...reference.results import Bf16Array
from ..cases import weights_of

Hidden: TypeAlias = npt.NDArray[np.float64]
"""Rows of the residual stream, float64 [R, hidden], all integers."""
Tokens: TypeAlias = npt.NDArray[np.int64]

LIMIT = 127
"""Largest integer that a matrix product is given."""
EXACT_FLOAT32 = 2**24
EXACT_FLOAT64 = 2**53

WIDE = 1024
"""Elements of a row's attention output from which the residual stream is wide."""

_NORM = 32.0
"""Root mean square of a quantised row."""
_ATTENTION = 64.0
"""Steps of the quantised attention output between 0 and 1."""
_WEIGHT = 3
"""Largest integer of a weight matrix, and its root mean square."""
_WEIGHT_RMS = 2.0
_STREAM = 512.0
"""Root mean square of the embedding."""
_SHARE = 2.0
"""What a layer's attention adds, in units of the embedding: enough that the text depends on what was long ago."""
_SHARPNESS = 1.5
"""Factor of the query norm's weights: attention that is nearly even would hardly tell one key from another."""
_PAIRS = 2.5
"""Weight of the tables of word pairs, in units of what the hidden row says."""
_TURNS = 13
"""Tables of word pairs, which take turns by position, so that no text falls into a short cycle."""


class ServeModel:
    """The model; the same arguments give the same bits everywhere.

    Args:
        geometry: of the attention layers, the last of which is the draft head's.
        seed: of all weights.
        vocabulary: tokens.
        hidden: width of the residual stream; 64 or, for wide geometries, 256 when None.

    Attributes:
        weights: norm weights of each layer, on the host.

    Raises:
        ValueError: there is no layer beside the draft head's, a size is out of its range, or sums might not be exact.
    """

    def __init__(self, geometry: Geometry, *, seed: int = 0, vocabulary: int = 128, hidden: int | None = None) -> None:
        attention = geometry.query_heads * geometry.head_dim
        width = hidden if hidden is not None else 64 if attention < WIDE else 256
        _require(geometry, seed, vocabulary, width)
        self.geometry = geometry
        self.seed = seed
        self.vocabulary = vocabulary
        self.hidden = width
        rng = np.random.Generator(np.random.PCG64([seed, geometry.head_dim, geometry.query_heads, geometry.layers]))
        self.weights: tuple[Weights, ...] = tuple(_sharp(weights_of(geometry, rng)) for _ in range(geometry.layers))
        self._into = [_matrix(rng, width, geometry.projection_width) for _ in range(geometry.layers)]
        self._out_of = [_matrix(rng, attention, width) for _ in range(geometry.layers)]
        self._head_hidden = _matrix(rng, width, width)
        self._head_token = _matrix(rng, width, width)
        self._unembed = [_matrix(rng, width, vocabulary), _matrix(rng, width, vocabulary)]
        self._embedding = np.rint(_STREAM * rng.standard_normal((vocabulary, width)))
        spread = _PAIRS * _NORM * _WEIGHT_RMS * math.sqrt(width)
        self._pairs = np.rint(spread * rng.standard_normal((_TURNS, vocabulary, vocabulary)))
        self._to_unit = np.float32(_power_of_two(_NORM * _WEIGHT_RMS * math.sqrt(width)))
        self._to_stream = _power_of_two(_NORM * _WEIGHT_RMS * math.sqrt(attention) / (_SHARE * _STREAM))
        self._head_scale = _power_of_two(_NORM * _WEIGHT_RMS * math.sqrt(2 * width) / _STREAM)

    @property
    def main_layers(self) -> tuple[int, ...]:
        """Layers of the main model."""
        return tuple(range(self.geometry.layers - 1))

    @property
    def head_layer(self) -> int:
        """The draft head's layer."""
        return self.geometry.layers - 1

    def embed(self, tokens: Sequence[int] | Tokens) -> Hidden:
        """Hidden rows [R, hidden] that the first layer is given."""
        rows: Hidden = self._embedding[np.asarray(tokens, np.int64)]
        return rows

    def head_input(self, hidden: Hidden, following: Sequence[int] | Tokens) -> Hidden:
        """Rows [R, hidden] that the draft head's layer is given.

        Args:
            hidden: of the main model's last layer, or the head's own output in its place.
            following: the token that follows each row's.
        """
        mixed = _quantised(hidden) @ self._head_hidden + _quantised(self.embed(following)) @ self._head_token
        rows: Hidden = np.rint(mixed.astype(np.float64) * self._head_scale)
        return rows

    def projection(self, layer: int, hidden: Hidden) -> Bf16Array:
        """What the layer's kernels are given, bf16 [R, projection_width]."""
        scaled: Bf16Array = ((_quantised(hidden) @ self._into[layer]) * self._to_unit).astype(BF16)
        return scaled

    def absorb(self, layer: int, hidden: Hidden, gated: Bf16Array) -> Hidden:
        """Hidden rows behind the layer.

        Args:
            gated: the kernels' output, bf16 [R, QH, D].
        """
        flat = gated.reshape(len(gated), -1).astype(np.float32)
        steps = np.clip(np.rint(flat * np.float32(_ATTENTION)), -LIMIT, LIMIT)
        added = np.rint((steps @ self._out_of[layer]).astype(np.float64) * self._to_stream)
        behind: Hidden = hidden + added
        return behind

    def next_tokens(self, hidden: Hidden, tokens: Sequence[int] | Tokens, positions: Sequence[int] | Tokens) -> Tokens:
        """The main model's token after each row, int64 [R]; the lowest where logits tie.

        Args:
            hidden: behind the last main layer.
            tokens, positions: each row's.
        """
        return self._greedy(0, hidden, tokens, positions)

    def draft_tokens(
        self, hidden: Hidden, following: Sequence[int] | Tokens, positions: Sequence[int] | Tokens
    ) -> Tokens:
        """The draft head's token after `following`, int64 [R].

        Args:
            hidden: behind the head's layer.
            following: the token that follows each row's.
            positions: of the tokens that follow.
        """
        return self._greedy(1, hidden, following, positions)

    def _greedy(
        self, which: int, hidden: Hidden, tokens: Sequence[int] | Tokens, positions: Sequence[int] | Tokens
    ) -> Tokens:
        said = (_quantised(hidden) @ self._unembed[which]).astype(np.float64)
        logits = said + self._pairs[np.asarray(positions, np.int64) % _TURNS, np.asarray(tokens, np.int64)]
        best: Tokens = logits.argmax(axis=1)
        return best


def require_exact(name: str, terms: int, weight: int, limit: int = EXACT_FLOAT32) -> None:
    """Raise ValueError unless every partial sum of a matrix product is exact, in any order.

    Args:
        terms: products that one sum has; each is of an integer up to LIMIT and one up to `weight`.
        limit: the first integer beyond which not all are held.
    """
    largest = terms * LIMIT * weight
    if largest >= limit:
        raise ValueError(
            f"{name}: {terms} products of integers up to {LIMIT} and {weight} may add up to {largest}, which is not "
            f"below {limit}: sums would depend on their order. Make the model narrower"
        )


def _require(geometry: Geometry, seed: int, vocabulary: int, hidden: int) -> None:
    if geometry.layers < 2:
        raise ValueError(
            f"geometry {geometry.name!r} has {geometry.layers} layer; the model needs at least 2, the last of which is "
            "the draft head's"
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    if vocabulary < 2:
        raise ValueError(f"vocabulary is {vocabulary}; it must be at least 2")
    if hidden < 1:
        raise ValueError(f"hidden is {hidden}; it must be at least 1")
    require_exact("projections", hidden, _WEIGHT)
    require_exact("draft head", 2 * hidden, _WEIGHT)
    require_exact("attention output", geometry.query_heads * geometry.head_dim, _WEIGHT)


def _quantised(hidden: Hidden) -> npt.NDArray[np.float32]:
    """Rows of integers up to LIMIT, of about the same size whatever the rows' own."""
    squares = np.einsum("ij,ij->i", hidden, hidden)  # integers below 2**53: exact in any order
    scale = _NORM / np.sqrt(np.maximum(squares, 1.0) / hidden.shape[1])
    steps: npt.NDArray[np.float32] = np.clip(np.rint(hidden * scale[:, None]), -LIMIT, LIMIT).astype(np.float32)
    return steps


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float32]:
    return rng.integers(-_WEIGHT, _WEIGHT, (rows, columns), np.int8, endpoint=True).astype(np.float32)


def _sharp(weights: Weights) -> Weights:
    return dataclasses.replace(weights, q_scale=weights.q_scale * np.float32(_SHARPNESS))


def _power_of_two(size: float) -> float:
    """What brings numbers of this size near 1 without rounding them."""
    return float(2.0 ** -round(math.log2(size)))
