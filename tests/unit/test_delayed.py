"""Work that is late: pools and streams give the same bits however long their work stays pending, on whatever queue.

Each scene is a race between two queues. Without its fences it must go red, or it would prove nothing.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof import fast
from kvproof.fast.backend import PassedFence
from kvproof.fast.stream_work import Keep
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.oracle.serving.delayed import DelayedBackend, DelayedEngine
from kvproof.oracle.serving.recycled import RecycledMemory
from kvproof.reference import TINY
from kvproof.reference.layout import BF16
from pools import PAGE, WEIGHTS, page_bits, rows_of
from streams import bits, make_rope, refused


def delayed(**options):
    return DelayedEngine(DelayedBackend(HOST, **options))


HOST = fast.HostBackend(workers=1)
SOLO = fast.Engine(HOST)


def text(seed, count):
    """What a stream gives that was never late, and its pages."""
    pool = fast.PagePool(TINY, streams=1, context=64, page_size=PAGE, engine=SOLO)
    stream = fast.Stream(pool, WEIGHTS)
    results = stream.append(rows_of(seed, 0, count))
    return [bits(result.gated) for result in results], page_bits(stream)


def gated(*windows):
    """The gated rows of several windows, layer by layer; only once they are computed."""
    return [np.concatenate([bits(window[layer].gated) for window in windows]) for layer in range(TINY.layers)]


def same(got, want):
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


# ---- the backend itself ----


def array(*values):
    return np.array(values, np.int32)


def test_memory_goes_to_the_next_of_its_queue_size_and_kind():
    backend = DelayedBackend(HOST)
    x = backend.empty((15,), np.int32)
    address, view = x.ctypes.data, x[1:].reshape(2, 7).T
    backend.write(x, np.full(15, 7, np.int32))
    with backend.queue(1):
        backend.write(x[:5], np.full(5, 8, np.int32))
    del x
    assert backend.empty(15, np.int32).ctypes.data != address  # a view is left
    del view
    with backend.queue(1):
        assert backend.empty(15, np.int32).ctypes.data != address
    for shape, dtype in ((600, np.int32), (15, np.float32), ((3, 5), np.int32)):
        assert backend.empty(shape, dtype).ctypes.data != address
    y = backend.upload(np.arange(20, dtype=np.int32))
    assert (y.ctypes.data, list(y)) == (address, list(range(20)))
    backend.synchronize()
    assert list(y[:6]) == [8] * 5 + [5]


def test_memory_of_any_type():
    backend = DelayedBackend(HOST)
    for dtype in (BF16, np.float32, np.int32):
        x = backend.empty((2, 3), dtype)
        assert (x.dtype, x.shape, x.flags.writeable) == (np.dtype(dtype), (2, 3), True)
        backend.write(x, np.ones((2, 3), dtype))
        assert list(backend.download(x[:, 1])) == [1, 1]
    assert backend.empty((0, 3), np.int32).shape == (0, 3)


def test_nothing_runs_before_it_is_waited_for():
    backend = DelayedBackend(HOST)
    x = array(1, 2)
    backend.zero(x)
    backend.write(x, array(3, 4))
    assert (list(x), backend.pending(0)) == ([1, 2], 2)
    backend.run(0, 1)
    assert list(x) == [0, 0]
    backend.synchronize()
    assert (list(x), backend.pending(0)) == ([3, 4], 0)


def test_values_are_copied_when_they_are_given():
    backend = DelayedBackend(HOST)
    x, values = array(0, 0), array(3, 4)
    backend.write(x, values)
    values[:] = 9
    assert list(backend.download(x)) == [3, 4]


def test_a_download_waits_for_its_own_queue_only():
    backend = DelayedBackend(HOST)
    x, y = array(0), array(0)
    backend.write(x, array(1))
    with backend.queue(1):
        backend.write(y, array(2))
        assert list(backend.download(x)) == [0]
        assert list(y) == [2]
    assert list(backend.download(x)) == [1]


def test_an_upload_waits_for_its_own_queue_only():
    backend = DelayedBackend(HOST)
    x, y = array(0), array(0)
    backend.write(x, array(1))
    with backend.queue(1):
        backend.write(y, array(2))
        backend.upload(y)
    assert (list(x), list(y)) == ([0], [2])


def test_queues_take_turns():
    backend, seen = DelayedBackend(HOST, queues=3, policy="turns"), []
    for queue in range(3):
        with backend.queue(queue):
            for i in range(3):
                backend.submit(lambda at=(queue, i): seen.append(at))
    with backend.queue(1):
        backend.download(array(0))
    assert seen == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("policy", ["late", "turns"])
def test_an_order_runs_the_other_queue_up_to_the_fence_and_no_further(policy):
    backend, seen = DelayedBackend(HOST, policy=policy), []
    backend.submit(lambda: seen.append("before"))
    fence = backend.fence()
    backend.submit(lambda: seen.append("after"))
    with backend.queue(1):
        backend.submit(lambda: seen.append("first"))
        fence.order()
        backend.submit(lambda: seen.append("second"))
    assert not fence.done()
    backend.run(1)
    assert fence.done()
    assert seen == ["first", "before", "second"]
    assert backend.pending(0) == 1


def test_a_fence_of_an_idle_queue_has_passed():
    backend = DelayedBackend(HOST)
    assert backend.fence().done()


def test_long_chains_of_orders_run():
    backend, seen = DelayedBackend(HOST), []
    fence = backend.fence()
    for i in range(5000):
        with backend.queue(i % 2):
            fence.order()
            backend.submit(lambda i=i: seen.append(i))
            fence = backend.fence()
    backend.run(1)
    assert seen == list(range(5000))


def test_a_failed_task_is_over():
    backend, seen = DelayedBackend(HOST), []
    backend.submit(lambda: [].pop())
    backend.submit(lambda: seen.append(1))
    with pytest.raises(IndexError):
        backend.synchronize()
    backend.synchronize()
    assert seen == [1]


def test_launches_keep_their_arguments_alive():
    engine = delayed()
    stream = fast.Stream(fast.PagePool(TINY, streams=1, context=16, page_size=PAGE, engine=engine), WEIGHTS)
    window = stream.append(rows_of(1, 0, 9))  # nobody holds the projections
    for _ in range(20):
        np.full(9 * TINY.projection_width, np.nan, fast.page_pool.BF16)
    engine.backend.synchronize()
    assert same(gated(window), text(1, 9)[0])


def test_a_replay_goes_to_the_queue_that_is_current_then():
    engine = delayed()
    stream = fast.Stream(fast.PagePool(TINY, streams=1, context=16, page_size=PAGE, engine=engine), WEIGHTS)
    stream.reserve(9)
    engine.backend.synchronize()
    rows = rows_of(1, 0, 9)
    with fast.capture(engine) as step:
        window = fast.window(TINY, WEIGHTS[0], stream.cache(0), rows[0], 0, stream.rope, engine=engine)
    assert engine.backend.pending(0) == 0
    with engine.backend.queue(1):
        step.replay()
    assert engine.backend.pending(1) > 0
    engine.backend.run(1)
    assert np.array_equal(bits(window.gated), text(1, 9)[0][0])


@pytest.mark.parametrize("number", [-1, 2])
def test_there_are_no_other_queues(number):
    backend = DelayedBackend(HOST)
    for call in (backend.run, backend.pending, lambda number: backend.queue(number).__enter__()):
        with refused(ValueError, f"queue {number} does not exist; there are queues 0 to 1"):
            call(number)


def test_options_of_the_backend():
    with refused(ValueError, "queues is 0; it must be at least 1"):
        DelayedBackend(HOST, queues=0)
    with refused(ValueError, "policy is 'soon'; it must be one of late, turns"):
        DelayedBackend(HOST, policy="soon")


# ---- races between queues ----


class Scene:
    """A race: streams on two queues, of which `cut` tasks of queue 0 run, then queue 1, then the rest."""

    def __init__(self, cut, *, pages=2, policy="late"):
        self.engine = delayed(policy=policy)
        self.backend = self.engine.backend
        self.pool = guarded_pool(TINY, streams=1, context=pages * PAGE, page_size=PAGE, engine=self.engine)
        self.cut = cut
        self.wanted = []

    def on(self, queue):
        return self.backend.queue(queue)

    def stream(self):
        return fast.Stream(self.pool, WEIGHTS)

    def append(self, stream, seed, count):
        """Append rows that are to be found as if they had never been late."""
        first = stream.length
        window = stream.append(rows_of(seed, first, count))
        self.wanted.append((window, [rows[first:] for rows in text(seed, first + count)[0]]))

    def end(self, *streams):
        """Run all; whether every window, and the pages of these streams, are right."""
        self.backend.run(0, self.cut)
        self.backend.run(1)
        self.backend.synchronize()
        outputs = all(same(gated(window), want) for window, want in self.wanted)
        pages = all(np.array_equal(page_bits(stream), text(seed, stream.length)[1]) for stream, seed in streams)
        return outputs and pages and audit(self.pool, [stream for stream, _ in streams]) == []


def freed_pages(cut):
    """Pages that one stream gives back while its work is pending, taken by another."""
    scene = Scene(cut)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
        a.close()
    with scene.on(1):
        b = scene.stream()
        scene.append(b, 2, 10)
    assert b.pages == (0, 1)
    assert scene.pool.statistics().draining == 0
    return scene.end((b, 2))


def closed_elsewhere(cut):
    """A stream closed on another queue than its work's."""
    scene = Scene(cut)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
    with scene.on(1):
        a.close()
        b = scene.stream()
        scene.append(b, 2, 10)
    return scene.end((b, 2))


