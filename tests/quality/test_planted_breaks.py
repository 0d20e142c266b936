"""A deliberate break of each kind, planted in the kernels' text, turns the check red at the gate that should see it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvproof.fast import HostBackend, KernelSources
from kvproof.oracle.cases import at_check, cases
from kvproof.oracle.contract import Plan, check
from kvproof.oracle.report import Report
from kvproof.oracle.variants import host_variants
from kvproof.reference import TINY

GEOMETRY = at_check(TINY)


@dataclass(frozen=True)
class Break:
    """One change of kernel text, and the (gate, kernel) pairs of which one at least must fail."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    seen_by: tuple[tuple[str, str], ...]
    cases: tuple[str, ...] = ("block-tile", "sparse")


BREAKS = (
    Break(
        "table-ignored",
        (("pages.cuh", "if (!pages.table) return", "return"),),
        (("bits", "chunks"), ("bits", "scores"), ("bits", "prep")),
    ),
    Break(
        "address-off-by-one-page",
        (("pages.cuh", "return pages.table[page] *", "return (pages.table[page] ? pages.table[page] - 1 : 0) *"),),
        (("bits", "chunks"), ("bits", "scores"), ("bits", "prep")),
    ),
    Break(
        "barrier-removed-in-chunks",
        (
            (
                "chunks.cu",
                "    look_up(tile + (AHEAD ? 2 : 1));\n    __syncthreads();",
                "    look_up(tile + (AHEAD ? 2 : 1));",
            ),
        ),
        (("bits", "chunks"),),
    ),
    Break(
        "barrier-removed-in-the-norm",
        (("rotary.cuh", "  __syncthreads();\n\n  const float mean", "  const float mean"),),
        (("bits", "prep"),),
    ),
    Break(
        "row-written-past-the-end",
        (
            (
                "prep.cu",
                "a.index_keys + index_row(a.pages, position)",
                "a.index_keys + index_row(a.pages, position + 1)",
            ),
        ),
        (("memory", "prep"),),
    ),
    Break(
        "output-written-past-its-end",
        (("gate.cu", "gated[at + d + i] =", "gated[at + d + i + (d + i == KVP_HEAD_DIM - 1)] ="),),
        (("memory", "gate"),),
    ),
    Break(
        "tail-read-under-a-zero-weight",
        (
            ("chunks.cu", "if (k >= count) continue;", ""),
            ("chunks.cu", "for (int k = 0; k < here; ++k) {", "for (int k = 0; k < (here + 7) / 8 * 8; ++k) {"),
        ),
        (("memory", "chunks"),),
    ),
    Break(
        "tie-taken-by-the-higher-block",
        (
            (
                "select.cu",
                "tie < wanted ? tie : wanted",
                "ties_of_all(equal) - wanted < tie ? tie - (ties_of_all(equal) - wanted) : 0",
            ),
            ("select.cu", "u == least && tie < wanted", "u == least && tie >= ties_of_all(equal) - wanted"),
            (
                "select.cu",
                'extern "C"',
                "__device__ int ties_of_all(const int* equal) {\n"
                "  int all = 0;\n  for (int i = 0; i < KVP_THREADS; ++i) all += equal[i];\n  return all;\n}\n\n"
                'extern "C"',
            ),
        ),
        (("bound", "select"),),
        cases=("prompt",),
    ),
)


def run(sources: KernelSources, names: tuple[str, ...]) -> Report:
    report = Report()
    plan = Plan(
        geometry=GEOMETRY,
        cases=tuple(case for case in cases(GEOMETRY) if case.name in names),
        page_sizes=(16,),
        seed=0,
        replay="kvproof check --geometry tiny --case {case} --page {page}",
    )
    check(plan, host_variants(seed=0, sources=sources, backend=HostBackend(flags=("-O1",))), report)
    return report


@pytest.mark.parametrize("planted", BREAKS, ids=lambda b: b.name)
def test_a_planted_break_turns_the_check_red(planted: Break) -> None:
    sources = KernelSources()
    for file, old, new in planted.edits:
        sources = sources.edit(file, old, new)
    report = run(sources, planted.cases)
    assert not report.green
    red = {key for key, count in report.counts.items() if count.failed}
    assert red & set(planted.seen_by), f"seen only by {sorted(red)}"
    assert all("--case" in failure.replay for failure in report.failures)


def test_the_unplanted_kernels_are_green_on_the_same_cases() -> None:
    report = run(KernelSources(), ("block-tile", "sparse", "prompt"))
    assert report.green, report.failures


def test_an_edit_that_no_longer_applies_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"pages\.cuh holds this text 0 times"):
        KernelSources().edit("pages.cuh", "no such text", "")
    with pytest.raises(KeyError, match=r"no kernel source 'nope\.cu'"):
        KernelSources().edit("nope.cu", "a", "b")
