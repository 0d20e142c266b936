"""`kvproof gpu-check`: everything that only a GPU can show, in one call of bounded time, and one JSON of what it found.

Each step runs in a process of its own (`steps`), for its share of the time that is left; what a step does not use
goes to those after it. Nothing here touches the device.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ...fast import KernelSources, NoDeviceError
from ..compiled.records import folder as records_folder
from .found import ROOT, Verdict

FORMAT = "kvproof gpu-check"
VERSION = 1

SECONDS = 480
"""Of the whole call."""
LEAST_SECONDS = 10.0
"""A step that has less left is skipped."""
GRACE_S = 5.0
"""After the time that a step is given, until its process is killed."""

_LOG_CHARS = 4000
_CHILD_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

OUT_OF_TIME = "the time was out"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: in `steps.STEPS`, and for `--skip`.
        title: for people.
        share: of the time that is left, as a weight among the steps to come.
    """

    name: str
    title: str
    share: float


STEPS = (
    Step(name="facts", title="what is here", share=6),
    Step(name="check", title="the whole check on the device", share=46),
    Step(name="bytes", title="every byte against the CPU's", share=12),
    Step(name="digests", title="recorded digests", share=3),
    Step(name="tests", title="pytest -m gpu", share=8),
    Step(name="sanitizer", title="compute-sanitizer", share=12),
    Step(name="records", title="resource records", share=6),
    Step(name="bench", title="benchmark", share=12),
)
"""In their order: what proves most comes first."""

PROOF = ("facts", "check", "bytes")
"""Steps without which a run proves nothing that is worth keeping."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step ended.

    Attributes:
        step: its name.
        verdict: see `found.Verdict`; one that found the time out is "cut" as well.
        reason: in words.
        seconds: that it took.
        result: what it found.
        log: the end of what its process printed, where that ended in another way than it should.
    """

    step: str
    verdict: Verdict | Literal["no device"]
    reason: str
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    log: str = ""


Runner = Callable[[Step, float], Outcome]
"""Runs a step for at most so many seconds."""


def shares(steps: Sequence[Step], seconds: float) -> float:
    """Seconds for the first of the steps that are still to come."""
    return seconds * steps[0].share / sum(step.share for step in steps)


def run_steps(
    steps: Sequence[Step],
    *,
    seconds: float,
    skip: Sequence[str] = (),
    run: Runner,
    after: Callable[[list[Outcome]], None] = lambda outcomes: None,
    now: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run steps one after another, whatever becomes of each, within so many seconds.

    Args:
        skip: names of steps that are left out.
        run: runs one.
        after: is given all outcomes so far, after each.

    Raises:
        NoDeviceError: a step found no device; the message says what is missing.
    """
    end = now() + seconds
    outcomes: list[Outcome] = []
    chosen = [step for step in steps if step.name not in skip]
    for step in steps:
        if step.name in skip:
            outcomes.append(Outcome(step=step.name, verdict="skipped", reason=f"--skip {step.name}"))
            continue
        left = end - now()
        if left < LEAST_SECONDS:
            outcomes.append(Outcome(step=step.name, verdict="cut", reason=OUT_OF_TIME))
        else:
            outcomes.append(run(step, shares(chosen, left)))
        chosen.remove(step)
        if outcomes[-1].verdict == "no device":
            raise NoDeviceError(outcomes[-1].reason)
        after(outcomes)
    return outcomes


def run_in_process(step: Step, seconds: float) -> Outcome:
    """Run a step in a process of its own, which is killed with all that it started when its time is up."""
    with tempfile.TemporaryDirectory(prefix="kvproof-gpu-") as folder:
        file = Path(folder) / "found.json"
        own = max(1.0, seconds - GRACE_S)
        words = [sys.executable, "-m", "kvproof.oracle.gpu.steps", step.name, f"{own:.1f}", str(file)]
        return run_child(step.name, words, file, seconds)


def run_child(name: str, words: Sequence[str], file: Path, seconds: float) -> Outcome:
    """Run a command that writes what it found to a file, as `steps.run_step` does, for so many seconds at most."""
    started = time.monotonic()
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **_CHILD_ENVIRONMENT},
        start_new_session=True,
    )
    killed = False
    try:
        log, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        log, killed = _kill(child), True
    except BaseException:  # Ctrl-C, which does not reach a session of its own
        _kill(child)
        raise
    return _outcome(name, file, child.returncode, log, killed, time.monotonic() - started)


def _kill(child: subprocess.Popen[str]) -> str:
    """End a process and all that it started; returns what it printed."""
    os.killpg(child.pid, signal.SIGKILL)
    return child.communicate()[0]


def _outcome(name: str, file: Path, status: int, log: str, killed: bool, seconds: float) -> Outcome:
    found = _read(file)
    verdict, reason = found["verdict"], found["reason"]
    if killed:
        verdict, reason = "cut", f"killed after {seconds:.0f} s"
    elif status and verdict != "red":  # what it saved while it ran is no verdict
        verdict, reason = "red", f"its process ended with status {status}"
    return Outcome(
        step=name,
        verdict=verdict,
        reason=reason,
        seconds=round(seconds, 1),
        result=found["result"],
        log=log[-_LOG_CHARS:] if status else "",
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"verdict": "red", "reason": "its process told nothing", "result": {}}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# ---- what came of it ----


def succeeded(outcomes: Sequence[Outcome]) -> bool:
    """Nothing is red, and no step wanted time; what was skipped for another reason is told, and forgiven."""
    return bool(outcomes) and all(outcome.verdict in ("green", "skipped") for outcome in outcomes)


def proves(outcomes: Sequence[Outcome]) -> bool:
    """The run succeeded, and the steps that matter ran: its JSON belongs among the records."""
    green = {outcome.step for outcome in outcomes if outcome.verdict == "green"}
    return succeeded(outcomes) and green >= set(PROOF)


def as_json(outcomes: Sequence[Outcome], *, seconds: float) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "kernel_sources": sources_digest(),
        "budget_seconds": seconds,
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "green": succeeded(outcomes),
        "proves": proves(outcomes),
        "steps": [asdict(outcome) for outcome in outcomes],
    }


def commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None where Git cannot tell."""
    try:
        head, status = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if status else "")


def sources_digest() -> str:
    """SHA-256 of the kernels' sources: what was run, also where no commit is known."""
    return hashlib.sha256(json.dumps(sorted(KernelSources().texts.items())).encode()).hexdigest()


def file_name(outcomes: Sequence[Outcome]) -> str:
    """gpu-<device>-<sm>.json."""
    facts = next((outcome.result for outcome in outcomes if outcome.step == "facts"), {})
    device = re.sub(r"[^a-z0-9]+", "-", str(facts.get("device", "unknown")).lower()).strip("-")
    return f"gpu-{device}-{facts.get('arch', 'unknown')}.json"


def draft_file(outcomes: Sequence[Outcome]) -> Path:
    """Where a run that is not over, or proves nothing, is kept."""
    return Path(".kvproof") / file_name(outcomes)


def final_file(outcomes: Sequence[Outcome]) -> Path:
    """Among the records where the run proves something."""
    return records_folder() / file_name(outcomes) if proves(outcomes) else draft_file(outcomes)