def rolled_back_elsewhere(cut):
    """Pages given back by a rollback on another queue than the stream's work's, then taken by that other's stream."""
    scene = Scene(cut)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
    with scene.on(1):
        a.roll_back(3)
        b = scene.stream()
        scene.append(b, 2, 5)
    return scene.end((a, 1), (b, 2))


def made_elsewhere(cut):
    """A stream's table is zeroed on one queue and written on another."""
    scene = Scene(cut)
    with scene.on(1):
        other = scene.stream()
        scene.append(other, 3, 1)  # page 0, so that a zeroed table is wrong
    with scene.on(0):
        a = scene.stream()
    with scene.on(1):
        scene.append(a, 1, 5)
    return scene.end((other, 3), (a, 1))


def reserved_elsewhere(cut):
    """Pages are zeroed, and put in the table, on one queue; rows are stored on another."""
    scene = Scene(cut)
    with scene.on(0):
        a = scene.stream()
        a.reserve(9)
    with scene.on(1):
        scene.append(a, 1, 9)
    return scene.end((a, 1))


def moved(cut):
    """A stream that changes its queue with each call."""
    scene = Scene(cut, pages=4)
    a = scene.stream()
    for queue, count in ((0, 7), (1, 2), (0, 1), (1, 9)):
        with scene.on(queue):
            scene.append(a, 1, count)
    with scene.on(0):
        a.roll_back(12)
    with scene.on(1):
        scene.append(a, 1, 5)
    return scene.end((a, 1))


