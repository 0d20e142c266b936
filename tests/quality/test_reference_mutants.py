"""Mutants of the reference change one place each, and its own tests see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvproof.oracle.planted import reference_judge
from kvproof.oracle.planted.reference_equivalents import EQUIVALENT, reason_of
from kvproof.oracle.planted.reference_judge import run_reference_mutants
from kvproof.oracle.planted.reference_mutants import changed, reference_mutants, reference_texts

ROOT = Path(__file__).parents[2]
TEXTS = reference_texts()


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def kvproof(*words):
    command = [sys.executable, "-c", "from kvproof.oracle.cli import main; main()", *words]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# ---- making them ----

TEXT = '''"""a + b in a docstring"""
from x import y

Array = npt.NDArray[np.int32]


def f(x: Sequence[1], n=3) -> dict[2, 3]:
    """c * d."""
    if not n or n < 2:
        raise ValueError(f"{n + 1} is too few")
    if x is None:
        return -1.5
    x[0, i:, None] = np.where(x[i] == True, np.maximum(x, y), z)
    return g(x, axis=n, **rest) if len(x) else n // 0x10
'''


def made(text=TEXT):
    return list(reference_mutants({"x.py": text}))


def test_each_kind_of_change_and_nothing_in_docstrings_annotations_imports_or_messages():
    assert [f"{m.line}:{m.old}->{m.new}" for m in made()] == [
        "7:3->4",
        "9:not ->",
        "9:not n or n < 2->not (not n or n < 2)",
        "9:or->and",
        "9:<-><=",
        "9:2->3",
        '10:raise ValueError(f"{n + 1} is too few")->pass',
        "10:ValueError->TypeError",
        "11:is->is not",
        "12:return -1.5->pass",
        "12:-->",
        "12:1.5->3.0",
        "13:x[0, i:, None] = np.where(x[i] == True, np.maximum(x, y), z)->pass",
        "13:0->(0) - 1",
        "13:0->1",
        "13:i->(i) + 1",
        "13:i->(i) - 1",
        "13:i->(i) + 1",
        "13:i->(i) - 1",
        "13:==->!=",
        "13:True->False",
        "13:np.maximum(x, y), z->z, np.maximum(x, y)",
        "13:maximum->minimum",
        "14:, axis=n->",
        "14:len(x)->not (len(x))",
        "14://->*",
        "14:0x10->0x11",
    ]


@pytest.mark.parametrize("file", sorted(TEXTS))
def test_a_mutant_changes_one_place_and_compiles(file):
    for mutant in reference_mutants(TEXTS, [file]):
        text = changed(TEXTS[file], mutant)
        assert text == TEXTS[file][: mutant.start] + mutant.new + TEXTS[file][mutant.start + len(mutant.old) :]
        compile(text, file, "exec")


def test_every_source_has_mutants_and_no_two_are_the_same():
    every = [(m.file, m.start, m.old, m.new) for m in reference_mutants(TEXTS)]
    assert len(set(every)) == len(every) > 1000
    assert {file for file, *_ in every} == set(TEXTS) - {"__init__.py"}


def test_a_mutant_of_another_text_is_an_error():
    with pytest.raises(ValueError, match=r"x.py:7:25 3 -> 4: the text there is 'y'"):
        changed("y" * len(TEXT), made()[0])


def test_each_known_equivalent_is_a_mutant_of_today_and_has_a_reason():
    today = {(m.file, m.text, m.old, m.new, m.nth) for m in reference_mutants(TEXTS)}
    known = [entry for reason, entries in EQUIVALENT.items() for entry in entries if reason]
    assert len(known) == sum(map(len, EQUIVALENT.values()))
    assert sorted(set(known) - today) == []
    assert len(set(known)) == len(known)
    assert all(reason_of(*entry) for entry in known)


# ---- running them ----


def one(file, line_text, old, new):
    """The one mutant of this line."""
    (found,) = [
        m for m in reference_mutants(TEXTS, [file]) if m.text == line_text and (m.old, m.new, m.nth) == (old, new, 0)
    ]
    return found


HAND_PICKED = [
    ("merge.py", "m = np.maximum(a.m, b.m)", "maximum", "minimum"),
    ("select.py", 'return np.sort(np.argsort(~keys, kind="stable")[:count])', "sort", "array"),
    ("chunks.py", "p = np.exp(s - running[..., None])", "exp", "exp2"),
    ("pool.py", "angle = angles(geometry, weights.inv_freq, blocks * block, rope)", "*", "+"),
    ("layout.py", "page = table[index // self.rows_per_page].astype(np.int64)", "int64", "int32"),
]


def test_the_unchanged_reference_is_green_and_broken_ones_are_not():
    """Each is killed, so the run began with green tests: run_reference_mutants raises where they are not."""
    found = run_reference_mutants([one(*picked) for picked in HAND_PICKED], jobs=1)
    assert [judged.status for judged in found] == ["killed"] * len(HAND_PICKED)
    assert all(judged.by.startswith("tests/meta/test_") for judged in found)


GATE_OF_ZERO = """
import numpy as np
from kvproof.reference import TINY, gate
from kvproof.reference.layout import BF16

