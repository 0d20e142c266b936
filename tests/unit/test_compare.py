"""One message form for every difference: stream, row, head, element, byte, both values, page and position."""

from __future__ import annotations

import numpy as np
import pytest
from kvproof.oracle.compare import Site, compare_bits, compare_bound
from kvproof.oracle.interval import Interval
from kvproof.reference import TINY, LayerCache, Layout
from kvproof.reference.layout import BF16

AXES = ("row", "head", "element")


def site(pos0=17):
    layout = Layout(geometry=TINY, page_size=8, pages=6)
    cache = LayerCache(buffer=layout.zeros(), layout=layout, layer=0, table=np.array([5, 2, 4, 0], np.int32))
    return Site(stream=1, pos0=pos0, cache=cache)


def test_equal_bits_are_no_difference():
    x = np.array([[[np.nan, -0.0]]], np.float32)
    assert compare_bits("prep.q", x, x.copy(), AXES, site()) is None


def test_the_message_names_everything():
    want = np.zeros((3, 2, 4), np.float32)
    got = want.copy()
    got[1, 1, 2], got[2, 0, 0] = 1.5, 2.0
    found = compare_bits("chunks.out", got, want, AXES, site())
    assert str(found) == (
        "chunks.out: stream 1, row 1, head 1, element 2, byte 58, position 18 (page 4, table entry 2, row 2 of the "
        "page): got 1.5 (0x3fc00000), want 0 (0x00000000); 2 of 24 elements differ"
    )


def test_zeros_of_either_sign_differ():
    zero = np.zeros((1, 1, 1), BF16)
    found = compare_bits("gate.gated", -zero, zero, AXES, site())
    assert found is not None
    assert (found.got_bits, found.want_bits, found.byte) == ("0x8000", "0x0000", 1)


def test_a_block_stands_at_its_first_position():
    want = np.zeros((1, 4), np.float32)
    got = want.copy()
    got[0, 3] = 1
    found = compare_bits("scores.scores", got, want, ("row", "block"), site())
    assert found is not None
    assert (found.position, found.entry, found.page, found.page_row) == (12, 1, 2, 4)


def test_without_a_table_there_is_a_position_but_no_page():
    layout = Layout.contiguous(TINY, 32)
    plain = Site(stream=0, pos0=9, cache=LayerCache(buffer=layout.zeros(), layout=layout))
    found = compare_bits("prep.q", np.ones((1, 1, 1)), np.zeros((1, 1, 1)), AXES, plain)
    assert found is not None
    assert (found.position, found.page) == (9, None)


def test_shapes_and_dtypes_must_agree():
    with pytest.raises(ValueError, match=r"prep\.q: got float64 \[1\], want float32 \[1\]; both must agree"):
        compare_bits("prep.q", np.zeros(1), np.zeros(1, np.float32), ("row",), site())


def test_a_bound_is_told_with_what_it_allows():
    value = np.zeros((1, 1, 2))
    bound = Interval(value, value - 1.0, value + 2.0, np.full(value.shape, 2.0))
    got = np.array([[[1.0, -1.5]]], np.float32)
    worst, found = compare_bound("merge.out", got, bound, AXES, site())
    assert worst == np.inf or worst > 1
    assert "allowed is -1 to 2; 1 of 2 elements differ" in str(found)
    assert compare_bound("merge.out", np.float32([[[1.0, -1.0]]]), bound, AXES, site()) == (0.5, None)


def test_nan_is_outside_every_bound():
    value = np.zeros((1, 1, 1))
    worst, found = compare_bound(
        "merge.out", np.float32([[[np.nan]]]), Interval(value, value - 1, value + 1, value + 1), AXES, site()
    )
    assert worst == np.inf
    assert found is not None
