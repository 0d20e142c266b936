"""prep: norm and rotate a window's queries, keys and indexer queries, and store its cache rows (SPEC section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .geometry import FloatArray, Geometry, IntArray, Rope, Weights
from .layout import LayerCache
from .numerics import bf16, widen
from .results import Bf16Array, Prepared, require_window


@dataclass(frozen=True, eq=False)
class Fields:
    """Views into projection rows: q, gate [R, QH, D]; k, v [R, KH, D]; iq [R, IH, DI]; ik [R, 1, DI]; all bf16."""

    q: Bf16Array
    gate: Bf16Array
    k: Bf16Array
    v: Bf16Array
    iq: Bf16Array
    ik: Bf16Array


def split(geometry: Geometry, projection: Bf16Array) -> Fields:
    """Cut projection rows, bf16 [R, projection_width]: each query head then its gate; keys; values; the indexer's."""
    g, rows = geometry, len(projection)
    widths = [2 * g.query_heads * g.head_dim, g.kv_heads * g.head_dim, g.kv_heads * g.head_dim]
    widths += [g.index_heads * g.index_dim]
    queries, k, v, iq, ik = np.split(projection, np.cumsum(widths), axis=1)
    queries = queries.reshape(rows, g.query_heads, 2, g.head_dim)
    return Fields(
        q=queries[:, :, 0],
        gate=queries[:, :, 1],
        k=k.reshape(rows, g.kv_heads, g.head_dim),
        v=v.reshape(rows, g.kv_heads, g.head_dim),
        iq=iq.reshape(rows, g.index_heads, g.index_dim),
        ik=ik.reshape(rows, 1, g.index_dim),
    )


def angles(
    geometry: Geometry, inv_freq: npt.NDArray[np.float32], positions: IntArray, rope: Rope
) -> npt.NDArray[np.float32]:
    """Rotary angles in radians, fp32 [len(positions), rotary_half]: fp32(position) * inv_freq, rounded to fp32."""
    return _rotary_positions(geometry, positions, rope).astype(np.float32) * inv_freq


def norm(x: FloatArray, weight: npt.NDArray[np.float32], eps: float) -> Bf16Array:
    """RMS norm over the last axis: bf16(x * (1 / sqrt(mean(x * x) + eps)) * weight)."""
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return bf16(x * scale * widen(weight))


def rotate(x: Bf16Array, angle: npt.NDArray[np.float32]) -> Bf16Array:
    """Rotate-half RoPE of bf16 heads [R, heads, width] by fp32 [R, half] radians: pairs (d, d + half); bf16.

    Dims from 2 * half on pass through. Cos and sin are of exactly the fp32 angle.
    """
    half = angle.shape[-1]
    cos, sin = np.cos(widen(angle))[:, None], np.sin(widen(angle))[:, None]
    first, second = widen(x[..., :half]), widen(x[..., half : 2 * half])
    turned = bf16(np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1))
    return np.concatenate([turned, x[..., 2 * half :]], axis=-1)


def prep(
    geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
) -> Prepared:
    """Prepare a window of R rows at positions pos0 to pos0 + R - 1.

    Writes, at those positions of the cache, the rotated keys, the raw values and the raw indexer keys.

    Args:
        projection: bf16 [R, projection_width].
        rope: the rows' rotary positions.

    Returns:
        q bf16 [R, QH, D] and iq bf16 [R, IH, DI], normed and rotated.

    Raises:
        TypeError, ValueError: an argument does not fit (`results.require_window`); nothing was written.
    """
    rows = require_window(geometry, weights, cache, projection, pos0, rope)
    positions = pos0 + np.arange(rows, dtype=np.int64)
    angle = angles(geometry, weights.inv_freq, positions, rope)
    fields = split(geometry, projection)
    cache.write("keys", positions, rotate(norm(widen(fields.k), weights.k_scale, geometry.eps), angle))
    cache.write("values", positions, fields.v)
    cache.write("index_keys", positions, fields.ik)
    return Prepared(
        q=rotate(norm(widen(fields.q), weights.q_scale, geometry.eps), angle),
        iq=rotate(norm(widen(fields.iq), weights.i_scale, geometry.eps), angle),
    )


def _rotary_positions(geometry: Geometry, positions: IntArray, rope: Rope) -> IntArray:
    """Rotary position of each pair of each row: int64 [len(positions), rotary_half]."""
    pairs = np.arange(geometry.rotary_half)
    plain = np.broadcast_to((positions + rope.delta)[:, None], (len(positions), len(pairs)))
    if rope.mode != "media":
        return plain
    inside = positions < len(rope.triples)
    triples = rope.triples[np.where(inside, positions, 0)].astype(np.int64)
    return np.where(inside[:, None], triples[:, _axes(geometry, pairs)], plain)


def _axes(geometry: Geometry, pairs: IntArray) -> IntArray:
    """The axis (0 t, 1 h, 2 w) that each rotary pair of a media row turns by."""
    _, h, w = geometry.mrope_sections
    return np.where((pairs % 3 == 1) & (pairs < 3 * h), 1, np.where((pairs % 3 == 2) & (pairs < 3 * w), 2, 0))
