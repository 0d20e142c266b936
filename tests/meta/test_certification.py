"""The bounds are certified twice over.

In exact arithmetic (`exact_bounds`): the float64 reference errs by a small fraction of its bound, and no bound is below
its exact value, nor much above it. And by adversaries (`adversary`): kernels whose every operation errs by as much as
the model of docs/bounds.md allows, up, down or at random, must stay within; where one kind of error is all there is,
they come close to the bound, so that a term that is missing shows.
"""

from __future__ import annotations

import exact_bounds
import numpy as np
import pytest
import scalar_forms
from adversary import (
    DRAWS,
    Adversary,
    attend,
    block_scores,
    gated,
    mean_of,
    merge,
    norm,
    rotate,
    round_bf16,
)
from exact_bounds import Constants, Exact, Partial, around
from kvproof.oracle import bounds, interval
from kvproof.oracle.arithmetic import FP32, OURS, PAIRWISE, Arithmetic
from kvproof.oracle.bounds import PartialsBound
from kvproof.reference import TEXT, Geometry, KeyLists, Partials, Weights
from kvproof.reference.numerics import bf16, widen
from scalar_forms import mp, scalars
from streams import make_cache

FRACTION = 2.0**-28
"""The most of a bound that the float64 reference may err by: a 256th of what `interval.SLACK` allows."""

LOOSE = 2.0**-18
"""The most that a float64 bound may be above the exact one: SLACK enters three times, and a division grows it."""

FILL = 2.0**-60
"""Too small to count, but no zero, with which sums are exact."""

TILE, CHUNK = 64, 512

arithmetics = pytest.mark.parametrize("arithmetic", [OURS, FP32], ids=["ours", "fp32"])


@pytest.fixture(autouse=True)
def precision():
    with mp.workprec(exact_bounds.PRECISION):
        yield


@pytest.fixture
def before_rounding(monkeypatch):
    """Bounds before the last rounding to bf16, whose half ulp would hide errors as small as fp32's."""
    monkeypatch.setattr(bounds, "stored", lambda x: x)


# ---- inputs and their bounds ----


def geometry(width, *, heads=1, index_heads=1, block=1, half=1, eps=1e-6):
    """One key/value head and little else."""
    return Geometry(
        name="one",
        query_heads=heads,
        kv_heads=1,
        head_dim=width,
        index_heads=index_heads,
        index_dim=width,
        block=block,
        top_blocks=1,
        rotary_half=half,
        mrope_sections=(half, 0, 0),
        layers=1,
        eps=eps,
    )


KINDS = ["normal", "cancelling", "equal", "dominant", "rising", "falling", "huge", "tiny", "subnormal", "zero"]

TWO_TILES = ["uncertain first", "uncertain last", "uncertain and close"]
"""Kinds with a second tile, where one key's score may exceed its tile's maximum; that of the other tile if `close`."""


