"""gpu-check without a GPU: its time, processes and verdicts, its counts, and the gates over the fibers as a device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from kvproof import fast
from kvproof.fast import Engine, NoDeviceError
from kvproof.fast.nvrtc import Nvrtc
from kvproof.oracle.cases import at_check, cases, fill, weights_of
from kvproof.oracle.compiled.cubin import Resources
from kvproof.oracle.compiled.records import Measured
from kvproof.oracle.contract import Plan
from kvproof.oracle.gpu import (
    bench as gpu_bench,
)
from kvproof.oracle.gpu import (
    check as gpu_check,
)
from kvproof.oracle.gpu import (
    cli as gpu_cli,
)
from kvproof.oracle.gpu import (
    gates as gpu_gates,
)
from kvproof.oracle.gpu import (
    memory as gpu_memory,
)
from kvproof.oracle.gpu import (
    programs as gpu_programs,
)
from kvproof.oracle.gpu import (
    sanitizer,
)
from kvproof.oracle.gpu import (
    steps as gpu_steps,
)
from kvproof.oracle.gpu.bench import PAGES, Work, abba, copy_bandwidth, in_turns, layers_for
from kvproof.oracle.gpu.bytes import KERNELS, bytes_of
from kvproof.oracle.gpu.check import STEPS, Outcome, Step, run_child, run_steps, shares
from kvproof.oracle.gpu.found import Clock, TimeUpError
from kvproof.oracle.gpu.kernels import DeviceKernels, GuardedDevice, cuda_variants
from kvproof.oracle.memory import GUARD_BYTES
from kvproof.oracle.operations import calls_of
from kvproof.oracle.scene import Workspace, contiguous, with_pooled
from kvproof.reference import FLASH_NEXT, TEXT, TINY, LayerCache
from kvproof.reference.layout import BF16, Layout
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "gpu-check.md"


# ---- bytes, counted from the shapes and from the arrays ----


def window_of(geometry, rows, keys, engine):
    rng = np.random.Generator(np.random.PCG64(keys))
    layout = Layout.contiguous(geometry, keys)
    buffer = rng.standard_normal(layout.elements, dtype=np.float32).astype(BF16)
    projection = rng.standard_normal((rows, geometry.projection_width), dtype=np.float32).astype(BF16)
    cache = LayerCache(buffer=buffer, layout=layout)
    return fast.window(geometry, weights_of(geometry, rng), cache, projection, keys - rows, TEXT, engine=engine)


def bytes_seen(geometry, window, rows, keys):
    """What each kernel moves, told by what it was given and gave."""
    row = (window.out.nbytes, window.lists.ids.nbytes, window.scores.nbytes)
    out, ids, scores = row
    partials = window.partials.o.nbytes + window.partials.m.nbytes + window.partials.l.nbytes
    width = geometry.index_dim * BF16.itemsize
    scored = np.isfinite(window.scores).sum()
    sparse = window.lists.sparse == 1
    listed = (window.lists.ids >= 0).sum()
    key_bytes = 2 * geometry.kv_heads * geometry.head_dim * BF16.itemsize
    chunks = window.lists.nk.sum() * key_bytes + window.q.nbytes + listed * 4 * geometry.kv_heads + partials
    stored = rows * (key_bytes + width)
    return {
        "prep": 2 * (window.q.nbytes + window.iq.nbytes + stored),
        "pool": len([p for p in range(keys - rows, keys) if (p + 1) % geometry.block == 0])
        * (geometry.block + 1)
        * width,
        "scores": scored * (width + 4) + window.iq[sparse].nbytes + scores,
        "select": scored * 4 + listed * 4 + ids + window.lists.nk.nbytes + window.lists.sparse.nbytes,
        "chunks": chunks,
        "chunks_ahead": chunks,
        "merge": partials + out,
        "gate": 3 * out,
    }


@pytest.mark.parametrize("keys", [12, 19, 20, 513, 1000], ids="{}-keys".format)
@pytest.mark.parametrize("rows", [1, 7], ids="{}-rows".format)
def test_bytes_are_those_of_the_arrays(engine, rows, keys):
    seen = bytes_seen(TINY, window_of(TINY, rows, keys, engine), rows, keys)
    assert {name: bytes_of(name, TINY, rows=rows, keys=keys) for name in seen} == seen


def test_a_decode_row_of_the_model_reads_four_megabytes_of_keys_and_values():
    row = 24 * 256 * 2
    partials = 4 * 24 * (256 + 2) * 4
    assert bytes_of("chunks", FLASH_NEXT, rows=1, keys=2048) == 2048 * 2048 + row + partials
    parts = ("prep", "pool", "scores", "select", "chunks", "merge", "gate")
    assert bytes_of("window", FLASH_NEXT, rows=1, keys=8192) == sum(
        bytes_of(part, FLASH_NEXT, rows=1, keys=8192) for part in parts
    )


@pytest.mark.parametrize(
    ("kernel", "rows", "keys", "message"),
    [
        ("softmax", 1, 8, "kernel is 'softmax'; it must be one of prep"),
        ("gate", 9, 8, "9 rows of 8 positions"),
        ("gate", 0, 8, "0 rows of 8 positions"),
    ],
    ids=["unknown-kernel", "too-many-rows", "no-rows"],
)
def test_what_cannot_be_counted_is_refused(kernel, rows, keys, message):
    with pytest.raises(ValueError, match=message):
        bytes_of(kernel, TINY, rows=rows, keys=keys)


# ---- turns ----


class FakeTimer:
    """Runs the work and tells the next of its times."""

    def __init__(self, times=(1.0,)):
        self.times = list(times)
        self.copied = []

    def milliseconds(self, work):
        work()
        self.times.append(self.times.pop(0))
        return self.times[-1]

    def copier(self, size):
        return lambda: self.copied.append(size)


def test_turns_go_forwards_and_backwards():
    assert "".join(abba("ABC", 2)) == "ABCCBAABCCBA"


def test_every_step_runs_once_before_its_turns_are_timed():
    ran = []
    steps = {name: lambda name=name: ran.append(name) for name in "AB"}
    taken = in_turns(steps, FakeTimer([100.0, 100.0, 1.0, 2.0, 3.0, 4.0]), rounds=1)
    assert "".join(ran) == "ABABBA"
    assert taken == {"A": [1.0, 4.0], "B": [2.0, 3.0]}


def test_a_copy_counts_what_it_reads_and_what_it_writes():
    timer = FakeTimer([2.0])
    assert copy_bandwidth(timer, 10**6) == pytest.approx(1e9)
    assert set(timer.copied) == {10**6}


@pytest.mark.parametrize("work", gpu_bench.works(), ids=lambda work: work.name.replace(" ", "-"))
def test_a_step_reads_more_than_the_last_cache_holds_and_fits_memory(work):
    last_cache = 60 << 20
    layers = layers_for(FLASH_NEXT, work, last_cache)
    held = work.streams * Layout.contiguous(dataclasses.replace(FLASH_NEXT, layers=layers), work.keys).elements * 2
    read = work.streams * layers * bytes_of("window", FLASH_NEXT, rows=work.rows, keys=work.keys)
    assert min(held, read) >= gpu_bench.SPREAD * last_cache
    assert held <= gpu_bench.MOST_BYTES


@pytest.mark.parametrize("work", gpu_bench.works(), ids=lambda work: work.name.replace(" ", "-"))
def test_the_layouts_of_a_step_fit_a_small_device_together(work):
    """Of 4 GiB: either a layer of each layout and PyTorch's share fit, or the work is skipped."""
    most = gpu_bench.most_bytes(4 << 30)
    one = gpu_bench.cache_bytes(FLASH_NEXT, work)
    assert most == 1 << 30
    assert one * layers_for(FLASH_NEXT, work, 60 << 20, most) <= max(most, one)
    page = max(PAGES)
    paged = Layout(geometry=dataclasses.replace(FLASH_NEXT, layers=1), page_size=page, pages=-(-work.keys // page))
    assert one == work.streams * paged.elements * 2


def test_a_device_with_much_memory_is_not_filled():
    assert gpu_bench.most_bytes(139 << 30) == gpu_bench.MOST_BYTES


def test_works_that_do_not_fit_are_told(monkeypatch):
    engine = Engine(fiber_backend())
    small = gpu_bench.sample_of(engine.backend, 1009)
    monkeypatch.setattr(gpu_bench, "sample_of", lambda backend: small)
    works = (Work(streams=1, rows=2, keys=8), Work(streams=1, rows=2, keys=512), Work(streams=2, rows=2, keys=8))
    most = gpu_bench.cache_bytes(TINY, works[0])
    found = gpu_steps.timed(
        engine, TINY, WaitingTimer(engine.backend), works, last_cache=1, clock=Clock(600), most=most
    )
    assert found.verdict == "green"
    assert {one["work"] for one in found.result["timings"]} == {works[0].name}
    assert found.result["skipped"] == [works[1].name, works[2].name]
    assert "1 works, copy" in found.reason
    assert f"skipped, as they need more than 0 MiB, which one layout's caches may take here: {works[1].name}" in (
        found.reason
    )


def test_a_device_without_room_is_skipped():
    engine = Engine(fiber_backend())
    works = (Work(streams=1, rows=2, keys=8),)
    found = gpu_steps.timed(engine, TINY, WaitingTimer(engine.backend), works, last_cache=1, clock=Clock(600), most=0)
    assert (found.verdict, found.result["timings"]) == ("skipped", [])


TORCH = """
class cuda:
    def is_available():
        ANSWER
__version__ = "2.8.0+cpu"
"""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("return False", "PyTorch 2.8.0+cpu finds no CUDA device; is it built for the CPU alone?"),
        ("return True", "AttributeError: "),  # no other attribute: as of a PyTorch that lacks what is called
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "AssertionError: Torch not compiled"),
    ],
    ids=["cpu-only", "too-old", "raises"],
)
def test_a_pytorch_that_cannot_be_timed_is_told_and_spoils_nothing(monkeypatch, answer, told):
    module = types.ModuleType("torch")
    exec(TORCH.replace("ANSWER", answer), module.__dict__)
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.delitem(sys.modules, "kvproof.oracle.gpu.bench_torch", raising=False)
    result = {"torch": []}
    for _ in range(2):
        gpu_steps._add_torch(result, TINY, Work(streams=1, rows=1, keys=64), 1)
    assert result["torch_absent"].startswith(told)
    assert result["torch"] == []


