"""What must not matter: how a prompt is cut into windows, where its rows lie, and what lies beside them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof import reference
from kvproof.reference import TINY, LayerCache, Rope
from kvproof.reference.layout import BF16, PARTS
from streams import GEOMETRIES, assert_bits, bits, live_rows, make_cache, make_rope, make_weights, normal, read_all

pytestmark = pytest.mark.filterwarnings("error")

LENGTH = 61

geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
modes = pytest.mark.parametrize("mode", ["text", "delta", "media"])


def run(geometry, cache, cuts, rope=None, length=LENGTH):
    """Windows over positions 0 to length - 1, cut at `cuts`; their row results, joined."""
    projection = normal(20, length, geometry.projection_width)
    weights, rope = make_weights(geometry), rope or Rope()
    edges = sorted({0, length, *cuts})
    rows = {}
    for start, end in itertools.pairwise(edges):
        result = reference.window(geometry, weights, cache, projection[start:end], start, rope)
        width = max(1, length // geometry.block)
        scores = np.full((end - start, width), np.nan)
        scores[:, : result.scores.shape[1]] = result.scores
        parts = {"q": result.q, "iq": result.iq, "scores": scores, "out": result.out, "gated": result.gated}
        parts |= {"ids": result.lists.ids, "nk": result.lists.nk, "sparse": result.lists.sparse}
        parts |= {"o": result.partials.o, "m": result.partials.m, "l": result.partials.l}
        for name, array in parts.items():
            rows.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in rows.items()}


def assert_same(got, want, what):
    __tracebackhide__ = True
    for name in want:
        assert_bits(got[name], want[name], f"{name} of {what}")


@geometries
@modes
def test_windows_of_one_row_give_the_one_shot_bits(geometry, mode):
    """Later rows of a window are in the cache already; a row that read them would differ here."""
    whole, single = make_cache(geometry, LENGTH), make_cache(geometry, LENGTH)
    rope = make_rope(mode)
    want = run(geometry, whole, [], rope)
    assert_same(run(geometry, single, range(LENGTH), rope), want, "windows of one row")
    assert_same(read_all(single, LENGTH), read_all(whole, LENGTH), "the cache")
    assert want["sparse"].any()
    assert not want["sparse"].all()


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)), page=st.sampled_from([None, 4, 8, 16, 48]), seed=st.integers(0, 99))
def test_any_cut_and_any_page_give_the_same_bits(cuts, page, seed):
    whole, other = make_cache(TINY, LENGTH), make_cache(TINY, LENGTH, page, layer=1, seed=seed)
    want = run(TINY, whole, [])
    assert_same(run(TINY, other, cuts), want, "the cut prompt")
    assert_same(read_all(other, LENGTH), read_all(whole, LENGTH), "the cache")


@geometries
@modes
@pytest.mark.parametrize("pages", [1, 2, 6])
def test_paged_gives_the_contiguous_bits(geometry, mode, pages):
    page, rope = pages * geometry.block, make_rope(mode)
    flat, paged = make_cache(geometry, LENGTH), make_cache(geometry, LENGTH, page, layer=geometry.layers - 1)
    want = run(geometry, flat, [40], rope)
    assert_same(run(geometry, paged, [40], rope), want, f"pages of {page}")
    assert_same(read_all(paged, LENGTH), read_all(flat, LENGTH), "the cache")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -3e38, 0.0], ids=["nan", "inf", "huge", "zero"])
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_nothing_outside_the_stream_is_read_or_written(poison, page):
    """Rows past the end, slack pages, other layers and pooled rows of unfinished blocks all hold poison."""
    cache = make_cache(TINY, LENGTH + 19, page, layer=1, poison=poison)
    got = run(TINY, cache, [30, 50])
    assert_same(got, run(TINY, make_cache(TINY, LENGTH), [30, 50]), f"the stream amid {poison}")
    written = np.zeros(len(cache.buffer), bool)
    for part, rows in live_rows(TINY, LENGTH).items():
        width = cache.layout.part(1, part).width
        written[(cache.offsets(part, rows)[..., None] + np.arange(width)).reshape(-1)] = True
    assert (bits(cache.buffer)[~written] == bits(np.array([poison], BF16))).all()


READ = []


class RecordingCache(LayerCache):
    """A cache that notes which rows are read."""

    def read(self, part, rows):
        READ.append((part, np.asarray(rows).tolist()))
        return super().read(part, rows)


@pytest.mark.parametrize(("pos0", "count"), [(33, 1), (33, 3), (33, 9), (2, 1), (5, 10)])
def test_only_the_rows_that_the_spec_names_are_read(pos0, count):
    """A row that is read and then dropped would change no result, but may lie outside the arena."""
    plain = make_cache(TINY, 64, 16)
    run(TINY, plain, [], length=pos0)
    cache = RecordingCache(buffer=plain.buffer, layout=plain.layout, table=plain.table)
    READ.clear()
    projection = normal(20, count, TINY.projection_width)
    result = reference.window(TINY, make_weights(TINY), cache, projection, pos0, Rope())
    ids, nk, sparse = result.lists.ids, result.lists.nk, result.lists.sparse
    listed = {int(key) for row in range(count) for key in (ids[row] if sparse[row] else np.arange(64))[: nk[row]]}
    first, last = pos0 // 4, (pos0 + count) // 4
    want = {
        "index_keys": set(range(4 * first, 4 * last)),
        "pooled": set(range(last)) if sparse.any() else set(),
        "keys": listed,
        "values": listed,
    }
    assert {part: {row for p, rows in READ if p == part for row in rows} for part in PARTS} == want


@geometries
def test_the_first_row_of_a_stream_attends_itself(geometry):
    """No row came before it: its output is its own value."""
    cache = make_cache(geometry, LENGTH)
    projection = normal(20, 1, geometry.projection_width)
    got = reference.window(geometry, make_weights(geometry), cache, projection, 0, Rope())
    assert_bits(got.out, np.repeat(cache.read("values", [0]), geometry.group, axis=1), "out")
    assert (got.lists.nk.tolist(), got.lists.sparse.tolist()) == ([1], [0])
    assert np.isnan(got.scores).all()
    assert got.scores.shape == (1, 1)


def test_two_streams_share_an_arena():
    first = make_cache(TINY, 2 * 64, 16)
    second = LayerCache(buffer=first.buffer, layout=first.layout, table=first.table[4:].copy())
    first = LayerCache(buffer=first.buffer, layout=first.layout, table=first.table[:4].copy())
    apart = [run(TINY, make_cache(TINY, 64), [20]), run(TINY, make_cache(TINY, 64), [])]
    got = [run(TINY, first, [20]), run(TINY, second, [])]
    for i in range(2):
        assert_same(got[i], apart[i], f"stream {i}")
    assert_same(read_all(first, LENGTH), read_all(second, LENGTH), "the streams' caches")


def test_layers_keep_apart():
    lower = make_cache(TINY, LENGTH)
    upper = LayerCache(buffer=lower.buffer, layout=lower.layout, layer=1)
    run(TINY, upper, [])
    assert np.isnan(lower.buffer[: lower.layout.layer_elements].astype(float)).all()
    before = read_all(upper, LENGTH)
    run(TINY, lower, [])
    assert_same(read_all(upper, LENGTH), before, "the other layer")


def test_a_table_past_the_streams_pages_may_hold_anything():
    cache = make_cache(TINY, LENGTH, 16)
    table = np.concatenate([cache.table, np.array([-1, 2**31 - 1, cache.table[0]], np.int32)])
    other = LayerCache(buffer=cache.buffer.copy(), layout=cache.layout, table=table)
    assert_same(run(TINY, other, []), run(TINY, cache, []), "the longer table")


@geometries
def test_media_with_equal_axes_is_text(geometry):
    triples = np.repeat(np.arange(LENGTH, dtype=np.int32)[:, None], 3, axis=1)
    text, media = make_cache(geometry, LENGTH), make_cache(geometry, LENGTH)
    want = run(geometry, text, [33])
    assert_same(run(geometry, media, [33], Rope(mode="media", triples=triples)), want, "equal axes")
    assert_same(read_all(media, LENGTH), read_all(text, LENGTH), "the cache")


@geometries
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["t", "h", "w"])
def test_each_media_axis_turns_its_pairs_and_no_other(geometry, axis):
    triples = np.zeros((8, 3), np.int32)
    triples[:, axis] = 1_000_003 * (1 + np.arange(8))  # far enough to turn the slowest pair
    weights, projection = make_weights(geometry), normal(21, 8, geometry.projection_width)
    turned, still = (
        reference.prep(geometry, weights, make_cache(geometry, 8), projection, 0, Rope(mode="media", triples=t)).q
        for t in (triples, np.zeros_like(triples))
    )
    half = geometry.rotary_half
    changed = (bits(turned) != bits(still)).any(axis=(0, 1))
    _, h, w = geometry.mrope_sections
    owner = [1 if i % 3 == 1 and i < 3 * h else 2 if i % 3 == 2 and i < 3 * w else 0 for i in range(half)]
    want = [o == axis for o in owner]
    assert changed.tolist() == want + want + [False] * (geometry.head_dim - 2 * half)


def test_rows_past_a_media_prompt_of_one_row():
    """They have no triple of their own, and none is read in its place."""
    weights, projection = make_weights(TINY), normal(22, 5, TINY.projection_width)
    rope = Rope(mode="media", delta=3, triples=np.full((1, 3), 7, np.int32))
    got = reference.prep(TINY, weights, make_cache(TINY, 20), projection, 0, rope)
    text = reference.prep(TINY, weights, make_cache(TINY, 20), projection[1:], 4, Rope())
    assert_bits(got.q[1:], text.q, "q of text rows")
    first = reference.prep(TINY, weights, make_cache(TINY, 20), projection[:1], 7, Rope())
    assert_bits(got.q[:1], first.q, "q of the media row")


def test_a_delta_shifts_the_rotary_position():
    weights, projection = make_weights(TINY), normal(22, 5, TINY.projection_width)
    shifted = reference.prep(TINY, weights, make_cache(TINY, 20), projection, 9, Rope(mode="delta", delta=-4))
    plain = reference.prep(TINY, weights, make_cache(TINY, 20), projection, 5, Rope())
    assert_bits(shifted.q, plain.q, "q")
    assert_bits(shifted.iq, plain.iq, "iq")


@modes
def test_pooling_again_gives_the_same_bits(mode):
    cache, rope = make_cache(TINY, LENGTH), make_rope(mode)
    run(TINY, cache, [17], rope)
    before = bits(cache.buffer).copy()
    reference.pool(TINY, make_weights(TINY), cache, 0, LENGTH, rope)
    assert (bits(cache.buffer) == before).all()


def test_a_window_that_completes_no_block_pools_nothing():
    cache = make_cache(TINY, 8)
    reference.pool(TINY, make_weights(TINY), cache, 4, 3, Rope())
    assert np.isnan(cache.buffer.astype(float)).all()


def test_parts_of_a_poisoned_cache_start_as_poison():
    """The tests above prove something only if an unwritten row shows."""
    cache = make_cache(TINY, 8, 4, layer=1)
    assert all(np.isnan(cache.read(part, np.arange(2)).astype(float)).all() for part in PARTS)
