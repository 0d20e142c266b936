"""What a check found: counts by gate and kernel, the failures, and how near each output came to its bound."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GATES = ("bits", "bound", "memory", "controls")

KEPT = 5
"""Failures kept in words for each gate and kernel; all are counted."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One red check.

    Attributes:
        gate, kernel: which.
        where: case, page size, tables and thread order, in words.
        message: what differs.
        replay: the command line that runs it again.
    """

    gate: str
    kernel: str
    where: str
    message: str
    replay: str


@dataclass(kw_only=True)
class Count:
    """Checks of one gate on one kernel."""

    passed: int = 0
    failed: int = 0


@dataclass(kw_only=True)
class Report:
    """The running result of a check.

    Attributes:
        facts: what was run, for the head of the report: geometry, backend, compiler, seed, cases, page sizes.
        counts: by (gate, kernel).
        worst: largest error of each output, as a fraction of its bound.
        failures: the first few of each gate and kernel.
        not_judged: kernels that were not there to be run.
        diagnoses: failures that are still to be diagnosed, each for up to some seconds; the rest are told without.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    counts: dict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    not_judged: set[str] = field(default_factory=set)
    diagnoses: int = 5
    started: float = field(default_factory=time.monotonic)

    @property
    def green(self) -> bool:
        """Something was checked, and nothing failed."""
        return any(c.passed for c in self.counts.values()) and not any(c.failed for c in self.counts.values())

    @property
    def seconds(self) -> float:
        """Time since the report was begun."""
        return time.monotonic() - self.started

    def passed(self, gate: str, kernel: str) -> None:
        """Count a green check."""
        self.counts[gate, kernel].passed += 1

    def failed(self, failure: Failure) -> None:
        """Count a red check, and keep it in words if it is among the first of its kind."""
        count = self.counts[failure.gate, failure.kernel]
        count.failed += 1
        if count.failed <= KEPT:
            self.failures.append(failure)

    def near(self, tensor: str, fraction: float) -> None:
        """Note an output's largest error as a fraction of its bound."""
        self.worst[tensor] = max(self.worst.get(tensor, 0.0), fraction)

    def as_json(self) -> dict[str, Any]:
        """The report for machines."""
        return {
            "format": "kvproof check",
            "version": 1,
            "green": self.green,
            "seconds": round(self.seconds, 3),
            "facts": self.facts,
            "counts": [
                {"gate": gate, "kernel": kernel, "passed": c.passed, "failed": c.failed}
                for (gate, kernel), c in self.counts.items()
            ],
            "not_judged": sorted(self.not_judged),
            "worst_fraction_of_bound": self.worst,
            "failures": [asdict(f) for f in self.failures],
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        write_json(path, self.as_json())


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside its place, then move it there: a reader never finds half a file.

    What is there and is no regular file (a pipe, /dev/stdout) is written to as it is.
    """
    text = json.dumps(value, indent=2) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
