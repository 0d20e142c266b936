"""The formulas of docs/bounds.md in exact arithmetic: loops over mpmath scalars, with the symbols of that page.

Nothing is shared with `oracle`, and nothing is allowed for float64 (no SLACK). Depths of sums are written down from the
CUDA sources, or are those of any order. Run it under `mp.workprec(PRECISION)`.

A weight and both ends of its interval are rounded to bf16. Within float64's error of a midpoint, float64 may round to
the other side; `decided` refuses such a number, so that what it lets through rounds alike in both.
"""

from dataclasses import dataclass, fields
from itertools import pairwise

import scalar_forms
from scalar_forms import mp, round_bf16

PRECISION = 200
"""Bits."""

NEAR = mp.ldexp(1, -44)
"""Relative distance from a midpoint that float64 can tell: its formulas err by some 2**-50."""

TILE = 64


@dataclass(frozen=True)
class Exact:
    """A value of the reference and the ends of its interval, scalars."""

    value: mp.mpf
    low: mp.mpf
    high: mp.mpf

    @property
    def reach(self):
        return max(self.high - self.value, self.value - self.low)


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """An `Arithmetic` as scalars; `ours` has the trees of the CUDA sources, else sums have any order."""

    unit: mp.mpf
    tiny: mp.mpf
    exp: mp.mpf
    exp_floor: mp.mpf
    turn: mp.mpf
    probability: mp.mpf
    probability_floor: mp.mpf
    ours: bool

    @classmethod
    def of(cls, arithmetic):
        names = [field.name for field in fields(cls) if field.name != "ours"]
        return cls(ours=arithmetic.fused, **{name: mp.mpf(getattr(arithmetic, name)) for name in names})

    def gamma(self, depth):
        """Relative error of `depth` roundings on top of each other."""
        return depth * self.unit / (1 - depth * self.unit)

    @property
    def eps(self):
        """The most that |log(1 + error of exp)| may be."""
        return self.exp * (1 + 2 * self.exp)


def decided(x):
    """bf16 of x.

    Raises:
        ValueError: x is so near a midpoint that float64 may round it to another number.
    """
    nearest = round_bf16(x)
    half_ulp = mp.ldexp(1, max(int(mp.frexp(x)[1]) - 9, -134))
    if half_ulp - abs(x - nearest) <= NEAR * abs(x):
        raise ValueError(
            f"{mp.nstr(x, 20)} is too near a midpoint of bf16 to tell how float64 rounds it; use other data"
        )
    return nearest


def around(value, error):
    return Exact(value, value - error, value + error)


def times(x, low, high, value):
    """x times a factor in [low, high]."""
    ends = [x.low * low, x.low * high, x.high * low, x.high * high]
    return Exact(x.value * value, min(ends), max(ends))


def widened(x, relative, absolute):
    low = x.low - (abs(x.low) * relative + absolute)
    return Exact(x.value, low, x.high + (abs(x.high) * relative + absolute))


def rounded(x):
    return Exact(*(decided(end) for end in (x.value, x.low, x.high)))


# ---- prep and pool ----


def normed(x, weight, eps, c):
    """One head [D] of intervals, not yet rounded to bf16."""
    n, eps = len(x), mp.mpf(eps)

    def inverse(magnitudes):
        return 1 / mp.sqrt(sum(y * y for y in magnitudes) / n + eps)

    farthest = inverse([max(abs(y.low), abs(y.high)) for y in x])
    nearest = inverse([mp.zero if y.low <= 0 <= y.high else min(abs(y.low), abs(y.high)) for y in x])
    middle = inverse([y.value for y in x])
    depth = 1 + ((n - 1).bit_length() if c.ours else n - 1)
    relative = c.gamma(mp.mpf(depth + 2) / 2 + 4) + (n + 2) * c.tiny / eps
    result = []
    for y, w in zip(x, weight, strict=True):
        scaled = times(times(y, farthest, nearest, middle), w, w, w)
        result.append(widened(scaled, relative, 4 * c.tiny * (1 + abs(w))))
    return result


def rotated(x, angles, c):
    """One head [D] of intervals, rounded to bf16, turned, and not yet rounded again."""
    half, out = len(angles), list(x)
    for i, angle in enumerate(angles):
        cos, sin = mp.cos(angle), mp.sin(angle)
        first, second = rounded(x[i]), rounded(x[i + half])
        out[i] = turned(first, cos, second, -sin, c)
        out[i + half] = turned(first, sin, second, cos, c)
    return out


