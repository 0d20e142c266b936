"""Error bounds of every kernel's outputs, from its inputs alone.

Each function runs the reference on the kernel's inputs and carries along how far the fp32 arithmetic of SPEC section 5
can stray from it. With u = 2**-24 and gamma(n) = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, lemma 3.1), a sum of n products in *any* order errs by at most gamma(n) times the sum of their magnitudes,
so these bounds hold for every summation tree, ours and another engine's. A rounding to bf16 is monotone: a value known
to lie in [a, b] rounds into [bf16(a), bf16(b)], which is how every bf16 step is carried here, without adding half an
ulp where no value in reach changes its rounding.

All of this holds where no fp32 operation overflows: a row's mean of squares needs elements below 2**59 or so, a value
product weights and values whose sum stays below 2**127. Past that an output may be infinite and be called red.

An output is within its bound where it lies in the interval; its error as a fraction of the bound is
|got - reference| over the larger of the interval's two arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference import attention as attention_of
from ..reference import chunks as reference_chunks
from ..reference import gate as reference_gate
from ..reference import merge as reference_merge
from ..reference import scores as reference_scores
from ..reference.geometry import CHUNK, TILE, FloatArray, Geometry, Rope, Weights
from ..reference.layout import LayerCache
from ..reference.numerics import bf16, widen
from ..reference.prep import angles, norm, rotate, split
from ..reference.results import Bf16Array, KeyLists, Partials

SLACK = 1.0 + 2.0**-20
"""Covers the float64 rounding of the bounds' own evaluation: they are computed in a few thousand float64 operations."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What a kernel's fp32 arithmetic promises.

    Attributes:
        unit: unit roundoff of the accumulator.
        exp: relative error of exp on [-126 ln 2, 0].
        exp_floor: absolute error of exp anywhere below.
        turn: absolute error of cos and sin.
        tiny: absolute error of one operation that underflows.
        probability: unit roundoff of the weights as the value product takes them; 2**-8 for bf16, 0 where they stay in
            the accumulator's format. Our own kernels' bf16 weights are carried exactly instead.
    """

    unit: float = 2.0**-24
    probability: float = 2.0**-8
    exp: float = 2.0**-22
    exp_floor: float = 2.0**-126
    turn: float = 2.0**-23
    tiny: float = 2.0**-149

    def gamma(self, n: float) -> float:
        """Relative error of n roundings on top of each other."""
        return n * self.unit / (1.0 - n * self.unit)


FP32 = Arithmetic()


@dataclass(frozen=True, eq=False)
class Interval:
    """Where an output must lie: the reference's value and both ends, float64, same shape; low <= value <= high."""

    value: FloatArray
    low: FloatArray
    high: FloatArray

    def fraction(self, got: npt.NDArray[Any]) -> FloatArray:
        """|got - value| over the bound, elementwise: inf for NaN and outside a bound of 0."""
        wide = widen(got)
        with np.errstate(invalid="ignore", divide="ignore"):
            arm = np.maximum(self.high - self.value, self.value - self.low)
            error = np.abs(wide - self.value)
            ratio = np.where(error == 0, 0.0, error / arm)
            inside = (self.low <= wide) & (wide <= self.high)
            ratio = np.where(inside, np.minimum(ratio, 1.0), np.where(ratio > 1, ratio, np.inf))
        same = (wide == self.value) | (np.isnan(self.value) & np.isnan(wide))
        return np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio))


def _around(value: FloatArray, error: FloatArray) -> Interval:
    """value +- error; an error that overflowed, or is unknown because something did, allows everything."""
    reach = np.where(np.isnan(error) & ~np.isnan(value), np.inf, error * SLACK)
    return Interval(value, value - reach, value + reach)


def _rounded(x: Interval) -> Interval:
    """The interval after a rounding to bf16."""
    return Interval(*(widen(bf16(end)) for end in (x.value, x.low, x.high)))


def exact(x: npt.NDArray[Any]) -> Interval:
    """The interval of an output that must be this value: a copy, or a list that follows from its inputs."""
    value = widen(x)
    return Interval(value, value, value)


