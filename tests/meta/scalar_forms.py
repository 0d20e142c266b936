"""The kernels of SPEC section 2 a second time: explicit loops over mpmath scalars, nothing shared with `reference`.

Arrays come in as nested lists of scalars (`scalars`), so every sum below is spelled out. At 120 bits a result is as
good as exact beside float64's 53; roundings to bf16 and fp32 are exact rational arithmetic.
"""

import math
from fractions import Fraction

import numpy as np
from mpmath import MPContext

mp = MPContext()
mp.prec = 120

CHUNK, TILE = 512, 64


def scalars(array):
    """An array of numbers as nested lists of mpmath scalars; exact."""
    if isinstance(array, np.ndarray | np.generic):
        array = array.astype(np.float64).tolist()
    if isinstance(array, list):
        return [scalars(item) for item in array]
    return mp.mpf(array)


# ---- rounding ----


def exact(x):
    """A finite scalar as a fraction."""
    mantissa, exponent = x.man_exp  # without the sign
    return (-1 if x < 0 else 1) * mantissa * Fraction(2) ** exponent


def round_binary(x, precision, smallest, overflow):
    """Nearest binary number of `precision` bits, a multiple of 2**smallest; ties to even; infinite from 2**overflow."""
    if x == 0 or not mp.isfinite(x):
        return x
    quantum = Fraction(2) ** max(int(mp.frexp(x)[1]) - precision, smallest)
    nearest = round(exact(x) / quantum) * quantum
    if abs(nearest) >= Fraction(2) ** overflow:
        return mp.sign(x) * mp.inf
    return mp.mpf(nearest.numerator) / nearest.denominator


def round_bf16(x):
    return round_binary(x, 8, -133, 128)


def round_fp32(x):
    return round_binary(x, 24, -149, 128)


# ---- prep and pool ----


def inv_freq(theta, half):
    """Rotary frequencies: theta ** (-i / half), fp32."""
    return [round_fp32(mp.mpf(theta) ** (-mp.mpf(i) / half)) for i in range(half)]


def norm(x, weight, eps):
    square = mp.zero
    for value in x:
        square += value * value
    scale = 1 / mp.sqrt(square / len(x) + mp.mpf(eps))
    return [round_bf16(value * scale * w) for value, w in zip(x, weight, strict=True)]


def rotate(x, angles):
    half = len(angles)
    out = list(x)
    for d, radians in enumerate(angles):
        cos, sin = mp.cos(radians), mp.sin(radians)
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


def angles(geometry, weights, rope, position):
    """Each pair's angle at a position: the fp32 product of the fp32 position and the frequency."""
    result = []
    for pair, frequency in enumerate(scalars(weights.inv_freq)):
        at = rotary_position(position, pair, rope.mode, rope.delta, rope.triples.tolist(), geometry.mrope_sections)
        result.append(round_fp32(round_fp32(mp.mpf(int(at))) * frequency))
    return result


def prep(geometry, weights, row, turn):
    """One projection row, turned by these angles: its heads by name; `gate` has the raw gates, q to iq are normed."""
    rest = list(row)

    def take(count, width):
        heads = [rest[i * width : (i + 1) * width] for i in range(count)]
        del rest[: count * width]
        return heads

    def normed(heads, scale):
        return [rotate(norm(head, scalars(scale), geometry.eps), turn) for head in heads]

    queries_and_gates = take(2 * geometry.query_heads, geometry.head_dim)
    keys, values = take(geometry.kv_heads, geometry.head_dim), take(geometry.kv_heads, geometry.head_dim)
    index_queries, index_keys = take(geometry.index_heads, geometry.index_dim), take(1, geometry.index_dim)
    assert rest == []
    return {
        "q": normed(queries_and_gates[::2], weights.q_scale),
        "gate": queries_and_gates[1::2],
        "keys": normed(keys, weights.k_scale),
        "values": values,
        "iq": normed(index_queries, weights.i_scale),
        "index_keys": index_keys,
    }


def pool(geometry, weights, index_keys, turn):
    """The pooled row of one block's raw indexer keys."""
    mean = []
    for d in range(geometry.index_dim):
        total = mp.zero
        for key in index_keys:
            total += key[d]
        mean.append(round_bf16(total / len(index_keys)))
    return rotate(norm(mean, scalars(weights.pool_scale), geometry.eps), turn)


# ---- scores and select ----


def scores(iq, pooled, complete, top_blocks):
    """(score, sum of the products' sizes / sqrt(DI)) of one row's complete blocks; [] for a dense row."""
    result = []
    root = mp.sqrt(len(iq[0]))
    for block in range(complete if complete > top_blocks else 0):
        total, size = mp.zero, mp.zero
        for head in iq:
            dot = mp.zero
            for a, b in zip(head, pooled[block], strict=True):
                dot += a * b
                size += abs(a * b)
            total += max(dot, mp.zero)
        result.append((total / root, size / root))
    return result


