"""Hard examples are found, and shrink to what a person would have written."""

from __future__ import annotations

import functools

from hypothesis import find, settings
from kvproof.fast import HostBackend, KernelSources
from kvproof.oracle import strategies as kv
from kvproof.oracle.contract import check_example
from kvproof.oracle.judge import ContractError, judge
from kvproof.oracle.report import Report
from kvproof.oracle.variants import host_variants
from numpy_kernel import attend

SEARCH = settings(max_examples=2000, database=None, deadline=None)


def breaks(**options):
    kernel = functools.partial(attend, **options)

    def broken(case):
        try:
            judge(kernel, case, save=False)
        except ContractError:
            return True
        return False

    return broken


def test_a_kernel_that_ignores_its_table_shrinks_to_two_pages_of_the_smallest_page():
    case = find(kv.attention_cases(), breaks(bug="table ignored"), settings=SEARCH)
    assert (case.page_size, len(case.order), case.fill) == (1, 2, "zero")
    assert sum(case.lengths) <= 2


def test_a_stale_tail_shrinks_to_a_handful_of_positions():
    case = find(kv.attention_cases(), breaks(bug="stale tail"), settings=SEARCH)
    assert case.page_size <= 3
    assert sum(case.lengths) <= 3
    assert (len(case.lengths), case.profile, case.padding) == (1, "normal", 0)


def test_our_kernels_without_their_table_shrink_to_two_pages_of_one_block():
    variants = host_variants(
        seed=0,
        sources=KernelSources().edit("pages.cuh", "if (!pages.table) return", "return"),
        backend=HostBackend(flags=("-O1",)),
    )

    def broken(example):
        report = Report(diagnoses=0)
        check_example(example, variants, report)
        return not report.green

    example = find(kv.cases(), broken, settings=settings(SEARCH, max_examples=200))
    assert (example.page_size, len(example.order)) == (4, 2)
    assert [stream.end for stream in example.streams] == [1]
