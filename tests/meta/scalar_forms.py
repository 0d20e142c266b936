"""The kernels of SPEC section 2 a second time: explicit loops over Python floats, nothing shared with `reference`.

Arrays come in as nested lists of floats (`array.astype(float).tolist()`), so every sum below is spelled out.
"""

from __future__ import annotations

import math
from fractions import Fraction


def round_bf16(x):
    """Nearest bf16, ties to even, by exact rational arithmetic."""
    if x == 0 or math.isinf(x) or math.isnan(x):
        return x
    quantum = Fraction(2) ** max(math.frexp(x)[1] - 8, -133)
    nearest = round(Fraction(x) / quantum) * quantum
    if abs(nearest) >= 2**128:
        return math.copysign(math.inf, x)
    return math.copysign(float(nearest), x)


def norm(x, weight, eps):
    square = 0.0
    for value in x:
        square += value * value
    scale = 1.0 / math.sqrt(square / len(x) + eps)
    return [round_bf16(value * scale * w) for value, w in zip(x, weight, strict=True)]


def rotate(x, angle):
    half = len(angle)
    out = list(x)
    for d, radians in enumerate(angle):
        cos, sin = math.cos(radians), math.sin(radians)
        out[d] = round_bf16(x[d] * cos - x[d + half] * sin)
        out[d + half] = round_bf16(x[d] * sin + x[d + half] * cos)
    return out


def rotary_position(position, pair, mode, delta, triples, sections):
    if mode == "text":
        return position
    if mode == "delta" or position >= len(triples):
        return position + delta
    t, h, w = triples[position]
    if pair % 3 == 1 and pair < 3 * sections[1]:
        return h
    if pair % 3 == 2 and pair < 3 * sections[2]:
        return w
    return t


def scores(iq, pooled, complete, top_blocks):
    """Scores of one row's complete blocks; [] for a dense row."""
    result = []
    for block in range(complete if complete > top_blocks else 0):
        total = 0.0
        for head in iq:
            dot = 0.0
            for a, b in zip(head, pooled[block], strict=True):
                dot += a * b
            total += max(dot, 0.0)
        result.append(total / math.sqrt(len(iq[0])))
    return result


def select(scores, position, block, top_blocks):
    """One row's key list. `scores` are fp32 values of its complete blocks."""
    end = position + 1
    complete = end // block
    if complete <= top_blocks:
        return list(range(end))
    chosen = []
    for _ in range(top_blocks):
        best = None
        for b in range(complete):
            if b not in chosen and (best is None or above(scores[b], scores[best])):
                best = b
        chosen.append(best)
    keys = []
    for b in sorted(chosen):
        keys += [b * block + i for i in range(block)]
    return keys + list(range(block * complete, end))


def above(a, b):
    """a > b, with -0 below +0."""
    if a == b == 0:
        return math.copysign(1, a) > math.copysign(1, b)
    return a > b


def chunk(q, keys, values):
    """Online softmax of one head over one chunk, tile by tile: (o, m, l)."""
    o, m, total = [0.0] * len(q), -math.inf, 0.0
    for start in range(0, len(keys), 64):
        tile = range(start, min(start + 64, len(keys)))
        s = {}
        for i in tile:
            dot = 0.0
            for a, b in zip(q, keys[i], strict=True):
                dot += a * b
            s[i] = dot * len(q) ** -0.5
        new = max(m, *s.values())
        rescale = math.exp(m - new)
        o = [x * rescale for x in o]
        total *= rescale
        for i in tile:
            p = math.exp(s[i] - new)
            total += p
            weight = round_bf16(p)
            for d, value in enumerate(values[i]):
                o[d] += weight * value
        m = new
    return o, m, total


def merge(partials, width):
    """One head's (o, m, l) partials in chunk order, as its bf16 output."""
    o, m, total = [0.0] * width, -math.inf, 0.0
    for part_o, part_m, part_l in partials:
        if part_l == 0:
            continue
        new = max(m, part_m)
        old, fresh = math.exp(m - new), math.exp(part_m - new)
        o = [x * old + y * fresh for x, y in zip(o, part_o, strict=True)]
        total = total * old + part_l * fresh
        m = new
    return [round_bf16(x / total) if total else 0.0 for x in o]


def gate(o, g):
    return round_bf16(o * (1.0 / (1.0 + math.exp(-g))))
