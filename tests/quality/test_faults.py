"""The fault catalogue is whole, its edits apply, and its gates see them; mutants change one place each."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import re
import subprocess
import sys

import pytest
from kvproof.fast import Capture, HostBackend, KernelSources
from kvproof.oracle.captured import Batch
from kvproof.oracle.cases import at_check
from kvproof.oracle.examples import draw, run_example
from kvproof.oracle.planted import hunt as hunting
from kvproof.oracle.planted import mutants as mutating
from kvproof.oracle.planted.equivalent_mutants import EQUIVALENT, reason_of
from kvproof.oracle.planted.faults import CATALOGUE, FAULT_GATES, Edit, Fault, chosen, replaced
from kvproof.oracle.planted.hunt import Hunt
from kvproof.oracle.planted.isolate import isolated
from kvproof.oracle.planted.mutant_judge import SANITIZER, judge, portable
from kvproof.oracle.planted.mutants import mutants, run_mutants, sample
from kvproof.oracle.report import Report
from kvproof.oracle.variants import host_variants
from kvproof.reference import TINY

GEOMETRY = at_check(TINY)


# ---- the catalogue ----


def test_every_entry_of_the_list_is_there_once_and_in_order():
    assert [fault.id for fault in CATALOGUE] == [f"F{number:02}" for number in range(1, 31)]


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.id)
def test_an_entry_is_planted_and_says_how(fault):
    assert fault.title
    assert fault.mechanism.endswith(".")
    assert fault.gate in FAULT_GATES
    assert fault.edits or fault.host or fault.method
    assert fault.kernels
    assert fault.shown_by
    assert bool(fault.host or fault.method) == bool(fault.host_step)


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.id)
def test_an_entry_comes_back_from_a_process_of_its_own(fault):
    assert pickle.loads(pickle.dumps(fault)) == fault


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.id)
def test_edits_apply_to_the_kernels_of_today(fault):
    texts = fault.sources().texts
    changed = {name for name, text in KernelSources().texts.items() if texts[name] != text}
    assert changed == {edit.file for edit in fault.edits}


def test_an_edit_that_no_longer_applies_is_an_error_and_not_a_pass():
    gone = Edit(what="nothing", file="pool.cu", old="no such text", new="")
    fault = Fault(id="F01", title="x", mechanism="x.", gate="bits", kernels=("pool",), edits=(gone,))
    with pytest.raises(ValueError, match=r"pool\.cu holds this text 0 times"):
        Hunt().run(fault)


@pytest.mark.parametrize("name", ["F05", "F07", "F11", "F16", "F18", "F20", "F22", "F24", "F25", "F30"])
def test_a_fault_is_caught_by_the_gate_that_should(name):
    caught = Hunt().run(chosen([name])[0])
    assert caught.caught, caught.message
    assert caught.fault.gate in caught.red


def test_a_fault_that_changes_nothing_is_missed_and_the_verdict_says_what_went_red():
    harmless = Edit(what="a comment", file="pool.cu", old="  // a page holds whole blocks", new="")
    fault = Fault(id="F99", title="x", mechanism="x.", gate="bits", kernels=("pool",), edits=(harmless,))
    caught = Hunt(limit=1).run(fault)
    assert not caught.caught
    assert caught.examples == 1
    assert caught.message == "bits of pool stayed green; red: nothing"


def test_a_fault_seen_by_another_gate_only_is_missed():
    elsewhere = chosen(["F08"])[0]
    fault = Fault(
        id="F08", title="x", mechanism="x.", gate="memory", kernels=("pool",), edits=elsewhere.edits, shown_by="x"
    )
    caught = Hunt(limit=1).run(fault)
    assert not caught.caught
    assert "bound (pool)" in caught.message


def test_unplanted_kernels_that_are_red_are_no_proof(monkeypatch):
    broken = KernelSources().edit("gate.cu", "(2 * head + 1)", "(2 * head)")
    monkeypatch.setattr(hunting, "KernelSources", lambda: broken)
    caught = Hunt(limit=1).run(chosen(["F08"])[0])
    assert not caught.caught
    assert caught.message.startswith("the unplanted kernels are red too: ")


def test_a_method_is_replaced_while_the_planted_kernels_run_and_no_longer():
    kept = Batch.clear, Capture.add
    for name in ("F20", "F24"):
        assert Hunt().run(chosen([name])[0]).caught
        assert (Batch.clear, Capture.add) == kept
    with pytest.raises(AttributeError, match="no_such_method"), replaced(Batch, "no_such_method", kept[0]):
        pass


def test_a_replaced_method_that_does_the_same_is_missed():
    clear = Batch.clear
    harmless = dataclasses.replace(chosen(["F20"])[0], method=lambda: replaced(Batch, "clear", clear))
    caught = Hunt().run(harmless)
    assert (caught.caught, caught.message) == (False, "memory of captured stayed green; red: nothing")


def test_the_unplanted_kernels_are_green_index_nothing_past_an_array_and_align_what_a_gpu_needs_aligned():
    backend = HostBackend(flags=("-O1", *SANITIZER))
    variants = host_variants(seed=0, sources=portable(), backend=backend)
    for example in itertools.islice(draw(GEOMETRY, seed=0), 3):
        report = Report()
        run_example(GEOMETRY, example, variants, report, seed=0)
        assert report.green, report.failures


@pytest.mark.slow
def test_the_whole_catalogue():
    missed = [f"{one.fault.id}: {one.message}" for one in hunting.hunt(CATALOGUE) if not one.caught]
    assert not missed


def kvproof(*words):
    command = [sys.executable, "-c", "from kvproof.oracle.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_the_matrix_and_writes_json(tmp_path):
    file = tmp_path / "faults.json"
    chosen_ids = [word for name in ("F20", "F30", "F28") for word in ("--only", name)]
    done = kvproof("faults", *chosen_ids, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"F30 .* caught ", done.stdout)
    assert re.search(r"F20 .* red .* caught ", done.stdout)
    assert re.search(r"F28 .* caught ", done.stdout)
    assert "GREEN: 3 of 3 planted faults caught" in done.stdout
    found = json.loads(file.read_text())
    assert found["green"] is True
    assert found["faults"][1]["red"] == {"validation": ["scores", "chunks", "chunks_ahead"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("faults", "--only", "F31"), "--only is 'F31'; it must be one of F01, F02"),
        (("faults", "--jobs", "0"), "--jobs is 0; it must be at least 1"),
        (("mutants", "--file", "nope.cu"), "--file is 'nope.cu'; it must be one of arithmetic.cuh"),
        (("mutants", "--limit", "0"), "--limit is 0; it must be at least 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_misuse_exits_2(words, message):
    done = kvproof(*words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


# ---- processes of their own ----


def die(how: str) -> str:
    if how == "crash":
        import os

        os.kill(os.getpid(), 11)
    while how == "hang":
        pass
    if how == "raise":
        raise ValueError("told so")
    return how


def test_crashes_and_hangs_end_their_own_process_only():
    ends = {end.number: end for end in isolated(die, [("well",), ("crash",)], jobs=2, limit_s=120)}
    assert ends[0].result == "well"
    assert ends[0].died is None
    assert ends[1].died == "crashed with exit status -11"
    (hung,) = isolated(die, [("hang",)], jobs=1, limit_s=3)
    assert hung.died == "ran past 3 s"


def test_a_process_that_cannot_start_is_an_error_and_no_crash(monkeypatch):
    monkeypatch.setattr("kvproof.oracle.planted.isolate._call", leave)
    with pytest.raises(RuntimeError, match="never ran its function: it ended with exit status 3"):
        list(isolated(die, [("well",)], jobs=1, limit_s=30))


def leave(*words):
    raise SystemExit(3)


def test_an_exception_comes_back():
    with pytest.raises(ValueError, match="told so"):
        list(isolated(die, [("raise",)], jobs=1, limit_s=30))


# ---- mutants ----

TEXT = """// a + b in a comment
#include "x.h"
#define KVP_N 4
/* c * d */
#ifndef KVP_HOST
int not_built = a + b;
#else
__device__ int f(const int* p, int n) {
  __shared__ float wide[8];
  const char* s = "a + b";
  for (int i = 0; i < n; ++i) n += p[i] * -2;
  __syncthreads();
  return KVP_HOST_OR(n, n + 3) == 1.5f ? !n : n >> 1;
}
#endif
"""


def made(text=TEXT):
    return list(mutants(KernelSources({"x.cu": text}), ["x.cu"]))


def test_the_generator_finds_each_kind_of_change_and_nothing_in_comments_strings_or_what_is_not_built():
    assert [f"{m.line}:{m.old}->{m.new}" for m in made()] == [
        "3:4->5",
        "11:0->1",
        "11:<-><=",
        "11:++->--",
        "11:+=->-=",
        "11:[i]->[(i) + 1]",
        "11:[i]->[(i) - 1]",
        "11:*->+",
        "11:-->",
        "11:2->3",
        "12:__syncthreads();->;",
        "13:+->-",
        "13:3->4",
        "13:==->!=",
        "13:1.5f->3.0f",
        "13:!->",
        "13:>>-><<",
        "13:1->2",
    ]


def test_a_mutant_changes_one_place_only():
    sources = portable()
    every = list(mutants(sources))
    assert len({str(m) for m in every}) == len(every) > 1000
    for mutant in every:
        text, changed = sources.texts[mutant.file], mutant.sources(sources).texts
        assert [name for name in changed if changed[name] != sources.texts[name]] == [mutant.file]
        assert changed[mutant.file] == text[: mutant.start] + mutant.new + text[mutant.start + len(mutant.old) :]
        line = text.splitlines()[mutant.line - 1]
        assert line[mutant.column - 1 :].startswith(mutant.old.partition("\n")[0])
        assert mutant.text == line.strip()


def test_every_kernel_source_has_mutants():
    files = {m.file for m in mutants(portable())}
    assert files == {f for f in KernelSources().texts if f.endswith((".cu", ".cuh"))} - {"fetch.cuh"}


def test_each_known_equivalent_is_a_mutant_of_today_and_has_a_reason():
    today = {(m.file, m.text, m.old, m.new, m.nth) for m in mutants(portable())}
    known = [entry for reason, entries in EQUIVALENT.items() for entry in entries if reason]
    assert len(known) == sum(map(len, EQUIVALENT.values()))
    assert sorted(set(known) - today) == []
    assert len(set(known)) == len(known)
    assert all(reason_of(*entry) for entry in known)


@pytest.mark.slow
def test_known_equivalents_are_seen_by_nothing(monkeypatch):
    known = [m for m in mutants(portable()) if reason_of(m.file, m.text, m.old, m.new, m.nth)]
    monkeypatch.setattr(mutating, "reason_of", lambda *key: None)
    seen = [f"{one.mutant}: {one.by}" for one in run_mutants(known, jobs=2) if one.status != "survived"]
    assert not seen


def test_unchanged_kernels_survive_and_broken_ones_do_not():
    base = KernelSources()
    assert judge(base, base) == ("survived", "")
    assert judge(base, base.edit("gate.cu", "(2 * head + 1)", "(2 * head)"))[0] == "killed"
    assert judge(base, base.edit("gate.cu", "int head", "no_type head"))[0] == "invalid"


def test_a_sample_of_mutants_is_killed():
    every = list(mutants(portable(), ["select.cu", "gate.cu", "merge.cu"]))
    drawn = sample(every, 6, seed=0)
    assert drawn == sample(every, 6, seed=0)
    survivors = [str(one.mutant) for one in run_mutants(drawn, jobs=2) if one.status == "survived"]
    assert not survivors
