"""Inputs made to bring each kernel as near to its bound as they can: how loose is the bound at worst?

An attack is a recipe: a few numbers that say how inputs are laid out. `adversary_search` draws the numbers and climbs
towards a larger error / bound; the largest that a long search found are kept in `RECORDED` and replayed.

Rounding errors line up where a sum stays just above a power of two and every further term lies just above half an ulp
of it: each addition then rounds up by almost half an ulp, as the bound supposes. A term just below half an ulp is
lost, and the sum errs downwards by as much. All these terms are numbers of bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..reference.geometry import TEXT, TILE, FloatArray, Weights
from ..reference.layout import LayerCache, Layout, Part
from ..reference.numerics import bf16, widen
from ..reference.results import Bf16Array, KeyLists, Partials
from . import bounds
from .accuracy import GEOMETRY, Judged, before_rounding
from .arithmetic import Arithmetic, arithmetic_of
from .cases import weights_of
from .interval import Interval, half_ulp
from .operations import Array, Kernels

AIM = 20.0
"""A bound should be at most this many times as wide as the largest error found."""

LANES = 8
"""Chains of our dot products."""

HALF_ULP = 2.0**-24
"""Half an ulp of fp32 above 1: what a term must pass to move a sum that lies there."""

UP, LOST = HALF_ULP * (1 + 2.0**-7), HALF_ULP * (1 - 2.0**-8)
"""The numbers of bf16 next to it."""


class Attack(Protocol):
    """A recipe of inputs; `judge` runs the kernels on them, and bounds what kernels of an arithmetic may give."""

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]: ...


def cache_of(parts: Mapping[Part, FloatArray], positions: int) -> LayerCache:
    """A contiguous cache of GEOMETRY that holds these rows, from row 0 on, rounded to bf16."""
    layout = Layout.contiguous(GEOMETRY, positions)
    cache = LayerCache(buffer=layout.zeros(), layout=layout)
    for part, rows in parts.items():
        cache.write(part, np.arange(len(rows)), bf16(rows))
    return cache


def aligned(width: int, ups: tuple[int, ...]) -> FloatArray:
    """A row [width] whose dot product with ones rounds the same way everywhere: lane j starts at 1, then come ups[j]
    terms that round it up; where ups[j] is below 0, -ups[j] terms that are lost.
    """
    row = np.zeros((width // LANES, LANES))
    row[0] = 1.0
    for lane, count in enumerate(ups):
        row[1 : 1 + abs(count), lane] = UP if count > 0 else LOST
    return row.ravel()


@dataclass(frozen=True, kw_only=True)
class ScoreErrors:
    """chunks and merge: one key scores a little more than all others, whose scores err the other way.

    Query head h is 2**(exponent + h % group) all over, so that one attack tries many magnitudes.

    Attributes:
        keys: how many.
        top: the key with the largest score.
        ups: terms of each lane that round up, of the others' keys; the top key's terms are lost.
        swap: the top key's terms round up, the others' are lost.
        gap: the top key's first lane holds 2**-gap more.
        steps: other keys lie 0 to steps - 1 gaps below.
        value: exponent of the top key's value, of the other sign; the others' are 1.
        exponent: of the queries.
    """

    keys: int
    top: int
    ups: tuple[int, ...]
    swap: bool
    gap: int
    steps: int
    value: int
    exponent: int

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        up, lost = aligned(GEOMETRY.head_dim, self.ups), aligned(GEOMETRY.head_dim, tuple(-n for n in self.ups))
        top, other = (up, lost) if self.swap else (lost, up)
        rows = np.tile(other, (self.keys, 1))
        at = self.top % self.keys
        rows[:, -LANES] = -(2.0**-self.gap) * (np.arange(self.keys) % self.steps)
        rows[at] = top
        rows[at, -LANES] = 2.0**-self.gap
        values = np.ones_like(rows)
        values[at] = -(2.0**self.value)
        heads = np.exp2(self.exponent + np.arange(GEOMETRY.query_heads) % GEOMETRY.group)
        return _attended(kernels, arithmetic, heads, rows, values)


@dataclass(frozen=True, kw_only=True)
class ValueErrors:
    """chunks: all scores are 0, so that weights and normaliser are exact and o errs by its sums alone.

    Attributes:
        keys: how many, up to a chunk.
        ups: of them in each tile, behind its first, that round the tile's sum up.
        later: exponent by which later tiles are smaller than the first.
    """

    keys: int
    ups: int
    later: int

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        place = np.arange(self.keys) % TILE
        column = np.where(place == 0, 1.0, np.where(place <= self.ups, UP, 0.0))
        column[TILE:] *= 2.0**self.later
        rows = np.zeros((self.keys, GEOMETRY.head_dim))
        found = _attended(kernels, arithmetic, np.ones(GEOMETRY.query_heads), rows, rows + column[:, None])
        return {"chunks.o, equal scores": found["chunks.o"]}


def _attended(
    kernels: Kernels, arithmetic: Arithmetic, heads: FloatArray, keys: FloatArray, values: FloatArray
) -> dict[str, Judged]:
    """Partials and row of one query, heads[h] all over for head h, over keys and values [n, D] of every kv head."""
    g = GEOMETRY
    wide = (len(keys), g.kv_heads, g.head_dim)
    parts: dict[Part, FloatArray] = {"keys": keys, "values": values}
    cache = cache_of({part: np.broadcast_to(x[:, None], wide) for part, x in parts.items()}, len(keys))
    q = bf16(np.broadcast_to(heads[:, None], (1, g.query_heads, g.head_dim)))
    lists = KeyLists.dense([len(keys)])
    partials = kernels.chunks(g, cache, q, lists)
    bound = bounds.chunks(g, cache, q, lists, arithmetic)
    return {
        "chunks.o": (bound.o, partials.o),
        "chunks.m": (bound.m, partials.m),
        "chunks.l": (bound.l, partials.l),
        "dense.out": (bounds.attention(g, bound, arithmetic), kernels.merge(g, partials)),
    }


@dataclass(frozen=True, kw_only=True)
class BlockScoreErrors:
    """scores: all pooled rows alike, each index head a multiple of ones.

    Attributes:
        ups: terms of each lane that round up.
        heads: 128ths by which each head is above its power of two.
        exponents: of the heads.
    """

    ups: tuple[int, ...]
    heads: tuple[int, ...]
    exponents: tuple[int, ...]

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        g = GEOMETRY
        blocks = g.top_blocks + 1
        positions = blocks * g.block
        row = np.broadcast_to(aligned(g.index_dim, self.ups), (blocks, 1, g.index_dim))
        cache = cache_of({"pooled": row}, positions)
        scale = (1 + np.array(self.heads) / 128) * np.exp2(self.exponents)
        iq = bf16(np.broadcast_to(scale[:, None], (1, g.index_heads, g.index_dim)))
        bound = bounds.scores(g, cache, iq, positions - 1, arithmetic)
        return {"scores.scores": (bound, kernels.scores(g, cache, iq, positions - 1))}


@dataclass(frozen=True, kw_only=True)
class MergeErrors:
    """merge: the last partial nearly cancels the ones before it, so that o / l is small beside its error.

    Attributes:
        chunks: partials of each row.
        drop: how far the maxima rise, from the first to the last.
        rest: exponent of what is left of o.
        seed: of the rows.
    """

    chunks: int
    drop: int
    rest: int
    seed: int

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        rng, g = np.random.Generator(np.random.PCG64(self.seed)), GEOMETRY
        shape = (ROWS, self.chunks, g.query_heads)
        m = np.sort(rng.random(shape) * self.drop, axis=1)
        weight = np.exp(m - m[:, -1:])[..., None]
        o = rng.standard_normal((*shape, g.head_dim)) / weight
        rest = 1 + 2.0**self.rest * rng.random((ROWS, g.query_heads, g.head_dim))
        o[:, -1] = -(o * weight)[:, :-1].sum(axis=1) * rest
        partials = Partials(*(x.astype(np.float32) for x in (o, m, 1 + rng.random(shape))))
        return {"merge.out": (bounds.merge(g, partials, arithmetic), kernels.merge(g, partials))}


ROWS = 8
"""Rows of an attack on the kernels that see one row at a time."""

POOLED = 1024
"""Positions whose blocks an attack pools."""


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """prep, pool and gate: many rows, so that some value lies so near a midpoint of bf16 that its error shows.

    Attributes:
        exponent: of the rows' magnitude.
        spread: 128ths by which elements differ; 0: N(0, 1).
        seed: of the rows.
    """

    exponent: int
    spread: int
    seed: int

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        rng, g = np.random.Generator(np.random.PCG64(self.seed)), GEOMETRY
        weights = weights_of(g, rng)
        projection = self._rows(rng, (ROWS, g.projection_width))
        out = self._rows(rng, (ROWS, g.query_heads, g.head_dim))
        index_keys = self._rows(rng, (POOLED, 1, g.index_dim))
        gated = bounds.gate(g, out, projection, arithmetic)
        return {
            **_stored(kernels, arithmetic, weights, projection, index_keys),
            "gate.gated": (gated, kernels.gate(g, out, projection)),
        }

    def _rows(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Bf16Array:
        rows = 1 + rng.integers(0, self.spread, shape) / 128 if self.spread else rng.standard_normal(shape)
        return bf16(rows * 2.0**self.exponent)


@dataclass(frozen=True, kw_only=True)
class TieErrors:
    """prep and pool: every head is the same row, and the norm's weights bring its elements next to midpoints of bf16.

    Attributes:
        exponent: of the row's magnitude.
        lift: how far above their midpoints, in 16ths of u; the weights' own rounding moves each by up to u.
        seed: of the row.
    """

    exponent: int
    lift: int
    seed: int

    def judge(self, kernels: Kernels, arithmetic: Arithmetic) -> dict[str, Judged]:
        rng, g = np.random.Generator(np.random.PCG64(self.seed)), GEOMETRY
        wide = bf16(rng.standard_normal(g.head_dim) * 2.0**self.exponent)
        narrow = wide[: g.index_dim]
        scale, narrow_scale = self._scale(wide), self._scale(narrow)
        weights = Weights(
            q_scale=scale, k_scale=scale, i_scale=narrow_scale, pool_scale=narrow_scale, inv_freq=g.inv_freq()
        )
        heads = (np.tile(wide, 2 * (g.query_heads + g.kv_heads)), np.tile(narrow, g.index_heads + 1))
        projection = np.tile(np.concatenate(heads), (ROWS, 1))
        return _stored(kernels, arithmetic, weights, projection, np.tile(narrow, (POOLED, 1, 1)))

    def _scale(self, row: Bf16Array) -> npt.NDArray[np.float32]:
        x = widen(row)
        normed = x / np.sqrt(np.mean(x * x) + GEOMETRY.eps)
        near = np.abs(widen(bf16(normed)))
        lifted = (near + half_ulp(near)) * (1 + self.lift / 16 * 2.0**-24)
        return np.where(x == 0, 1.0, lifted / np.where(x == 0, 1.0, np.abs(normed))).astype(np.float32)


def _stored(
    kernels: Kernels, arithmetic: Arithmetic, weights: Weights, projection: Bf16Array, index_keys: Bf16Array
) -> dict[str, Judged]:
    """What prep and pool give and store."""
    g = GEOMETRY
    cache = cache_of({"index_keys": widen(index_keys)}, len(index_keys))
    bound = bounds.prep(g, weights, projection, 0, TEXT, arithmetic)
    pooled = bounds.pool(g, weights, cache, 0, len(index_keys), TEXT, arithmetic)
    kernels.pool(g, weights, cache, 0, len(index_keys), TEXT)
    prepared = kernels.prep(g, weights, cache, projection, 0, TEXT)
    return {
        "prep.q": (bound.q, prepared.q),
        "prep.iq": (bound.iq, prepared.iq),
        "prep.keys": (bound.keys, cache.read("keys", np.arange(len(projection)))),
        "pool.pooled": (pooled, cache.read("pooled", np.arange(len(index_keys) // g.block))),
    }


@dataclass(frozen=True, kw_only=True)
class Hit:
    """The largest error / bound that one attack reaches in one output.

    Attributes:
        output: "kernel.tensor", with what is special about the attack.
        ratio: error / bound, as the bound gate judges it.
        before: without the output's own rounding to bf16; the ratio itself where the output is fp32.
        attack: the recipe.
    """

    output: str
    ratio: float
    before: float
    attack: Attack


def strike(kernels: Kernels, attack: Attack, arithmetic: Arithmetic | None = None) -> list[Hit]:
    """Run an attack; one hit for each output, in the bound of the arithmetic that the kernels declare unless told."""
    judged = attack.judge(kernels, arithmetic or arithmetic_of(kernels))
    return [_hit(output, bound, got, attack) for output, (bound, got) in judged.items()]


def _hit(output: str, bound: Interval, got: Array, attack: Attack) -> Hit:
    ratio = float(bound.fraction(got).max())
    before = ratio if got.dtype == np.float32 else float(before_rounding(bound, got).max())
    return Hit(output=output, ratio=ratio, before=before, attack=attack)


@dataclass(frozen=True, kw_only=True)
class Looseness:
    """How near the recorded attacks come to the bound of one output.

    Attributes:
        output: as in `Hit`.
        ratio, before: the largest.
        spare: the smallest divisor of the arithmetic's errors with which an attack breaks the bound; inf above AIM.
        attack: the one that does.
    """

    output: str
    ratio: float
    before: float
    spare: float
    attack: Attack


DIVISORS = tuple(AIM ** (step / 16) for step in range(1, 17))
"""Of the errors that an arithmetic promises: unit, exp and turn."""


def replay(kernels: Kernels) -> list[Looseness]:
    """The recorded attacks: how near they come, and how much smaller the bounds' constants might be at most.

    A bf16 step inside a kernel moves its result by a whole step of bf16 or not at all, and a bound that allows the step
    is then met, however near or far the error was that caused it. Divided constants tell: they allow fewer steps.
    """
    found: dict[str, Looseness] = {}
    for attack in RECORDED:
        breaking = _breaking(kernels, attack)
        for hit in strike(kernels, attack):
            spare = breaking.get(hit.output, float("inf"))
            one = Looseness(output=hit.output, ratio=hit.ratio, before=hit.before, spare=spare, attack=attack)
            found[hit.output] = _nearer(found.get(hit.output, one), one)
    return list(found.values())


def _breaking(kernels: Kernels, attack: Attack) -> dict[str, float]:
    """By output, the smallest divisor with which the attack breaks its bound."""
    arithmetic = arithmetic_of(kernels)
    found: dict[str, float] = {}
    for divisor in DIVISORS:
        hits = strike(kernels, attack, divided(arithmetic, divisor))
        found = {**{hit.output: divisor for hit in hits if hit.ratio > 1}, **found}
        if len(found) == len(hits):
            break
    return found


def divided(arithmetic: Arithmetic, divisor: float) -> Arithmetic:
    """The arithmetic with smaller errors: what it would be had its bounds' constants room to spare."""
    smaller = {name: getattr(arithmetic, name) / divisor for name in ("unit", "exp", "turn")}
    return replace(arithmetic, **smaller)


