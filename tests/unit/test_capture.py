"""A captured decode step replays with the eager bits, follows what its arrays hold, and refuses what would go stale.

Each test runs on the CPU's launch list and on a graph of the stand-in GPU of fiber_gpu.py; test_gpu.py has CUDA's own.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from kvproof import fast
from kvproof.fast import CaptureError, Engine, HostBackend, LaunchError, capture
from kvproof.fast.engine import HOST_THREADS
from kvproof.oracle.memory import GUARD_BYTES, GuardedEngine
from kvproof.reference import TEXT, TINY, KeyLists
from kvproof.reference.layout import BF16
from streams import assert_bits, normal
from windows import CACHED, assert_same_window, history

PAGE = 8
ENTRIES = -(-(CACHED + 1) // PAGE)


class Poisoned(Engine):
    """An engine whose memory, once nobody holds it, is poisoned and given out again at once."""

    def __init__(self, backend):
        super().__init__(backend, threads=HOST_THREADS)
        self._free = {}

    def array(self, shape, dtype):
        """Host memory of this kind."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(size, [])
        held = free.pop() if free else bytearray(size)
        raw = np.frombuffer(held, np.uint8)
        weakref.finalize(raw, self._give_back, free, held)
        return raw.view(dtype).reshape(shape)

    @staticmethod
    def _give_back(free, held):
        held[:] = b"\x7f" * len(held)
        free.append(held)

    def empty(self, shape, dtype):
        made = super().empty(shape, dtype)
        return replaced(made, self.array(shape, dtype))

    def given(self, value):
        """A copy of an array or a dataclass of arrays, in memory of this kind."""
        return fast.arrays.map_arrays(self.upload(value), self._moved)

    def _moved(self, made):
        mine = self.array(memory(made).shape, memory(made).dtype)
        mine[...] = memory(made)
        return replaced(made, mine)


def memory(array):
    """The host memory of a host array, or of one of the stand-in GPU's."""
    return array if isinstance(array, np.ndarray) else array._memory


def replaced(array, mine):
    """The same kind of array over other memory."""
    return mine if isinstance(array, np.ndarray) else type(array)(mine)


@pytest.fixture(params=[HostBackend, fiber_backend], ids=["host", "graph"])
def poisoned(request):
    return Poisoned(request.param())


class Step:
    """A decode step of one stream: what goes in, and the eager result."""

    def __init__(self, engine, *, stable=True, page=PAGE):
        self.engine = engine
        weights, cache, projection, _ = history(TINY, page, rows=1)
        self.weights = engine.given(weights)
        self.cache = engine.given(dataclasses.replace(cache, table_is_stable=stable))
        self.projection = engine.given(projection)

    def run(self):
        """The step on the engine, as it is called."""
        return fast.window(TINY, self.weights, self.cache, self.projection, CACHED, TEXT, engine=self.engine)

    def eager(self):
        """The result's bits, the cache left as it was."""
        before = memory(self.cache.buffer).copy()
        result = self.engine.download(self.run())
        memory(self.cache.buffer)[...] = before
        return result

    def capture(self):
        with capture(self.engine) as step:
            window = self.run()
        return step, window


def test_nothing_runs_while_a_step_is_captured(poisoned):
    decode = Step(poisoned)
    before = memory(decode.cache.buffer).copy()
    _, window = decode.capture()
    assert_bits(memory(decode.cache.buffer), before, "cache")
    assert memory(window.gated).view(np.uint8).max() == 0  # as it was made


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_a_replay_gives_the_eager_bits(poisoned, page):
    decode = Step(poisoned, page=page)
    want = decode.eager()
    step, window = decode.capture()
    for _ in range(3):
        for output in (window.gated, window.scores, window.lists.ids):
            memory(output)[...] = 0
        step.replay()
        assert_same_window(poisoned.download(window), want)


def test_a_replay_stores_the_eager_rows(poisoned):
    decode = Step(poisoned)
    step, _ = decode.capture()
    step.replay()
    poisoned.download(decode.projection)  # behind it
    got = memory(decode.cache.buffer).copy()
    other = Step(poisoned)
    other.run()
    poisoned.download(other.projection)
    assert_bits(got, memory(other.cache.buffer), "cache")


def test_freed_inputs_are_kept_and_freed_outputs_are_not_given_out_again(poisoned):
    decode = Step(poisoned)
    want = decode.eager()
    step, window = decode.capture()
    gated = window.gated
    watched = [weakref.ref(x) for x in (decode.projection, decode.cache.table, decode.weights.k_scale, window.q)]
    del decode, window
    gc.collect()
    churn = [poisoned.array(x.shape, x.dtype) for x in _arrays(want) for _ in range(3)]
    for array in churn:
        array.view(np.uint8)[...] = 0x55
    for _ in range(2):
        step.replay()
        assert_bits(poisoned.download(gated), want.gated, "gated")
    assert all((array.view(np.uint8) == 0x55).all() for array in churn)
    assert all(ref() is not None for ref in watched)
    del step
    gc.collect()
    assert all(ref() is None for ref in watched)


