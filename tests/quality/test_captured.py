"""Captured launches are checked: green as they are, red once a capture forgets an array or a table keeps stale rows."""

from __future__ import annotations

import functools
import gc
import re
import weakref

import numpy as np
import pytest
from kvproof.fast import Capture, Engine, HostBackend
from kvproof.fast.capture import active_capture
from kvproof.oracle import captured as checking
from kvproof.oracle.captured import (
    BATCH_ROWS,
    CAPTURED,
    ENTRIES,
    HELD,
    LIVE,
    POISON,
    Batch,
    ReusedMemory,
    ReusingEngine,
)
from kvproof.oracle.cases import Case, StreamCase, at_check
from kvproof.oracle.contract import Plan, check
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.planted.faults import _fill_at, chosen, replaced
from kvproof.oracle.report import Report
from kvproof.oracle.variants import variant_of
from kvproof.reference import TINY
from streams import GEOMETRIES, SLIM

ENGINE = Engine(HostBackend())


def judged(geometry=TINY, *, seed=0):
    report = Report()
    checking.check_captured(at_check(geometry), [variant_of(FastKernels(ENGINE))], report, seed=seed, replay="again")
    return report


def failed(report):
    return {gate: count.failed for (gate, kernel), count in report.counts.items() if count.failed}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("geometry", [*GEOMETRIES, SLIM], ids=lambda g: g.name)
def test_captured_launches_are_green(geometry, seed):
    report = judged(geometry, seed=seed)
    assert report.green, report.failures
    assert {key: count.passed for key, count in report.counts.items()} == {
        ("bits", CAPTURED): 15 + sum(map(len, LIVE)),
        ("memory", CAPTURED): 10,
    }


def test_every_decoded_row_is_sparse_and_lies_in_the_last_page():
    for geometry in (*GEOMETRIES, SLIM):
        size = checking.page_size_of(geometry)
        first = ENTRIES * size - checking.STEPS
        assert size % geometry.block == 0
        assert (first + 1) // geometry.block > geometry.top_blocks
        assert first // size == ENTRIES - 1


def test_the_contract_has_the_check_once_and_can_leave_it_out():
    counts = {}
    for wanted in (True, False):
        report = Report()
        cases = (Case(name="two", edge="", streams=(StreamCase(cached=40, rows=1), StreamCase(cached=9, rows=2))),) * 2
        plan = Plan(geometry=at_check(TINY), cases=cases, page_sizes=(8,), seed=0, replay="", captured=wanted)
        check(plan, [variant_of(FastKernels(ENGINE))], report)
        counts[wanted] = sum(count.passed for (_, kernel), count in report.counts.items() if kernel == CAPTURED)
    assert counts == {True: 35, False: 0}


def test_kernels_without_an_engine_are_not_judged():
    report = Report()
    checking.check_captured(TINY, [variant_of(object())], report)
    assert not report.counts


# ---- memory that changes hands ----


def address(array):
    return array.__array_interface__["data"][0]


def test_freed_memory_is_poisoned_joined_and_handed_out_again():
    memory = ReusedMemory(4096)
    first, second, last = (memory.take((100,), np.uint8) for _ in range(3))
    assert (first == POISON).all()
    at, view = address(first), second[3:]
    first[:] = second[:] = last[:] = 7
    del first
    assert address(memory.take((1,), np.float32)) == at
    del second
    assert (view == 7).all(), "a view keeps the memory"
    del view
    gc.collect()
    (hole,) = memory.hold_freed()
    assert (address(hole), len(hole)) == (at, 512)
    assert (hole == HELD).all()
    assert (last == 7).all()


def test_freed_memory_that_rests_is_poisoned_and_handed_out_later():
    memory = ReusedMemory(4096)
    with memory.rest():
        array = memory.take((8,), np.uint8)
        at = address(array)
        array[:] = 7
        del array
        assert address(memory.take((8,), np.uint8)) == at + 256
    again = memory.take((8,), np.uint8)
    assert address(again) == at
    assert (again == POISON).all()


def test_memory_ends():
    with pytest.raises(MemoryError, match="no 5000 bytes in a row are left"):
        ReusedMemory(4096).take((5000,), np.uint8)


# ---- a capture that forgets ----