def test_works_are_those_of_the_issue():
    decode = {(work.streams, work.keys) for work in gpu_bench.works() if work.rows == 1}
    assert decode == {(streams, keys) for streams in (1, 2, 4, 8) for keys in (2048, 8192, 31744)}
    assert [work.keys for work in gpu_bench.works() if work.rows == 64] == [2048, 8192, 31744]


class WaitingTimer(FakeTimer):
    """Waits for the fibers after the work, so that each replay runs."""

    def __init__(self, backend):
        super().__init__([4.0, 2.0])
        self._backend = backend

    def milliseconds(self, work):
        def waited():
            work()
            self._backend.synchronize()

        return super().milliseconds(waited)


@pytest.mark.parametrize("streams", [1, 2], ids="{}-streams".format)
def test_every_kernel_and_layout_is_timed_over_the_fibers(streams):
    engine = Engine(fiber_backend())
    work = Work(streams=streams, rows=1, keys=64)
    sample = gpu_bench.sample_of(engine.backend, 1009)
    found = gpu_bench.measure(
        engine, TINY, work, WaitingTimer(engine.backend), sample=sample, copied=1e9, layers=2, rounds=1
    )
    assert [(one.kernel, one.page) for one in found] == [(kernel, page) for kernel in KERNELS for page in PAGES]
    for one in found:
        assert one.bytes == streams * bytes_of(one.kernel, TINY, rows=1, keys=64)
        assert one.median_us == 1500.0  # of 4 and 2 ms, over two layers
        assert one.fastest_us == 1000.0
        assert one.bandwidth == pytest.approx(2 * one.bytes / 3e-3)
        assert one.fraction == pytest.approx(one.bandwidth / 1e9)
        assert one.ratio == 1.0


