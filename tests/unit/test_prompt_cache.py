"""The prompt cache: a restored stream goes on with the bits of one that never stopped, and nobody else notices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from kvproof import fast
from kvproof.fast import CaptureError, Engine, PoolExhaustedError, PromptError, StreamError
from kvproof.fast.engine import HOST_THREADS
from kvproof.oracle.serving.audit import audit
from kvproof.oracle.serving.delayed import DelayedBackend, DelayedEngine
from kvproof.reference import TINY, Rope
from kvproof.reference.layout import BF16, PARTS
from prompts import (
    CONTEXT,
    assert_same_prompt,
    changed_part,
    computed,
    extend,
    make_pool,
    page_bits,
    rope_of,
    there,
    weights_of,
)
from streams import ODD, assert_bits, bits
from windows import assert_same_window

MODES = ["text", "delta", "media"]
PAGES = [None, 4, 8, 16, 48]
MOVES = [(page, 16) for page in PAGES] + [(16, page) for page in PAGES] + [(None, None), (48, None), (4, 48), (8, 4)]
MIDDLE = 37
"""In the middle of a block and of every page; beyond the budget of 16, so that rows are sparse; in the media prompt."""
STEPS = [1, 3, 17]
"""Rows of the windows behind it: one completes no block, one a block of saved and new rows, one crosses pages."""


@pytest.fixture(scope="module")
def unbroken(engine):
    """For each rope, the windows behind MIDDLE of a contiguous stream that never stopped."""
    found = {}
    for mode in MODES:
        stream = computed(make_pool(TINY, None, engine), mode, MIDDLE)
        found[mode] = go_on(stream)
    return found


@pytest.fixture(scope="module")
def saved(engine):
    """MIDDLE positions, for each rope, of a stream in pages of 16 that went on to 61."""
    return {mode: fast.save(computed(make_pool(TINY, 16, engine), mode, 61), MIDDLE) for mode in MODES}


def go_on(stream):
    return [extend(stream, stream.length + rows) for rows in STEPS]


def assert_same_steps(got, want):
    __tracebackhide__ = True
    for step, other in zip(got, want, strict=True):
        for layer, window in enumerate(step):
            assert_same_window(window, other[layer])


def restored(pool, saved, **options):
    return fast.restore(pool, saved, there(pool), **options)


# ---- bits ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_restored_stream_goes_on_as_if_it_had_never_stopped(engine, unbroken, mode, source, target):
    prompt = fast.save(computed(make_pool(TINY, source, engine), mode, 61), MIDDLE)
    pool = make_pool(TINY, target, engine)
    stream = restored(pool, prompt)
    assert stream.lengths == (MIDDLE,) * TINY.layers
    assert_same_steps(go_on(stream), unbroken[mode])
    own = computed(make_pool(TINY, target, engine), mode, MIDDLE + sum(STEPS))
    assert_bits(page_bits(stream), page_bits(own), "page")
    assert audit(pool, [stream]) == []


@pytest.mark.parametrize("page", [None, 8, 24])
@pytest.mark.parametrize("positions", [1, 7, 8, 9, 23, 24, 31, 48, 56])
def test_restored_pages_are_those_of_a_stream_that_computed_them(engine, positions, page):
    source = computed(make_pool(ODD, 16, engine, context=56), "media", 56)
    stream = restored(make_pool(ODD, page, engine, context=56), fast.save(source, positions))
    own = computed(make_pool(ODD, page, engine, context=56), "media", positions)
    assert_bits(page_bits(stream), page_bits(own), "page")


def test_a_contiguous_page_that_is_full_is_moved_whole(engine):
    source = computed(make_pool(TINY, None, engine, context=48), "text", 48)
    stream = restored(make_pool(TINY, None, engine, context=48), fast.save(source, 48))
    assert_bits(page_bits(stream), page_bits(source), "page")


def test_saving_changes_nothing_and_the_saved_rows_cannot_be_changed(engine):
    pool = make_pool(TINY, 16, engine)
    stream = computed(pool, "text", 61)
    before, account = bits(pool.arena).copy(), (stream.lengths, stream.pages, pool.free)
    prompt = fast.save(stream, MIDDLE)
    assert_bits(bits(pool.arena), before, "arena")
    assert (stream.lengths, stream.pages, pool.free) == account
    assert prompt.nbytes == sum(layer.part(part).nbytes for layer in prompt.layers for part in PARTS)
    for part in PARTS:
        with pytest.raises(ValueError, match="read-only"):
            prompt.layers[0].part(part)[...] = 0


def test_a_saved_prompt_does_not_follow_its_stream(engine, saved):
    pool = make_pool(TINY, 16, engine)
    stream = computed(pool, "media", 61)
    prompt = fast.save(stream, MIDDLE)
    stream.roll_back(1)
    stream.close()
    stream.rope.triples[...] = 7
    pool.arena[...] = np.nan
    assert_same_prompt(prompt, saved["media"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page", [None, 8, 48])
def test_nothing_of_the_source_is_needed(engine, unbroken, saved, mode, page):
    """Between save and restore every page is poisoned: what is not carried is not there."""
    pool = make_pool(TINY, page, engine)
    with computed(pool, mode, MIDDLE) as source:
        prompt = fast.save(source, MIDDLE)
    pool.arena[...] = np.nan
    stream = restored(pool, prompt)
    assert_same_steps(go_on(stream), unbroken[mode])


def large(rows):
    rows[...] = 50


def large_first(rows):
    rows[0] = 50


def large_unfinished(rows):
    rows[MIDDLE // TINY.block * TINY.block :] = 50


@pytest.mark.parametrize("layer", range(TINY.layers))
@pytest.mark.parametrize(
    ("part", "change", "step"),
    [
        ("keys", large, 0),
        ("values", large, 0),
        ("pooled", large_first, 0),
        ("index_keys", large_unfinished, 1),
    ],
)
def test_every_part_is_carried_because_the_next_rows_need_it(engine, unbroken, saved, layer, part, change, step):
    wrong = changed_part(saved["text"], layer, part, change)
    steps = go_on(restored(make_pool(TINY, 8, engine), wrong))
    with pytest.raises(AssertionError, match="should be"):
        assert_same_steps(steps[: step + 1], unbroken["text"][: step + 1])


@pytest.mark.parametrize("page", [None, 8])
def test_blocks_of_saved_rows_can_be_opened_and_pooled_again(engine, page):
    """Raw indexer keys of complete blocks are carried too: a rollback needs them."""
    whole = computed(make_pool(TINY, page, engine), "text", 60)
    other = restored(make_pool(TINY, page, engine), fast.save(whole, 60))
    for stream in (whole, other):
        stream.roll_back(38)
    assert_same_steps([extend(other, 61)], [extend(whole, 61)])
    assert_bits(page_bits(other), page_bits(whole), "page")


# ---- neighbours ----


@pytest.mark.parametrize("page", [None, 4, 16, 48])
@pytest.mark.parametrize("positions", [1, 32, MIDDLE])
def test_no_byte_outside_the_new_pages_changes(engine, saved, page, positions):
    pool = make_pool(TINY, page, engine)
    neighbour = computed(pool, "delta", 41)
    gone = computed(pool, "text", 20)
    kept = computed(pool, "text", 20)
    gone.close()
    before = bits(pool.arena).reshape(pool.layout.pages, -1).copy()
    source = computed(make_pool(TINY, 16, engine), "text", 61)
    stream = restored(pool, fast.save(source, positions))
    after = bits(pool.arena).reshape(pool.layout.pages, -1)
    changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
    assert changed <= set(stream.pages)
    assert not set(stream.pages) & {*neighbour.pages, *kept.pages}
    assert len(stream.pages) == pool.pages_for(positions)
    extend(neighbour, 50)
    own = computed(make_pool(TINY, page, engine), "delta", 50)
    assert_bits(page_bits(neighbour), page_bits(own), "page of the neighbour")


def test_the_page_test_restores_through_reversed_tables(engine, unbroken, saved, monkeypatch):
    monkeypatch.setenv("KVPROOF_PAGE_TEST", "16")
    pool = make_pool(TINY, None, engine)
    stream = restored(pool, saved["text"])
    assert stream.pages == tuple(range(pool.layout.pages - 1, pool.layout.pages - 4, -1))
    assert_same_steps(go_on(stream), unbroken["text"])


# ---- ropes ----


@pytest.mark.parametrize(
    ("mode", "rope"),
    [
        ("text", Rope(mode="delta")),
        ("text", Rope(mode="media", triples=np.repeat(np.arange(50, dtype=np.int32)[:, None], 3, axis=1))),
        ("delta", Rope(mode="delta", delta=-3)),
        ("media", Rope(mode="media", delta=5, triples=np.vstack([rope_of("media").triples, np.full((4, 3), 9, "i4")]))),
        ("media", Rope(mode="media", delta=2, triples=rope_of("media").triples[:MIDDLE].copy())),
    ],
    ids=["no delta", "text as triples", "the same", "another image behind", "media cut behind"],
)
def test_a_rope_that_agrees_on_the_saved_positions_is_taken(engine, saved, mode, rope):
    stream = restored(make_pool(TINY, 8, engine), saved[mode], rope=rope)
    assert stream.rope is rope
    own = fast.Stream(make_pool(TINY, 8, engine), weights_of(TINY), rope=rope)
    extend(own, MIDDLE)
    assert_same_steps(go_on(stream), go_on(own))


def moved_image():
    triples = rope_of("media").triples.copy()
    triples[MIDDLE - 1, 2] += 1
    return Rope(mode="media", delta=-7, triples=triples)


@pytest.mark.parametrize(
    ("mode", "rope", "where"),
    [
        ("text", Rope(mode="delta", delta=1), "position 0 .* = (0, 0, 0), but the rope given says (1, 1, 1)"),
        ("media", moved_image(), f"position {MIDDLE - 1} "),
        ("media", Rope(mode="media", delta=-7, triples=rope_of("media").triples[:36].copy()), "position 36 "),
    ],
    ids=["delta", "triple", "short"],
)
def test_a_rope_of_other_positions_is_refused(engine, saved, mode, rope, where):
    pool = make_pool(TINY, 8, engine)
    before = bits(pool.arena).copy()
    with pytest.raises(PromptError, match=where.replace("(", r"\(").replace(")", r"\)")):
        restored(pool, saved[mode], rope=rope)
    assert_untouched(pool, before)


# ---- refusals ----


def assert_untouched(pool, before):
    __tracebackhide__ = True
    assert pool.audit() == []
    assert pool.free == pool.layout.pages
    assert_bits(bits(pool.arena), before, "arena")


def test_what_is_foreign_or_too_long_is_refused_before_anything_is_touched(engine, saved):
    deeper = dataclasses.replace(TINY, layers=3, name="deeper")
    other = [dataclasses.replace(weights_of(TINY)[0]), dataclasses.replace(weights_of(TINY)[1])]
    other[1] = dataclasses.replace(other[1], pool_scale=np.nextafter(other[1].pool_scale, np.float32(9)))
    cases = [
        (
            deeper,
            CONTEXT,
            weights_of(deeper),
            PromptError,
            "name is 'tiny' instead of 'deeper', layers is 2 instead of 3",
        ),
        (TINY, CONTEXT, other, PromptError, "it is another model's"),
        (TINY, CONTEXT, weights_of(TINY)[::-1], PromptError, "it is another model's"),
        (TINY, CONTEXT, weights_of(TINY)[:1], ValueError, "weights of 1 layers are given"),
        (
            TINY,
            MIDDLE - 1,
            weights_of(TINY),
            PromptError,
            f"{MIDDLE} positions; .* at most {MIDDLE - 1}: make the pool",
        ),
    ]
    for geometry, context, weights, error, message in cases:
        for page in (None, 8):
            pool = make_pool(geometry, page, engine, context=context)
            before = bits(pool.arena).copy()
            with pytest.raises(error, match=message):
                fast.restore(pool, saved["text"], weights)
            assert_untouched(pool, before)


@pytest.mark.parametrize("page", [None, 16])
def test_an_exhausted_pool_leaves_nothing_taken(engine, saved, page):
    pool = make_pool(TINY, page, engine, streams=1)
    holder = computed(pool, "text", 70)
    before, free = bits(pool.arena).copy(), pool.free
    with pytest.raises(PoolExhaustedError, match="nothing was taken"):
        restored(pool, saved["text"])
    assert (pool.free, pool.audit()) == (free, [])
    assert_bits(bits(pool.arena), before, "arena")
    holder.close()
    assert restored(pool, saved["text"]).length == MIDDLE


def test_what_cannot_be_saved_is_refused(engine):
    pool = make_pool(TINY, 16, engine)
    stream = computed(pool, "text", 20)
    with pytest.raises(StreamError, match=r"21 positions of stream 0 .* hold \(20, 20\), so 1 to 20 can be saved"):
        fast.save(stream, 21)
    for positions in (0, -1):
        with pytest.raises(StreamError, match="cannot be saved"):
            fast.save(stream, positions)
    for positions in (True, 4.0):
        with pytest.raises(TypeError, match=r"positions is .*; it must be an integer"):
            fast.save(stream, positions)
    assert fast.save(stream, np.int64(20)).positions == 20
    stream.roll_back(18, layers=[1])
    with pytest.raises(StreamError, match=r"hold \(20, 18\), so 1 to 18 can be saved"):
        fast.save(stream, 19)
    with pytest.raises(StreamError, match="there is nothing to save"):
        fast.save(fast.Stream(pool, weights_of(TINY)), 1)
    stream.roll_back(18)
    with fast.Round([(stream, 1)]) as step:
        with pytest.raises(StreamError, match="a round or a `work` block is at work"):
            fast.save(stream, 1)
        for layer in step.layers:
            step.attend(layer, [np.zeros((1, TINY.projection_width), BF16)])
    stream.close()
    with pytest.raises(StreamError, match="closed"):
        fast.save(stream, 1)


def test_a_capture_is_refused(engine, saved):
    pool = make_pool(TINY, 16, engine)
    stream = computed(pool, "text", 20)
    with fast.capture(engine):
        with pytest.raises(CaptureError, match="a prompt is saved inside a capture"):
            fast.save(stream, 4)
        with pytest.raises(CaptureError, match="a prompt is restored inside a capture"):
            restored(pool, saved["text"])
        fast.gate(TINY, *gate_arguments(), engine=engine)
    assert pool.audit() == []


def gate_arguments():
    return np.zeros((1, TINY.query_heads, TINY.head_dim), BF16), np.zeros((1, TINY.projection_width), BF16)


def test_a_saved_prompt_prints_no_rows(saved):
    prompt = saved["media"]
    assert repr(prompt) == (
        f"SavedPrompt(geometry 'tiny', 37 positions, rope 'media', {prompt.nbytes:,} bytes, "
        f"weights {prompt.weights_digest[:16]})"
    )
    assert repr(prompt.layers[0]) == "SavedLayer(37 positions, 9 pooled rows)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": 0}, "of 0 positions; it must have at least 1"),
        ({"positions": MIDDLE + 1}, r"layer 0 of the saved prompt: keys has shape \[37, 2, 32\]; it must be \[38, 2"),
        ({"weights_digest": "ABC"}, "must be a sha256 in 64 hex digits"),
        ({"layers": ()}, "0 layers are given; geometry 'tiny' has 2"),
        ({"geometry": ODD}, "2 layers are given; geometry 'odd' has 3"),
    ],
)
def test_a_saved_prompt_that_does_not_fit_itself_cannot_be_made(saved, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(saved["text"], **change)


# ---- failures ----


class Breaking:
    """Makes the k-th operation of a pool and its backend fail."""

    def __init__(self, monkeypatch, pool, error=RuntimeError):
        self.error = error
        self.left = None
        self.seen = set()
        for name in ("zero", "write", "fence", "empty", "upload", "download"):
            monkeypatch.setattr(pool.engine.backend, name, self._counted(name, getattr(pool.engine.backend, name)))
        monkeypatch.setattr(pool, "take", self._counted("take", pool.take))

    def _counted(self, name, operation):
        def counted(*args):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    self.seen.add(name)
                    raise self.error(f"planted in {name}")
            return operation(*args)

        return counted

    def each(self, action):
        """Run the action with its first, second, ... operation failing, until none fails; yields between."""
        for k in range(10_000):
            self.left = k
            try:
                result = action()
            except self.error as error:
                if "planted" not in str(error):
                    raise
                yield None
            else:
                self.left = None
                yield result
                return


def fresh(kind):
    """An engine of its own, whose backend may be broken."""
    return Engine(fast.HostBackend()) if kind == "host" else Engine(fiber_backend(), threads=HOST_THREADS)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("page", [None, 8])
def test_a_failing_restore_leaves_nothing_taken(engine, saved, monkeypatch, page, kind, error):
    pool = make_pool(TINY, page, fresh(kind))
    neighbour = restored(pool, saved["delta"])
    held = pool.layout.pages - pool.free
    want, weights = page_bits(neighbour), there(pool)
    breaking = Breaking(monkeypatch, pool, error)
    for stream in breaking.each(lambda: fast.restore(pool, saved["media"], weights)):
        assert audit(pool, [neighbour] if stream is None else [neighbour, stream]) == []
        assert_bits(page_bits(neighbour), want, "page of the neighbour")
        if stream is None:
            assert pool.layout.pages - pool.free == held
    assert breaking.seen >= {"zero", "write", "fence", "take"}
    own = computed(make_pool(TINY, page, engine), "media", stream.length)
    assert_bits(page_bits(stream), page_bits(own), "page")


def test_a_backend_that_stays_broken_still_tells_the_first_error(saved, monkeypatch):
    pool = make_pool(TINY, None, fresh("host"))
    backend = pool.engine.backend

    def broken(*args):
        monkeypatch.setattr(backend, "fence", broken)
        raise RuntimeError(f"planted in the call with {len(args)} arguments")

    monkeypatch.setattr(backend, "write", broken)
    with pytest.raises(RuntimeError, match="with 2 arguments"):
        restored(pool, saved["text"])
    assert pool.audit() == []


@pytest.mark.parametrize("page", [None, 8])
def test_a_failing_save_leaves_the_stream_as_it_was(saved, monkeypatch, page):
    pool = make_pool(TINY, page, fresh("device"))
    stream = restored(pool, saved["media"])
    before = page_bits(stream), stream.lengths, stream.pages
    breaking = Breaking(monkeypatch, pool)
    for result in breaking.each(lambda: fast.save(stream, MIDDLE)):
        assert_bits(page_bits(stream), before[0], "page")
        assert (stream.lengths, stream.pages) == before[1:]
        prompt = result
    assert breaking.seen == {"download"}
    assert_same_prompt(prompt, saved["media"])


# ---- devices ----


@pytest.mark.parametrize("mode", ["text", "media"])
@pytest.mark.parametrize("page", [None, 16])
def test_a_prompt_moves_between_host_and_device(engine, saved, unbroken, mode, page):
    gpu = fresh("device")
    there_and_back = computed(make_pool(TINY, page, gpu), mode, MIDDLE)
    prompt = fast.save(there_and_back, MIDDLE)
    assert_same_prompt(prompt, saved[mode])
    stream = restored(make_pool(TINY, 8, gpu), prompt)
    steps = [[gpu.download(window) for window in step] for step in go_on(stream)]
    assert_same_steps(steps, unbroken[mode])
    assert_same_steps(go_on(restored(make_pool(TINY, 8, engine), prompt)), unbroken[mode])


@pytest.mark.parametrize(("page", "positions"), [(None, MIDDLE), (16, MIDDLE), (16, 32), (48, 48)])
def test_only_rows_in_use_are_copied(monkeypatch, page, positions):
    """However large a contiguous context is, and whatever else the last page holds."""
    pool = make_pool(TINY, page, fresh("device"), context=4096, streams=1)
    stream = computed(pool, "text", 61)
    sizes = []
    download = pool.engine.backend.download
    monkeypatch.setattr(pool.engine.backend, "download", lambda array: counted(download(array), sizes))
    prompt = fast.save(stream, positions)
    weights = sum(getattr(w, f.name).nbytes for w in weights_of(TINY) for f in dataclasses.fields(w))
    assert sum(sizes) == prompt.nbytes + weights


def counted(array, sizes):
    sizes.append(array.nbytes)
    return array


def test_only_rows_of_the_prompt_are_written(saved, monkeypatch):
    pool = make_pool(TINY, None, fresh("device"), context=4096, streams=1)
    sizes = []
    write = pool.engine.backend.write
    monkeypatch.setattr(pool.engine.backend, "write", lambda array, values: write(array, counted(values, sizes)))
    restored(pool, saved["text"])
    assert sum(sizes) == saved["text"].nbytes


# ---- several queues ----


@pytest.fixture(params=[None, 8], ids=["contiguous", "paged"])
def late(request):
    """A pool whose work is pending until it is waited for."""
    return make_pool(TINY, request.param, DelayedEngine(DelayedBackend(queues=2, policy="late")))


def test_save_waits_for_work_on_another_queue(late, saved):
    queue = late.engine.backend.queue
    with queue(0):
        stream = computed(late, "media", 61)
    with queue(1):
        assert_same_prompt(fast.save(stream, MIDDLE), saved["media"])


def test_what_follows_a_restore_runs_behind_it(late, saved, unbroken):
    queue = late.engine.backend.queue
    with queue(0):
        other = computed(late, "text", 61)
        other.close()
    with queue(1):
        stream = restored(late, saved["media"])
    with queue(0):
        step = extend(stream, MIDDLE + 1)
        late.engine.download(step[-1].gated)
        assert_same_steps([step], unbroken["media"][:1])
    late.engine.backend.synchronize()
    assert_bits(page_bits(stream), page_bits(computed(other_pool(late), "media", MIDDLE + 1)), "page")


def other_pool(pool):
    return make_pool(TINY, None if pool.contiguous else pool.page_size, Engine(fast.HostBackend()))
