"""Streams that share pools, draft, are saved and restored have their solos' bits; planted faults are found."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kvproof import fast
from kvproof.fast import Engine, HostBackend, PagePool, Stream, StreamError
from kvproof.fast.backend import PassedFence
from kvproof.oracle.planted.faults import chosen
from kvproof.oracle.serving import faults as stream_faults
from kvproof.oracle.serving.delayed import DelayedBackend, DelayedEngine
from kvproof.oracle.serving.load import run_load
from kvproof.oracle.serving.machine import stream_machine
from kvproof.oracle.serving.world import Draft, StreamFaultError, StreamWorld

FEW = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
FIND = settings(FEW, max_examples=300, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)


def in_turns():
    return DelayedEngine(DelayedBackend(policy="turns"))


def kernels_with(fault):
    """Engines whose kernels have an entry of the catalogue planted."""
    sources = chosen([fault])[0].sources()
    return lambda: Engine(HostBackend(flags=("-O1",)), sources=sources)


def gates(*names):
    """What is raised where one of these gates sees a fault."""
    return lambda error: isinstance(error, StreamFaultError) and error.gate in names


def refused(error):
    """The page table names a page twice, or none: the check of arguments sees it before a kernel runs."""
    return isinstance(error, ValueError) and "page table entr" in str(error)


def said(error):
    """The stream's own word against what was asked of it."""
    return isinstance(error, StreamError) or gates("validation")(error)


FAULTS = {
    "F01": (nullcontext, kernels_with("F01"), gates("bits")),
    "F03": (nullcontext, kernels_with("F03"), gates("bits", "memory")),
    "F04": (stream_faults.pooled_rows_stay_valid, Engine, gates("bits")),
    "F06": (stream_faults.restore_clears_every_stream, Engine, gates("bits")),
    "F07": (stream_faults.pooled_rows_not_saved, Engine, gates("bits")),
    "F22": (stream_faults.pages_for_committed_rows_only, Engine, refused),
    "F23": (stream_faults.table_rewritten_before_its_copy, DelayedEngine, gates("bits", "memory")),
    "F25": (stream_faults.scratch_kept_by_shape, in_turns, gates("bits")),
    "F26": (stream_faults.copy_that_nothing_orders, DelayedEngine, gates("bits")),
    "F28": (stream_faults.rollback_returns_early, Engine, said),
}


@pytest.mark.parametrize("engine", [Engine, DelayedEngine, in_turns], ids=["at-once", "late", "in-turns"])
def test_streams_have_their_solos_bits(engine):
    run_state_machine_as_test(stream_machine(engine), settings=FEW)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_load_finds_a_planted_fault(fault):
    plant, engine, seen = FAULTS[fault]
    with plant(), pytest.raises((StreamFaultError, StreamError, ValueError)) as error:
        run_load(engine(), operations=400, streams=12)
    assert seen(error.value), error.value


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_machine_finds_a_planted_fault(fault):
    plant, engine, seen = FAULTS[fault]
    with plant(), pytest.raises((StreamFaultError, StreamError, ValueError)) as error:
        run_state_machine_as_test(stream_machine(engine), settings=FIND)
    assert seen(error.value), error.value


def test_the_machine_finds_one_of_them_now():
    plant, engine, seen = FAULTS["F06"]
    with plant(), pytest.raises(StreamFaultError) as error:
        run_state_machine_as_test(stream_machine(engine), settings=FIND)
    assert seen(error.value), error.value


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_plant_is_gone_behind_its_block(fault):
    plant, _, _ = FAULTS[fault]
    with plant():
        pass
    assert run_load(DelayedEngine(), operations=30, streams=6).done["rows"]


def left_out(owner, name):
    """A step that does nothing."""
    return mock.patch.object(owner, name, return_value=None)


def without(name, step):
    """A stream's step that leaves another out."""
    whole = getattr(Stream, name)

    def planted(stream, *args, **options):
        with left_out(Stream, step):
            return whole(stream, *args, **options)

    return mock.patch.object(Stream, name, planted)


NONSENSE = fast.Settled(accepted=0, tokens=(), removed=0)
LEFT_OUT = {
    "no order between queues": lambda: left_out(Stream, "order"),
    "no order in tidy": lambda: without("tidy", "order"),
    "no fence of freed pages": lambda: mock.patch.object(DelayedBackend, "fence", return_value=PassedFence()),
    "no zero-fill": lambda: left_out(DelayedBackend, "zero"),
    "settle says anything": lambda: mock.patch.object(fast, "settle", return_value=NONSENSE),
}


def loads_on_queues():
    for engine in (DelayedEngine, in_turns):
        run_load(engine(), operations=600, streams=24)


@pytest.mark.parametrize("what", LEFT_OUT, ids=str)
def test_a_step_that_is_left_out_is_seen(what):
    with LEFT_OUT[what](), pytest.raises((StreamFaultError, StreamError)):
        loads_on_queues()


def test_a_neighbours_byte_that_changes_is_seen():
    world = StreamWorld(Engine(), streams=2)
    a, b = world.arrive(0, "text", 1), world.arrive(0, "media", 2)
    world.round([(a, Draft(9)), (b, Draft(5))])
    b.stream.cache(1).write("values", [3], np.zeros((1, 2, 32), a.stream.pool.arena.dtype))
    with pytest.raises(StreamFaultError, match=r"layer 1 cache.values.*position 3"):
        world.check()


def test_a_lost_page_is_seen():
    world = StreamWorld(Engine(), streams=2)
    pair = world.arrive(0, "text", 1)
    world.round([(pair, Draft(9))])
    with mock.patch.object(PagePool, "_push"):
        pair.stream.roll_back(1)
    with pytest.raises(StreamFaultError, match="page 1 is held by stream 0, whose pages do not name it") as seen:
        world.check()
    assert seen.value.gate == "memory"


def test_a_round_without_pages_changes_nothing_and_says_so():
    world = StreamWorld(Engine(), page_sizes=(8,), streams=1, context=24)
    a, b = world.arrive(0, "text", 1), world.arrive(0, "text", 2)
    assert world.round([(a, Draft(16))])
    assert not world.round([(a, Draft(1)), (b, Draft(9))])
    assert world.done["exhausted"] == 1
    assert world.round([(b, Draft(8))])


def test_what_a_load_does(tmp_path):
    world = run_load(Engine(), operations=120, streams=12, folder=tmp_path)
    assert all(world.done.values()), world.done


def test_a_load_is_the_same_twice():
    first, second = (run_load(Engine(), operations=60, streams=8, seed=3) for _ in range(2))
    assert first.done == second.done
    assert [pair.stream.pages for pair in first.live] == [pair.stream.pages for pair in second.live]


def test_a_fault_shows_in_a_load():
    with mock.patch.object(Stream, "_zero_past_end"), pytest.raises(StreamFaultError, match="to be tidied"):
        run_load(Engine(), operations=200, streams=12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Engine, DelayedEngine, in_turns], ids=["at-once", "late", "in-turns"])
def test_64_streams_and_10_000_operations(engine, tmp_path):
    world = run_load(engine(), operations=10_000, streams=64, folder=tmp_path)
    assert world.done["exhausted"] > 100, world.done
    assert world.done["restored"] > 1000, world.done


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Engine, DelayedEngine, in_turns], ids=["at-once", "late", "in-turns"])
def test_many_programs(engine):
    run_state_machine_as_test(stream_machine(engine), settings=settings(FEW, max_examples=400, stateful_step_count=40))