def test_paged_and_contiguous_caches_are_filled_whole():
    engine = Engine(fiber_backend())
    values = np.arange(1, 1010, dtype=np.float32).astype(BF16)
    sample = engine.upload(values)
    for page in (0, 16):
        caches = gpu_bench._caches(engine, TINY, Work(streams=3, rows=1, keys=64), page, sample)
        assert len(caches) == 3 * TINY.layers
        for cache in caches:
            held = engine.download(cache.buffer).view(np.uint16)
            assert np.array_equal(held, np.resize(values.view(np.uint16), len(held)))
        if page:
            tables = [engine.download(cache.table) for cache in caches[:3]]
            assert sorted(np.concatenate(tables)) == list(range(12))


def test_a_benchmark_whose_time_is_up_keeps_what_it_has(monkeypatch):
    engine = Engine(fiber_backend())
    small = gpu_bench.sample_of(engine.backend, 1009)
    monkeypatch.setattr(gpu_bench, "sample_of", lambda backend: small)
    works = (Work(streams=1, rows=2, keys=8), Work(streams=1, rows=3, keys=8))
    clock = Clock(-1.0)
    found = gpu_steps.timed(engine, TINY, WaitingTimer(engine.backend), works, last_cache=1, clock=clock)
    assert found.verdict == "cut"
    assert "after 1 of 2 works" in found.reason
    assert {one["work"] for one in found.result["timings"]} == {works[0].name}


# ---- the kernels on a device, judged on the host ----


def tiny_plan(*names):
    shape = at_check(TINY)
    chosen = tuple(case for case in cases(shape) if case.name in names)
    return Plan(geometry=shape, cases=chosen, page_sizes=(16,), seed=0, replay="{case} {page}")


@pytest.fixture(scope="module")
def fibers():
    return fiber_backend()


def test_the_whole_check_is_green_on_the_fibers(fibers):
    found = gpu_gates.judged([tiny_plan("block-tile")], cuda_variants(fibers), Clock(600))
    assert found.verdict == "green", found.reason
    report = found.result["reports"]["tiny"]
    assert report["facts"]["variants"] == ["192 threads", "64 threads", "256 threads"]
    assert {count["gate"] for count in report["counts"]} == {"bits", "bound", "memory", "controls"}


def test_the_cpu_s_bytes_are_the_truth_for_the_device(fibers):
    found = gpu_gates.judged([tiny_plan("page-chunk")], gpu_gates.cpu_then(fibers), Clock(600))
    assert found.verdict == "green", found.reason
    assert found.result["reports"]["tiny"]["facts"]["variants"] == ["forward", "192 threads"]


def test_one_bit_that_only_the_device_has_is_red(fibers, monkeypatch):
    merge = DeviceKernels.merge

    def flipped(self, geometry, partials):
        out = merge(self, geometry, partials)
        out.view(np.uint16)[0, 0, 0] ^= 1
        return out

    monkeypatch.setattr(DeviceKernels, "merge", flipped)
    found = gpu_gates.judged([tiny_plan("block-tile")], gpu_gates.cpu_then(fibers), Clock(600))
    assert found.verdict == "red"
    assert "merge.out: stream 0, row 0, head 0, element 0" in found.reason


def test_a_check_whose_time_is_up_says_how_far_it_came(fibers):
    found = gpu_gates.judged([tiny_plan("block-tile")], gpu_gates.cpu_then(fibers), Clock(0.3))
    assert found.verdict == "cut"
    assert found.result["runs"] < found.result["of"]


def test_a_check_of_nothing_is_red(fibers):
    assert gpu_gates.judged([], cuda_variants(fibers), Clock(600)).verdict == "red"


def test_what_was_red_before_the_time_was_up_stays_red(fibers, monkeypatch):
    monkeypatch.setattr(DeviceKernels, "gate", lambda self, geometry, out, projection: out)
    clock = Clock(600)
    calls = []

    def left():
        calls.append(None)
        return 1.0 if len(calls) < 6 else -1.0

    monkeypatch.setattr(clock, "left", left)
    found = gpu_gates.judged([tiny_plan("block-tile")], gpu_gates.cpu_then(fibers), clock)
    assert found.verdict == "red"
    assert found.result["runs"] == 6


@pytest.fixture
def device(fibers):
    return GuardedDevice(fibers, threads=64, poison=0xFF)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (GUARD_BYTES - 3, "1 guard bytes changed, the first 3 bytes before an output of 24 bytes"),
        (GUARD_BYTES + 24 + 5, "1 guard bytes changed, the first byte 5 behind an output of 24 bytes"),
    ],
    ids=["before", "behind"],
)
def test_a_guard_byte_that_changed_on_the_device_is_told(device, place, told):
    output = device.empty((2, 3), np.float32)
    assert np.isnan(device.fetch(output)).all()
    assert device.broken_guards() == []
    output.raw._memory[place] ^= 0xFF
    device.fetch(output)
    assert device.broken_guards() == [told]
    assert device.broken_guards() == []