def grown_after_a_rollback(cut):
    """A table entry that names another page before the kernels that read it have run."""
    scene = Scene(cut, pages=4)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
        a.roll_back(3)
    with scene.on(1):
        b = scene.stream()
        scene.append(b, 2, 6)  # takes page 1
        scene.append(a, 1, 10)  # whose logical page 1 is page 2 now
    assert a.pages == (0, 2)
    return scene.end((a, 1), (b, 2))


def dropped_table(cut, drop=fast.Stream.close):
    """A stream is gone whose kernels are pending on a queue; on the queue that its table came from, another is made."""
    scene = Scene(cut, pages=6)
    other = scene.stream()
    scene.append(other, 3, 3)  # page 0, which a zeroed table names
    with scene.on(0):
        a = scene.stream()
        a.reserve(9)
    scene.backend.synchronize()  # its table is written
    with scene.on(1):
        scene.append(a, 1, 9)
        drop(a)
    del a
    with scene.on(0):
        b = scene.stream()
        scene.append(b, 2, 10)
    return scene.end((other, 3), (b, 2))


def dropped_without_a_close(cut):
    """The same, of a stream that nobody has closed, which holds no page."""
    return dropped_table(cut, drop=lambda stream: stream.roll_back(0))


MEDIA = make_rope("media", length=12)


