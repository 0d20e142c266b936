"""merge and gate against their scalar forms, to the bit."""

import numpy as np
import pytest
import scalar_forms
from kvproof import reference
from kvproof.reference import TINY, Partials
from kvproof.reference.layout import BF16
from kvproof.reference.numerics import bf16
from kvproof.reference.prep import split
from scalar_forms import scalars
from streams import GEOMETRIES, SLIM, assert_bits, narrow, normal

pytestmark = pytest.mark.filterwarnings("error")


def drawn_partials(seed, rows, chunks, empty=()):
    """Random partials of SLIM, those of the `empty` chunks without keys."""
    rng = np.random.default_rng(seed)
    o, m = rng.normal(size=(rows, chunks, 4, 8)), 30 * rng.normal(size=(rows, chunks, 4))
    total = 1 + rng.random((rows, chunks, 4))
    for chunk in empty:
        o[:, chunk], m[:, chunk], total[:, chunk] = 0.0, -np.inf, 0.0
    return o, m, total


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["fp32", "float64"])
@pytest.mark.parametrize("empty", [(), (0,), (3,), (1, 2), (0, 1, 3)], ids=str)
def test_merge(dtype, empty):
    partials = Partials(*(x.astype(dtype) for x in drawn_partials(16, 2, 4, empty)))
    got = reference.merge(SLIM, partials)
    for row in range(2):
        for head in range(4):
            parts = [tuple(scalars(x[row, c, head]) for x in (partials.o, partials.m, partials.l)) for c in range(4)]
            assert_bits(got[row, head], narrow(scalar_forms.merge(parts, 8)), f"out[{row}, {head}]")


def test_merge_adds_in_chunk_order():
    """2**60 swallows a 1 that is added to it, and not one that comes once it has left."""
    for order, want in (
        ([2.0**60, 1, -(2.0**60)], 0),
        ([2.0**60, -(2.0**60), 1], 1 / 3),
        ([1, 2.0**60, -(2.0**60)], 0),
    ):
        o = np.broadcast_to(np.array(order)[:, None, None], (3, 4, 8))[None].copy()
        got = reference.merge(SLIM, Partials(o, np.zeros((1, 3, 4)), np.ones((1, 3, 4))))
        assert_bits(got, bf16(np.full((1, 4, 8), want)), f"merge of {order}")


def test_merge_keeps_an_only_partial_wherever_the_empty_ones_stand():
    """Empty partials change no bit, not even the sign of a zero, and their o is never used."""
    x = np.random.default_rng(15).normal(size=(4, 32))
    x[:, :2] = [0.0, -0.0]
    for at in range(3):
        o, m, total = np.full((1, 3, 4, 32), np.nan), np.full((1, 3, 4), -np.inf), np.zeros((1, 3, 4))
        o[0, at], m[0, at], total[0, at] = x, -3.0, 7.0
        assert_bits(reference.merge(TINY, Partials(o, m, total)), bf16(x[None] / 7.0), f"merge with chunk {at} only")


def test_merge_of_partials_too_far_apart_for_exp():
    """The far partial's weight underflows; only a running maximum keeps the other's from overflowing."""
    x = np.random.default_rng(15).normal(size=(3, 4, 32))
    for order in ([0, 1000, -1000], [1000, -1000, 0], [-1000, 0, 1000]):
        m = np.broadcast_to(np.array(order, float)[:, None], (3, 4))
        got = reference.merge(TINY, Partials(x[None], m[None].copy(), np.full((1, 3, 4), 2.0)))
        assert_bits(got, bf16(x[None, int(np.argmax(order))] / 2), f"merge of maxima {order}")


def test_merge_of_empty_partials_is_zero():
    empty = Partials(*drawn_partials(16, 2, 3, empty=(0, 1, 2)))
    assert_bits(reference.merge(SLIM, empty), bf16(np.zeros((2, 4, 8))), "merge")


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_gate(geometry):
    out = normal(17, 2, geometry.query_heads, geometry.head_dim)
    projection = bf16(8 * normal(18, 2, geometry.projection_width).astype(float))
    got = reference.gate(geometry, out, projection)
    for row in range(2):
        for head in range(geometry.query_heads):
            start = (2 * head + 1) * geometry.head_dim
            gates = scalars(projection[row, start : start + geometry.head_dim])
            want = [scalar_forms.gate(o, g) for o, g in zip(scalars(out[row, head]), gates, strict=True)]
            assert_bits(got[row, head], narrow(want), f"gated[{row}, {head}]")


def test_gate_is_open_or_shut_at_the_ends_of_the_range():
    projection = np.zeros((1, TINY.projection_width), BF16)
    gates = split(TINY, projection).gate
    gates[0, 0], gates[0, 1] = 3e38, -3e38
    got = reference.gate(TINY, normal(19, 1, 4, 32), projection)
    assert_bits(got[:, 0], normal(19, 1, 4, 32)[:, 0], "gated")
    assert (got[:, 1] == 0).all()