def turned(first, a, second, b, c):
    """first * a + second * b, where a and b err by `turn`."""
    one, two = times(first, a, a, a), times(second, b, b, b)
    size = max(abs(one.low), abs(one.high)) + max(abs(two.low), abs(two.high))
    error = size * (c.turn * (1 + c.unit) + c.unit) + 3 * c.tiny
    total = Exact(one.value + two.value, one.low + two.low, one.high + two.high)
    return widened(total, c.unit, error * (1 + c.unit))


def pool(keys, weight, angles, eps, c):
    """The pooled row [DI] of one block's raw indexer keys [block][DI]."""
    block, means = len(keys), []
    for column in zip(*keys, strict=True):
        mean = sum(column) / block
        error = c.gamma(block) * sum(abs(x) for x in column) / block + c.tiny
        # Means of so few bf16 are exact in float64, which so rounds a midpoint alike.
        means.append(Exact(round_bf16(mean), decided(mean - error), decided(mean + error)))
    return rotated(normed(means, weight, eps, c), angles, c)


# ---- scores ----


def dot(q, key, c):
    """(q . key, its error but for underflow)."""
    runs, value, error = len(q) // 8, mp.zero, mp.zero
    for run in range(runs):  # eight lanes, a chain of FMAs each, then three additions
        gamma = c.gamma(runs - run + 3 if c.ours else len(q))
        for i in range(8 * run, 8 * run + 8):
            product = q[i] * key[i]
            value += product
            error += gamma * abs(product)
    return value, error


def block_score(iq, pooled, c):
    """Score of one block: index queries [IH][DI] with its pooled row [DI]."""
    value, low, high = mp.zero, mp.zero, mp.zero
    for query in iq:
        product, error = dot(query, pooled, c)
        error += len(query) * c.tiny
        value += max(product, mp.zero)
        low += max(product - error, mp.zero)
        high += max(product + error, mp.zero)
    root = mp.sqrt(len(pooled))
    inside = widened(Exact(value / root, low / root, high / root), c.gamma(len(iq) + 1), len(iq) * c.tiny)
    return Exact(inside.value, max(inside.low, mp.zero), inside.high)


# ---- chunks ----


@dataclass(frozen=True)
class Partial:
    """One head's partial of one chunk: o [D], m and l."""

    o: list[Exact]
    m: Exact
    l: Exact


def score(q, key, scale, c):
    """(s, e) of one key."""
    product, error = dot(q, key, c)
    if not c.ours:  # queries scaled first, or the base of exp folded into the scale: two roundings more
        width = len(q)
        error *= c.gamma(width + 2) / c.gamma(width)
    s, e = product * scale, error * abs(scale)
    if c.ours and abs(mp.frexp(scale)[0]) != 0.5:
        e += (abs(s) + e) * (2 * c.unit + c.unit**2)
    return s, e + (len(q) * abs(scale) + 1) * c.tiny


@dataclass(frozen=True)
class Tile:
    """What the keys of one tile share.

    Attributes:
        keys: their numbers.
        low, middle, high: where the running maximum lies after the tile, and its exact value.
        most: the largest that a score of the tile may be.
        may: later tiles that may raise the maximum.
    """

    keys: range
    low: mp.mpf
    middle: mp.mpf
    high: mp.mpf
    most: mp.mpf
    may: int = 0


def tiles_of(scored):
    """Tiles over scores and errors [(s, e)]."""
    tiles, low, middle, high = [], -mp.inf, -mp.inf, -mp.inf
    for start in range(0, len(scored), TILE):
        keys = range(start, min(start + TILE, len(scored)))
        most = max(scored[k][0] + scored[k][1] for k in keys)
        low = max(low, *(scored[k][0] - scored[k][1] for k in keys))
        middle = max(middle, *(scored[k][0] for k in keys))
        high = max(high, most)
        tiles.append(Tile(keys, low, middle, high, most))
    raised = [after.most > before.low for before, after in pairwise(tiles)]
    return [Tile(t.keys, t.low, t.middle, t.high, t.most, sum(raised[i:])) for i, t in enumerate(tiles)]


