"""The kernels as a user calls them: what must not show in any bit, and the edges of each kernel."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kvproof import fast, reference
from kvproof.fast import Engine, HostBackend
from kvproof.fast.compiler import find_compiler, find_zig
from kvproof.reference import TEXT, TINY, KeyLists, LayerCache, Layout, Partials
from kvproof.reference.layout import BF16
from streams import ODD, assert_bits, make_cache, make_rope, make_weights, normal


def attend(geometry, engine, *, cached=75, rows=6, page=None, mode="text"):
    """A window over a cache of normal rows; every result, and the cache rows it stored."""
    cache = make_cache(geometry, cached + rows, page, layer=1, poison=0.0)
    for part, seed in (("keys", 1), ("values", 2), ("index_keys", 3)):
        rows_of = cache.layout.part(1, part)
        cache.write(part, np.arange(cached), normal(seed, cached, rows_of.heads, rows_of.width))
    weights, rope = make_weights(geometry), make_rope(mode, length=cached + 2)
    fast.pool(geometry, weights, cache, 0, cached, rope, engine=engine)
    projection = normal(4, rows, geometry.projection_width)
    window = fast.window(geometry, weights, cache, projection, cached, rope, engine=engine)
    ahead = fast.chunks_ahead(geometry, cache, window.q, window.lists, engine=engine)
    stored = {part: cache.read(part, np.arange(cached, cached + rows)) for part in ("keys", "values", "index_keys")}
    stored["pooled"] = cache.read("pooled", np.arange((cached + rows) // geometry.block))
    partials = {
        f"{kind}.{n}": getattr(p, n) for kind, p in (("plain", window.partials), ("ahead", ahead)) for n in "oml"
    }
    lists = {n: getattr(window.lists, n) for n in ("ids", "nk", "sparse")}
    outputs = {n: getattr(window, n) for n in ("q", "iq", "scores", "out", "gated")}
    return {**outputs, **lists, **partials, **stored}


def assert_same(got, want):
    __tracebackhide__ = True
    for name in want:
        assert_bits(got[name], want[name], name)


@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda g: g.name)
@pytest.mark.parametrize("mode", ["text", "delta", "media"])
def test_paged_equals_contiguous(engine, geometry, mode):
    want = attend(geometry, engine, mode=mode)
    for page in (geometry.block, 3 * geometry.block, 16 * geometry.block):
        assert_same(attend(geometry, engine, page=page, mode=mode), want)


@pytest.mark.parametrize("threads", [1, 16, 64, 96, 256])
def test_the_thread_count_never_enters(engine, threads):
    other = Engine(HostBackend(flags=("-O1",)), threads=threads)
    assert_same(attend(TINY, other), attend(TINY, engine))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("order", ["reverse", "shuffle"])
def test_neither_thread_order_nor_workers_enter(engine, order, workers):
    other = Engine(HostBackend(order=order, seed=7, workers=workers))
    assert_same(attend(TINY, other), attend(TINY, engine))


def oldest_cpu():
    """The flag for a CPU without an FMA instruction, where there are such."""
    if platform.machine() != "x86_64":
        return "-march=armv8-a"
    return "-march=x86_64" if find_compiler().is_zig else "-march=x86-64"


@pytest.mark.parametrize("flags", [("-O0",), ("-O2",), (oldest_cpu(),)], ids=" ".join)
def test_compiler_flags_do_not_enter(engine, flags):
    assert_same(attend(TINY, Engine(HostBackend(flags=flags))), attend(TINY, engine))


def test_the_zig_compiler_gives_the_same_bits(engine):
    zig = find_zig()
    assert zig is not None, "ziglang is a dependency"
    assert_same(attend(TINY, Engine(HostBackend(compiler=zig))), attend(TINY, engine))


def test_an_arena_past_2_to_the_31_elements(engine):
    layout = Layout(geometry=TINY, page_size=4096, pages=1601)
    assert layout.elements > 2**31
    buffer = np.zeros(layout.elements, BF16)  # untouched pages of memory are never made
    high = LayerCache(buffer=buffer, layout=layout, layer=1, table=np.array([1600], np.int32))
    low = make_cache(TINY, 4096, layer=1, poison=0.0)
    weights, projection = make_weights(TINY), normal(5, 30, TINY.projection_width)
    got, want = (fast.window(TINY, weights, cache, projection, 0, TEXT, engine=engine) for cache in (high, low))
    assert_bits(got.gated, want.gated, "gated")
    assert_bits(high.read("keys", np.arange(30)), low.read("keys", np.arange(30)), "keys")


def test_a_compiler_that_fails_does_so_before_anything_is_stored():
    broken = fast.KernelSources().edit("gate.cu", "const int head", "const nonsense head")
    cache = make_cache(TINY, 8, layer=1)
    before = cache.buffer.copy()
    with pytest.raises(fast.CompileError, match=r"gate\.cu"):
        fast.window(TINY, make_weights(TINY), cache, normal(1, 4, TINY.projection_width), 0, TEXT,
                    engine=Engine(sources=broken))  # fmt: skip
    assert_bits(cache.buffer, before, "cache")


def random_bits(rows, blocks):
    """fp32 of any bits: every NaN, both infinities, both zeros, subnormals; few values, so that many tie."""
    words = st.sampled_from([0, 0x80000000, 1, 0x3F800000, 0x3F800001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001])
    return hnp.arrays(np.uint32, (rows, blocks), elements=words | st.integers(0, 2**32 - 1))


@given(data=st.data(), pos0=st.integers(0, 90), rows=st.integers(1, 5))
def test_select_is_exact_for_any_bits(engine, data, pos0, rows):
    blocks = max(1, (pos0 + rows) // TINY.block)
    scores = data.draw(random_bits(rows, blocks)).view(np.float32)
    got = fast.select(TINY, scores, pos0, engine=engine)
    want = reference.select(TINY, scores, pos0)
    for name in ("ids", "nk", "sparse"):
        assert_bits(getattr(got, name), getattr(want, name), name)


@pytest.mark.parametrize("nk", [[0], [1], [63], [64], [65], [511], [512], [513], [0, 700, 3, 1025]], ids=str)
def test_dense_lists_of_any_length(engine, nk):
    cache = make_cache(TINY, max(*nk, 4), page=16, layer=1)
    for part, seed in (("keys", 1), ("values", 2)):
        cache.write(part, np.arange(max(nk)), normal(seed, max(nk), TINY.kv_heads, TINY.head_dim))
    q, lists = normal(3, len(nk), TINY.query_heads, TINY.head_dim), KeyLists.dense(nk)
    got = fast.chunks(TINY, cache, q, lists, engine=engine)
    want = reference.chunks(TINY, cache, q, lists)
    ahead = fast.chunks_ahead(TINY, cache, q, lists, engine=engine)
    for name in "oml":
        assert_bits(getattr(ahead, name), getattr(got, name), name)
    np.testing.assert_array_equal(np.isneginf(got.m), np.isneginf(want.m))
    np.testing.assert_allclose(got.l, want.l, rtol=1e-5)
    np.testing.assert_allclose(got.o, want.o, atol=2e-2)
    empty = np.arange(got.m.shape[1]) * 512 >= np.array(nk)[:, None]
    assert (got.o[empty] == 0).all()
    assert (got.l[empty] == 0).all()
    out = fast.merge(TINY, got, engine=engine)
    assert (out[np.array(nk) == 0] == 0).all()
    assert np.isfinite(out.astype(np.float32)).all()


def partials(*chunks):
    """One row's partials, each chunk (o, m, l) for all heads and elements."""
    shape = (1, len(chunks), TINY.query_heads)
    o, m, l = (np.array(x, np.float32).reshape(1, -1, 1) for x in zip(*chunks, strict=True))
    wide = np.broadcast_to(o[..., None], (*shape, TINY.head_dim)).copy()
    return Partials(wide, np.broadcast_to(m, shape).copy(), np.broadcast_to(l, shape).copy())