@functools.cache
def media_text(count):
    """A saved prompt with images, and the row behind it."""
    pool = fast.PagePool(TINY, streams=1, context=64, page_size=PAGE, engine=SOLO)
    stream = fast.Stream(pool, WEIGHTS, rope=MEDIA)
    stream.append(rows_of(1, 0, count))
    return fast.save(stream, count), [bits(window.gated) for window in stream.append(rows_of(1, count, 1))]


def dropped_rope(cut):
    """Triples that a restore has uploaded; on the queue that they came from, others are uploaded."""
    scene = Scene(cut, pages=6)
    saved, want = media_text(9)
    with scene.on(0):
        a = fast.restore(scene.pool, saved, WEIGHTS)
    with scene.on(1):
        scene.wanted.append((a.append(rows_of(1, 9, 1)), want))
        a.close()
    del a
    with scene.on(0):
        others = scene.engine.upload(make_rope("media", length=12, seed=7))
        b = scene.stream()
        scene.append(b, 2, 10)
    assert others.media_length == 12
    return scene.end((b, 2))


def fresh_arena(cut):
    """An arena in memory that work on the queue where it was made has not left yet."""
    scene = Scene(cut)
    with scene.on(0):
        gone = scene.engine.empty((scene.pool.layout.elements,), BF16)
        address = gone.ctypes.data
        scene.backend.write(gone, np.ones(len(gone), BF16))
        del gone
        scene.pool = fast.PagePool(TINY, streams=1, context=2 * PAGE, page_size=PAGE, engine=scene.engine)
    assert scene.pool.arena.ctypes.data == address
    with scene.on(1):
        a = scene.stream()
        scene.append(a, 1, 9)
    return scene.end((a, 1))


def captured(stream, rows, first):
    """The windows of a captured step, and the step."""
    engine = stream.pool.engine
    with fast.capture(engine) as step:
        windows = [
            fast.window(TINY, WEIGHTS[layer], stream.cache(layer), rows[layer], first, stream.rope, engine=engine)
            for layer in range(TINY.layers)
        ]
    return windows, step


def replayed(cut):
    """A captured step is replayed on a queue, its stream closed on another, and its pages taken there."""
    scene = Scene(cut)
    a = scene.stream()
    a.reserve(9)
    scene.backend.synchronize()  # a replay looks at the table
    windows, step = captured(a, rows_of(1, 0, 9), 0)
    with scene.on(1), a.work(9):
        step.replay()
    scene.wanted.append((windows, text(1, 9)[0]))
    with scene.on(0):
        a.close()
        b = scene.stream()
        scene.append(b, 2, 10)
    return scene.end((b, 2))


def called(cut):
    """The functions of `kvproof.fast` over a stream's caches, between its rollback and an append on another queue."""
    scene = Scene(cut, pages=4)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 12)
        a.roll_back(5)
    with scene.on(1), a.work(9):
        rows = rows_of(1, 5, 4)
        windows = [
            fast.window(TINY, WEIGHTS[layer], a.cache(layer), rows[layer], 5, a.rope, engine=scene.engine)
            for layer in range(TINY.layers)
        ]
    scene.wanted.append((windows, [rows[5:] for rows in text(1, 9)[0]]))
    with scene.on(0):
        scene.append(a, 1, 6)
    return scene.end((a, 1))


SCENES = [
    freed_pages,
    closed_elsewhere,
    rolled_back_elsewhere,
    made_elsewhere,
    reserved_elsewhere,
    moved,
    grown_after_a_rollback,
    dropped_table,
    dropped_without_a_close,
    dropped_rope,
    fresh_arena,
    replayed,
    called,
]


@pytest.fixture
def tame(monkeypatch):
    """Page tables have memory of their own, zeroed at first, so that what is red names pages, and is no crash."""
    empty = DelayedBackend.empty

    def apart(backend, shape, dtype):
        if dtype is not np.int32 or len(shape) != 1:
            return empty(backend, shape, dtype)
        tables = backend.__dict__.setdefault("tables", RecycledMemory())
        return tables.empty(backend._current, shape, dtype)

    monkeypatch.setattr(DelayedBackend, "empty", apart)