def chunk(q, keys, values, c):
    """One head q [D] over one chunk's keys and values [n][D]."""
    value_o, value_m, value_l, _ = scalar_forms.chunk(q, keys, values)
    scored = [score(q, key, 1 / mp.sqrt(len(q)), c) for key in keys]
    tiles = tiles_of(scored)
    n, last = len(keys), tiles[-1]
    o_error, l_error = [2 * (n + len(tiles)) * c.tiny for _ in q], mp.zero
    for number, tile in enumerate(tiles):
        joins = len(tiles) - max(number, 1)
        factor = rescaling(tile, last, c)
        for k in tile.keys:
            inside = len(tile.keys) - (k - tile.keys.start)
            moved = value_error(scored[k], tile, factor, c.gamma(inside + joins if c.ours else n + len(tiles)), c)
            o_error = [error + moved * abs(v) for error, v in zip(o_error, values[k], strict=True)]
            l_error += weight_error(scored[k], tile, last, c.gamma(6 + joins if c.ours else n + len(tiles)), c)
    o = [around(value, error) for value, error in zip(value_o, o_error, strict=True)]
    return Partial(o, Exact(value_m, last.low, last.high), around(value_l, l_error))


@dataclass(frozen=True)
class Factor:
    """exp(m_t - m), its relative error, and its absolute one where exp may be below its range."""

    exact: mp.mpf
    grown: mp.mpf
    flushed: mp.mpf


def rescaling(tile, last, c):
    drop = last.middle - tile.middle
    if not tile.may:
        return Factor(mp.exp(-drop), mp.zero, mp.zero)
    farthest, nearest = last.high - tile.low, max(last.low - tile.high, mp.zero)
    strayed = max(farthest - drop, drop - nearest) + c.unit * farthest + tile.may * c.eps
    return Factor(mp.exp(-drop), mp.expm1(strayed), tile.may * c.exp_floor)


def value_error(scored, tile, factor, order, c):
    """What a key's product, divided by its value, may err by in o."""
    s, e = scored
    weight = decided(mp.exp(s - tile.middle))
    least = mp.exp((s - e - tile.high) * (1 + c.unit)) * (1 - c.exp) - c.exp_floor
    most = mp.exp(min(s + e - tile.low, mp.zero) * (1 - c.unit)) * (1 + c.exp) + c.exp_floor
    stray = max(decided(most) - weight, weight - decided(max(least, mp.zero)))
    g = factor.grown
    further = (1 + g) * (1 + order)
    moved = stray * further + weight * (g + order * (1 + g))
    return moved * factor.exact + factor.flushed * (weight + stray) * further


def weight_error(scored, tile, last, order, c):
    """What a key's weight may err by in l."""
    s, e = scored
    shift = max(last.high - last.middle, last.middle - last.low)
    g = mp.expm1(e + shift + c.unit * (last.high - (s - e)) + c.eps * (1 + tile.may))
    flushed = (1 + tile.may) * c.exp_floor * (1 + g) * (1 + order)
    return mp.exp(s - last.middle) * (g * (1 + order) + order) + flushed


# ---- merge ----


def merged(partials, width, c):
    """o / l of one head's partials, not yet rounded to bf16: [D]."""
    live = [part for part in partials if part.l.value]
    if not live:
        return [around(mp.zero, mp.zero)] * width
    top, top_high = max(part.m.value for part in live), max(part.m.high for part in live)
    slip = mp.exp(max(part.m.reach for part in live))
    joined = [
        join(part, top, top_high, slip, *steps, c) for part, steps in zip(live, merge_steps(live, c), strict=True)
    ]
    tiny = 2 * c.tiny * slip * len(live)
    total = sum(x.scale * x.l.value for x in joined)
    l_apart = tiny + sum(x.apart(x.l) for x in joined)
    least = total - l_apart - sum(x.omega * x.scale * x.l.value for x in joined)
    return [quotient(joined, d, total, l_apart, least, tiny, c) for d in range(width)]


@dataclass(frozen=True)
class Joined:
    """A partial on its way: its factor, what errs in the factor, what its sums err by, and what exp may flush."""

    o: list[Exact]
    l: Exact
    scale: mp.mpf
    omega: mp.mpf
    order: mp.mpf
    flushed: mp.mpf

    def apart(self, x):
        """Errors that o and l do not share."""
        stray = x.reach * (1 + self.order) + abs(x.value) * self.order
        return (1 + self.omega) * stray * self.scale + self.flushed * (abs(x.value) + x.reach)


