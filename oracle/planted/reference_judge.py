"""Runs the tests of the reference on each of its mutants, and tells what they saw.

Each mutant runs `tests/meta` alone, in a process of its own. What passes is a survivor: it needs a test, or a line in
`reference_equivalents` that says why it changes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from .fault_report import print_mutants
from .mutant_judge import Status
from .mutants import Judged, Mutant
from .reference_equivalents import reason_of
from .reference_mutants import PACKAGE, changed, reference_texts

TESTS = "tests/meta"
NOT_RUN = "test_certification.py"
"""It tests `oracle.bounds`."""

Trial: TypeAlias = tuple[str, str, str, tuple[tuple[str, ...], ...]]
"""Arguments of `reference_trial.trial`."""

_TELLING: Mapping[str, tuple[str, ...]] = {
    "attention.py": ("test_plain_attention.py",),
    "chunks.py": ("test_scalar_chunks.py",),
    "gate.py": ("test_scalar_merge.py",),
    "geometry.py": ("test_refused_shapes.py", "test_scalar_prep.py"),
    "layout.py": ("test_addresses.py", "test_refused_shapes.py"),
    "merge.py": ("test_scalar_merge.py",),
    "numerics.py": ("test_rounding.py",),
    "pool.py": ("test_scalar_prep.py",),
    "prep.py": ("test_scalar_prep.py",),
    "results.py": ("test_refused_arguments.py", "test_refused_shapes.py"),
    "scores.py": ("test_scalar_select.py",),
    "select.py": ("test_scalar_select.py",),
    "window.py": ("test_scalar_stream.py",),
}
"""Tests that see most mutants of a file, run before all the others."""


def run_reference_mutants(
    chosen: Sequence[Mutant], *, jobs: int, progress: Callable[[Judged], None] = lambda judged: None
) -> list[Judged]:
    """Run the reference's tests on each mutant, `jobs` at a time; in the order given.

    What is known to be equivalent is not run. First the tests are run on the reference as it is.

    Raises:
        ValueError: there is no folder of tests here, nothing to run them with, or they are red without any change.
        RuntimeError: the processes could not be started.
    """
    _require_tests()
    texts = reference_texts()
    _require_green(texts)
    done = {number: judged for number, mutant in enumerate(chosen) if (judged := _known(mutant))}
    for judged in done.values():
        progress(judged)
    open_ones = [number for number in range(len(chosen)) if number not in done]
    mutants = [chosen[number] for number in open_ones]
    trials = [_trial(mutant.file, changed(texts[mutant.file], mutant)) for mutant in mutants]
    for end in _ends(trials, jobs=jobs):
        by = end["died"] or end["result"]
        status: Status = "killed" if by else "survived"
        judged = Judged(mutant=mutants[end["number"]], status=status, by=by, seconds=end["seconds"])
        done[open_ones[end["number"]]] = judged
        progress(judged)
    return [done[number] for number in range(len(chosen))]


def _require_tests() -> None:
    if not Path(TESTS).is_dir():
        raise ValueError(f"there is no folder {TESTS} in {Path.cwd()}; run `kvproof mutants --reference` in a checkout")
    missing = [name for name in ("pytest", "mpmath") if find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} cannot be imported; run pip install -e '.[test]' in the checkout")


def _require_green(texts: Mapping[str, str]) -> None:
    end = next(_ends([_trial("window.py", texts["window.py"])], jobs=1))
    if end["result"] != "":
        raise ValueError(f"{end['result'] or end['died']} is red on the unchanged reference; mend it first")


def _known(mutant: Mutant) -> Judged | None:
    """The verdict on a mutant that is known to change nothing; None on any other."""
    reason = reason_of(mutant.file, mutant.text, mutant.old, mutant.new, mutant.nth)
    return None if reason is None else Judged(mutant=mutant, status="equivalent", by=reason, seconds=0.0)


def _trial(file: str, text: str) -> Trial:
    """The run of a file's text under every test, the telling ones first."""
    first = tuple(f"{TESTS}/{name}" for name in _TELLING[file])
    others = (TESTS, *(f"--ignore={name}" for name in (*first, f"{TESTS}/{NOT_RUN}")))
    with resources.as_file(resources.files(PACKAGE) / file) as path:
        return f"{PACKAGE}.{path.stem}", str(path), text, (first, others) if first else (others,)


def _ends(trials: Sequence[Trial], *, jobs: int) -> Iterator[dict[str, Any]]:
    """Run trials in a program of its own, which never loads the reference; how each ended, as they end."""
    command = [sys.executable, "-c", "from kvproof.oracle.planted.reference_trial import serve; serve()"]
    with tempfile.TemporaryDirectory(prefix="kvproof-mutants-") as scratch:
        asked = Path(scratch) / "trials.json"
        asked.write_text(json.dumps({"jobs": jobs, "trials": trials}))
        environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": scratch, "OPENBLAS_NUM_THREADS": "1"}
        with (
            asked.open() as words,
            subprocess.Popen(command, stdin=words, stdout=subprocess.PIPE, text=True, env=environment) as server,
        ):
            yield from map(json.loads, server.stdout or ())
    if server.returncode:
        raise RuntimeError(f"the trials of mutants ended with exit status {server.returncode}")


# ---- telling it ----


def print_reference_mutants(console: Console, judged: Sequence[Judged], seconds: float) -> None:
    """Counts by file, which tests killed how many, the survivors, and the score."""
    statuses: tuple[Status, ...] = ("killed", "survived", "equivalent")
    print_mutants(console, judged, seconds, title="mutants of the reference", statuses=statuses, killer=_killer)


def _killer(one: Judged) -> str:
    """The file of the test that failed first; what ended the process, where none did."""
    return Path(one.by.partition("::")[0]).stem