CUTS = [0, 1, 3, 6, 8, 10, 13, 17, 20, 28, 36, 44]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_late_work_harms_nobody(scene):
    for cut in CUTS:
        assert scene(cut), f"queue 1 ran after {cut} tasks of queue 0"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.usefixtures("tame")
def test_every_scene_is_red_without_fences(scene, monkeypatch):
    monkeypatch.setattr(DelayedBackend, "fence", lambda self: PassedFence())
    assert not all(scene(cut) for cut in CUTS)


@pytest.mark.parametrize(
    ("scene", "broken"),
    [
        (freed_pages, "give_back"),
        (closed_elsewhere, "close"),
        (made_elsewhere, "__init__"),
        (reserved_elsewhere, "grow"),
        (moved, "__exit__"),
        (moved, "__enter__"),
        (rolled_back_elsewhere, "tidy"),
        (replayed, "work"),
        (called, "work"),
    ],
)
@pytest.mark.usefixtures("tame")
def test_each_order_is_needed(scene, broken, monkeypatch):
    """Leave out what one function orders, or marks, and its scene is red."""

    def absent(original):
        return lambda stream: None if sys._getframe(1).f_code.co_name == broken else original(stream)

    if broken == "give_back":
        monkeypatch.setattr(fast.PagePool, "give_back", without_fences(fast.PagePool.give_back))
    for name in ("mark", "order"):
        monkeypatch.setattr(fast.Stream, name, absent(getattr(fast.Stream, name)))
    assert not all(scene(cut) for cut in CUTS)


@pytest.mark.parametrize("scene", [dropped_table, dropped_without_a_close, dropped_rope], ids=lambda s: s.__name__)
@pytest.mark.usefixtures("tame")
def test_what_a_stream_leaves_must_be_kept(scene, monkeypatch):
    monkeypatch.setattr(Keep, "add", lambda keep, work: None)
    assert not all(scene(cut) for cut in CUTS)


@pytest.mark.usefixtures("tame")
def test_a_fresh_arena_needs_its_fence(monkeypatch):
    make = fast.PagePool.__init__

    def without(pool, *args, **options):
        make(pool, *args, **options)
        pool._fences = [None] * pool.layout.pages

    monkeypatch.setattr(fast.PagePool, "__init__", without)
    assert not all(fresh_arena(cut) for cut in CUTS)


def test_what_a_stream_leaves_is_let_go_once_its_work_has_ended():
    scene = Scene(0, pages=4)
    for _ in range(3):
        with scene.on(1):
            a = scene.stream()
            scene.append(a, 1, 9)
            a.close()
        with scene.on(0):
            scene.stream().close()
    assert len(scene.pool.kept) == 6
    assert scene.end()
    scene.stream()
    assert len(scene.pool.kept) == 1  # the stream that nobody holds
    engine = scene.engine
    table, scene = weakref.ref(a.table), None
    del a
    gc.collect()
    assert (table(), engine.backend.pending(0)) == (None, 1)


def test_entries_of_a_late_table_lead_nowhere_outside_the_arena():
    """Nobody looks at them before a kernel follows them: they name a page, also where none is held."""
    scene = Scene(0, pages=4)
    a = scene.stream()
    scene.append(a, 1, 9)
    a.roll_back(3)
    b = scene.stream()
    scene.backend.synchronize()
    for stream in (a, b):
        assert stream.table.min() >= 0
        assert stream.table.max() < scene.pool.layout.pages


def without_fences(original):
    def give_back(pool, owner, pages):
        given = tuple(pages)
        original(pool, owner, given)
        for page in given:
            pool._fences[page] = None

    return give_back


def half_run(cut):
    """A table entry that changes when half of the kernels that read the old one have run."""
    scene = Scene(0, pages=4)
    a, b = scene.stream(), scene.stream()
    scene.backend.synchronize()
    scene.append(a, 1, 9)
    scene.backend.run(0, cut)
    a.roll_back(3)
    scene.append(b, 2, 6)
    scene.append(a, 1, 10)
    assert a.pages == (0, 2)
    return scene.end((a, 1), (b, 2))