def _arrays(value):
    if isinstance(value, np.ndarray):
        return [value]
    return [x for item in vars(value).values() if not isinstance(item, int) for x in _arrays(item)]


def test_a_guarded_engine_keeps_its_hands_off_what_a_capture_owns():
    """Its outputs are watched at every replay, and their memory is nobody else's."""
    guarded = GuardedEngine(HostBackend())
    decode, want = unguarded_step(guarded)
    step, window = decode.capture()
    assert guarded.broken_guards() == []
    for _ in range(2):
        decode.run()  # may use again what no capture owns
        assert guarded.broken_guards() == []
    others = [guarded.empty(x.shape, x.dtype) for x in _arrays(want) for _ in range(2)]
    assert not any(np.shares_memory(x, y) for x in others for y in _arrays(window) if x.size)
    for _ in range(2):
        step.replay()
        assert_bits(window.gated, want.gated, "gated")
        assert guarded.broken_guards() == []


def unguarded_step(engine):
    """A step whose inputs are plain arrays, and its result."""
    weights, cache, projection, _ = history(TINY, PAGE, rows=1)
    decode = Step.__new__(Step)
    decode.engine, decode.weights, decode.projection = engine, weights, projection
    decode.cache = dataclasses.replace(cache, table_is_stable=True)
    return decode, decode.eager()


def test_guards_of_a_captured_output_are_watched_as_long_as_its_capture_lives():
    guarded = GuardedEngine(HostBackend())
    decode, _ = unguarded_step(guarded)
    step, window = decode.capture()
    last = window.gated.reshape(-1).view(np.uint8)[-1:]
    behind = np.lib.stride_tricks.as_strided(last, (1 + GUARD_BYTES,))[1:]
    guarded.broken_guards()
    for _ in range(2):
        behind[3] = 0
        told = [f"1 guard bytes changed, the first byte 3 behind an output of {window.gated.nbytes} bytes"]
        assert guarded.broken_guards() == told
        assert guarded.broken_guards() == []
    del step
    gc.collect()
    behind[3] = 0
    assert guarded.broken_guards() == told, "what was written before its capture went"
    behind[3] = 0
    assert guarded.broken_guards() == []
    again = [guarded.empty(window.gated.shape, window.gated.dtype) for _ in range(20)]
    assert not any(np.shares_memory(x, window.gated) for x in again), "the caller may still read it"


def test_a_replay_reads_what_its_inputs_hold_then(poisoned):
    decode, other = Step(poisoned), Step(poisoned)
    step, window = decode.capture()
    step.replay()
    first = poisoned.download(window.gated)
    for case in (decode, other):
        memory(case.projection)[...] = normal(9, 1, TINY.projection_width)
    want = other.eager()
    step.replay()
    assert_same_window(poisoned.download(window), want)
    assert (first != want.gated).any()


def move_page(cache, entry, to):
    """Copy an entry's page elsewhere, spoil where it was, and change the table in place."""
    buffer, table = memory(cache.buffer), memory(cache.table)
    pages = buffer.reshape(cache.layout.pages, cache.layout.page_elements)
    pages[to] = pages[table[entry]]
    pages[table[entry]] = np.nan
    table[entry] = to


def test_a_replay_follows_the_present_page_table(poisoned):
    decode = Step(poisoned)
    want = decode.eager()
    step, window = decode.capture()
    for entry in (0, ENTRIES - 1):
        spare = next(p for p in range(decode.cache.layout.pages) if p not in memory(decode.cache.table))
        move_page(decode.cache, entry, spare)
        step.replay()
        assert_same_window(poisoned.download(window), want)


def test_a_page_table_that_may_move_is_refused(poisoned):
    decode = Step(poisoned, stable=False)
    with pytest.raises(CaptureError, match=r"keeps the address of the page table.*LayerCache\(\.\.\., table_is_stable"):
        decode.capture()
    want = decode.eager()
    assert_same_window(poisoned.download(decode.run()), want)


def test_a_table_on_the_host_is_looked_at_before_each_replay():
    engine = Poisoned(HostBackend())
    decode = Step(engine)
    step, window = decode.capture()
    memory(window.gated)[...] = 1
    decode.cache.table[2] = 99
    with pytest.raises(ValueError, match="page table entry 2 names page 99; the arena has pages 0 to"):
        step.replay()
    assert (window.gated == 1).all()