def attention_data(kind, keys, width):
    """q [D], keys and values [n, D] in bf16, as float64."""
    rng = np.random.default_rng([keys, width])
    q, (k, v) = rng.standard_normal(width), rng.standard_normal((2, keys, width))
    if kind == "cancelling":
        q, k = 100 * np.repeat(q[::2], 2), 100 * np.repeat(k[:, ::2], 2, axis=1)
        k[:, 1::2] *= -1
    elif kind == "equal":
        k[:] = k[0]
    elif kind == "dominant":
        k[keys // 3] *= 50
    elif kind == "rising":
        k = np.linspace(1, 6, keys)[:, None] * q
    elif kind == "falling":
        k = np.linspace(6, 1, keys)[:, None] * q
    elif kind in TWO_TILES:
        q, k = np.ones(width), np.zeros((keys, width))
        k[TILE:, 0] = 0.0078125 if kind == "uncertain and close" else 3.0
        k[-1 if kind == "uncertain last" else 0, 1:4] = 2.0**17, -(2.0**17), -0.015625
    elif kind == "huge":
        k, v = k * 2.0**10, v * 2.0**100
    elif kind == "tiny":
        k, v = k * 1e-30, v * 1e-30
    elif kind == "subnormal":
        q, k, v = q * 2.0**-20, k * 2.0**-115, v * 2.0**-132
    elif kind == "zero":
        k[:], v[:] = 0.0, -0.0
    return tuple(widen(bf16(x)) for x in (q, k, v))


def weights_near_midpoints(top):
    """q [16], keys and values [13, 16]: key 0 scores `top`, the most. Errors of the others just take their weights over
    a midpoint of bf16, 3 each upwards and downwards, or just do not. Each has a column of the values to itself.
    """
    rng = np.random.default_rng(7)
    q, drawn = np.full(16, FILL), np.full((400_000, 16), FILL)
    q[8:], drawn[:, 8:] = widen(bf16(rng.uniform(0.5, 1, 8))), widen(bf16(rng.uniform(-1, 0, (len(drawn), 8))))
    first = np.full((1, 16), FILL)
    first[0, 8:] = bf16(top * 4 / q[8:].sum())
    s, m = drawn @ q / 4, first @ q / 4
    # Of exp; four roundings of either score; one of the difference.
    error = OURS.exp + OURS.unit * (4 * np.abs(s) + 4 * np.abs(m) + np.abs(s - m))
    ulps = np.exp(s - m) / np.ldexp(1.0, np.frexp(np.exp(s - m))[1] - 8)
    way = (0.5 - ulps % 1) / ulps / error
    ends = [(0.8, 0.97), (-0.97, -0.8), (1.03, 1.4), (-1.4, -1.03)]
    found = [np.flatnonzero((low < way) & (way < high))[:3] for low, high in ends]
    chosen = np.concatenate(found)
    assert len(chosen) == 12
    return q, np.concatenate([first, drawn[chosen]]), np.eye(13, 16)


TOPS = pytest.mark.parametrize("top", [0.0, 1.0], ids=["maximum 0", "maximum 1"])


QUERY = np.full(16, 1.5)
"""No product with it is exact; a key of 16 times x scores 6 x."""


def one_far_below(key):
    """A key that scores 6 key, in the tile of the maximum, 0; nothing else has a value."""
    values = np.zeros((3, 16))
    values[1] = 1.0
    return QUERY, np.repeat([[FILL], [key], [FILL]], 16, axis=1), values


def two_rescalings():
    """A tile of uncertain scores, which has all the values, and two keys far above it, each in another tile."""
    rng = np.random.default_rng(8)
    keys = np.zeros((2 * TILE + 1, 16))
    keys[:TILE, 2:] = widen(bf16(rng.uniform(0, 0.25, (TILE, 14))))
    keys[:TILE, 0], keys[:TILE, 4] = 2.0**12, -(2.0**12)
    keys[TILE], keys[2 * TILE] = 20.0, 24.0
    values = np.zeros((len(keys), 16))
    values[:TILE] = 2.0**100
    return QUERY, keys, values


def bound_of(q, keys, values, arithmetic):
    """Bound of one head's partials: o [chunks, D], m and l [chunks]; and of its row [D]."""
    one = geometry(len(q))
    cache = make_cache(one, len(keys))
    for part, rows in (("keys", keys), ("values", values)):
        cache.write(part, np.arange(len(rows)), bf16(rows[:, None]))
    partials = bounds.chunks(one, cache, bf16(q[None, None]), KeyLists.dense([len(keys)]), arithmetic)
    found = PartialsBound(o=partials.o[0, :, 0], m=partials.m[0, :, 0], l=partials.l[0, :, 0])
    return found, bounds.attention(one, partials, arithmetic)[0, 0]


def given_partials():
    """fp32 o [rows, chunks, 2, 8], m and l [rows, chunks, 2], some of them empty; the last row throughout."""
    rng = np.random.default_rng(5)
    rows, chunks = 8, 24
    o = rng.standard_normal((rows, chunks, 2, 8)).astype(np.float32)
    m = rng.standard_normal((rows, chunks, 2)).astype(np.float32)
    l = rng.uniform(1, 512, (rows, chunks, 2)).astype(np.float32)
    m[1], m[2] = np.sort(m[1], axis=0), np.sort(m[2], axis=0)[::-1]  # rising, falling
    m[3] = m[3, 0]
    m[4] *= 60
    o[5], l[5] = o[5] * 2.0**-140, l[5] * 2.0**-140
    m[6, 0], l[6, 0], o[6, 0], o[6, 1:] = -120.0, 2.0**120, o[6, 0] * 2.0**120, 0.0  # exp may give 0 for what counts
    empty = np.zeros((rows, chunks), bool)
    empty[[0, 0, 1, 2], [1, 4, 0, 2]] = True
    empty[-1] = True
    o[empty], m[empty], l[empty] = np.nan, -np.inf, 0.0
    m[2, 2] = 100.0
    return o, m, l


def uncertain_partials():
    """`given_partials` that may be off, every other row's maxima more upwards than downwards: intervals o, m and l."""
    o, m, l = (widen(x) for x in given_partials())
    o[np.isnan(o)] = 0.0
    m_error = np.where(l > 0, np.random.default_rng(6).uniform(0, 1e-3, m.shape), 0.0)
    down = 1 + 2 * (np.arange(len(l)) % 2)[:, None, None]
    return PartialsBound(
        o=interval.between(o, o - 1e-4 * np.abs(o), o + 1e-4 * np.abs(o)),
        m=interval.between(m, m - down * m_error, m + (4 - down) * m_error),
        l=interval.between(l, l - 1e-4 * l, l + 1e-4 * l),
    )


HEADS = ["normal", "equal", "small", "subnormal", "huge", "zero", "one-sided"]
"""Rows to norm and rotate, see `head_data`."""


def head_data(kind, rows, width):
    """Heads [rows, D] in bf16, as float64."""
    x = np.random.default_rng([rows, width, 1]).standard_normal((rows, width))
    if kind == "equal":
        x[:] = x[:, :1]
    elif kind == "zero":
        x[:] = 0.0
    elif kind == "one-sided":
        x[:, 1:] *= 2.0**-30
    scale = {"small": 2.0**-9, "subnormal": 2.0**-130, "huge": 2.0**50}.get(kind, 1.0)
    return widen(bf16(x * scale))


EPS = pytest.mark.parametrize("eps", [1e-6, 2.0**-138, 1e8], ids=["eps 1e-6", "eps tiny", "eps large"])

POSITION = 12_345


def make_scales(one):
    """Norm weights like a model's, and one that is very small."""
    scale = (1 + 0.3 * np.random.default_rng(6).standard_normal(one.head_dim)).astype(np.float32)
    scale[-1] = 1e-36
    return Weights(q_scale=scale, k_scale=scale, i_scale=scale, pool_scale=scale, inv_freq=one.inv_freq())


def bound_of_head(one, weights, x, arithmetic):
    """Bound of a query [D] at position POSITION."""
    projection = bf16(np.zeros((1, one.projection_width)))
    projection[0, : len(x)] = bf16(x)
    return bounds.prep(one, weights, projection, POSITION, TEXT, arithmetic).q[0, 0]


BLOCKS = [*HEADS, "cancelling", "vanishing", "midpoint"]
"""Blocks to pool, see `block_data`."""


def block_data(kind, block):
    """A block's raw indexer keys [block, 8]."""
    keys = head_data(kind, block, 8)
    if kind == "cancelling":
        keys[1::2] = -keys[::2][: block // 2] * (1 + 2.0**-6)
    elif kind == "vanishing":  # means of 0, and errors far above eps
        keys *= 2.0**30
        keys[1::2] = -keys[::2][: block // 2]
    elif kind == "midpoint":  # four roundings, and no fewer, take a mean over the midpoint 1 + 2**-8
        keys[:] = 1.0
        keys[:, 6] = np.resize([2.0, 2.0, 2.0**-6, -3.7 * 2.0**-22], block)
    return widen(bf16(keys))


def bound_of_block(one, weights, keys, arithmetic):
    """Bound of the pooled row of block 1."""
    cache, positions = make_cache(one, 2 * len(keys)), np.arange(len(keys), 2 * len(keys))
    cache.write("index_keys", positions, bf16(keys[:, None]))
    return bounds.pool(one, weights, cache, len(keys), len(keys), TEXT, arithmetic)[0, 0]


def score_data(kind, width):
    """Index queries [3, D] and pooled rows [12, D]."""
    _, pooled, iq = attention_data("normal" if kind == "positive" else kind, 12, width)
    return (np.abs(iq[:3]), np.abs(pooled)) if kind == "positive" else (iq[:3], pooled)


def bound_of_scores(iq, pooled, arithmetic):
    """Bound of the scores of all blocks [blocks]."""
    one, blocks = geometry(iq.shape[1], index_heads=len(iq)), len(pooled)
    cache = make_cache(one, blocks)
    cache.write("pooled", np.arange(blocks), bf16(pooled[:, None]))
    return bounds.scores(one, cache, bf16(iq[None]), blocks - 1, arithmetic)[0]


GATES = widen(
    bf16([0.0, 1e-30, 0.3, -0.3, 2.0, -2.0, 20.0, -20.0, 80.0, -80.0, 87.5, -87.5, 100.0, -100.0, 3e38, -3e38])
)

GATED = pytest.mark.parametrize("out", [1.703125, -(2.0**-130), 2.0**127], ids=["one", "subnormal", "huge"])


def bound_of_gated(out, arithmetic):
    """Bound of a row that is `out` everywhere, by GATES."""
    one = geometry(len(GATES))
    projection = bf16(np.zeros((1, one.projection_width)))
    projection[:, len(GATES) : 2 * len(GATES)] = bf16(GATES)
    return bounds.gate(one, bf16(np.full((1, 1, len(GATES)), out)), projection, arithmetic)[0, 0]


TILES_OF_16 = Arithmetic(probability=0.0, fused=True, dot_lanes=8, value_lanes=1, weight_lanes=PAIRWISE, tile=16)
PLAIN = pytest.mark.parametrize(
    "arithmetic",
    [FP32, Arithmetic(probability=0.0), TILES_OF_16],
    ids=["fp32", "weights in fp32", "tiles of 16"],
)


# ---- exactly ----


def certify(got, wants):
    """Hold a float64 interval against as many exact ones."""
    __tracebackhide__ = True
    columns = (np.ravel(x).tolist() for x in (got.value, got.low, got.high, got.reach))
    for number, (value, low, high, reach, want) in enumerate(zip(*columns, wants, strict=True)):
        assert abs(value - want.value) <= FRACTION * want.reach, f"the reference errs at {number}"
        ends = {"lower end": (-low, -want.low), "upper end": (high, want.high), "reach": (reach, want.reach)}
        for name, (found, exact) in ends.items():
            assert exact <= found <= exact + LOOSE * want.reach, f"the {name} at {number} is {found}, exactly {exact}"


def certify_attention(q, keys, values, arithmetic):
    """Hold the bounds of one head's partials and of its row against the exact ones."""
    constants = Constants.of(arithmetic)
    partials, row = bound_of(q, keys, values, arithmetic)
    q, keys, values = scalars(q), scalars(keys), scalars(values)
    starts = range(0, len(keys), CHUNK)
    exact = [exact_bounds.chunk(q, keys[s : s + CHUNK], values[s : s + CHUNK], constants) for s in starts]
    certify(partials.o, [x for part in exact for x in part.o])
    certify(partials.m, [part.m for part in exact])
    certify(partials.l, [part.l for part in exact])
    certify(row, exact_bounds.merged(exact, len(q), constants))


@arithmetics
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("kind", KINDS + TWO_TILES)
@pytest.mark.usefixtures("before_rounding")
def test_attention(kind, width, arithmetic):
    certify_attention(*attention_data(kind, 80, width), arithmetic)


@arithmetics
@pytest.mark.parametrize("keys", [1, 64, 65, 513])
@pytest.mark.usefixtures("before_rounding")
def test_attention_at_the_edges_of_tiles_and_chunks(keys, arithmetic):
    certify_attention(*attention_data("normal", keys, 8), arithmetic)


@pytest.mark.usefixtures("before_rounding")
def test_attention_over_nine_thousand_keys():
    certify_attention(*attention_data("normal", 9000, 8), OURS)


@arithmetics
@TOPS
@pytest.mark.usefixtures("before_rounding")
def test_weights_that_only_just_reach_a_midpoint(top, arithmetic):
    certify_attention(*weights_near_midpoints(top), arithmetic)


@arithmetics
@pytest.mark.parametrize("case", ["weight", "weight at the edge", "rescalings"])
@pytest.mark.usefixtures("before_rounding")
def test_exp_below_its_range(case, arithmetic):
    """Nothing else has a value, so that these errors count."""
    data = {"weight": one_far_below(-20.0), "weight at the edge": one_far_below(-14.5), "rescalings": two_rescalings()}
    certify_attention(*data[case], arithmetic)


@arithmetics
@pytest.mark.usefixtures("before_rounding")
def test_merge_of_given_partials(arithmetic):
    """Also empty ones, whatever their o and m hold, and rows that are empty throughout."""
    one, constants = geometry(8, heads=2), Constants.of(arithmetic)
    o, m, l = given_partials()
    got = bounds.merge(one, Partials(o=o, m=m, l=l), arithmetic)
    given = PartialsBound(*(interval.exact(x) for x in (o, m, l)))
    for row in range(len(o)):
        for head in range(2):
            certify(got[row, head], exact_bounds.merged(partials_of(given, row, head), 8, constants))


@arithmetics
@pytest.mark.usefixtures("before_rounding")
def test_merge_of_uncertain_partials(arithmetic):
    given, constants = uncertain_partials(), Constants.of(arithmetic)
    got = bounds.attention(geometry(8, heads=2), given, arithmetic)
    for row in range(len(got.value)):
        for head in range(2):
            certify(got[row, head], exact_bounds.merged(partials_of(given, row, head), 8, constants))


def partials_of(given, row, head):
    """One head's partials as scalars; an empty one's o is not looked at."""
    chunks = range(given.l.value.shape[1])
    o, m, l = (x[row, :, head] for x in (given.o, given.m, given.l))
    return [
        Partial(scalar_ends(o[c]) if l.value[c] else [], *scalar_ends(m[c : c + 1]), *scalar_ends(l[c : c + 1]))
        for c in chunks
    ]


def scalar_ends(x):
    """An interval [n] as n exact ones."""
    return [Exact(*ends) for ends in zip(*(scalars(end) for end in (x.value, x.low, x.high)), strict=True)]


@arithmetics
@EPS
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("before_rounding")
def test_prep(kind, width, eps, arithmetic):
    one, constants, x = geometry(width, half=3, eps=eps), Constants.of(arithmetic), head_data(kind, 1, width)[0]
    weights = make_scales(one)
    given = [around(y, mp.zero) for y in scalars(x)]
    turn = scalar_forms.angles(one, weights, TEXT, POSITION)
    normed = exact_bounds.normed(given, scalars(weights.q_scale), eps, constants)
    certify(bound_of_head(one, weights, x, arithmetic), exact_bounds.rotated(normed, turn, constants))


@arithmetics
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.usefixtures("before_rounding")
def test_pool(kind, block, arithmetic):
    one, constants, keys = geometry(8, half=3, block=block), Constants.of(arithmetic), block_data(kind, block)
    weights = make_scales(one)
    turn = scalar_forms.angles(one, weights, TEXT, block)
    want = exact_bounds.pool(scalars(keys), scalars(weights.pool_scale), turn, one.eps, constants)
    certify(bound_of_block(one, weights, keys, arithmetic), want)


@arithmetics
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_scores(kind, width, arithmetic):
    constants, (iq, pooled) = Constants.of(arithmetic), score_data(kind, width)
    want = [exact_bounds.block_score(scalars(iq), scalars(row), constants) for row in pooled]
    certify(bound_of_scores(iq, pooled, arithmetic), want)


@arithmetics
@GATED
@pytest.mark.usefixtures("before_rounding")
def test_gate(out, arithmetic):
    constants = Constants.of(arithmetic)
    certify(bound_of_gated(out, arithmetic), [exact_bounds.gate(mp.mpf(out), x, constants) for x in scalars(GATES)])


@PLAIN
@pytest.mark.parametrize("scale", [None, 0.3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_attention(kind, scale, arithmetic):
    certify_plain_attention(*attention_data(kind, 60, 8), 8**-0.5 if scale is None else scale, arithmetic)


@PLAIN
def test_plain_attention_with_a_weight_below_exp(arithmetic):
    certify_plain_attention(*one_far_below(-20.0), 0.25, arithmetic)


def certify_plain_attention(q, keys, values, scale, arithmetic):
    """Hold the bound of one head's row against the exact one."""
    got = bounds.plain_attention(q[None], keys[:, None], values[:, None], scale, arithmetic)
    constants = Constants.of(arithmetic)
    tile = arithmetic.tile or 1
    certify(got, exact_bounds.plain(scalars(q), scalars(keys), scalars(values), mp.mpf(scale), constants, tile))


# ---- by adversaries ----


def shares(interval, got):
    """The largest |got - value| over the bound, for each element; all of `got`, [DRAWS, *shape], must lie within."""
    __tracebackhide__ = True
    outside = np.argwhere(~((interval.low <= got) & (got <= interval.high)))
    assert not len(outside), f"{len(outside)} of {got.size} are outside, the first at {outside[0].tolist()}"
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.abs(got - interval.value) / interval.reach).max(axis=0)


def attack(q, keys, values, arithmetic):
    """Shares of the bounds of a head's o [chunks, D], m and l [chunks], and row [D]."""
    __tracebackhide__ = True
    adversary = Adversary(arithmetic)
    bound, row = bound_of(q, keys, values, arithmetic)
    starts = range(0, len(keys), CHUNK)
    partials = [attend(adversary, q, keys[s : s + CHUNK], values[s : s + CHUNK]) for s in starts]
    found = {name: np.stack([part[i] for part in partials], axis=1) for i, name in enumerate("oml")}
    result = {name: shares(getattr(bound, name), found[name]) for name in "oml"}
    return result | {"row": shares(row, merge(adversary, partials))}


@arithmetics
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("kind", KINDS + TWO_TILES)
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bounds_of_attention(kind, width, arithmetic):
    attack(*attention_data(kind, 100, width), arithmetic)


def singled_out(keys, *columns):
    """Values [n, 16] with a column for each list of keys: 1 for those, and next to nothing for the others."""
    values = np.full((keys, 16), FILL)
    for column, chosen in enumerate(columns):
        values[chosen, column] = 1.0
    return values


def rising_a_little(keys):
    """Scores so small that their own errors do not count, and rise at each tile."""
    steps = np.repeat((np.arange(keys) // TILE * 2.0**-8)[:, None], 16, axis=1)
    return QUERY, steps, singled_out(keys, [0], [TILE - 1], [TILE], [2 * TILE - 1], [keys - 1])


def cancelling_scores():
    """Two tiles, whose scores are next to nothing beside their errors."""
    keys = np.full((TILE + 1, 16), FILL)
    keys[:, 0], keys[:, 4], keys[TILE, 8] = 2.0**12, -(2.0**12), 0.5
    return QUERY, keys, singled_out(len(keys), [0], [TILE - 1], np.arange(TILE))


def two_far_apart(low, high, value=1.0):
    """Two keys, at a tile's end and at the next one's start, score 6 low and 6 high; the first alone has a value."""
    keys = np.full((TILE + 1, 16), -40.0)
    keys[TILE - 1], keys[TILE] = low, high
    values = np.zeros((len(keys), 16))
    values[TILE - 1] = value
    return QUERY, keys, values


def subnormal_values():
    return QUERY, np.full((TILE, 16), FILL), np.full((TILE, 16), 2.0**-133)


REACHED = {
    "sums and rescalings": (rising_a_little(CHUNK), {"o": 0.98, "l": 0.87, "row": 0.65}),
    "three chunks": (rising_a_little(2 * CHUNK + 76), {"o": 0.98, "l": 0.69, "row": 0.56}),
    "errors of scores": (cancelling_scores(), {"o": 0.49, "l": 0.78, "m": 0.79}),
    "roundings of differences": (two_far_apart(-1.75, 1.75), {"o": 0.98, "m": 0.98}),
    "rescaling below exp": (two_far_apart(-8.0, 8.0), {"o": 0.98, "row": 0.98}),
    "weight below exp": (one_far_below(-20.0), {"o": 0.98, "row": 0.98}),
    "large values, rescaling below exp": (two_far_apart(-8.0, 8.0, 2.0**100), {"o": 0.98, "row": 0.98}),
    "subnormal values": (subnormal_values(), {"o": 0.4}),
}
"""Inputs in which some errors outweigh all others, and the share of each element's bound that adversaries reach."""


@arithmetics
@pytest.mark.parametrize("case", REACHED, ids=[name.replace(" ", "-") for name in REACHED])
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_reach_the_bounds_of_attention(case, arithmetic):
    """Ours, whose sums they take in the order that is declared; those of any order hold them all the same."""
    data, least = REACHED[case]
    found = attack(*data, arithmetic)
    if arithmetic == OURS:
        assert {name: found[name].min() >= share for name, share in least.items()} == dict.fromkeys(least, True)


@TOPS
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_take_weights_over_a_midpoint(top):
    """Of the first keys all, and of the others none."""
    found = attack(*weights_near_midpoints(top), OURS)["o"][0]
    assert found[1:7].min() > 0.98
    assert found[7:].max() < 0.01


@arithmetics
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bound_of_merge(arithmetic):
    o, m, l = given_partials()
    got = bounds.merge(geometry(8, heads=2), Partials(o=o, m=m, l=l), arithmetic)
    for row in range(len(o) - 1):  # the last is empty
        for head in range(2):
            live = [[x[row, c, head] for x in (o, m, l)] for c in np.flatnonzero(l[row, :, head])]
            shares(got[row, head], merge(Adversary(arithmetic), in_all_draws(live)))


@arithmetics
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bound_of_merge_whatever_the_partials_are(arithmetic):
    given, adversary = uncertain_partials(), Adversary(arithmetic)
    got = bounds.attention(geometry(8, heads=2), given, arithmetic)
    for row in range(len(got.value) - 1):
        for head in range(2):
            live = np.flatnonzero(given.l.value[row, :, head])
            parts = [
                [drawn(adversary, f"{name} of chunk {c}", getattr(given, name)[row, c, head]) for name in "oml"]
                for c in live
            ]
            shares(got[row, head], merge(adversary, parts))


def drawn(adversary, kind, x):
    """Values in an interval, at its ends or between."""
    errors = adversary.errors(kind, x.value.shape)
    return np.where(errors < 0, x.value + errors * (x.value - x.low), x.value + errors * (x.high - x.value))


def in_all_draws(partials):
    """The same (o, m, l) given to every draw."""
    return [[np.broadcast_to(widen(x), (DRAWS, *x.shape)) for x in map(np.asarray, part)] for part in partials]


MERGED = {
    "rising": (2.0**-6 * np.arange(8), 0.98),
    "far apart": (3.0 * np.arange(8), 0.9),
    "falling": (-(2.0**-6) * np.arange(8), 0.9),
    "below exp": (np.array([0.0, 100.0]), 0.98),
}
"""Maxima of chunks, and the share of the bound that adversaries reach."""


@pytest.mark.parametrize("case", MERGED, ids=[name.replace(" ", "-") for name in MERGED])
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_reach_the_bound_of_merge(case):
    """Each column has its o in another chunk, and nearly all of l is in the chunk of the maximum."""
    maxima, least = MERGED[case]
    chunks = len(maxima)
    o, l = np.full((chunks, 8), FILL, np.float32), np.full(chunks, 2.0**-20, np.float32)
    np.fill_diagonal(o, 1.0)
    l[maxima.argmax()] = 1.0
    m = maxima.astype(np.float32)
    bound = bounds.merge(geometry(8), Partials(o=o[None, :, None], m=m[None, :, None], l=l[None, :, None]), OURS)
    found = shares(bound[0, 0], merge(Adversary(OURS), in_all_draws(zip(o, m, l, strict=True))))
    assert found.min() > least


REACHED_BY_NORMS = ("normal", "equal", "small", "huge")
"""Kinds of heads whose bounds adversaries come close to."""


@arithmetics
@EPS
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bound_of_prep(kind, width, eps, arithmetic):
    one, x = geometry(width, half=3, eps=eps), head_data(kind, 1, width)[0]
    weights, adversary = make_scales(one), Adversary(arithmetic)
    angle = widen(np.float32(POSITION) * weights.inv_freq)
    normed = norm(adversary, np.broadcast_to(x, (DRAWS, width)), weights.q_scale, eps)
    found = shares(bound_of_head(one, weights, x, arithmetic), rotate(adversary, normed, angle))
    if kind in REACHED_BY_NORMS and eps == 1e-6 and arithmetic == OURS:
        assert found[:-1].min() > 0.75


@arithmetics
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bound_of_pool(kind, block, arithmetic):
    one, keys, adversary = geometry(8, half=3, block=block), block_data(kind, block), Adversary(arithmetic)
    weights = make_scales(one)
    mean = round_bf16(mean_of(adversary, keys))
    angle = widen(np.float32(block) * weights.inv_freq)
    got = rotate(adversary, norm(adversary, mean, weights.pool_scale, one.eps), angle)
    shares(bound_of_block(one, weights, keys, arithmetic), got)


@arithmetics
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("kind", [*KINDS, "positive"])
def test_adversaries_stay_within_the_bound_of_scores(kind, width, arithmetic):
    iq, pooled = score_data(kind, width)
    found = shares(bound_of_scores(iq, pooled, arithmetic), block_scores(Adversary(arithmetic), iq, pooled))
    if kind == "positive" and arithmetic == OURS:
        assert found.min() > 0.9


@arithmetics
@GATED
@pytest.mark.usefixtures("before_rounding")
def test_adversaries_stay_within_the_bound_of_gate(out, arithmetic):
    found = shares(bound_of_gated(out, arithmetic), gated(Adversary(arithmetic), out, GATES))
    if arithmetic == OURS:
        assert np.delete(found, np.flatnonzero(GATES == -80)).min() > 0.8


@PLAIN
@pytest.mark.parametrize("kind", KINDS)
def test_adversaries_stay_within_the_bound_of_plain_attention(kind, arithmetic):
    q, keys, values = attention_data(kind, 60, 8)
    bound = bounds.plain_attention(q[None], keys[:, None], values[:, None], 8**-0.5, arithmetic)
    adversary = Adversary(arithmetic)

    def rounded(p):
        floor = arithmetic.probability_floor if arithmetic.probability else 0.0
        return p + (p * arithmetic.probability + floor) * adversary.errors("weight", p.shape[1:])

    o, _, l = attend(adversary, q, keys, values, arithmetic.tile or 1, rounded)
    shares(bound[0], adversary.divide(o, l[:, None], "quotient"))


@pytest.mark.slow
@arithmetics
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.usefixtures("before_rounding")
def test_attention_on_random_inputs(seed, arithmetic):
    """Exactly and by adversaries: any kind, width, length and size of scores and values."""
    rng = np.random.default_rng(seed)
    kind, width = rng.choice(KINDS), int(rng.choice([8, 16, 24, 32, 40, 64]))
    q, keys, values = attention_data(kind, int(rng.choice([1, 2, 63, 64, 65, 200, 512, 513, 700])), width)
    q, values = (round_bf16(x * 2.0**size) for x, size in ((q, rng.integers(-12, 3)), (values, rng.integers(-20, 20))))
    values[:, 0] = np.abs(values[:, 0])
    certify_attention(q, keys, values, arithmetic)
    attack(q, keys, values, arithmetic)