def _times(x: Interval, low: FloatArray, high: FloatArray, value: FloatArray) -> Interval:
    """x times a factor in [low, high]."""
    ends = (x.low * low, x.low * high, x.high * low, x.high * high)
    return Interval(x.value * value, np.minimum.reduce(ends), np.maximum.reduce(ends))


def _widened(x: Interval, relative: float, absolute: FloatArray | float) -> Interval:
    """x with further rounding errors on top."""
    low = x.low - (np.abs(x.low) * relative + absolute) * SLACK
    high = x.high + (np.abs(x.high) * relative + absolute) * SLACK
    return Interval(x.value, low, high)


@dataclass(frozen=True, eq=False)
class PrepBound:
    """Intervals of prep's outputs: q [R, QH, D], iq [R, IH, DI], keys [R, KH, D]."""

    q: Interval
    iq: Interval
    keys: Interval


def prep(
    geometry: Geometry, weights: Weights, projection: Bf16Array, pos0: int, rope: Rope, arithmetic: Arithmetic = FP32
) -> PrepBound:
    """Bounds of prep's queries, indexer queries and stored keys; its other stores are copies and exact."""
    fields = split(geometry, projection)
    angle = angles(geometry, weights.inv_freq, pos0 + np.arange(len(projection), dtype=np.int64), rope)

    def head(x: Bf16Array, weight: npt.NDArray[np.float32]) -> Interval:
        return _rotated(_normed(exact(x), weight, geometry.eps, arithmetic), angle, arithmetic)

    return PrepBound(
        q=head(fields.q, weights.q_scale), iq=head(fields.iq, weights.i_scale), keys=head(fields.k, weights.k_scale)
    )


def _normed(x: Interval, weight: npt.NDArray[np.float32], eps: float, arithmetic: Arithmetic) -> Interval:
    """bf16(x * (1 / sqrt(mean(x * x) + eps)) * weight).

    The mean of n squares errs by gamma(n + 1), all terms being positive; eps adds one rounding, its own fp32 value one
    more; the root halves that and rounds; the reciprocal and two products round: gamma((n + 3) / 2 + 4).
    """
    n = x.value.shape[-1]
    ends = np.maximum(np.abs(x.low), np.abs(x.high))
    nearest = np.where((x.low <= 0) & (x.high >= 0), 0.0, np.minimum(np.abs(x.low), np.abs(x.high)))

    def inverse(magnitude: FloatArray) -> FloatArray:
        result: FloatArray = 1.0 / np.sqrt(np.mean(magnitude * magnitude, axis=-1, keepdims=True) + eps)
        return result

    w = widen(weight)
    scaled = _times(x, inverse(ends), inverse(nearest), inverse(np.abs(x.value)))
    weighted = _times(scaled, w, w, w)
    result = _rounded(_widened(weighted, arithmetic.gamma((n + 3) / 2 + 4), 4 * arithmetic.tiny * (1 + np.abs(w))))
    return Interval(widen(norm(x.value, weight, eps)), result.low, result.high)


def _rotated(x: Interval, angle: npt.NDArray[np.float32], arithmetic: Arithmetic) -> Interval:
    """bf16 of the rotation: each product errs by the turn's error and a rounding, the sum by one more."""
    half = angle.shape[-1]
    cos, sin = np.cos(widen(angle))[:, None], np.sin(widen(angle))[:, None]
    first = Interval(x.value[..., :half], x.low[..., :half], x.high[..., :half])
    second = Interval(*(end[..., half : 2 * half] for end in (x.value, x.low, x.high)))
    reach = np.maximum(np.abs(first.low), np.abs(first.high)) + np.maximum(np.abs(second.low), np.abs(second.high))
    error = reach * (arithmetic.turn + arithmetic.gamma(3)) + 3 * arithmetic.tiny

    def combine(a: FloatArray, b: FloatArray) -> Interval:
        one, two = _times(first, a, a, a), _times(second, b, b, b)
        return _rounded(_widened(Interval(one.value + two.value, one.low + two.low, one.high + two.high), 0.0, error))

    upper, lower = combine(cos, -sin), combine(sin, cos)
    turned = widen(rotate(bf16(x.value), angle))
    rest = (x.low[..., 2 * half :], x.high[..., 2 * half :])
    return Interval(
        turned,
        np.concatenate([upper.low, lower.low, rest[0]], axis=-1),
        np.concatenate([upper.high, lower.high, rest[1]], axis=-1),
    )


