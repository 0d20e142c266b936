"""Streams that come, grow, end and move over one arena always have their contiguous models' bits."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kvproof import fast
from kvproof.fast import Engine, HostBackend, KernelSources
from kvproof.oracle.machine import arena_machine
from kvproof.oracle.memory import FastKernels

FEW = settings(max_examples=25, stateful_step_count=20, deadline=None)
FIND = settings(FEW, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)

FAULTS = {
    "table-ignored": ("pages.cuh", "if (!pages.table) return", "return"),
    "pooled-row-at-its-block-number": (
        "pages.cuh",
        "return row_at(pages, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM);",
        "return static_cast<long long>(block) * KVP_INDEX_DIM;",
    ),
    "page-stride-from-one-layer": (
        "pages.cuh",
        "pages.table[page] * pages.page_elements",
        "pages.table[page] * (pages.page_elements / 2)",
    ),
}


def test_our_kernels_agree_with_the_model(engine):
    run_state_machine_as_test(arena_machine(FastKernels(engine)), settings=FEW)


def test_kernels_with_some_of_the_functions_will_do():
    class Mine:
        scores = staticmethod(fast.scores)

    run_state_machine_as_test(arena_machine(Mine()), settings=settings(FEW, max_examples=3))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault):
    sources = KernelSources().edit(*FAULTS[fault])
    broken = FastKernels(Engine(HostBackend(flags=("-O1",)), sources=sources))
    with pytest.raises(AssertionError, match="stream"):
        run_state_machine_as_test(arena_machine(broken), settings=FIND)
