"""A deliberate break of each kind, planted in the kernels' text, turns the check red at the gate that should see it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvproof.fast import HostBackend, KernelSources
from kvproof.oracle.cases import at_check, cases
from kvproof.oracle.contract import Plan, check
from kvproof.oracle.planted.isolate import isolated
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
        (("bound", "select"), ("bound", "select_close")),
        cases=("prompt",),
    ),
    Break(
        "a-key-list-without-its-tail",
        (
            (
                "select.cu",
                "for (int i = tid; i < tail; i += KVP_THREADS) list",
                "for (int i = tid; i < 0; i += KVP_THREADS) list",
            ),
        ),
        (("bound", "select"), ("bits", "chunks")),
    ),
    Break(
        "scores-compared-without-their-last-bits",
        (
            (
                "select.cu",
                "return u & 0x80000000u ? ~u : u | 0x80000000u;",
                "return (u & 0x80000000u ? ~u : u | 0x80000000u) & ~1u;",
            ),
        ),
        (("bound", "select_close"),),
    ),
    Break(
        "next-tile-fetched-from-this-ones-rows",
        (
            (
                "chunks.cu",
                "fetch_rows<width>(tile_keys, keys, s.key_at[(tile + 1) & 1], keys_in(tile + 1))",
                "fetch_rows<width>(tile_keys, keys, s.key_at[tile & 1], keys_in(tile + 1))",
            ),
        ),
        (("bits", "dense_ahead"),),
    ),
    Break(
        "pooled-rows-past-their-page",
        (("pages.cuh", "pages.positions / KVP_BLOCK, KVP_INDEX_DIM", "pages.positions, KVP_INDEX_DIM"),),
        (("memory", "pool"),),
    ),
    Break(
        "an-output-written-far-past-its-end",
        (("gate.cu", "gated[at + d + i] =", "gated[at + d + i + (row > 0 ? 100000 : 0)] ="),),
        (("memory", "gate"),),
    ),
    Break(
        "an-input-written",
        (
            (
                "gate.cu",
                "const Lanes weight = sigmoid8",
                "const_cast<bf16*>(gates)[d] = bf16{0}; const Lanes weight = sigmoid8",
            ),
        ),
        (("memory", "window"),),
    ),
)


BARRIER = "__syncthreads();"


def barriers() -> list[tuple[str, int]]:
    """Every barrier of the kernels: its file, and its place among the file's."""
    texts = KernelSources().texts
    return [(file, place) for file in sorted(texts) for place in range(texts[file].count(BARRIER))]


def without_barrier(file: str, place: int) -> KernelSources:
    """The kernels without one barrier."""
    parts = KernelSources().texts[file].split(BARRIER)
    text = BARRIER.join(parts[: place + 1]) + ";" + BARRIER.join(parts[place + 1 :])
    return KernelSources({**KernelSources().texts, file: text})


@pytest.mark.parametrize(("file", "place"), barriers(), ids=lambda x: str(x))
def test_every_barrier_is_missed(file: str, place: int) -> None:
    report = run(without_barrier(file, place), ("block-tile", "sparse"))
    assert not report.green


def run(sources: KernelSources, names: tuple[str, ...]) -> Report:
    """The check in a process of its own: a broken kernel may write anywhere."""
    ended = next(isolated(checked, [(sources, names)], jobs=1, limit_s=300))
    assert ended.result is not None, ended.died
    return ended.result


def checked(sources: KernelSources, names: tuple[str, ...]) -> Report:
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