def test_a_gate_of_zero_is_half_open():
    got = gate(TINY, np.ones((1, 4, 32), BF16), np.zeros((1, 480), BF16))
    assert (got == {half}).all()
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with one short test of gate; returns a function that writes what it expects."""
    (tmp_path / "tests" / "meta").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def write(half):
        (tmp_path / "tests" / "meta" / "test_scalar_merge.py").write_text(GATE_OF_ZERO.format(half=half))
        for other in ("test_scalar_stream.py", "test_others.py"):
            (tmp_path / "tests" / "meta" / other).write_text("def test_nothing():\n    pass\n")

    return write


def test_red_tests_are_an_error_and_no_score(checkout):
    checkout(half=0.25)
    with pytest.raises(
        ValueError, match=r"test_a_gate_of_zero_is_half_open is red on the unchanged reference; mend it"
    ):
        run_reference_mutants([one(*HAND_PICKED[0])], jobs=1)


def test_the_command_tells_what_was_seen_and_what_was_not(checkout, tmp_path):
    checkout(half=0.5)
    file = tmp_path / "mutants.json"
    done = kvproof("mutants", "--reference", "--file", "gate.py", "--jobs", "1", "--json", str(file))
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stdout.split())
    assert "killed by test_scalar_merge 5 " in told
    assert "survived: gate.py:26:5 require_gate(geometry, out, projection) -> pass" in told
    found = json.loads(file.read_text())
    assert "55.6% of 9 mutants are killed" in told
    assert found["score"] == 0.5556
    assert {m["status"] for m in found["mutants"]} == {"killed", "survived"}


def test_a_folder_without_tests_is_an_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"no folder tests/meta in .*; run `kvproof mutants --reference` in a checkout"
    ):
        run_reference_mutants([], jobs=1)


def test_misuse_exits_2():
    done = kvproof("mutants", "--reference", "--file", "gate.cu")
    assert done.returncode == 2
    assert "--file is 'gate.cu'; it must be one of __init__.py, attention.py" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_at_least_95_percent_are_killed():
    valid = [
        judged
        for judged in run_reference_mutants(list(reference_mutants(TEXTS)), jobs=2)
        if judged.status != "equivalent"
    ]
    survivors = [str(judged.mutant) for judged in valid if judged.status == "survived"]
    assert len(survivors) <= 0.05 * len([judged for judged in valid if judged.status != "invalid"]), survivors


@pytest.mark.slow
def test_known_equivalents_are_seen_by_nothing(monkeypatch):
    known = [m for m in reference_mutants(TEXTS) if reason_of(m.file, m.text, m.old, m.new, m.nth)]
    monkeypatch.setattr(reference_judge, "reason_of", lambda *key: None)
    seen = [f"{judged.mutant}: {judged.by}" for judged in run_reference_mutants(known, jobs=2) if judged.by]
    assert not seen