def test_guards_on_the_host_are_another_engine_s(engine):
    with pytest.raises(ValueError, match="backend 'host' is no device"):
        GuardedDevice(engine.backend, threads=16, poison=0).empty((1,), np.float32)


def test_what_a_kernel_writes_to_its_inputs_shows_on_the_host(device):
    data = with_pooled(fill(TINY, cases(TINY)[1], seed=0))
    call = calls_of(data)[0]
    cache = contiguous(data, Workspace()).cache(0, 0)
    before, given = cache.buffer.view(np.uint16).copy(), call.projection.view(np.uint16).copy()

    def writes(mine, projection, *, engine):
        engine.backend.synchronize()
        for array in (mine.buffer, projection):
            array._memory.view(np.uint16).flat[5] ^= 1

    DeviceKernels(device)._run(writes, cache, call.projection)
    assert np.flatnonzero(cache.buffer.view(np.uint16) != before).tolist() == [5]
    assert np.flatnonzero(call.projection.view(np.uint16).ravel() != given.ravel()).tolist() == [5]


@pytest.mark.parametrize("place", [0, 20_000, 39_999], ids="element-{}".format)
def test_two_arrays_of_a_device_differ_in_one_bit(fibers, place):
    values = np.arange(40_000, dtype=np.uint16)
    other = values.copy()
    other[place] ^= 0x8000
    one, same, flipped = (fibers.upload(words.view(BF16)) for words in (values, values, other))
    assert not gpu_memory.differ(fibers, one, same)
    assert gpu_memory.differ(fibers, one, flipped)


def test_a_table_that_names_no_page_is_refused_before_the_device_reads_it(device):
    layout = Layout(geometry=TINY, page_size=8, pages=2)
    cache = LayerCache(buffer=layout.zeros(), layout=layout, table=np.array([0, 7], np.int32))
    with pytest.raises(ValueError, match="names page 7"):
        DeviceKernels(device).scores(TINY, cache, np.zeros((1, 2, 32), BF16), 15)


# ---- time ----


class FakeTime:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def outcomes_of(takes, *, seconds, skip=(), verdicts=()):
    """Run fake steps that take so long; returns the outcomes, and the limits that they were given."""
    clock, limits = FakeTime(), {}
    steps = [Step(name=name, title=name, share=1) for name in takes]

    def run(step, limit):
        limits[step.name] = limit
        clock.seconds += takes[step.name]
        return Outcome(step=step.name, verdict=dict(verdicts).get(step.name, "green"), reason="", seconds=limit)

    return run_steps(steps, seconds=seconds, skip=skip, run=run, now=clock), limits


def test_time_that_a_step_leaves_goes_to_those_after_it():
    outcomes, limits = outcomes_of({"a": 10, "b": 100, "c": 0}, seconds=300)
    assert limits == {"a": 100, "b": 145, "c": 190}
    assert [one.verdict for one in outcomes] == ["green"] * 3


def test_a_step_that_finds_the_time_out_is_not_run():
    outcomes, limits = outcomes_of({"a": 55, "b": 0, "c": 0}, seconds=60)
    assert list(limits) == ["a"]
    assert [(one.verdict, one.reason) for one in outcomes[1:]] == [("cut", gpu_check.OUT_OF_TIME)] * 2
    assert not gpu_check.succeeded(outcomes)


def test_a_step_that_is_left_out_gives_its_time_to_the_others():
    outcomes, limits = outcomes_of({"a": 0, "b": 0}, seconds=100, skip=("a",))
    assert limits == {"b": 100}
    assert outcomes[0] == Outcome(step="a", verdict="skipped", reason="--skip a")


def test_a_red_step_does_not_stop_the_rest():
    outcomes, _ = outcomes_of({"a": 1, "b": 1, "c": 1}, seconds=100, verdicts={"b": "red"})
    assert [one.verdict for one in outcomes] == ["green", "red", "green"]
    assert not gpu_check.succeeded(outcomes)


def test_without_a_device_nothing_else_is_tried():
    with pytest.raises(NoDeviceError):
        outcomes_of({"a": 1, "b": 1}, seconds=100, verdicts={"a": "no device"})


def test_every_step_can_be_run_and_the_proof_is_among_them():
    assert [step.name for step in STEPS] == list(gpu_steps.STEPS)
    assert set(gpu_check.PROOF) < set(gpu_steps.STEPS)
    total = 0.0
    for number in range(len(STEPS)):
        total += shares(STEPS[number:], gpu_check.SECONDS - total)
    assert total == pytest.approx(gpu_check.SECONDS)


# ---- processes ----

GREEN = (
    'import json, sys; json.dump({"verdict": "VERDICT", "reason": "r", "result": {"n": 1}}, open(sys.argv[1], "w"));'
)


def child(tmp_path, then, *, verdict="green", seconds=30.0):
    file = tmp_path / "found.json"
    words = [sys.executable, "-c", GREEN.replace("VERDICT", verdict) + then, str(file)]
    return run_child("step", words, file, seconds)


def test_a_process_that_ends_well_gives_its_verdict(tmp_path):
    found = child(tmp_path, "print('talk')")
    assert (found.verdict, found.reason, found.result, found.log) == ("green", "r", {"n": 1}, "")


@pytest.mark.parametrize("verdict", ["green", "cut"])
def test_a_process_that_crashes_is_red_and_what_it_told_is_kept(tmp_path, verdict):
    found = child(tmp_path, "import os; print('last words', flush=True); os.abort()", verdict=verdict)
    assert found.verdict == "red"
    assert found.reason == "its process ended with status -6"
    assert found.result == {"n": 1}
    assert "last words" in found.log