def merge_steps(live, c):
    """(scalings that are not by exp(0), roundings) of each partial."""
    scaled, raised, low, high = [], [], -mp.inf, -mp.inf
    for number, part in enumerate(live):
        scaled.append(number > 0 and part.m.low < high)
        raised.append(number > 0 and part.m.high > low)
        low, high = max(low, part.m.low), max(high, part.m.high)
    join_roundings = 1 if c.ours else 2
    return [
        (scaled[i] + sum(raised[i + 1 :]), scaled[i] + join_roundings * (len(live) - max(i, 1)))
        for i in range(len(live))
    ]


def join(part, top, top_high, slip, scalings, depth, c):
    way = top_high - part.m.low if scalings else mp.zero
    omega = mp.expm1(part.m.reach + c.unit * way + scalings * c.eps)
    order = c.gamma(depth)
    flushed = scalings * c.exp_floor * slip * (1 + omega) * (1 + order)
    return Joined(part.o, part.l, mp.exp(part.m.value - top), omega, order, flushed)


def quotient(joined, d, total, l_apart, least, tiny, c):
    """Element d of o / l."""
    f = sum(x.scale * x.o[d].value for x in joined) / total
    error = tiny
    for x in joined:
        error += x.apart(x.o[d]) + x.omega * x.scale * abs(x.o[d].value - f * x.l.value)
    if least <= 0:
        return around(f, mp.inf)
    error = (error + abs(f) * l_apart) / least
    return around(f, error * (1 + c.unit) + abs(f) * c.unit + c.tiny)


# ---- gate ----


def gate(out, x, c):
    """One element of the row and its gate, not yet rounded to bf16."""
    e = mp.exp(-abs(x))
    step = e * c.exp + c.exp_floor

    def sigmoid(e):
        return (e if x < 0 else 1) / (1 + e)

    ends = [sigmoid(max(e - step, mp.zero)), sigmoid(e + step)]
    product = times(Exact(sigmoid(e), min(ends), max(ends)), out, out, out)
    return widened(product, c.gamma(3), (abs(out) + 1) * c.tiny)


# ---- plain attention ----


def plain(q, keys, values, scale, c, tile):
    """One head q [D] over its keys and values [n][D], rescaled at each tile."""
    tiles = -(-len(keys) // tile)
    scored = [score(q, key, scale, c) for key in keys]
    top, worst = max(s for s, _ in scored), max(e for _, e in scored)
    value_order, weight_order = (c.gamma(depth) for depth in plain_depths(len(keys), tile, c))
    o, o_error = [mp.zero for _ in q], [(len(keys) + tiles) * c.tiny for _ in q]
    l, l_error = mp.zero, mp.zero
    for (s, e), value in zip(scored, values, strict=True):
        p = mp.exp(s - top)
        exponent = e + worst + 2 * c.unit * abs(s - top) + (tiles + 1) * (c.eps + c.unit)
        weight = p * mp.expm1(exponent) + (tiles + 1) * c.exp_floor * mp.exp(exponent)
        taken = weight * (1 + c.probability) + p * c.probability + (c.probability_floor if c.probability else 0)
        moved = taken + (p + taken) * value_order
        o = [x + p * v for x, v in zip(o, value, strict=True)]
        o_error = [x + moved * abs(v) for x, v in zip(o_error, value, strict=True)]
        l, l_error = l + p, l_error + taken + (p + taken) * weight_order
    return [plain_quotient(x, error, l, l_error, c) for x, error in zip(o, o_error, strict=True)]


def plain_depths(n, tile, c):
    """Roundings of a value product, and of a weight."""
    tiles = -(-n // tile)
    if not c.ours:
        return n + tiles, n + tiles
    inside = min(n, tile)
    return inside + 2 * tiles, 1 + (inside - 1).bit_length() + 2 * tiles


def plain_quotient(o, o_error, l, l_error, c):
    if l_error >= l:
        return around(o / l, mp.inf)
    ratio = o / l
    error = (o_error + abs(ratio) * l_error) / (l - l_error)
    return around(ratio, error * (1 + c.unit) + abs(ratio) * c.unit + c.tiny)