EMPTY, SOME, MORE = (0.0, -np.inf, 0.0), (3.0, 1.5, 2.0), (-0.7, 40.0, 7.0)


@pytest.mark.parametrize("place", range(3))
def test_an_empty_partial_is_the_identity_of_merge(engine, place):
    chunks = [SOME, MORE]
    want = fast.merge(TINY, partials(*chunks), engine=engine)
    chunks.insert(place, EMPTY)
    assert_bits(fast.merge(TINY, partials(*chunks), engine=engine), want, "out")


def test_merging_nothing_gives_zero(engine):
    assert (fast.merge(TINY, partials(EMPTY, EMPTY, EMPTY), engine=engine) == 0).all()


def test_what_an_empty_partial_holds_beside_l_is_not_read(engine):
    noise = (np.nan, np.nan, 0.0)
    want = fast.merge(TINY, partials(SOME), engine=engine)
    assert_bits(fast.merge(TINY, partials(noise, SOME, noise), engine=engine), want, "out")


def test_pooling_again_gives_the_same_bits(engine):
    cache, weights = make_cache(TINY, 32, page=8, layer=1), make_weights(TINY)
    cache.write("index_keys", np.arange(32), normal(1, 32, 1, TINY.index_dim))
    fast.pool(TINY, weights, cache, 0, 32, TEXT, engine=engine)
    once = cache.read("pooled", np.arange(8)).copy()
    fast.pool(TINY, weights, cache, 5, 20, TEXT, engine=engine)
    assert_bits(cache.read("pooled", np.arange(8)), once, "pooled")
