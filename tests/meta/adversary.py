"""Kernels whose every operation errs by as much as the model of docs/bounds.md allows, instead of rounding to nearest.

`Adversary` does the operations; the functions put them together as the kernels do, for as many kernels at once as there
are draws.
"""

from __future__ import annotations

import numpy as np
from kvproof.reference.geometry import TILE
from kvproof.reference.numerics import bf16, widen

DRAWS = 512
"""Kernels that err in as many ways."""


class Adversary:
    """fp32 operations whose errors are chosen, not made: float64 arrays [DRAWS, ..] of as many kernels.

    A quarter of the draws errs one way for each kind of operation (the first two: all up, all down), a quarter one way
    for each place along the last axis, a quarter either way, a quarter by any amount. What is exact in any arithmetic
    stays so: a result of 0, sums with 0, products with 1, sums that are subnormal, exp(0).
    """

    def __init__(self, arithmetic, seed=0):
        self.arithmetic = arithmetic
        self._rng = np.random.default_rng(seed)
        self._known = {}

    def errors(self, kind, shape):
        """Errors in units of the largest one allowed, in [-1, 1]: [DRAWS, *shape]."""
        by_kind, by_place, either, _ = (slice(i * DRAWS // 4, (i + 1) * DRAWS // 4) for i in range(4))
        found = self._rng.uniform(-1, 1, (DRAWS, *shape))
        found[by_kind] = self._by_kind(kind).reshape(-1, *(1 for _ in shape))
        found[by_place] = self._by_place(shape[-1] if shape else 1).reshape(-1, *(1 for _ in shape[1:]), *shape[-1:])
        found[either] = np.sign(found[either])
        return found

    def _by_kind(self, kind):
        if kind not in self._known:
            self._known[kind] = self._signs(1)[:, 0]
            self._known[kind][:2] = 1, -1
        return self._known[kind]

    def _by_place(self, places):
        """The same for every kind; in half of these draws, one way for each tile."""
        if places not in self._known:
            signs = self._signs(places)
            signs[::2] = np.repeat(signs[::2, ::TILE], TILE, axis=1)[:, :places]
            self._known[places] = signs
        return self._known[places]

    def _signs(self, places):
        return self._rng.choice([-1.0, 1.0], (DRAWS // 4, places))

    def rounded(self, x, kind, exact=False, sum_of_floats=False):
        """x after a rounding, which never changes a sign."""
        size = np.abs(x)
        small = 0.0 if sum_of_floats else self.arithmetic.tiny
        most = np.where(size < 2.0**-126, small, self.arithmetic.unit * np.where(np.isinf(x), 0.0, size))
        found = x + self.errors(kind, x.shape[1:]) * np.where(exact | (x == 0), 0.0, most)
        return np.where(np.sign(found) == np.sign(x), found, 0.0)

    def constant(self, x, kind):
        """A constant as fp32 holds it."""
        return self.rounded(np.full((DRAWS,), x), kind)

    def add(self, a, b, kind):
        return self.rounded(a + b, kind, (a == 0) | (b == 0), sum_of_floats=True)

    def times(self, a, b, kind):
        return self.rounded(a * b, kind, np.isin(a, (0, 1)) | np.isin(b, (0, 1)))

    def fma(self, a, b, c, kind):
        """a * b + c; in two steps where products are not fused."""
        if not self.arithmetic.fused:
            return self.add(self.times(a, b, f"{kind}, product"), c, kind)
        product = a * b
        return self.rounded(product + c, kind, (product == 0) | (c == 0) & (np.isin(a, (0, 1)) | np.isin(b, (0, 1))))

    def divide(self, a, b, kind):
        return self.rounded(a / b, kind)

    def root(self, x, kind):
        return self.rounded(np.sqrt(x), kind)

    def exp(self, x, kind):
        """exp of x <= 0; below its range anything from 0 to exp_floor above the true value."""
        true, errors = np.exp(x), self.errors(kind, x.shape[1:])
        below = np.where(errors > 0, true + errors * self.arithmetic.exp_floor, 0.0)
        found = np.where(x < -126 * np.log(2), below, true * (1 + self.arithmetic.exp * errors))
        return np.where(x == 0, 1.0, np.where(np.isneginf(x), 0.0, found))

    def turn(self, true, kind):
        """A sine or cosine; those of 0 are exact."""
        return true * (1 + np.where(np.isin(true, (0, 1)), 0.0, self.arithmetic.turn) * self.errors(kind, true.shape))

    def tree(self, x, kind):
        """Pairwise sum over axis 1."""
        while x.shape[1] > 1:
            even, odd = x[:, ::2], x[:, 1::2]
            paired = odd.shape[1]
            x = np.concatenate([self.add(even[:, :paired], odd, kind), even[:, paired:]], axis=1)
        return x[:, 0]

    def in_order(self, x, kind):
        """Sum over axis 1."""
        total = x[:, 0]
        for k in range(1, x.shape[1]):
            total = self.add(total, x[:, k], kind)
        return total

    def dot(self, q, keys):
        """q [D] . keys [n, D]: eight chains and a tree, else in order; [DRAWS, n]."""
        lanes = 8 if self.arithmetic.fused else 1
        sums = np.zeros((DRAWS, lanes, len(keys)))
        for start in range(0, len(q), lanes):
            piece = slice(start, start + lanes)
            sums = self.fma(q[piece, None], keys.T[None, piece], sums, "dot product")
        return self.tree(sums, "dot product")


def round_bf16(x):
    return widen(bf16(x))


def attend(adversary, q, keys, values, tile=TILE, rounded=round_bf16):
    """chunks.cu: o [DRAWS, D], m and l [DRAWS] of one head over one chunk; sums in order where products are not fused.

    Args:
        tile: keys between two rescalings.
        rounded: weights as the value product takes them.
    """
    o, high, l = np.zeros((DRAWS, len(q))), np.full(DRAWS, -np.inf), np.zeros(DRAWS)
    s = scores_of(adversary, q, keys)
    join = join_tile if adversary.arithmetic.fused else join_keys
    for start in range(0, len(keys), tile):
        here = slice(start, min(start + tile, len(keys)))
        before, high = high, np.maximum(high, s[:, here].max(axis=1))
        p = adversary.exp(adversary.add(s[:, here], -high[:, None], "difference"), "exp")
        rescale = adversary.exp(adversary.add(before, -high, "rescaling difference"), "rescaling")
        whole = np.pad(p, ((0, 0), (0, start + tile - here.stop)))
        o, l = join(adversary, o, l, rescale, whole, rounded(p), values[here])
    return o, high, l


def scores_of(adversary, q, keys):
    scale, products = len(q) ** -0.5, adversary.dot(q, keys)
    if np.frexp(scale)[0] == 0.5:  # a power of two
        return products * scale
    return adversary.times(products, adversary.constant(scale, "scale")[:, None], "scaling")


def join_tile(adversary, o, l, rescale, p, weights, values):
    """A chain of FMAs and a tree, then an FMA each to join what was before."""
    inside = np.zeros_like(o)
    for k, value in enumerate(values):
        inside = adversary.fma(weights[:, k, None], value, inside, "value product")
    o = adversary.fma(rescale[:, None], o, inside, "joined values")
    return o, adversary.fma(rescale, l, adversary.tree(p, "sum of weights"), "joined weights")


def join_keys(adversary, o, l, rescale, p, weights, values):
    """Key by key to what was before."""
    o, l = adversary.times(rescale[:, None], o, "rescaled values"), adversary.times(rescale, l, "rescaled weights")
    for k, value in enumerate(values):
        o = adversary.fma(weights[:, k, None], value, o, "value product")
        l = adversary.add(l, p[:, k], "sum of weights")
    return o, l


def merge(adversary, partials):
    """merge.cu: o / l of one head, [DRAWS, D], before the rounding to bf16."""
    o, high, l = partials[0]
    for part_o, part_m, part_l in partials[1:]:
        top = np.maximum(high, part_m)
        a = adversary.exp(adversary.add(high, -top, "difference of maxima"), "exp of the older")
        b = adversary.exp(adversary.add(part_m, -top, "difference of maxima"), "exp of the newer")
        scaled_o = adversary.times(b[:, None], part_o, "scaled o")
        scaled_l = adversary.times(b, part_l, "scaled l")
        o = adversary.fma(a[:, None], o, scaled_o, "merged o")
        l, high = adversary.fma(a, l, scaled_l, "merged l"), top
    return adversary.divide(o, l[:, None], "quotient")


def norm(adversary, x, weight, eps):
    """rotary.cuh: x [D] or [DRAWS, D] over its root mean square, before the rounding to bf16."""
    squares = adversary.times(x, x, "square")
    sums = adversary.tree if adversary.arithmetic.fused else adversary.in_order
    mean = adversary.divide(sums(squares, "sum of squares"), x.shape[-1], "mean")
    root = adversary.root(adversary.add(mean, adversary.constant(eps, "eps"), "mean and eps"), "root")
    scaled = adversary.times(x, adversary.divide(1.0, root, "reciprocal")[:, None], "normed")
    return adversary.times(scaled, weight, "weighted")


def rotate(adversary, x, angle):
    """rotary.cuh: bf16(x) [DRAWS, D] turned, before the next rounding to bf16."""
    half = len(angle)
    cos, sin = adversary.turn(np.cos(angle), "cosine"), adversary.turn(np.sin(angle), "sine")
    n = round_bf16(x)
    first, second = n[:, :half], n[:, half : 2 * half]
    out = x.copy()
    products = [adversary.times(*factors, "turned") for factors in ((first, cos), (second, -sin))]
    out[:, :half] = adversary.add(*products, "rotated")
    products = [adversary.times(*factors, "turned") for factors in ((first, sin), (second, cos))]
    out[:, half : 2 * half] = adversary.add(*products, "rotated")
    return out


def mean_of(adversary, keys):
    """pool.cu: keys [block, D]; [DRAWS, D], before the rounding to bf16."""
    total = adversary.in_order(np.broadcast_to(keys, (DRAWS, *keys.shape)), "sum of keys")
    return adversary.divide(total, len(keys), "mean of keys")


def block_scores(adversary, iq, pooled):
    """scores.cu: iq [IH, D], pooled [blocks, D]; [DRAWS, blocks]."""
    heads = [np.maximum(adversary.dot(query, pooled), 0.0) for query in iq]
    root = adversary.constant(np.sqrt(iq.shape[-1]), "root of the width")
    total = adversary.in_order(np.stack(heads, axis=1), "sum of heads")
    return adversary.divide(total, root[:, None], "score")


def gated(adversary, out, gates):
    """gate.cu: out and gates [D]; before the rounding to bf16."""
    e = adversary.exp(np.broadcast_to(-np.abs(gates), (DRAWS, len(gates))), "exp")
    below = adversary.add(1.0, e, "1 + exp")
    sigmoid = adversary.divide(np.where(gates < 0, e, 1.0), below, "sigmoid")
    return adversary.times(out, sigmoid, "gated")
