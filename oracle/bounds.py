"""Error bounds of every kernel's outputs, from its inputs alone: theorems about the arithmetic of SPEC section 5.

Each function runs the reference on the kernel's inputs and carries along how far a kernel of the given `Arithmetic` can
stray from it. docs/bounds.md derives each bound, with the same symbols:

    u         unit roundoff of the accumulator, 2**-24
    gamma(h)  h u / (1 - h u), the relative error of h roundings on top of each other: Higham, Accuracy and Stability of
              Numerical Algorithms, lemma 3.1. h is the depth of a term in the actual tree of its sum (section 4.2), one
              number for each term, not the length of the sum.
    e_k       error of score k;  [low_t, high_t], where the running maximum after tile t lies
    eps       relative error of exp

Softmax follows Blanchard, Higham and Higham, Accurately computing the log-sum-exp and softmax functions (2021), section
4: the error of exp(s - m) is that of its exponent, as a factor. A step that is exact is not counted: exp(0) = 1, so
that a rescaling costs nothing where the running maximum surely stays.

All of this holds where no fp32 operation overflows: a row's mean of squares needs elements below 2**59 or so, a value
product weights and values whose sum stays below 2**127. Past that an output may be infinite and be called red.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ..reference import attention as attention_of
from ..reference import scores as reference_scores
from ..reference.chunks import attend, runs
from ..reference.geometry import TILE, FloatArray, Geometry, IntArray, Rope, Weights
from ..reference.layout import LayerCache
from ..reference.numerics import bf16, widen
from ..reference.prep import angles, split
from ..reference.results import Bf16Array, KeyLists, Partials, chunk_count, require_chunks
from .arithmetic import FP32, Arithmetic
from .interval import SLACK, Interval, around, between, exact, joined, rounded, stored, times, widened

_overflows = np.errstate(over="ignore", invalid="ignore")
"""An error that overflows, or that no number tells, becomes a bound that allows everything (`interval.around`)."""


@functools.cache
def _blas() -> ThreadpoolController:
    """NumPy's BLAS: products this small take longer on several threads than on one."""
    return ThreadpoolController().select(user_api="blas")


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
    """x * (1 / sqrt(mean(x * x) + eps)) * weight, not yet rounded to bf16.

    A square of x passes h roundings to its sum, then the division by the width and the addition of eps; eps itself is
    rounded to fp32. The root halves these and rounds, the reciprocal and two products round: gamma((h + 2) / 2 + 4).
    """
    n = x.value.shape[-1]
    ends = np.maximum(np.abs(x.low), np.abs(x.high))
    nearest = np.where((x.low <= 0) & (x.high >= 0), 0.0, np.minimum(np.abs(x.low), np.abs(x.high)))

    def inverse(magnitude: FloatArray) -> FloatArray:
        result: FloatArray = 1.0 / np.sqrt(np.mean(magnitude * magnitude, axis=-1, keepdims=True) + eps)
        return result

    w = widen(weight)
    scaled = times(x, inverse(ends), inverse(nearest), inverse(np.abs(x.value)))
    weighted = times(scaled, w, w, w)
    depth = 1.0 + float(arithmetic.sum_depths(n, arithmetic.square_lanes).max())
    relative = arithmetic.gamma((depth + 2) / 2 + 4) + (n + 2) * arithmetic.tiny / eps
    return widened(weighted, relative, 4 * arithmetic.tiny * (1 + np.abs(w)))


def _rotated(x: Interval, angle: npt.NDArray[np.float32], arithmetic: Arithmetic) -> Interval:
    """bf16 of the rotation of bf16(x): each product errs by the turn's error and a rounding, the sum by one more."""
    n, half, u = rounded(x), angle.shape[-1], arithmetic.unit
    cos, sin = np.cos(widen(angle))[:, None], np.sin(widen(angle))[:, None]
    first, second = n[..., :half], n[..., half : 2 * half]

    def combine(a: FloatArray, b: FloatArray) -> Interval:
        one, two = times(first, a, a, a), times(second, b, b, b)
        size = _farthest(one) + _farthest(two)
        error = size * (arithmetic.turn * (1 + u) + u) + 3 * arithmetic.tiny
        total = between(one.value + two.value, one.low + two.low, one.high + two.high)
        return stored(widened(total, u, error * (1 + u)))

    return joined([combine(cos, -sin), combine(sin, cos), stored(x[..., 2 * half :])])