def _nearer(one: Looseness, other: Looseness) -> Looseness:
    best = min(one, other, key=lambda each: each.spare)
    return replace(best, ratio=max(one.ratio, other.ratio), before=max(one.before, other.before))


_UPS = (26, 27, 12, 24, 28, 28, 26, 30)

RECORDED: tuple[Attack, ...] = (
    TieErrors(exponent=0, lift=-64, seed=0),
    TieErrors(exponent=0, lift=40, seed=5),
    TieErrors(exponent=0, lift=-19, seed=875),
    RowErrors(exponent=0, spread=8, seed=2416),
    RowErrors(exponent=0, spread=0, seed=8968),
    BlockScoreErrors(ups=(12, 11, 10, 9, 14, 12, 9, 10), heads=(0, 1, 0, 0), exponents=(0, 0, 10, 0)),
    ScoreErrors(keys=513, top=27, ups=_UPS, swap=False, gap=15, steps=1, value=-2, exponent=2),
    ScoreErrors(keys=512, top=27, ups=_UPS, swap=False, gap=14, steps=1, value=-2, exponent=2),
    ScoreErrors(keys=65, top=381, ups=(15, 28, 22, 1, 0, 0, 0, 1), swap=True, gap=7, steps=1, value=6, exponent=-5),
    ValueErrors(keys=63, ups=63, later=-18),
    MergeErrors(chunks=2, drop=74, rest=-12, seed=659),
)
"""The attacks that come nearest: found by adversary_search, and by a sweep of `lift`, which its climb is blind to."""
