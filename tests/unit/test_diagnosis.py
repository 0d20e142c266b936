"""A planted misreading of the cache is found and told in one sentence; what is none is not made up."""

from __future__ import annotations

import numpy as np
import pytest
from kvproof.fast import HostBackend, KernelSources
from kvproof.oracle.arithmetic import FP32
from kvproof.oracle.attention import AttentionCase
from kvproof.oracle.cases import StreamCase, at_check
from kvproof.oracle.contract import Example, check_example
from kvproof.oracle.diagnosis import diagnose
from kvproof.oracle.report import Report
from kvproof.oracle.variants import host_variants
from kvproof.reference import TINY
from numpy_kernel import attend

CASE = AttentionCase(
    lengths=(11, 6, 3), query_lengths=(1, 1, 1), seeds=(1, 2, 3), order=(5, 2, 7, 0, 6, 1, 3, 4), tail=1, fill="other"
)


def arguments_through(case, table=None, lengths=None):
    given = case.arguments()
    if table is not None:
        given["page_table"] = np.array(table, np.int32)
    if lengths is not None:
        given["lengths"] = np.array(lengths, np.int32)
    return given


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"table": [[5, 4, 7, 1], [0, 6, 1, 2], [1, 3, 4, 5]]},
            "logical page 1 was read from physical 4; the table says 2",
        ),
        ({"table": [[2, 7, 0, 1], [0, 6, 1, 2], [1, 3, 4, 5]]}, "the page table was read one entry too far"),
        ({"lengths": [12, 6, 3]}, "one row past the last key was read as well"),
        ({"lengths": [10, 6, 3]}, "the last key was left out"),
    ],
    ids=["one-page", "off-by-one", "one-more", "one-less"],
)
def test_wrong_arguments_are_told_from_the_result(change, sentence):
    got = attend(*arguments_through(CASE, **change).values())
    told = diagnose(CASE, got, FP32)
    assert told == f"stream 0, row 0: {sentence}"


def test_a_right_result_is_not_called_a_misreading():
    got = attend(*CASE.arguments().values())
    assert diagnose(CASE, got, FP32) is None


def test_noise_is_explained_by_nothing():
    got = attend(*CASE.arguments().values())
    assert diagnose(CASE, (got.astype(np.float32) + 3.0).astype(got.dtype), FP32) is None


@pytest.mark.parametrize(
    ("old", "new", "kernel", "sentence"),
    [
        ("if (!pages.table) return", "return", "chunks", "layer 1: the page table was ignored"),
        (
            "return pages.table[page] *",
            "return pages.table[page == 1 ? 0 : page] *",
            "chunks",
            "layer 1: logical page 1 was read from physical 8; the table says 7",
        ),
        (
            "return row_at(pages, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM);",
            "return row_at(pages, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM) +\n"
            "         (block / (pages.positions / KVP_BLOCK) == 1 ? pages.page_elements : 0);",
            "scores",
            "layer 1: logical page 1 was read from physical 8; the table says 7",
        ),
    ],
    ids=["ignored", "entry", "pooled-page"],
)
def test_our_kernels_failures_name_the_page(old, new, kernel, sentence):
    sources = KernelSources().edit("pages.cuh", old, new)
    example = Example(
        geometry=at_check(TINY),
        streams=(StreamCase(cached=40, rows=3), StreamCase(cached=9, rows=1)),
        page_size=12,
        order=tuple(reversed(range(9))),
    )
    report = Report()
    check_example(example, host_variants(seed=0, sources=sources, backend=HostBackend(flags=("-O1",))), report)
    told = [failure.message for failure in report.failures if failure.kernel == kernel]
    assert any(sentence in message for message in told), told
