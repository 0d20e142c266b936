"""The reference against an independent implementation's tensors (fixtures/peer/README.md).

Tensors that are rounded to bf16 must be equal: both sides round the same real numbers, and none in these files lies
within fp32 error of a midpoint. fp32 tensors must be as near as fp32 summation in any order allows.
"""

from pathlib import Path

import numpy as np
import pytest
from kvproof import reference
from kvproof.reference import Geometry, KeyLists, LayerCache, Layout, Partials, Rope, Weights
from kvproof.reference.layout import BF16
from kvproof.reference.numerics import widen
from safetensors import safe_open
from streams import assert_bits

pytestmark = pytest.mark.filterwarnings("error")

FOLDER = Path(__file__).parents[2] / "fixtures" / "peer"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
UNIT = 2.0**-24
"""Half an fp32 ulp at 1: the relative error of one fp32 rounding."""


class Peer:
    """One file: its tensors by name, the inputs as our dataclasses, and a cache with the history in it."""

    def __init__(self, name, page):
        with safe_open(FOLDER / f"{name}.safetensors", framework="numpy") as file:
            meta = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        fields = (
            "query_heads",
            "kv_heads",
            "head_dim",
            "index_heads",
            "index_dim",
            "block",
            "top_blocks",
            "rotary_half",
        )
        self.geometry = Geometry(
            name=name,
            mrope_sections=(3, 3, 2),
            layers=1,
            rope_theta=float(meta["theta"]),
            eps=float(meta["eps"]),
            **{field: int(meta[field]) for field in fields},
        )
        names = ("q_scale", "k_scale", "i_scale", "pool_scale", "inv_freq")
        self.weights = Weights(**{field: self[f"in.{field}"] for field in names})
        mode = ("text", "delta", "media")[int(meta["rope_mode"])]
        triples = self["in.rope"] if mode == "media" else np.zeros((0, 3), np.int32)
        self.rope = Rope(mode=mode, delta=int(meta["rope_delta"]), triples=triples)
        self.pos0, self.rows = int(meta["pos0"]), int(meta["rows"])
        self.cache = self.make_cache(page)

    def __getitem__(self, key):
        return self.tensors[key]

    @property
    def attends(self):
        """Media and delta files stop at prep."""
        return "out.out" in self.tensors

    def make_cache(self, page):
        capacity = len(self["out.kc"])
        layout, table = Layout.contiguous(self.geometry, capacity), None
        if page:
            pages = -(-capacity // page)
            layout = Layout(geometry=self.geometry, page_size=page, pages=pages)
            table = np.random.default_rng(0).permutation(pages).astype(np.int32)
        cache = LayerCache(buffer=np.full(layout.elements, np.nan, BF16), layout=layout, table=table)
        self.store(cache, self.pos0)
        return cache

    def store(self, cache, end):
        """Put the peer's own rows of positions 0 to end - 1 into a cache."""
        for part, name in (("keys", "kc"), ("values", "vc"), ("index_keys", "ikc")):
            rows = self[f"out.{name}"][:end]
            cache.write(part, np.arange(end), rows.reshape(end, -1, rows.shape[-1]))
        if self.attends:
            blocks = end // self.geometry.block
            cache.write("pooled", np.arange(blocks), self["out.pooled"][:blocks, None])


@pytest.fixture(params=[None, 4, 16], ids=["contiguous", "pages-of-4", "pages-of-16"])
def page(request):
    return request.param


def test_all_peer_files_are_here():
    assert FILES == ["tiny_boundary", "tiny_delta", "tiny_dense", "tiny_media", "tiny_sparse", "tiny_ties"]


@pytest.mark.parametrize("name", FILES)
def test_prep(name, page):
    peer = Peer(name, page)
    got = reference.prep(peer.geometry, peer.weights, peer.cache, peer["in.p"], peer.pos0, peer.rope)
    assert_bits(got.q, peer["out.q"], "q")
    assert_bits(got.iq, peer["out.iq"], "iq")
    rows = np.arange(peer.pos0 + peer.rows)
    for part, key in (("keys", "kc"), ("values", "vc"), ("index_keys", "ikc")):
        want = peer[f"out.{key}"][rows]
        assert_bits(peer.cache.read(part, rows).reshape(want.shape), want, part)
    np.testing.assert_array_equal(peer.geometry.inv_freq(), peer["in.inv_freq"])


ATTENDING = [name for name in FILES if name not in ("tiny_delta", "tiny_media")]


@pytest.mark.parametrize("name", ATTENDING)
def test_window(name, page):
    peer = Peer(name, page)
    got = reference.window(peer.geometry, peer.weights, peer.cache, peer["in.p"], peer.pos0, peer.rope)
    blocks = np.arange((peer.pos0 + peer.rows) // peer.geometry.block)
    assert_bits(peer.cache.read("pooled", blocks)[:, 0], peer["out.pooled"][blocks], "pooled")
    for field in ("ids", "nk", "sparse"):
        assert_bits(getattr(got.lists, field), peer[f"out.{field}"], field)
    assert_bits(got.out, peer["out.out"], "out")


@pytest.mark.parametrize("name", ATTENDING)
def test_pooling_the_whole_history_again(name, page):
    peer = Peer(name, page)
    end = peer.pos0 + peer.rows
    peer.store(peer.cache, end)
    reference.pool(peer.geometry, peer.weights, peer.cache, 0, end, peer.rope)
    blocks = np.arange(end // peer.geometry.block)
    assert_bits(peer.cache.read("pooled", blocks)[:, 0], peer["out.pooled"][blocks], "pooled")


@pytest.mark.parametrize("name", ATTENDING)
def test_scores_and_select(name):
    peer = Peer(name, None)
    g = peer.geometry
    peer.store(peer.cache, peer.pos0 + peer.rows)
    got = reference.scores(g, peer.cache, peer["out.iq"], peer.pos0)
    theirs = peer["out.scores"][:, : got.shape[1]]
    computed = ~np.isnan(got)
    sizes = np.abs(widen(peer["out.iq"])) @ np.abs(widen(peer["out.pooled"][: got.shape[1]])).T
    bound = (g.index_dim + g.index_heads + 2) * UNIT * sizes.sum(axis=1) / np.sqrt(g.index_dim)
    assert (np.abs(got - theirs) <= bound)[computed].all()
    lists = reference.select(g, np.where(computed, theirs, np.nan).astype(np.float32), peer.pos0)
    for field in ("ids", "nk", "sparse"):
        assert_bits(getattr(lists, field), peer[f"out.{field}"], field)


def test_their_scores_divide_once_after_the_sum_over_heads():
    """Their fp32 arithmetic, bit for bit; a division of each head's term gives other bits."""
    equal = []
    for name in ATTENDING:
        peer = Peer(name, None)
        iq, pooled = peer["out.iq"].astype(np.float32), peer["out.pooled"].astype(np.float32)
        dots = np.maximum((iq[:, :, None] * pooled).sum(axis=-1, dtype=np.float32), 0)
        root = np.sqrt(np.float32(peer.geometry.index_dim))
        once, each = (dots[:, 0] + dots[:, 1]) / root, dots[:, 0] / root + dots[:, 1] / root
        scored = peer["out.scores"] != 0
        assert_bits(once[scored], peer["out.scores"][scored], f"scores of {name}")
        equal.append((each == once)[scored].all())
    assert not all(equal)


@pytest.mark.parametrize("name", ATTENDING)
def test_chunks_and_merge(name, page):
    peer = Peer(name, page)
    g, end = peer.geometry, peer.pos0 + peer.rows
    peer.store(peer.cache, end)
    lists = KeyLists(peer["out.ids"], peer["out.nk"], peer["out.sparse"])
    got = reference.chunks(g, peer.cache, peer["out.q"], lists)
    theirs = Partials(peer["out.partial_o"], peer["out.partial_m"], peer["out.partial_l"])
    keys, values = (np.abs(widen(peer[f"out.{part}"][:end])) for part in ("kc", "vc"))
    size = np.abs(widen(peer["out.q"])).sum(axis=-1).max() * keys.max() * g.head_dim**-0.5
    score_error = (g.head_dim + 2) * UNIT * size
    sum_error = 2 * score_error + (int(lists.nk.max()) + 8) * UNIT
    assert (np.abs(got.m - theirs.m) <= score_error).all()
    assert (np.abs(got.l - theirs.l) <= sum_error * got.l).all()
    assert (np.abs(got.o - theirs.o) <= sum_error * got.l[..., None] * values.max()).all()
    assert sum_error < 1e-4, "the bound has grown too wide to mean anything"
    for partials in (got, theirs):
        assert_bits(reference.merge(g, partials), peer["out.out"], "out")