def pool(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    pos0: int,
    rows: int,
    rope: Rope,
    arithmetic: Arithmetic = FP32,
) -> Interval:
    """Bound of the pooled rows that a window completes: [blocks, 1, DI]."""
    blocks = np.arange(pos0 // geometry.block, (pos0 + rows) // geometry.block, dtype=np.int64)
    first = blocks * geometry.block
    positions = first[:, None] + np.arange(geometry.block)
    raw = widen(cache.read("index_keys", positions.ravel())).reshape(len(blocks), geometry.block, 1, geometry.index_dim)
    error = arithmetic.gamma(geometry.block) * np.abs(raw).mean(axis=1) + arithmetic.tiny
    mean = _rounded(_around(raw.mean(axis=1), error))
    angle = angles(geometry, weights.inv_freq, first, rope)
    return _rotated(_normed(mean, weights.pool_scale, geometry.eps, arithmetic), angle, arithmetic)


def scores(geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the block scores, [R, blocks]; NaN where nothing is computed.

    A dot product errs by gamma(DI) times its magnitudes; root, division and the sum over heads by gamma(IH + 2).
    """
    value = reference_scores(geometry, cache, iq, pos0)
    error = np.zeros_like(value)
    for row in np.flatnonzero(~np.isnan(value[:, 0])):
        seen = np.flatnonzero(~np.isnan(value[row]))
        pooled = widen(cache.read("pooled", seen))[:, 0]
        size = (np.abs(widen(iq[row])) @ np.abs(pooled).T).sum(axis=0) / np.sqrt(geometry.index_dim)
        relative = arithmetic.gamma(geometry.index_dim) + arithmetic.gamma(geometry.index_heads + 2)
        error[row, seen] = relative * size + geometry.index_dim * geometry.index_heads * arithmetic.tiny
    return _around(value, error)


@dataclass(frozen=True, eq=False)
class PartialsBound:
    """Intervals of the chunk partials: o [R, chunks, QH, D], m and l [R, chunks, QH]."""

    o: Interval
    m: Interval
    l: Interval


def chunks(
    geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, arithmetic: Arithmetic = FP32
) -> PartialsBound:
    """Bounds of the partials.

    With e_k the error of score k, E the largest e_k of the chunk, m_t and m the running maximum at key k's tile and at
    the end: p_k = exp(s_k - m_t) errs in its exponent by e_k + E + u |s_k - m_t|, the later rescaling by exp(m_t - m)
    by 2 E + u |m_t - m|, and each exp by its own relative error, at most 8 of them in a chunk. bf16(p_k) is carried as
    an interval. The sums over at most 512 keys and their FMAs err by gamma(n + 16).
    """
    value = reference_chunks(geometry, cache, q, lists)
    errors = Partials(*(np.zeros_like(x) for x in (value.o, value.m, value.l)))
    for row in range(len(q)):
        count = int(lists.nk[row])
        positions = lists.ids[row, :count].astype(np.int64) if lists.sparse[row] else np.arange(count)
        for chunk, start in enumerate(range(0, count, CHUNK)):
            here = positions[start : start + CHUNK]
            o, m, l = _chunk_errors(geometry, cache, q[row], here, arithmetic)
            errors.o[row, chunk], errors.m[row, chunk], errors.l[row, chunk] = o, m, l
    with np.errstate(invalid="ignore"):
        return PartialsBound(
            o=_around(value.o, errors.o), m=_settled(_around(value.m, errors.m)), l=_around(value.l, errors.l)
        )


def _settled(x: Interval) -> Interval:
    """An infinite value has no error."""
    infinite = np.isinf(x.value)
    return Interval(x.value, np.where(infinite, x.value, x.low), np.where(infinite, x.value, x.high))


def _chunk_errors(
    geometry: Geometry, cache: LayerCache, q: Bf16Array, positions: npt.NDArray[np.int64], arithmetic: Arithmetic
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Errors of one row's partial: o [QH, D], m [QH], l [QH]."""
    u = arithmetic.unit
    keys = widen(cache.read("keys", positions)).transpose(1, 2, 0)
    values = np.abs(widen(cache.read("values", positions))).transpose(1, 0, 2)
    wide = widen(q).reshape(geometry.kv_heads, geometry.group, geometry.head_dim)
    scale = geometry.head_dim**-0.5
    s = (wide @ keys) * scale
    size = (np.abs(wide) @ np.abs(keys)) * scale
    e = arithmetic.gamma(geometry.head_dim + 2) * size + geometry.head_dim * arithmetic.tiny
    top = e.max(axis=-1, keepdims=True)

    n = len(positions)
    starts = np.arange(0, n, TILE)
    sizes = np.diff(starts, append=n)
    running = np.maximum.accumulate(np.maximum.reduceat(s, starts, axis=-1), axis=-1)
    at_tile = np.repeat(running, sizes, axis=-1)
    last = running[..., -1:]

    first = e + top + u * np.abs(s - at_tile) + arithmetic.exp
    later = 2 * top + u * (last - at_tile) + len(starts) * arithmetic.exp
    p = np.exp(s - at_tile)
    low = widen(bf16(np.maximum(p * np.exp(-first * SLACK) - arithmetic.exp_floor, 0.0)))
    high = widen(bf16(p * np.exp(first * SLACK) + arithmetic.exp_floor))
    taken = widen(bf16(p))
    rescale = np.exp(at_tile - last)
    grown = np.expm1(later * SLACK)
    order = arithmetic.gamma(n + 16)

    stray = np.maximum(high - taken, taken - low)
    weight_error = (stray * (1 + grown) * (1 + order) + taken * (grown + order * (1 + grown))) * rescale
    o = weight_error @ values + n * (arithmetic.tiny + arithmetic.exp_floor * values.max(axis=1)[:, None, :])
    l_error = p * (np.expm1((first + later) * SLACK) + order * 1.01) * rescale + 2 * arithmetic.exp_floor
    heads = geometry.query_heads
    return o.reshape(heads, -1), top.reshape(heads), l_error.sum(axis=-1).reshape(heads)


def merge(geometry: Geometry, partials: Partials, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the merged rows [R, QH, D], given the partials.

    A chunk's share is scaled by exp(m_c - M) in at most `chunks` steps, whose exponents add up to M - m_c: each step
    errs by exp's error and two roundings, the exponents by u (M - m_c).
    """
    given = Partials(*(widen(x) for x in (partials.o, partials.m, partials.l)))
    zero = np.zeros_like(given.m)
    return _merged(geometry, given, Partials(np.zeros_like(given.o), zero, zero), arithmetic)


def attention(geometry: Geometry, bound: PartialsBound, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the whole attention row [R, QH, D], given that of its chunks."""
    errors = Partials(*(_arm(x) for x in (bound.o, bound.m, bound.l)))
    return _merged(geometry, Partials(bound.o.value, bound.m.value, bound.l.value), errors, arithmetic)


def _arm(x: Interval) -> FloatArray:
    """How far an output may stray; 0 from the identity's infinite maximum."""
    return np.where(np.isinf(x.value), 0.0, x.high - np.where(np.isinf(x.value), 0.0, x.value))


def _merged(geometry: Geometry, value: Partials, error: Partials, arithmetic: Arithmetic) -> Interval:
    """Bound of merge(value) when the partials themselves err by `error`."""
    live = value.l != 0
    m = np.where(live, value.m, -np.inf)
    top = m.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # broken partials may hold infinities; what follows from them is red
        drop = np.where(live, np.where(live, top, 0.0) - np.where(live, m, 0.0), 0.0)
    scale = np.where(live, np.exp(-drop), 0.0)
    steps = value.m.shape[1]
    exponent = arithmetic.unit * drop + steps * (arithmetic.exp + 2 * arithmetic.unit)
    exponent = exponent + error.m + error.m.max(axis=1, keepdims=True)
    grown = np.expm1(exponent * SLACK) + arithmetic.gamma(steps + 2)
    floor = steps * (arithmetic.exp_floor + arithmetic.tiny)

    o = (np.where(live[..., None], value.o, 0.0) * scale[..., None]).sum(axis=1)
    o_share = np.abs(value.o) * grown[..., None] + error.o * (1 + grown[..., None])
    o_error = (np.where(live[..., None], o_share, 0.0) * scale[..., None]).sum(axis=1)
    o_error = o_error + floor * (1 + np.abs(np.where(live[..., None], value.o, 0.0)).sum(axis=1))
    l = (np.where(live, value.l, 0.0) * scale).sum(axis=1)
    l_error = (np.where(live, value.l * grown + error.l * (1 + grown), 0.0) * scale).sum(axis=1)
    l_error = l_error + floor * (1 + np.where(live, value.l, 0.0).sum(axis=1))

    empty = l == 0
    l_safe = np.where(empty, 1.0, l)[..., None]
    ratio = o / l_safe
    least = np.where(empty, 1.0, l - l_error)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(least > 0, (o_error + np.abs(ratio) * l_error[..., None]) / least, np.inf)
    spread = _around(ratio, np.where(empty[..., None], 0.0, quotient * (1 + arithmetic.unit)))
    rounded = _rounded(_widened(spread, arithmetic.unit, 0.0))
    return Interval(widen(reference_merge(geometry, value)), rounded.low, rounded.high)


def gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the gated rows [R, QH, D]: exp, the sum, the division and the product each err once."""
    gates = widen(split(geometry, projection).gate)
    e = np.exp(-np.abs(gates))
    sigmoid = np.where(gates < 0, e, 1.0) / (1.0 + e)
    relative = 2 * arithmetic.exp + arithmetic.gamma(4)
    product = widen(out) * sigmoid
    error = np.abs(product) * relative + np.abs(widen(out)) * 2 * arithmetic.exp_floor + arithmetic.tiny
    rounded = _rounded(_around(product, error))
    return Interval(widen(reference_gate(geometry, out, projection)), rounded.low, rounded.high)


def plain_attention(
    q: FloatArray, keys: FloatArray, values: FloatArray, scale: float, arithmetic: Arithmetic = FP32
) -> Interval:
    """Bound of one row of `reference.attention`, [QH, D], before its result is rounded.

    Weight k is exp(s_k - m), whatever m the kernel subtracts: it errs by e_k, the score's error, and by the roundings
    of the difference and of exp; a running maximum rescales at most once per key. The shift m cancels between the
    value product and the normaliser. Sums are taken to be in any order.
    """
    value = attention_of(q, keys, values, scale=scale)
    n, kv_heads = keys.shape[:2]
    if not n:
        return exact(value)
    u = arithmetic.unit
    grouped = q.reshape(kv_heads, -1, q.shape[-1])
    s = np.einsum("hgd,nhd->hgn", grouped, keys) * scale
    size = np.einsum("hgd,nhd->hgn", np.abs(grouped), np.abs(keys)) * abs(scale)
    top = s.max(axis=-1, keepdims=True)
    e = arithmetic.gamma(q.shape[-1] + 2) * size + q.shape[-1] * arithmetic.tiny
    exponent = e + e.max(axis=-1, keepdims=True) + 2 * u * np.abs(s - top) + (n + 1) * (arithmetic.exp + u)
    p = np.exp(s - top)
    weight = p * np.expm1(exponent * SLACK) + arithmetic.exp_floor
    order = arithmetic.gamma(2 * n + 2)
    rounded = weight * (1 + arithmetic.probability) + p * arithmetic.probability
    o_error = np.einsum("hgn,nhd->hgd", rounded + (p + rounded) * order, np.abs(values))
    l = p.sum(axis=-1, keepdims=True)
    l_error = (rounded + (p + rounded) * order).sum(axis=-1, keepdims=True)
    ratio = value.reshape(o_error.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (o_error + np.abs(ratio) * l_error) / np.maximum(l - l_error, 0.0) * (1 + 4 * u)
    return _around(value, (error + arithmetic.tiny).reshape(value.shape))


def stored(x: Interval, unit: float, tiny: float) -> Interval:
    """The interval after a rounding to a storage format: its unit roundoff, and half its least subnormal."""
    return _widened(x, unit, tiny)