def test_a_table_changes_behind_the_kernels_that_read_it():
    for cut in range(20):
        assert half_run(cut), f"the table changed after {cut} tasks"


@pytest.mark.usefixtures("tame")
def test_a_table_written_by_the_host_is_red(monkeypatch):
    """F23: the entry changes at once, while the kernels that are to read the old one are pending."""
    monkeypatch.setattr(DelayedBackend, "write", lambda self, where, values: np.copyto(where, values))
    assert not all(half_run(cut) for cut in range(20))


def test_a_save_on_another_queue_reads_what_was_appended():
    scene = Scene(0)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
    with scene.on(1):
        unordered = bits(scene.backend.download(scene.pool.page(a.pages[1])))
        a.order()
        saved = bits(scene.backend.download(scene.pool.page(a.pages[1])))
    want = text(1, 9)[1][1]
    assert np.array_equal(saved, want)
    assert not np.array_equal(unordered, want)


def outputs_of_two_queues(engine, *, before=lambda queue: None):
    """Two streams whose outputs have the same shapes, in turns."""
    pool = guarded_pool(TINY, streams=2, context=16, page_size=PAGE, engine=engine)
    windows = []
    for queue in (0, 1):
        before(queue)
        with engine.backend.queue(queue):
            windows.append(fast.Stream(pool, WEIGHTS).append(rows_of(queue, 0, 9)))
    engine.backend.synchronize()
    return all(same(gated(window), text(queue, 9)[0]) for queue, window in enumerate(windows))


@pytest.mark.parametrize("policy", ["late", "turns"])
def test_outputs_of_two_queues(policy):
    assert outputs_of_two_queues(delayed(policy=policy))


def test_scratch_that_two_queues_share_is_red(monkeypatch):
    """F25: the second stream's outputs are the arrays that the first was given."""
    engine, given = delayed(policy="turns"), []
    fresh = engine.empty

    def first(shape, dtype):
        given.append(fresh(shape, dtype))
        return given[-1]

    def before(queue):
        again = iter(given)
        monkeypatch.setattr(engine, "empty", (lambda shape, dtype: next(again)) if queue else first)

    assert not outputs_of_two_queues(engine, before=before)


def test_draining_pages_are_counted():
    scene = Scene(0, pages=3)
    with scene.on(0):
        a = scene.stream()
        scene.append(a, 1, 9)
        a.close()
    given = scene.pool.statistics()
    assert (given.free, given.draining) == (3, 2)
    scene.backend.synchronize()
    assert scene.pool.statistics().draining == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "roll_back", "close", "run"]),
        st.integers(0, 1),  # stream
        st.integers(0, 2),  # queue
        st.integers(0, 11),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=40)
@given(steps=STEPS, policy=st.sampled_from(["late", "turns"]))
def test_any_order_of_calls_on_any_queue(steps, policy):
    engine = delayed(policy=policy, queues=3)
    backend = engine.backend
    pool = guarded_pool(TINY, streams=2, context=24, page_size=PAGE, engine=engine)
    streams, windows = [fast.Stream(pool, WEIGHTS), fast.Stream(pool, WEIGHTS)], []
    for what, i, queue, n in steps:
        with backend.queue(queue):
            stream = streams[i]
            count = min(n + 1, pool.context - stream.length)
            if what == "append" and count:
                first = stream.length
                windows.append((stream.append(rows_of(i, first, count)), i, first))
            elif what == "roll_back":
                stream.roll_back(min(n, stream.length))
            elif what == "close":
                stream.close()
                streams[i] = fast.Stream(pool, WEIGHTS)
            elif what == "run":
                backend.run(queue, n)
    backend.synchronize()
    assert audit(pool, streams) == []
    for window, i, first in windows:
        end = first + len(window[0].gated)
        assert same(gated(window), [rows[first:] for rows in text(i, end)[0]])
    for i, stream in enumerate(streams):
        if stream.length:
            assert np.array_equal(page_bits(stream), text(i, stream.length)[1])
