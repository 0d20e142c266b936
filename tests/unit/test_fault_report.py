"""How judged mutants, of the kernels and of the reference, are told: counts, killers, survivors and the score."""

from __future__ import annotations

import io

import pytest
from kvproof.oracle.planted.fault_report import print_mutants
from kvproof.oracle.planted.mutants import Judged, Mutant
from kvproof.oracle.planted.reference_judge import print_reference_mutants
from rich.console import Console


def judged(file, status, by, old="a"):
    mutant = Mutant(file=file, line=3, column=5, start=40, old=old, new="b", text=f"x = {old[0]}", nth=0)
    return Judged(mutant=mutant, status=status, by=by, seconds=1.0)


def told(tell, found):
    out = io.StringIO()
    tell(Console(file=out, width=100), found, 12.4)
    return [line.strip() for line in out.getvalue().splitlines()]


def cells(lines, file):
    """The numbers in a file's row of the table."""
    (row,) = [line for line in lines if line.startswith(f"│ {file} ")]
    return row.strip("│ ").replace(" ", "").split("│")[1:]


KERNELS = [
    judged("gate.cu", "killed", "bound of gate: 3 outside"),
    judged("gate.cu", "killed", "ran past 20 s"),
    judged("merge.cu", "survived", "", old="a +\n    c"),
    judged("merge.cu", "equivalent", "for a reason"),
    judged("merge.cu", "invalid", "no such name"),
]
REFERENCE = [
    judged("gate.py", "killed", "tests/meta/test_scalar_merge.py::test_gate[1]"),
    judged("gate.py", "killed", "tests/meta/test_scalar_merge.py::test_merge"),
    judged("merge.py", "survived", "", old="a +\n    c"),
    judged("merge.py", "equivalent", "for a reason"),
]


def test_mutants_of_kernels():
    lines = told(print_mutants, KERNELS)
    assert "mutants" in lines
    assert cells(lines, "gate.cu") == ["2", "0", "0", "0"]
    assert cells(lines, "merge.cu") == ["0", "1", "1", "1"]
    assert cells(lines, "all") == ["2", "1", "1", "1"]
    assert "killed by bound 1, crash or time limit 1" in lines
    assert lines[-1] == "75.0% of 4 valid mutants are killed, or equivalent for a reason given (12 s)"


def test_mutants_of_the_reference():
    lines = told(print_reference_mutants, REFERENCE)
    assert "mutants of the reference" in lines
    assert cells(lines, "gate.py") == ["2", "0", "0"]
    assert cells(lines, "merge.py") == ["0", "1", "1"]
    assert cells(lines, "all") == ["2", "1", "1"]
    assert "killed by test_scalar_merge 2" in lines
    assert lines[-1] == "75.0% of 4 mutants are killed, or equivalent for a reason given (12 s)"


@pytest.mark.parametrize(
    ("tell", "found"), [(print_mutants, KERNELS), (print_reference_mutants, REFERENCE)], ids=["kernels", "reference"]
)
def test_a_survivor_of_several_lines_is_told_in_one(tell, found):
    (line,) = [line for line in told(tell, found) if line.startswith("survived")]
    assert line == f"survived: {found[2].mutant.file}:3:5 a + c -> b    x = a"
