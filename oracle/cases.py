"""The cases that the contract runs: cached lengths on both sides of every edge, and the data they hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..reference.geometry import Geometry, Rope, Weights
from ..reference.layout import BF16

PAGE_SIZES = (16, 48, 128, 256, 512)
"""Page sizes of the pull request's own suite, in positions."""

CHECK_LAYERS = 2
"""Layers that a checked arena holds, so that a layer's part of a page does not start at the page."""


RopeMode = Literal["text", "delta", "media"]
Profile = Literal["normal", "heavy", "tied", "zeros", "tiny", "huge"]
PROFILES: tuple[Profile, ...] = ("normal", "heavy", "tied", "zeros", "tiny", "huge")


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """One stream: `cached` positions of history, then a window of `rows` rows.

    Attributes:
        rope: how its rows are rotated.
        profile: what its data look like. "tied": all but half a budget of its blocks have zero indexer keys, so that
            the selection's cut falls among equal scores; "heavy": a few rows outweigh all others; "zeros": half of
            all elements are zeros of either sign; "tiny" and "huge": other magnitudes.
    """

    cached: int
    rows: int
    rope: RopeMode = "text"
    profile: Profile = "normal"

    @property
    def end(self) -> int:
        """Positions that the stream holds after its window."""
        return self.cached + self.rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """Streams that share one arena.

    Attributes:
        name: how `--case` calls it.
        edge: the edge it stands on, for people.
        streams: interleaved page by page in the arena.
        dense_rows: rows of plain grouped-query attention over a stream's whole length, for the dense form.
    """

    name: str
    edge: str
    streams: tuple[StreamCase, ...]
    dense_rows: int = 2


def cases(geometry: Geometry) -> tuple[Case, ...]:
    """The six cases at one geometry; lengths follow its block and budget, and SPEC's tile of 64 and chunk of 512."""
    block, sparse_from = geometry.block, geometry.budget + geometry.block - 1
    return (
        Case(
            name="start",
            edge="an empty cache; the first block; a prompt chunk of a whole tile",
            streams=(StreamCase(cached=0, rows=1), StreamCase(cached=0, rows=64)),
        ),
        Case(
            name="block-tile",
            edge="both sides of a block and of a tile of 64",
            streams=(
                StreamCase(cached=max(0, 64 - block), rows=2 * block),
                StreamCase(cached=126, rows=3, rope="delta"),
            ),
        ),
        Case(
            name="page-chunk",
            edge="both sides of a chunk of 512 and of pages of 16, 48, 128, 256 and 512",
            streams=(StreamCase(cached=508, rows=6, rope="media"), StreamCase(cached=1023, rows=2)),
        ),
        Case(
            name="sparse",
            edge="both sides of the dense/sparse boundary",
            streams=(
                StreamCase(cached=sparse_from - 5, rows=10),
                StreamCase(cached=sparse_from, rows=1),
            ),
        ),
        Case(
            name="prompt",
            edge="a prompt chunk of 64 rows, and a decode step whose scores tie at the cut",
            streams=(StreamCase(cached=2 * sparse_from, rows=64), StreamCase(cached=3001, rows=1, profile="tied")),
            dense_rows=1,
        ),
        Case(
            name="9000",
            edge="both sides of 9,000 cached positions: 18 chunks, the last partly filled",
            streams=(StreamCase(cached=8989, rows=11), StreamCase(cached=9000, rows=1)),
            dense_rows=1,
        ),
    )


QUICK = ("block-tile", "sparse")
"""Cases of `kvproof check --quick`."""


def at_check(geometry: Geometry) -> Geometry:
    """The geometry with as many layers as a checked arena holds."""
    return dataclasses.replace(geometry, layers=CHECK_LAYERS)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamData:
    """What one stream holds and is given.

    Attributes:
        case: lengths.
        history: per layer, keys, values [cached, KH, D], index_keys [cached, 1, DI], bf16.
        projection: bf16 [rows, projection_width], the window.
        rope: rotary positions.
    """

    case: StreamCase
    history: tuple[dict[str, npt.NDArray[np.generic]], ...]
    projection: npt.NDArray[np.generic]
    rope: Rope = field(default_factory=Rope)


@dataclass(frozen=True, kw_only=True, eq=False)
class CaseData:
    """A case filled with N(0, 1) data; the same seed gives the same bytes."""

    geometry: Geometry
    case: Case
    weights: Weights
    streams: tuple[StreamData, ...]


def fill(geometry: Geometry, case: Case, *, seed: int) -> CaseData:
    """Data of a case at a geometry: N(0, 1) rows, norm weights around 1."""
    key = [seed, *case.name.encode(), geometry.head_dim, geometry.query_heads]
    rng = np.random.Generator(np.random.PCG64(key))
    weights = weights_of(geometry, rng)
    streams = tuple(_stream(geometry, stream, rng) for stream in case.streams)
    return CaseData(geometry=geometry, case=case, weights=weights, streams=streams)


def weights_of(geometry: Geometry, rng: np.random.Generator) -> Weights:
    """Norm weights around 1, and the geometry's rotary frequencies."""

    def scale(width: int) -> npt.NDArray[np.float32]:
        return (1.0 + 0.25 * rng.standard_normal(width)).astype(np.float32)

    return Weights(
        q_scale=scale(geometry.head_dim),
        k_scale=scale(geometry.head_dim),
        i_scale=scale(geometry.index_dim),
        pool_scale=scale(geometry.index_dim),
        inv_freq=geometry.inv_freq(),
    )


def _stream(geometry: Geometry, case: StreamCase, rng: np.random.Generator) -> StreamData:
    g = geometry
    history = tuple(
        {
            "keys": _shaped(case, _normal(rng, (case.cached, g.kv_heads, g.head_dim)), rng),
            "values": _shaped(case, _normal(rng, (case.cached, g.kv_heads, g.head_dim)), rng),
            "index_keys": _index_keys(geometry, case, rng),
        }
        for _ in range(g.layers)
    )
    return StreamData(
        case=case,
        history=history,
        projection=_shaped(case, _normal(rng, (case.rows, g.projection_width)), rng),
        rope=_rope(case, rng),
    )


def _index_keys(geometry: Geometry, case: StreamCase, rng: np.random.Generator) -> npt.NDArray[Any]:
    keys = _shaped(case, _normal(rng, (case.cached, 1, geometry.index_dim)), rng)
    blocks = case.cached // geometry.block
    if case.profile == "tied" and blocks:
        kept = rng.choice(blocks, min(blocks, geometry.top_blocks // 2), replace=False)
        keys[~np.isin(np.arange(case.cached) // geometry.block, kept)] = 0.0
    return keys


def _shaped(case: StreamCase, rows: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    """Rows [n, ...] as the stream's profile wants them."""
    if case.profile == "heavy" and len(rows):
        rows[rng.integers(0, len(rows), max(1, len(rows) // 16))] *= BF16.type(16.0)
    elif case.profile == "zeros":
        rows[rng.random(rows.shape) < 0.5] = -0.0
    elif case.profile == "tiny":
        rows *= BF16.type(2.0**-20)
    elif case.profile == "huge":
        rows *= BF16.type(2.0**10)
    return rows


def _rope(case: StreamCase, rng: np.random.Generator) -> Rope:
    if case.rope == "delta":
        return Rope(mode="delta", delta=-5)
    if case.rope == "media":  # the prompt ends inside the window, so both kinds of row occur
        triples = rng.integers(0, case.end, (case.end - case.rows // 2, 3)).astype(np.int32)
        return Rope(mode="media", delta=-3, triples=triples)
    return Rope()


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)