def test_a_process_that_tells_nothing_is_red(tmp_path):
    file = tmp_path / "found.json"
    found = run_child("step", [sys.executable, "-c", "import sys; sys.exit(3)"], file, 30.0)
    assert (found.verdict, found.reason, found.result) == ("red", "its process told nothing", {})


def test_a_process_that_hangs_is_killed_with_what_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    then = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL,"
        f" stderr=subprocess.DEVNULL); open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    found = child(tmp_path, then, verdict="cut", seconds=2.0)
    assert found.verdict == "cut"
    assert found.reason.startswith("killed after 2 s")
    assert found.result == {"n": 1}
    assert gone(int(pid_file.read_text()))


def test_an_interrupt_ends_the_process(tmp_path, monkeypatch):
    pid_file, communicate = tmp_path / "pid", subprocess.Popen.communicate

    def interrupted(self, timeout=None):
        if timeout is None:
            return communicate(self)
        pid_file.write_text(str(self.pid))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_child("step", ["sleep", "60"], tmp_path / "found.json", 30.0)
    assert gone(int(pid_file.read_text()))


def gone(pid):
    """Whether a process ends within some seconds: a zombie has."""
    for _ in range(100):
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_real_step_runs_in_a_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_check.run_in_process(STEPS[0], 120.0)
    assert found.verdict == "no device", found
    assert found.reason


def fail(error):
    def step(clock):
        clock.save({"n": 2}, now=True)
        raise error

    return {"step": step}


def test_a_step_whose_time_is_up_keeps_its_result(tmp_path):
    file = tmp_path / "found.json"
    gpu_steps.run_step("step", 60.0, file, fail(TimeUpError()))
    assert json.loads(file.read_text())["verdict"] == "cut"
    assert json.loads(file.read_text())["result"] == {"n": 2}


def test_a_step_that_fails_says_why(tmp_path):
    file = tmp_path / "found.json"
    with pytest.raises(RuntimeError):
        gpu_steps.run_step("step", 60.0, file, fail(RuntimeError("illegal address")))
    found = json.loads(file.read_text())
    assert (found["verdict"], found["reason"]) == ("red", "RuntimeError: illegal address")
    assert found["result"] == {"n": 2}


def test_a_step_without_a_device_says_so(tmp_path):
    file = tmp_path / "found.json"
    gpu_steps.run_step("step", 60.0, file, fail(NoDeviceError("no driver")))
    assert json.loads(file.read_text()) == {"verdict": "no device", "reason": "no driver", "result": {}}


def test_the_clock_saves_seldom_unless_told_and_stops_when_its_time_is_up():
    saved = []
    clock = Clock(60.0, saved.append)
    clock.save({"n": 1})
    assert saved == []
    clock.save({"n": 2}, now=True)
    assert [one.result for one in saved] == [{"n": 2}]
    with pytest.raises(TimeUpError):
        Clock(-1.0).save({})


# ---- compute-sanitizer ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 2),
        ("========= ERROR SUMMARY: 13 errors\n========= ERROR SUMMARY: 3 errors were not printed.\n", 13),
        ("========= Error: Device not supported\n", None),
        ("", None),
    ],
    ids=["clean", "one", "hazards", "some-not-printed", "refused", "silent"],
)
def test_a_summary_is_read(text, found):
    assert sanitizer.summary(text) == found


def tool_run(found, status, *told, seen=True, refused=""):
    return sanitizer.ToolRun(
        tool="memcheck", program="p", found=found, status=status, seen=seen, refused=refused, told=told
    )


@pytest.mark.parametrize(
    ("planted", "small", "verdict", "reason"),
    [
        (tool_run(64, 99), tool_run(0, 0), "green", "finds the planted fault"),
        (tool_run(0, 0), None, "red", "does not find the fault that is planted"),
        (tool_run(None, 1, "Device not supported"), None, "skipped", "Device not supported"),
        (tool_run(64, 99), tool_run(2, 99, "Invalid read"), "red", "finds 2 errors in the kernels: Invalid read"),
        (tool_run(64, 99), tool_run(2, 0, "hazard"), "red", "finds 2 errors in the kernels: hazard"),
        (tool_run(64, 99), tool_run(0, 1, "ImportError"), "red", "did not run to their end: ImportError"),
        (tool_run(64, 99), tool_run(None, None, "ran past 9 s"), "red", "ran past 9 s"),
        (tool_run(1, 99, "API error", seen=False), tool_run(0, 0), "red", "does not report the fault .*: API error"),
        (tool_run(1, 99, seen=False, refused="no H9"), None, "skipped", "does not work here: no H9"),
        (tool_run(64, 99), tool_run(0, 0, seen=False), "red", "did not say how many windows it ran"),
    ],
    ids=[
        "clean", "blind", "unusable", "errors", "warnings", "program-failed", "hangs", "another-error", "refused",
        "nothing-ran",
    ],
)  # fmt: skip
def test_a_tool_that_sees_nothing_proves_nothing(planted, small, verdict, reason):
    judged = sanitizer.judge(planted, small)
    assert judged.verdict == verdict
    assert re.search(reason, judged.reason)


REPORTS = {
    "memcheck": "========= Invalid __global__ write of size 4 bytes\n=========     at planted+0xb0",
    "racecheck": "========= Error: Race reported between Write access at planted+0x90\n"
    "=========     and Read access at planted+0xb0 [64 hazards]",
    "initcheck": "========= Uninitialized __global__ memory read of size 4 bytes\n"
    "=========     at 0x70 in planted_initcheck.cu:1:planted",
    "synccheck": "========= Barrier error detected. Divergent thread(s) in block.\n=========     at planted+0x50",
}
"""As compute-sanitizer of CUDA 12 and 13 writes them."""