def test_lists_may_grow_up_to_what_they_told(poisoned):
    decode = Step(poisoned)
    q = poisoned.given(normal(5, 1, TINY.query_heads, TINY.head_dim))
    lists = poisoned.given(dataclasses.replace(KeyLists.dense([40]), longest=CACHED, end=CACHED))
    with capture(poisoned) as step:
        partials = fast.chunks(TINY, decode.cache, q, lists, engine=poisoned)
    for keys in (40, 7, CACHED):
        memory(lists.nk)[...] = keys
        step.replay()
        exact = poisoned.given(KeyLists.dense([keys]))
        want = fast.chunks(TINY, decode.cache, q, exact, engine=poisoned)
        for name in "oml":
            assert_bits(poisoned.download(getattr(partials, name)), poisoned.download(getattr(want, name)), name)


def test_lists_that_tell_nothing_are_refused(poisoned):
    decode = Step(poisoned)
    q = poisoned.given(normal(5, 1, TINY.query_heads, TINY.head_dim))
    lists = poisoned.given(dataclasses.replace(KeyLists.dense([40]), longest=None))
    with pytest.raises(ValueError, match=r"lists\.longest and lists\.end are not told"), capture(poisoned):
        fast.chunks(TINY, decode.cache, q, lists, engine=poisoned)


# ---- what ends a capture ----


class Stop(Exception):  # noqa: N818
    pass


def stop(decode):
    raise Stop


def call_badly(decode):
    fast.pool(TINY, decode.weights, decode.cache, 10**6, 4, TEXT, engine=decode.engine)


@pytest.mark.parametrize(("fail", "error"), [(stop, Stop), (call_badly, ValueError)], ids=["exception", "refused-call"])
def test_a_capture_that_fails_leaves_nothing_captured(poisoned, fail, error):
    decode = Step(poisoned)
    before = memory(decode.cache.buffer).copy()
    steps = []
    with pytest.raises(error), capture(poisoned) as step:
        fail_inside(decode, steps, step, fail)
    with pytest.raises(CaptureError, match="not captured to its end"):
        steps[0].replay()
    assert_bits(memory(decode.cache.buffer), before, "cache")
    want = decode.eager()
    again, window = decode.capture()
    again.replay()
    assert_same_window(poisoned.download(window), want)


def fail_inside(decode, steps, step, fail):
    steps.append(step)
    decode.run()
    fail(decode)


def test_a_step_is_not_replayed_before_its_end(poisoned):
    decode = Step(poisoned)
    done, _ = decode.capture()
    with capture(poisoned) as step:
        decode.run()
        for early in (step, done):
            with pytest.raises(CaptureError, match="replayed while one is captured; end the capture's `with` block"):
                early.replay()
    step.replay()


def test_captures_do_not_nest(poisoned):
    decode = Step(poisoned)
    want = decode.eager()
    with capture(poisoned) as step:
        for engine in (poisoned, Engine()):
            with pytest.raises(CaptureError, match="captures do not nest"), capture(engine):
                raise AssertionError("entered")
        window = decode.run()
    step.replay()
    assert_same_window(poisoned.download(window), want)


def test_another_engine_is_refused_inside(poisoned):
    out, projection = np.zeros((1, 4, 32), BF16), np.zeros((1, TINY.projection_width), BF16)
    with pytest.raises(CaptureError, match="pass engine= to every call"), capture(poisoned):
        fast.gate(TINY, out, projection)


def test_other_threads_run_at_once(poisoned):
    decode, other = Step(poisoned), Step(poisoned)
    results = []
    with capture(poisoned) as step:
        thread = threading.Thread(target=lambda: results.append(memory(other.run().gated).copy()))
        if isinstance(poisoned.backend, HostBackend):  # the stand-in GPU has one stream for all threads
            thread.start()
            thread.join()
        window = decode.run()
    step.replay()
    for result in results:
        assert_bits(result, poisoned.download(window.gated), "gated")
    assert len(results) == isinstance(poisoned.backend, HostBackend)


def test_a_kernel_that_fails_in_a_replay_is_told():
    broken = fast.KernelSources().edit(
        "gate.cu", "const int head = blockIdx.x", "__trap(); const int head = blockIdx.x"
    )
    engine = Engine(HostBackend(), sources=broken)
    out, projection = np.zeros((1, 4, 32), BF16), np.zeros((1, TINY.projection_width), BF16)
    with capture(engine) as step:
        fast.gate(TINY, out, projection, engine=engine)
    with pytest.raises(LaunchError, match="kernel fn_attn_gate"):
        step.replay()


class Invalid:
    """A recorder whose recording broke."""

    def add(self, launch):
        raise AssertionError("nothing was launched")

    def finish(self):
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")


def test_a_recording_that_broke_says_why(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine.backend, "recorder", Invalid)
    with pytest.raises(CaptureError, match=r"cannot be captured \(cudaError.*neither wait"), capture(engine):
        pass
