"""How the fault catalogue and the mutants are told: the matrix of faults and gates, survivors, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .faults import FAULT_GATES
from .hunt import Caught
from .mutant_judge import Status
from .mutants import Judged

SEEN, ALSO, MISSED = "caught", "red", "MISSED"
"""Marks of a gate: it was expected and went red, it went red too, it was expected and stayed green."""


def print_matrix(console: Console, found: Sequence[Caught], seconds: float) -> bool:
    """The matrix, what is missed, and the verdict; True where every planted fault was caught."""
    table = Table(title="gates that saw each planted fault")
    for name in ("fault", ""):
        table.add_column(name)
    for name in FAULT_GATES:
        table.add_column(name, justify="center")
    for name in ("examples", "s"):
        table.add_column(name, justify="right")
    for one in found:
        marks = (_mark(one, gate) for gate in FAULT_GATES)
        table.add_row(one.fault.id, one.fault.title, *marks, str(one.examples), f"{one.seconds:.1f}")
    console.print(table)
    missed = [one for one in found if not one.caught]
    for one in missed:
        console.print(Text(f"{one.fault.id} {one.fault.title}: {one.message}", style="red"))
    caught = len(found) - len(missed)
    console.print(
        Text(
            f"{'RED' if missed else 'GREEN'}: {caught} of {len(found)} planted faults caught by the gate that should "
            f"({seconds:.1f} s)",
            style="bold red" if missed else "bold green",
        )
    )
    return not missed


def _mark(one: Caught, gate: str) -> Text:
    if gate == one.fault.gate:
        return Text(SEEN, style="bold green") if one.caught else Text(MISSED, style="bold red")
    return Text(ALSO, style="green") if gate in one.red else Text("-", style="dim")


def matrix_json(found: Sequence[Caught], seed: int) -> dict[str, Any]:
    """The matrix for machines."""
    return {
        "format": "kvproof faults",
        "version": 2,
        "green": all(one.caught for one in found),
        "seed": seed,
        "faults": [one.as_json() for one in found],
    }


def print_mutants(
    console: Console,
    judged: Sequence[Judged],
    seconds: float,
    *,
    title: str = "mutants",
    statuses: Sequence[Status] = ("killed", "survived", "equivalent", "invalid"),
    killer: Callable[[Judged], str] | None = None,
) -> None:
    """Counts by file, what killed how many, the survivors, and the score.

    Args:
        statuses: that these mutants may have, each a column.
        killer: what killed a mutant, in a word or two; by default the gate that did.
    """
    table = Table(title=title)
    table.add_column("file")
    for name in statuses:
        table.add_column(name, justify="right")
    by_file = Counter((one.mutant.file, one.status) for one in judged)
    for file in dict.fromkeys(one.mutant.file for one in judged):
        table.add_row(file, *(str(by_file[file, status]) for status in statuses))
    total = Counter(one.status for one in judged)
    table.add_section()
    table.add_row("all", *(str(total[status]) for status in statuses))
    console.print(table)
    killers = Counter((killer or _gate)(one) for one in judged if one.status == "killed")
    console.print("killed by " + ", ".join(f"{name} {count}" for name, count in killers.most_common()))
    for one in judged:
        if one.status == "survived":
            console.print(Text(f"survived: {' '.join(str(one.mutant).split())}    {one.mutant.text}", style="red"))
    kind = "valid mutants" if "invalid" in statuses else "mutants"
    console.print(
        f"{score(judged):.1%} of {len(judged) - total['invalid']} {kind} are killed, or equivalent for a reason given "
        f"({seconds:.0f} s)"
    )


def _gate(one: Judged) -> str:
    for name in ("bits", "bound", "memory", "controls", "validation", "pinned bits", "sanitizer"):
        if one.by.startswith(name):
            return name
    return "crash or time limit"


def score(judged: Sequence[Judged]) -> float:
    """Share of the valid mutants that are killed or known to be equivalent; 1 where there are none."""
    valid = [one for one in judged if one.status != "invalid"]
    return sum(one.status != "survived" for one in valid) / len(valid) if valid else 1.0


def mutants_json(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """The verdicts for machines."""
    return {
        "format": "kvproof mutants",
        "version": 1,
        "score": round(score(judged), 4),
        "seed": seed,
        "mutants": [one.as_json() for one in judged],
    }