OUTPUTS = ("q", "iq", "scores", "ids", "nk", "sparse", "o", "m", "l", "out", "gated")
"""Of a decode step, in the order in which they are made."""


class Forgetful:
    """A capture that keeps all arrays but one output of each step."""

    def __init__(self, monkeypatch, name):
        self.forgotten, self.made, empty = [], 0, ReusingEngine.empty

        def made(engine, shape, dtype):
            array = empty(engine, shape, dtype)
            if active_capture() is not None:
                self.forgotten += [weakref.ref(array)] if OUTPUTS[self.made % len(OUTPUTS)] == name else []
                self.made += 1
            return array

        monkeypatch.setattr(ReusingEngine, "empty", made)
        monkeypatch.setattr(Capture, "add", lambda step, engine, launch, arrays: self.add(step, launch, arrays))

    def add(self, step, launch, arrays):
        every = [arrays] if isinstance(arrays, np.ndarray) else [getattr(x, "array", x) for x in arrays]
        kept = [x for x in every if not any(ref() is x for ref in self.forgotten if x is not None)]
        step._kept.append(kept)
        if isinstance(arrays, np.ndarray) and not kept:
            value = np.full(1, launch.args[1], arrays.dtype)
            launch = functools.partial(_fill_at, address(arrays), arrays.nbytes, value)
        step._recorder.add(launch)


def test_a_capture_that_forgets_nothing_is_green(monkeypatch):
    forgetful = Forgetful(monkeypatch, "nothing")
    assert judged().green
    assert forgetful.made == len(OUTPUTS) * checking.STEPS * (1 + BATCH_ROWS)


@pytest.mark.parametrize("name", OUTPUTS[:-1])
def test_an_output_that_a_capture_forgets_is_seen(monkeypatch, name):
    Forgetful(monkeypatch, name)
    report = judged()
    assert failed(report)["memory"] == checking.STEPS, "what a replay stores at a stale address is another's"
    crosses = name in ("q", "ids", "nk")  # read in the second part; any poison but 0 says sparse
    assert ("bits" in failed(report)) == crosses
    told = next(f for f in report.failures if f.gate == "memory")
    assert re.search(r"replay of stream 0, row 0, position \d+ stored into memory that another holds", told.message)
    assert told.replay == "again"


def test_a_stale_address_is_told_with_stream_row_and_page():
    with chosen(["F24"])[0].method():
        report = judged()
    told = next(f for f in report.failures if f.gate == "bits")
    assert told.where == "captured replays, position 19, after a prompt and with freed memory poisoned"
    assert re.match(
        r"captured\.gated: stream 0, row 0, .* position 19 \(page \d+, table entry 2, row 3 of", told.message
    )
    assert judged().green, "planted inside the block only"


# ---- a table with stale rows ----


def test_stale_table_rows_are_told_with_step_stream_row_and_page():
    with chosen(["F20"])[0].method():
        report = judged()
    told = next(f for f in report.failures if f.gate == "memory")
    assert told.where == "captured batch, step 1 at position 20: 1 of 3 rows live (streams 0)"
    assert re.search(r"\(page \d+: stream 3, table entry 2, layer 1, keys, row 4", told.message)
    assert re.search(r"row \d of the batch, which has no stream, names it in table entry 2$", told.message)
    bits = next(f for f in report.failures if f.gate == "bits")
    assert re.match(r"row 1 of the batch: captured\.gated: stream 3, row 0, .* position 21 \(page", bits.message)
    assert judged().green, "planted inside the block only"


def left_as_it_is(batch, row):
    pass


def another_streams(batch, row):
    batch.tables[row] = batch.tables[0]


@pytest.mark.parametrize("clear", [left_as_it_is, another_streams])
def test_rows_without_a_stream_over_a_streams_pages_are_seen(clear):
    with replaced(Batch, "clear", clear):
        found = failed(judged())
    assert found["memory"] >= 1
    assert found["bits"] >= 1


def test_a_batch_that_swaps_its_streams_is_seen(monkeypatch):
    run = Batch.run
    monkeypatch.setattr(Batch, "run", lambda batch, step, tables, rows: run(batch, step, tables[::-1], rows))
    found = failed(judged())
    assert found["bits"] >= 1
    assert found["memory"] >= 1