FAKE = """#!/bin/sh
tool=$2
for program in "$@"; do :; done
head="ERROR SUMMARY:"; word=errors
if [ "$tool" = racecheck ]; then head="RACECHECK SUMMARY:"; word="hazards displayed (0 errors, 0 warnings)"; fi
if [ "$program" = small ]; then echo "WINDOWS"; echo "========= $head SMALL $word"; exit STATUS; fi
case $tool in
CASES
esac
echo "========= $head 4 $word"
exit 99
"""


def fake_sanitizer(tmp_path, *, small=0, status=0, windows="8 windows", reports=REPORTS):
    program = tmp_path / "compute-sanitizer"
    cases = "\n".join(f"{tool}) echo '{report}';;" for tool, report in reports.items())
    text = FAKE.replace("SMALL", str(small)).replace("STATUS", str(status)).replace("WINDOWS", windows)
    program.write_text(text.replace("CASES", cases))
    program.chmod(0o755)
    return program


def test_each_tool_is_run_over_its_fault_and_over_the_kernels(tmp_path):
    saved = []
    verdicts = sanitizer.sanitize(fake_sanitizer(tmp_path), lambda: 60.0, lambda runs: saved.append(len(runs)))
    assert [(one.tool, one.verdict) for one in verdicts] == [(tool, "green") for tool in sanitizer.TOOLS]
    assert saved == list(range(1, 9))


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_another_error_is_not_the_planted_fault(tool):
    """Every other tool's report, the fault in another kernel, and an error of the CUDA API."""
    assert sanitizer.reports_planted(tool, REPORTS[tool])
    others = [report for name, report in REPORTS.items() if name != tool]
    elsewhere = re.sub(r"\bplanted\b", "fn_attn_gate", REPORTS[tool]) + "\n========= another report, of planted"
    api = "========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) on CUDA API call to cuModuleGetFunction of planted"
    assert not any(sanitizer.reports_planted(tool, text) for text in (*others, elsewhere, api))


def test_a_tool_that_counts_other_errors_is_red(tmp_path):
    api = dict.fromkeys(sanitizer.TOOLS, "========= Program hit CUDA_ERROR_INVALID_VALUE (error 1)")
    runs = []
    verdicts = sanitizer.sanitize(fake_sanitizer(tmp_path, reports=api), lambda: 60.0, runs.append)
    assert [one.verdict for one in verdicts] == ["red"] * len(sanitizer.TOOLS)
    assert all("4 errors, but does not report the fault that is planted for it" in one.reason for one in verdicts)
    assert sanitizer.SMALL not in {run.program for run in runs[-1]}


def test_a_device_that_a_tool_does_not_support_is_told(tmp_path):
    refused = dict.fromkeys(
        sanitizer.TOOLS, "========= Error: Device not supported. Please refer to the documentation."
    )
    verdicts = sanitizer.sanitize(fake_sanitizer(tmp_path, reports=refused), lambda: 60.0, lambda runs: None)
    assert [one.verdict for one in verdicts] == ["skipped"] * len(sanitizer.TOOLS)
    assert all("Error: Device not supported. Please refer" in one.reason for one in verdicts)


@pytest.mark.parametrize("windows", ["", "0 windows", "windows"])
def test_a_program_that_did_not_run_proves_nothing(tmp_path, windows):
    verdicts = sanitizer.sanitize(fake_sanitizer(tmp_path, windows=windows), lambda: 60.0, lambda runs: None)
    assert [one.verdict for one in verdicts] == ["red"] * len(sanitizer.TOOLS)
    assert all("did not say how many windows it ran" in one.reason for one in verdicts)


def test_the_kernels_are_not_run_under_a_tool_that_is_blind(tmp_path):
    program, runs = tmp_path / "compute-sanitizer", []
    program.write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n")
    program.chmod(0o755)
    verdicts = sanitizer.sanitize(program, lambda: 60.0, runs.append)
    assert [one.verdict for one in verdicts] == ["red"] * len(sanitizer.TOOLS)
    assert {run.program for run in runs[-1]} == set(sanitizer.TOOLS)


def test_a_tool_that_hangs_is_stopped(tmp_path):
    found = sanitizer.run_tool(["sleep", "60"], tool="memcheck", program="small", limit_s=0.2)
    assert (found.found, found.status, found.told) == (None, None, ("ran past 0 s",))


def test_a_tool_that_hangs_is_stopped_with_what_it_started(tmp_path):
    """What it started holds its output open: waiting for that would take as long as it runs."""
    file, started = tmp_path / "pid", time.monotonic()
    found = sanitizer.run_tool(
        ["sh", "-c", f"sleep 30 & echo $! > {file}; wait"], tool="memcheck", program="small", limit_s=0.5
    )
    assert found.status is None
    assert time.monotonic() - started < 10
    assert gone(int(file.read_text()))


def test_the_step_is_red_where_a_tool_finds_something(tmp_path, monkeypatch):
    program = fake_sanitizer(tmp_path, small=3, status=99)
    monkeypatch.setattr(gpu_programs, "find_sanitizer", lambda: program)
    found = gpu_programs.sanitizers(Clock(60.0))
    assert found.verdict == "red"
    assert "memcheck red: it finds 3 errors in the kernels" in found.reason


def test_the_step_is_skipped_where_the_tool_is_absent(monkeypatch):
    monkeypatch.setattr(gpu_programs, "find_sanitizer", lambda: None)
    found = gpu_programs.sanitizers(Clock(60.0))
    assert (found.verdict, "is not installed" in found.reason) == ("skipped", True)