def _farthest(x: Interval) -> FloatArray:
    """The largest magnitude that x may have."""
    return np.maximum(np.abs(x.low), np.abs(x.high))


def pool(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    pos0: int,
    rows: int,
    rope: Rope,
    arithmetic: Arithmetic = FP32,
) -> Interval:
    """Bound of the pooled rows that a window completes, [blocks, 1, DI]: the mean, then as in prep."""
    blocks = np.arange(pos0 // geometry.block, (pos0 + rows) // geometry.block, dtype=np.int64)
    first = blocks * geometry.block
    positions = first[:, None] + np.arange(geometry.block)
    raw = widen(cache.read("index_keys", positions.ravel())).reshape(len(blocks), geometry.block, 1, geometry.index_dim)
    error = arithmetic.gamma(geometry.block) * np.abs(raw).mean(axis=1) + arithmetic.tiny
    mean = rounded(around(raw.mean(axis=1), error))
    angle = angles(geometry, weights.inv_freq, first, rope)
    return _rotated(_normed(mean, weights.pool_scale, geometry.eps, arithmetic), angle, arithmetic)


def scores(geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the block scores, [R, blocks]; NaN where nothing is computed.

    Each head's product lies within its error of the exact one, and max(., 0) brings both ends to 0. The sum over heads,
    root and division are of numbers that are not negative: gamma(IH + 1).
    """
    value = reference_scores(geometry, cache, iq, pos0)
    low, high = value.copy(), value.copy()
    width, heads = geometry.index_dim, geometry.index_heads
    depth = arithmetic.gamma(arithmetic.product_depths(width, arithmetic.dot_lanes))
    relative = arithmetic.gamma(heads + 1)
    for row in np.flatnonzero(~np.isnan(value[:, 0])):
        seen = np.flatnonzero(~np.isnan(value[row]))
        pooled, query = widen(cache.read("pooled", seen))[:, 0].T, widen(iq[row])
        dots = query @ pooled
        error = ((np.abs(query) * depth) @ np.abs(pooled) + width * arithmetic.tiny) * SLACK
        ends = (np.maximum(dots + side * error, 0.0).sum(axis=0) / np.sqrt(width) for side in (-1, 1))
        low[row, seen], high[row, seen] = ends
    inside = widened(between(value, low, high), relative, heads * arithmetic.tiny)
    return Interval(value, np.maximum(inside.low, 0.0), inside.high, inside.reach)


@dataclass(frozen=True, eq=False)
class PartialsBound:
    """Intervals of the chunk partials: o [R, chunks, QH, D], m and l [R, chunks, QH]."""

    o: Interval
    m: Interval
    l: Interval


@_overflows
def chunks(
    geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, arithmetic: Arithmetic = FP32
) -> PartialsBound:
    """Bounds of the partials; a chunk without keys is exact."""
    shape = (require_chunks(geometry, cache, q, lists), chunk_count(lists.nk), geometry.query_heads)
    o, o_error = np.zeros((2, *shape, geometry.head_dim))
    l, l_error = np.zeros((2, *shape))
    m, low, high = np.full((3, *shape), -np.inf)
    wide = widen(q).reshape(len(q), geometry.kv_heads, geometry.group, geometry.head_dim)
    with _blas().limit(limits=1):
        for chunk in range(shape[1]):
            for rows, positions in runs(lists, chunk):
                keys, values = widen(cache.read("keys", positions)), widen(cache.read("values", positions))
                found = (*attend(wide[rows], keys, values), *_chunk(wide[rows], keys, values, arithmetic))
                for array, part in zip((o, m, l, o_error, l_error, low, high), found, strict=True):
                    array[rows, chunk] = part.reshape(array[rows, chunk].shape)
    return PartialsBound(o=around(o, o_error), m=between(m, low, high), l=around(l, l_error))


class _Scores(NamedTuple):
    """Scores of some keys and their errors, each [R, KH, group, n]."""

    s: FloatArray
    error: FloatArray


class _Chunk(NamedTuple):
    """Errors of a chunk's partials, and where the maximum lies: o_error [R, KH, group, D], the rest [R, KH, group]."""

    o_error: FloatArray
    l_error: FloatArray
    low: FloatArray
    high: FloatArray


def _scored(q: FloatArray, keys: FloatArray, scale: float, arithmetic: Arithmetic) -> _Scores:
    """Scores of q [R, KH, group, D] over keys [n, KH, D].

    A product passes its depth of roundings to the dot product; the scale's own fp32 value and the product with it err
    by u each, and not at all where the scale is a power of two. A kernel that promises no order may scale the queries
    or fold the base of its exp into the scale: two roundings more for every product.
    """
    width, u = q.shape[-1], arithmetic.unit
    columns = keys.transpose(1, 2, 0)
    s = (q @ columns) * scale
    any_way = arithmetic.dot_lanes is None
    depth = arithmetic.product_depths(width, arithmetic.dot_lanes) + (2 if any_way else 0)
    error = ((np.abs(q) * arithmetic.gamma(depth)) @ np.abs(columns)) * abs(scale)
    last = 0.0 if any_way or abs(np.frexp(scale)[0]) == 0.5 else 2 * u + u * u
    return _Scores(s, error + (np.abs(s) + error) * last + (width * abs(scale) + 1) * arithmetic.tiny)


def _chunk(q: FloatArray, keys: FloatArray, values: FloatArray, arithmetic: Arithmetic) -> _Chunk:
    """Errors of the partial of one chunk, q [R, KH, group, D] over keys, values [n, KH, D]."""
    walk = _walk(q, keys, arithmetic)
    o_error, l_error = _value_error(walk, values, arithmetic), _normaliser_error(walk, arithmetic)
    return _Chunk(o_error, l_error, walk.low[..., -1], walk.high[..., -1])


class _Walk(NamedTuple):
    """The walk over a chunk's tiles.

    Scores and their errors e_k, [.., n]; the running maximum after each tile, both its ends, and how many tiles after
    it may raise it, [.., tiles]; keys of each tile.
    """

    s: FloatArray
    e: FloatArray
    low: FloatArray
    middle: FloatArray
    high: FloatArray
    rescalings: FloatArray
    sizes: npt.NDArray[np.int64]

    def of_keys(self, x: FloatArray) -> FloatArray:
        """What each tile has, for each of its keys."""
        return np.repeat(x, self.sizes, axis=-1)


def _walk(q: FloatArray, keys: FloatArray, arithmetic: Arithmetic) -> _Walk:
    starts = np.arange(0, len(keys), TILE)
    scored = _scored(q, keys, q.shape[-1] ** -0.5, arithmetic)
    s, e = scored.s, scored.error * SLACK

    def running(x: FloatArray) -> FloatArray:
        highest: FloatArray = np.maximum.accumulate(np.maximum.reduceat(x, starts, axis=-1), axis=-1)
        return highest

    low, middle, high = running(s - e), running(s), running(s + e)
    rescalings = _rescalings(np.maximum.reduceat(s + e, starts, axis=-1), low)
    return _Walk(s, e, low, middle, high, rescalings, np.diff(starts, append=len(keys)))


def _value_error(walk: _Walk, values: FloatArray, arithmetic: Arithmetic) -> FloatArray:
    """Error of o, [R, KH, group, D].

    Key k of tile t brings exp(s_k - m_t), rounded to bf16, times exp(m_t - m) by the later rescalings. Its weight lies
    between the bf16 roundings of both ends of exp(s_k - m_t). The rescalings err by what their maxima may, by u times
    their exponents' sum, and by eps for each that may not be exp(0).
    """
    u, eps, floor = arithmetic.unit, arithmetic.exp, arithmetic.exp_floor
    at_tile, low, high = (walk.of_keys(x) for x in (walk.middle, walk.low, walk.high))
    p_low = np.exp((walk.s - walk.e - high) * (1 + u)) * (1 - eps) - floor
    p_high = np.exp(np.minimum(walk.s + walk.e - low, 0.0) * (1 - u)) * (1 + eps) + floor
    weight = widen(bf16(np.exp(walk.s - at_tile)))
    stray = np.maximum(widen(bf16(p_high)) - weight, weight - widen(bf16(np.maximum(p_low, 0.0))))

    drop = walk.middle[..., -1:] - walk.middle
    farthest, nearest = walk.high[..., -1:] - walk.low, np.maximum(walk.low[..., -1:] - walk.high, 0.0)
    strayed = np.maximum(farthest - drop, drop - nearest) + u * farthest + walk.rescalings * _as_exponent(eps)
    grown = walk.of_keys(np.where(walk.rescalings == 0, 0.0, np.expm1(strayed)))
    rescale, flushed = walk.of_keys(np.exp(-drop)), walk.of_keys(walk.rescalings) * floor

    order = arithmetic.gamma(_value_depths(walk.sizes, arithmetic))
    later = (1 + grown) * (1 + order)
    moved = (stray * later + weight * (grown + order * (1 + grown))) * rescale + flushed * (weight + stray) * later
    steps = walk.s.shape[-1] + len(walk.sizes)
    error: FloatArray = moved @ np.abs(values).transpose(1, 0, 2) + 2 * steps * arithmetic.tiny
    return error


def _normaliser_error(walk: _Walk, arithmetic: Arithmetic) -> FloatArray:
    """Error of l, [R, KH, group]: key k brings exp(s_k - m), in whose exponent the maxima between cancel."""
    low, end, high = (x[..., -1:] for x in (walk.low, walk.middle, walk.high))
    rescalings = walk.of_keys(walk.rescalings)
    way = arithmetic.unit * (high - walk.s + walk.e)
    exponent = walk.e + np.maximum(high - end, end - low) + way + _as_exponent(arithmetic.exp) * (1 + rescalings)
    grown, order = np.expm1(exponent), arithmetic.gamma(_weight_depths(walk.sizes, arithmetic))
    floor = (1 + rescalings) * arithmetic.exp_floor * (1 + grown) * (1 + order)
    share = np.exp(walk.s - end) * (grown * (1 + order) + order) + floor
    error: FloatArray = share.sum(axis=-1)
    return error


def _as_exponent(relative: float) -> float:
    """What moves an exponent at least as far as a relative error, up or down: -log(1 - x) <= x (1 + 2 x)."""
    return relative * (1 + 2 * relative)


def _rescalings(tile_most: FloatArray, low: FloatArray) -> FloatArray:
    """How many tiles after each may raise the running maximum: [..., tiles], from the most that each tile's scores may
    be and the least that the running maximum may be.
    """
    may = np.zeros(low.shape)
    may[..., 1:] = tile_most[..., 1:] > low[..., :-1]
    after = np.cumsum(may[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([after[..., 1:], np.zeros_like(after[..., :1])], axis=-1)


def _joins(parts: int, arithmetic: Arithmetic) -> FloatArray:
    """Roundings of each part's sum as later parts are joined to it: the first joins nothing, so as the second."""
    return arithmetic.join * (parts - np.maximum(np.arange(parts), 1.0))


def _value_depths(sizes: npt.NDArray[np.int64], arithmetic: Arithmetic) -> FloatArray:
    """Roundings of each key's product in a chunk: inside its tile, and as the later tiles are joined."""
    inside = [arithmetic.product_depths(int(size), arithmetic.value_lanes) for size in sizes]
    return _chunk_depths(inside, sizes, arithmetic, arithmetic.value_lanes)


def _weight_depths(sizes: npt.NDArray[np.int64], arithmetic: Arithmetic) -> FloatArray:
    """Roundings of each key's weight on the way to the normaliser; a short tile is summed like a whole one."""
    whole = arithmetic.sum_depths(TILE, arithmetic.weight_lanes)
    return _chunk_depths([whole[:size] for size in sizes], sizes, arithmetic, arithmetic.weight_lanes)


def _chunk_depths(
    inside: list[FloatArray], sizes: npt.NDArray[np.int64], arithmetic: Arithmetic, lanes: int | None
) -> FloatArray:
    if lanes is None:  # tiles are no part of the promise: any order over the chunk, and a product for each rescaling
        n = int(sizes.sum())
        return np.full(n, float(n + len(sizes)))
    return np.concatenate([x + later for x, later in zip(inside, _joins(len(sizes), arithmetic), strict=True)])


def merge(geometry: Geometry, partials: Partials, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the merged rows [R, QH, D], given the partials."""
    o, m, l = (exact(x) for x in (partials.o, partials.m, partials.l))
    return stored(_merged(PartialsBound(o, m, l), arithmetic))


def attention(geometry: Geometry, bound: PartialsBound, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the whole attention row [R, QH, D], given that of its chunks."""
    return stored(_merged(bound, arithmetic))


@_overflows
def _merged(part: PartialsBound, arithmetic: Arithmetic) -> Interval:
    """Bound of o / l over merged partials that lie in their intervals; before the rounding to bf16, [R, QH, D].

    With f = o / l, what errs alike in a chunk's factor for o and for l, omega_c, moves the quotient by
    omega_c (o_c - f l_c) / l only. The roundings of sums and products are apart for both.
    """
    u = arithmetic.unit
    live = part.l.value != 0
    factors = _factors(part.m, live, arithmetic)
    o, o_stray = (np.where(live[..., None], x, 0.0) for x in (part.o.value, part.o.reach))
    l, l_stray = (np.where(live, x, 0.0) for x in (part.l.value, part.l.reach))
    total = (l * factors.scale).sum(axis=1)
    empty = total == 0
    f = (o * factors.scale[..., None]).sum(axis=1) / np.where(empty, 1.0, total)[..., None]

    l_apart = factors.apart(l, l_stray)
    l_error = l_apart + (factors.omega * l * factors.scale).sum(axis=1)
    together = (factors.omega * factors.scale)[..., None] * np.abs(o - f[:, None] * l[..., None])
    o_error = factors.of_elements().apart(o, o_stray) + together.sum(axis=1)

    least = np.where(empty, 1.0, total - l_error * SLACK)[..., None]
    with np.errstate(divide="ignore"):
        error = np.where(least > 0, (o_error + np.abs(f) * l_apart[..., None]) / least, np.inf)
    error = error * (1 + u) + np.abs(f) * u + arithmetic.tiny
    return around(f, np.where(empty[..., None], 0.0, error))


class _Factors(NamedTuple):
    """What scales each chunk in merge, [R, chunks, QH], and tiny [R, QH], for the products that are subnormal.

    scale is exp(m_c - m); omega its relative error, order that of the roundings of sums and products that follow;
    flushed what a scaling below exp's range loses of a chunk.
    """

    scale: FloatArray
    omega: FloatArray
    order: FloatArray
    flushed: FloatArray
    tiny: FloatArray

    def of_elements(self) -> _Factors:
        """The same, for arrays that have elements behind the heads."""
        return _Factors(*(x[..., None] for x in self))

    def apart(self, x: FloatArray, stray: FloatArray) -> FloatArray:
        """Error of the merged sum of x, which errs by `stray`, without what errs alike for o and l."""
        rounded = (1 + self.omega) * (stray * (1 + self.order) + np.abs(x) * self.order) * self.scale
        error: FloatArray = (rounded + self.flushed * (np.abs(x) + stray)).sum(axis=1) + self.tiny
        return error


def _factors(m: Interval, live: npt.NDArray[np.bool_], arithmetic: Arithmetic) -> _Factors:
    """Chunk c is scaled by exp(m_c - m) in steps whose exponents add up. The error of m is a factor of o and of l
    alike, and cancels; `slip` bounds it where an absolute error stands beside it.
    """
    value, low, high = (np.where(live, x, -np.inf) for x in (m.value, m.low, m.high))
    shift = np.where(live, np.maximum(high - value, value - low), 0.0)
    drop = np.where(live, value.max(axis=1, keepdims=True) - value, 0.0)
    steps = _merge_steps(low, high, live, arithmetic.join)
    way = np.where(live & (steps.scalings > 0), high.max(axis=1, keepdims=True) - low, 0.0)
    omega = np.expm1(shift + arithmetic.unit * way + steps.scalings * _as_exponent(arithmetic.exp))
    order = arithmetic.gamma(steps.depth)
    slip = np.exp(shift.max(axis=1))
    return _Factors(
        scale=np.where(live, np.exp(-drop), 0.0),
        omega=omega,
        order=order,
        flushed=steps.scalings * arithmetic.exp_floor * slip[:, None] * (1 + omega) * (1 + order),
        tiny=2 * arithmetic.tiny * slip * live.sum(axis=1),
    )


class _Steps(NamedTuple):
    """What each chunk passes on its way through merge, [R, chunks, QH]: scalings that are not by exp(0), roundings."""

    scalings: FloatArray
    depth: FloatArray


def _merge_steps(m_low: FloatArray, m_high: FloatArray, live: npt.NDArray[np.bool_], join: int) -> _Steps:
    """Each chunk that is not empty joins those before it: the lower of both maxima is scaled by exp, the other by 1."""
    before_low, before_high = (_before(x) for x in (m_low, m_high))
    number = np.cumsum(live, axis=1) - 1.0
    joins = live & (number > 0)
    scaled = joins & (m_low < before_high)
    rescaling = joins & (m_high > before_low)
    later: IntArray = np.cumsum(rescaling[:, ::-1], axis=1)[:, ::-1] - rescaling
    depth = scaled + join * (live.sum(axis=1, keepdims=True) - np.maximum(number, 1.0))
    return _Steps(np.where(live, scaled + later, 0.0).astype(np.float64), np.where(live, depth, 0.0))


def _before(x: FloatArray) -> FloatArray:
    """The largest of the chunks before each, -inf before the first."""
    highest = np.maximum.accumulate(x, axis=1)
    return np.concatenate([np.full_like(x[:, :1], -np.inf), highest[:, :-1]], axis=1)


def gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array, arithmetic: Arithmetic = FP32) -> Interval:
    """Bound of the gated rows [R, QH, D].

    The sigmoid is a rising function of e = exp(-|gate|), or a falling one, and so lies between its values at both ends
    of e; 1 + e, the division and the product with out round once each.
    """
    gates, wide = widen(split(geometry, projection).gate), widen(out)
    e = np.exp(-np.abs(gates))
    step = e * arithmetic.exp + arithmetic.exp_floor
    ends = [_sigmoid(gates, x) for x in (np.maximum(e - step, 0.0), e + step)]
    sigmoid = between(_sigmoid(gates, e), np.minimum(*ends), np.maximum(*ends))
    product = times(sigmoid, wide, wide, wide)
    return stored(widened(product, arithmetic.gamma(3), (np.abs(wide) + 1) * arithmetic.tiny))


def _sigmoid(x: FloatArray, e: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x)) from e = exp(-|x|)."""
    return np.where(x < 0, e, 1.0) / (1.0 + e)


@_overflows
def plain_attention(
    q: FloatArray, keys: FloatArray, values: FloatArray, scale: float, arithmetic: Arithmetic = FP32
) -> Interval:
    """Bound of one row of `reference.attention`, [QH, D], before its result is rounded.

    Weight k is exp(s_k - m), m the maximum of the scores, or of those so far: it errs by e_k, by the roundings of the
    difference and of exp, and by each later rescaling, at most one for each tile. The error of m is a factor of the
    value product and of the normaliser, and cancels.
    """
    value = attention_of(q, keys, values, scale=scale)
    n, kv_heads = keys.shape[:2]
    if not n:
        return exact(value)
    u, eps = arithmetic.unit, _as_exponent(arithmetic.exp)
    tiles = n if arithmetic.tile is None else -(-n // arithmetic.tile)
    s, e = _scored(q.reshape(1, kv_heads, -1, q.shape[-1]), keys, scale, arithmetic)
    s, e = s[0], e[0] * SLACK
    top = s.max(axis=-1, keepdims=True)
    exponent = e + e.max(axis=-1, keepdims=True) + 2 * u * np.abs(s - top) + (tiles + 1) * (eps + u)
    p = np.exp(s - top)
    weight = p * np.expm1(exponent) + (tiles + 1) * arithmetic.exp_floor * np.exp(exponent)
    floor = arithmetic.probability_floor if arithmetic.probability else 0.0
    taken = weight * (1 + arithmetic.probability) + p * arithmetic.probability + floor
    sums = arithmetic.gamma(_plain_depth(n, tiles, arithmetic.value_lanes, arithmetic))
    o_error = np.einsum("hgn,nhd->hgd", taken + (p + taken) * sums, np.abs(values)) + (n + tiles) * arithmetic.tiny
    l = p.sum(axis=-1, keepdims=True)
    sums = arithmetic.gamma(_plain_depth(n, tiles, arithmetic.weight_lanes, arithmetic))
    l_error = (taken + (p + taken) * sums).sum(axis=-1, keepdims=True)
    ratio = value.reshape(o_error.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (o_error + np.abs(ratio) * l_error) / np.maximum(l - l_error * SLACK, 0.0) * (1 + u) + np.abs(ratio) * u
    return around(value, (error + arithmetic.tiny).reshape(value.shape))


def _plain_depth(n: int, tiles: int, lanes: int | None, arithmetic: Arithmetic) -> float:
    """Roundings that a key's product may pass: inside its tile, and as later tiles are joined."""
    if lanes is None or arithmetic.tile is None:
        return float(n + tiles)
    inside = arithmetic.product_depths(min(n, arithmetic.tile), lanes)
    return float(inside.max()) + 2 * tiles