def select(scores, position, block, top_blocks):
    """One row's key list. `scores` are the fp32 values of its complete blocks, as Python floats, which have a -0."""
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


# ---- attention ----


def score(q, key):
    """(q . k * D ** -0.5, the sum of its products' sizes)."""
    dot, size = mp.zero, mp.zero
    for a, b in zip(q, key, strict=True):
        dot += a * b
        size += abs(a * b)
    scale = 1 / mp.sqrt(len(q))
    return dot * scale, size * scale


def chunk(q, keys, values):
    """Online softmax of one head over one chunk, tile by tile: (o, m, l) and the largest size of a score."""
    o, m, total, largest = [mp.zero] * len(q), -mp.inf, mp.zero, mp.zero
    for start in range(0, len(keys), TILE):
        tile = range(start, min(start + TILE, len(keys)))
        s = {}
        for i in tile:
            s[i], size = score(q, keys[i])
            largest = max(largest, size)
        new = max(m, *s.values())
        rescale = mp.exp(m - new)
        o = [x * rescale for x in o]
        total *= rescale
        for i in tile:
            p = mp.exp(s[i] - new)
            total += p
            weight = round_bf16(p)
            for d, value in enumerate(values[i]):
                o[d] += weight * value
        m = new
    return o, m, total, largest


def merge(partials, width):
    """One head's (o, m, l) partials in chunk order, as its bf16 output."""
    o, m, total = [mp.zero] * width, -mp.inf, mp.zero
    for part_o, part_m, part_l in partials:
        if part_l == 0:
            continue
        new = max(m, part_m)
        old, fresh = mp.exp(m - new), mp.exp(part_m - new)
        o = [x * old + y * fresh for x, y in zip(o, part_o, strict=True)]
        total = total * old + part_l * fresh
        m = new
    return [round_bf16(x / total) if total else mp.zero for x in o]


def chunks(q, keys, values):
    """One row's query heads over its list of keys and values: for each head, its chunks as `chunk` has them."""
    heads = []
    for head, query in enumerate(q):
        kv = head * len(keys[0]) // len(q) if keys else 0
        parts = []
        for start in range(0, len(keys), CHUNK):
            part = slice(start, start + CHUNK)
            parts.append(chunk(query, [row[kv] for row in keys[part]], [row[kv] for row in values[part]]))
        heads.append(parts)
    return heads


def out(heads, width):
    """The merged bf16 output of each head's chunks."""
    return [merge([part[:3] for part in parts], width) for parts in heads]


def gate(o, g):
    return round_bf16(o * (1 / (1 + mp.exp(-g))))


def attention(q, keys, values, scale=None):
    """One row, no rounding between the steps: for each head its output, and the largest size of a score."""
    result = []
    for head, query in enumerate(q):
        o, total, largest = [mp.zero] * len(query), mp.zero, mp.zero
        for key, value in zip(keys, values, strict=True):
            kv = head * len(key) // len(q)
            s, size = score(query, key[kv])
            if scale is not None:
                factor = mp.mpf(scale) * mp.sqrt(len(query))
                s, size = s * factor, size * abs(factor)
            p = mp.exp(s)
            total += p
            largest = max(largest, size)
            for d, x in enumerate(value[kv]):
                o[d] += p * x
        result.append(([x / total if total else x for x in o], largest))
    return result


# ---- a whole stream ----


def stream(geometry, weights, projection, rope):
    """Rows 0 to R - 1 of a stream, each decoded on its own: what every kernel gives, one dictionary a row."""
    rows, pooled = [], []
    for position, line in enumerate(projection):
        row = prep(geometry, weights, line, angles(geometry, weights, rope, position))
        rows.append(row)
        end = position + 1
        complete = end // geometry.block
        if end % geometry.block == 0:
            first = end - geometry.block
            raw = [earlier["index_keys"][0] for earlier in rows[first:end]]
            pooled.append(pool(geometry, weights, raw, angles(geometry, weights, rope, first)))
        row["scores"] = scores(row["iq"], pooled, complete, geometry.top_blocks)
        narrow = [float(round_fp32(value)) for value, _ in row["scores"]]
        listed = select(narrow, position, geometry.block, geometry.top_blocks)
        row["listed"] = listed
        heads = chunks(row["q"], [rows[p]["keys"] for p in listed], [rows[p]["values"] for p in listed])
        row["out"] = out(heads, geometry.head_dim)
        row["gated"] = [
            [gate(o, g) for o, g in zip(head, gates, strict=True)]
            for head, gates in zip(row["out"], row["gate"], strict=True)
        ]
        row["pooled"] = [list(block) for block in pooled]
    return rows