def test_the_sanitizer_is_found_on_the_path(tmp_path, monkeypatch):
    program = fake_sanitizer(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitizer.find_sanitizer() == program


def test_only_memcheck_pads_allocations():
    words = {tool: sanitizer.command(Path("cs"), tool, "small") for tool in sanitizer.TOOLS}
    assert all(words[tool][1:3] == ["--tool", tool] for tool in sanitizer.TOOLS)
    assert all(words[tool][-2:] == ["kvproof.oracle.gpu.sanitizer", "small"] for tool in sanitizer.TOOLS)
    assert [tool for tool in sanitizer.TOOLS if "--padding" in words[tool]] == ["memcheck"]


def test_the_small_program_runs_every_kernel():
    backend = fiber_backend()
    assert sanitizer.run_small(Engine(backend)) == 8
    assert set(backend._launched) > {"fn_attn_chunks", "fn_attn_chunks_ahead", "fn_attn_gate"}


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_a_planted_fault_survives_the_compiler(tool):
    ptx = Nvrtc().compile(sanitizer.planted_source(tool), "sm_90").ptx
    stores, barriers = len(re.findall(r"st\.global", ptx)), len(re.findall(r"bar(rier)?\.", ptx))
    shared, loads = len(re.findall(r"ld\.shared", ptx)), len(re.findall(r"ld\.global", ptx))
    want = {"memcheck": (1, 0, 0, 0), "racecheck": (1, 0, 1, 0), "initcheck": (1, 0, 0, 1), "synccheck": (1, 1, 0, 0)}
    assert (stores, barriers, shared, loads) == want[tool]


# ---- tests and records ----


def junit(**counts):
    words = " ".join(f'{name}="{value}"' for name, value in counts.items())
    return f"<testsuites><testsuite {words}/></testsuites>"


@pytest.mark.parametrize(
    ("counts", "verdict", "reason"),
    [
        ({"tests": 20, "failures": 0, "errors": 0, "skipped": 1}, "green", "19 passed, 0 failed, 1 skipped"),
        ({"tests": 20, "failures": 1, "errors": 0, "skipped": 0}, "red", "19 passed, 1 failed, 0 skipped"),
        ({"tests": 20, "failures": 0, "errors": 2, "skipped": 0}, "red", "18 passed, 2 failed, 0 skipped"),
        ({"tests": 20, "failures": 0, "errors": 0, "skipped": 20}, "red", "0 passed, 0 failed, 20 skipped"),
        ({"tests": 0, "failures": 0, "errors": 0, "skipped": 0}, "red", "0 passed"),
    ],
    ids=["passed", "failed", "broken", "all-skipped", "none"],
)
def test_pytest_s_report_is_judged(counts, verdict, reason):
    found = gpu_programs.tests_verdict(junit(**counts), "output")
    assert found.verdict == verdict
    assert reason in found.reason


COLLECT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def collected(blocked, files):
    """The GPU-marked tests that pytest collects of files where some packages cannot be imported."""
    words = [sys.executable, "-c", COLLECT, ",".join(blocked), *map(str, files)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


NOT_CARRIED = ("ziglang", "threadpoolctl", "torch", "triton", "mypy")
"""Packages that the docs' wheels lack, and one of theirs that no GPU-marked test needs."""


def test_the_gpu_marked_tests_are_collected_where_little_is_installed():
    files = gpu_programs.gpu_test_files(ROOT / "tests")
    assert files == [ROOT / "tests" / "unit" / "test_gpu.py"]
    assert len(collected(NOT_CARRIED, files)) > 10


@pytest.mark.slow
def test_no_gpu_marked_test_is_left_out_and_no_other_file_hinders():
    """As `pytest -m gpu` over all tests, without the compiler wheel that the docs do not carry."""
    everywhere = collected(["ziglang"], [ROOT / "tests"])
    assert everywhere == collected(["ziglang"], gpu_programs.gpu_test_files(ROOT / "tests"))
    assert everywhere


@pytest.mark.slow
def test_the_gpu_marked_tests_are_what_is_run(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_programs.gpu_tests(Clock(120.0))
    assert found.result["skipped"] == found.result["tests"] > 10  # no device: each skips, which is red on a GPU
    assert found.verdict == "red"


def measured(**changed):
    resources = Resources(
        registers=40, shared_bytes=0, stack_bytes=0, local_bytes=0, spill_bytes=0, barriers=1, code_bytes=100
    )
    kernels = {"fn_attn_gate": {"sm_90": dataclasses.replace(resources, **changed)}}
    return Measured(toolkit="nvcc-13.0", build="V1", options=(), geometry="tiny", threads=192, kernels=kernels)


@pytest.mark.parametrize(
    ("recorded", "found", "verdict", "reason"),
    [
        (measured(), measured(), "green", "as recorded for nvcc-13.0"),
        (measured(registers=41), measured(), "red", "has 40 registers, recorded 41"),
        (None, measured(), "skipped", "no record of nvcc-13.0"),
        (None, measured(local_bytes=8), "red", "has 8 bytes of local memory"),
    ],
    ids=["same", "changed", "no-record", "no-record-and-local-memory"],
)
def test_records_are_judged(monkeypatch, recorded, found, verdict, reason):
    monkeypatch.setattr(gpu_programs.records, "read", lambda toolkit, geometry: recorded)
    judged = gpu_programs.compared_records([found], ("sm_90",))
    assert judged.verdict == verdict
    assert reason in judged.reason


# ---- the command ----

FACTS = {"device": "NVIDIA H200", "arch": "sm_90"}
WHY = "a long reason, " * 30


def timings():
    """As the benchmark gives them, of two kernels."""
    return [
        {"work": work.name, "kernel": kernel, "page": page, "median_us": 12.5, "fraction": 0.5, "ratio": 1.0}
        for work in gpu_bench.works()
        for kernel in ("chunks", "window")
        for page in PAGES
    ]


def fake_runner(**verdicts):
    results = {"facts": FACTS, "bench": {"copy_bandwidth": 4e12, "timings": timings()}}

    def run(step, limit):
        verdict = verdicts.get(step.name, "green")
        return Outcome(step=step.name, verdict=verdict, reason=WHY, seconds=1.0, result=results.get(step.name, {}))

    return run


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working folder, and the records' folder."""
    records = tmp_path / "records"
    records.mkdir()
    monkeypatch.setattr(gpu_check, "records_folder", lambda: records)
    monkeypatch.chdir(tmp_path)
    return tmp_path, records


def test_a_run_that_proves_something_is_kept_among_the_records(places, capsys):
    here, records = places
    gpu_cli.gpu_check(480, (), None, run=fake_runner())
    assert [file.name for file in records.iterdir()] == ["gpu-nvidia-h200-sm_90.json"]
    assert list((here / ".kvproof").iterdir()) == []
    found = json.loads((records / "gpu-nvidia-h200-sm_90.json").read_text())
    assert (found["format"], found["version"], found["green"], found["proves"]) == ("kvproof gpu-check", 1, True, True)
    assert [step["step"] for step in found["steps"]] == [step.name for step in STEPS]
    assert re.fullmatch(r"[0-9a-f]{64}", found["kernel_sources"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert any("GREEN: the device gives the CPU's bits" in line for line in lines)
    told = [line for line in lines if "12.5" in line and "50%" in line and "16: 1.000, 256: 1.000" in line]
    assert len(told) == 9  # decode of 1 and of 8 streams, and the prompt window, at three lengths


@pytest.mark.parametrize(
    ("verdicts", "skip", "succeeds"),
    [
        ({"bytes": "red"}, (), False),
        ({"bench": "cut"}, (), False),
        ({"sanitizer": "skipped"}, ("check",), True),
    ],
    ids=["red", "cut", "left-out"],
)
def test_a_run_that_proves_nothing_leaves_the_records_alone(places, verdicts, skip, succeeds):
    here, records = places
    kept = records / "gpu-nvidia-h200-sm_90.json"
    kept.write_text("an earlier proof")
    outcomes = gpu_cli.gpu_check(480, skip, None, run=fake_runner(**verdicts))
    assert gpu_check.succeeded(outcomes) is succeeds
    assert kept.read_text() == "an earlier proof"
    found = json.loads((here / ".kvproof" / kept.name).read_text())
    assert (found["green"], found["proves"]) == (succeeds, False)


def test_a_step_that_is_skipped_for_want_of_a_tool_is_forgiven(places):
    _, records = places
    gpu_cli.gpu_check(480, (), None, run=fake_runner(sanitizer="skipped", digests="skipped"))
    assert len(list(records.iterdir())) == 1


def test_what_is_known_is_written_after_each_step(places):
    here, _ = places
    file, seen = here / "out.json", []
    run = fake_runner()

    def looking(step, limit):
        seen.append(len(json.loads(file.read_text())["steps"]) if file.exists() else 0)
        return run(step, limit)

    gpu_cli.gpu_check(480, (), file, run=looking)
    assert seen == list(range(len(STEPS)))
    assert json.loads(file.read_text())["proves"] is True
    assert not (here / ".kvproof").exists()


def command(monkeypatch, run, *words):
    monkeypatch.setattr(gpu_cli, "run_in_process", run)
    from kvproof.oracle.cli import app

    return CliRunner().invoke(app, ["gpu-check", *words])


@pytest.mark.parametrize(("verdict", "status"), [("green", 0), ("red", 1), ("cut", 1)])
def test_the_status_says_how_it_went(places, monkeypatch, verdict, status):
    assert command(monkeypatch, fake_runner(check=verdict)).exit_code == status


def test_without_a_device_the_command_says_what_is_missing(places, monkeypatch):
    here, _ = places

    def no_device(step, limit):
        return Outcome(step=step.name, verdict="no device", reason="CuPy does not load: run `pip install ..`")

    done = command(monkeypatch, no_device)
    assert done.exit_code == 2
    assert "gpu-check needs a CUDA device, and none answers here: CuPy does not load" in done.output
    assert not list(here.glob("**/*.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--skip", "nothing"), "--skip is 'nothing'; it must be one of facts, check"),
        (("--seconds", "3"), "--seconds is 3; it must be at least 10"),
        (("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ],
    ids=["skip", "seconds", "json"],
)
def test_options_that_make_no_sense_are_refused(places, monkeypatch, words, message):
    done = command(monkeypatch, fake_runner(), *words)
    assert message in str(done.exception)


# ---- the docs ----


def test_the_shell_line_of_the_docs_runs_a_checkout_that_is_not_installed(tmp_path):
    line = next(text.strip() for text in DOCS.read_text().splitlines() if "python3 -m kvproof.oracle gpu-check" in text)
    line = line.replace("/tmp/kvproof", str(tmp_path / "site")).replace("python3", sys.executable)
    told = "import kvproof.oracle, sys; print(kvproof.oracle.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command_line in (f"{line} --help", line.replace("-m kvproof.oracle gpu-check", f'-c "{told}"')):
        done = subprocess.run(
            command_line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site" / "kvproof" / "oracle" / "__init__.py")


def test_the_docs_name_every_step():
    named = re.findall(r"^\| `(\w+)`", DOCS.read_text(), re.MULTILINE)
    assert named == [step.name for step in STEPS]
