"""What `kvproof serve-check` serves: prompts whose lengths stand on every edge, and images among their text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ...reference.geometry import CHUNK, TEXT, TILE, Geometry, Rope
from .model import ServeModel

PROMPTS = 8
TOKENS = 32
LAYERS = 4
"""Attention layers of a small geometry when it is served: three and the draft head's."""
LONG_PROMPT = 4096
LONG_BUDGET = 512
"""A geometry that reads more positions than this is served one long prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt.

    Attributes:
        number: its place in the plan.
        name: "text 3" or "media 3".
        tokens: of the prompt.
        limit: tokens to generate.
        rope: rotary positions of its stream.
    """

    number: int
    name: str
    tokens: tuple[int, ...]
    limit: int
    rope: Rope = TEXT

    @property
    def end(self) -> int:
        """Positions that a pool must have room for."""
        return len(self.tokens) + self.limit

    @property
    def image(self) -> bool:
        """Whether there is an image among its text."""
        return self.rope.mode == "media"


def shortened(request: Request, tokens: int) -> Request:
    """The prompt with at most so many tokens to generate."""
    return dataclasses.replace(request, limit=min(tokens, request.limit))


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is served.

    Attributes:
        geometry: with as many layers as are served.
        prompts: of text, and as many with images.
        tokens: that each generates.
        seed: of the weights, the tokens, the tables and the schedule.
        edges: lengths on either side of which the text prompts stand in turns; those of the geometry when empty.

    Raises:
        ValueError: a number is out of its range.
    """

    geometry: Geometry
    prompts: int = PROMPTS
    tokens: int = TOKENS
    seed: int = 0
    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("tokens", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def long(self) -> bool:
        """Whether one long prompt is served, which takes minutes."""
        return self.geometry.budget > LONG_BUDGET


def at_serving(geometry: Geometry) -> Geometry:
    """The geometry with as many layers as are served: a small one gets LAYERS."""
    return geometry if geometry.budget > LONG_BUDGET else dataclasses.replace(geometry, layers=LAYERS)


def text_requests(plan: ServePlan, model: ServeModel) -> list[Request]:
    """Prompts of text; those of the same plan are the same everywhere."""
    return [
        Request(
            number=i,
            name=f"text {i}",
            tokens=_tokens(plan, model, i, length),
            limit=plan.tokens,
            rope=Rope(mode="delta", delta=-3) if i % 4 == 3 else TEXT,
        )
        for i, length in enumerate(_lengths(plan))
    ]


def media_requests(plan: ServePlan, model: ServeModel) -> list[Request]:
    """Prompts with an image in the middle of their text."""
    made = []
    for i in range(plan.prompts):
        length = _ragged(plan, i + plan.prompts, 40 + 48 * (i % 8) if i % 8 < 7 else CHUNK + 4)
        number = plan.prompts + i
        rope = media_rope(length, image=(length // 3, max(1, length // 24), 4))
        made.append(
            Request(
                number=number,
                name=f"media {i}",
                tokens=_tokens(plan, model, number, length),
                limit=plan.tokens,
                rope=rope,
            )
        )
    return made


def media_rope(length: int, *, image: tuple[int, int, int]) -> Rope:
    """Rotary positions of a prompt with one image.

    Args:
        length: of the prompt.
        image: its first position, its height and its width in positions.
    """
    first, height, width = image
    size = min(height * width, length - first)
    triples = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
    cells = np.arange(size)
    triples[first : first + size] = first + np.stack([0 * cells, cells // width, cells % width], axis=1)
    following = int(triples[: first + size].max()) + 1
    triples[first + size :] = following + np.arange(length - first - size)[:, None]
    after = int(triples.max()) + 1
    return Rope(mode="media", delta=after - length, triples=triples)


def _lengths(plan: ServePlan) -> list[int]:
    if plan.long:
        return [LONG_PROMPT + i for i in range(plan.prompts)]
    geometry = plan.geometry
    sparse_from = geometry.budget + geometry.block - 1
    edges = plan.edges or (
        sparse_from,
        TILE,
        4 * CHUNK + geometry.budget,
        2 * TILE,
        CHUNK,
        3 * 48,
        256,
        2 * geometry.block,
    )
    return [_ragged(plan, i, edges[i % len(edges)]) for i in range(plan.prompts)]


def _ragged(plan: ServePlan, number: int, edge: int) -> int:
    """A length on either side of an edge."""
    away = np.random.Generator(np.random.PCG64([plan.seed, number, 7])).integers(-2, 3)
    return max(2, edge + int(away))


def _tokens(plan: ServePlan, model: ServeModel, number: int, length: int) -> tuple[int, ...]:
    rng = np.random.Generator(np.random.PCG64([plan.seed, number, 11]))
    return tuple(rng.integers(0, model.vocabulary, length).tolist())
