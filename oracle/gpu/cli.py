"""The `kvproof gpu-check` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ...fast import NoDeviceError
from ..report import write_json
from ..terminal import Json, choose, console, errors, require_writable
from .bench import CONTIGUOUS, works
from .check import (
    LEAST_SECONDS,
    SECONDS,
    STEPS,
    Outcome,
    Runner,
    Step,
    as_json,
    draft_file,
    final_file,
    proves,
    run_in_process,
    run_steps,
    succeeded,
)

NAMES = tuple(step.name for step in STEPS)
_STYLES = {"green": "green", "red": "bold red", "cut": "yellow", "skipped": "dim"}
_REASON_CHARS = 140
_TOLD_KERNEL = "window"
_TOLD_WORKS = tuple(work.name for work in works() if work.streams in (1, 8))
"""Whose times the table tells, of a layer end to end; all are in the JSON."""


def gpu_check_command(
    json_file: Json = None,
    seconds: Annotated[int, typer.Option(help="Of the whole call; a step that finds none left is not run.")] = SECONDS,
    skip: Annotated[
        list[str] | None, typer.Option(help=f"A step to leave out, of {', '.join(NAMES)}; may be repeated.")
    ] = None,
) -> None:
    """Prove the kernels on this machine's GPU: check, bytes, tests, sanitizer, records, benchmark."""
    left_out = [choose("--skip", name, NAMES) for name in skip or ()]
    if seconds < LEAST_SECONDS:
        raise ValueError(f"--seconds is {seconds}; it must be at least {LEAST_SECONDS:.0f}")
    require_writable(json_file)
    try:
        outcomes = gpu_check(seconds, left_out, json_file, run=run_in_process)
    except NoDeviceError as error:
        errors.print(Text(f"kvproof: gpu-check needs a CUDA device, and none answers here: {error}", style="red"))
        raise typer.Exit(2) from None
    raise typer.Exit(0 if succeeded(outcomes) else 1)


def gpu_check(seconds: float, skip: Sequence[str], json_file: Path | None, *, run: Runner) -> list[Outcome]:
    """Run the steps, write the JSON after each, and print the table last."""

    def told(step: Step, limit: float) -> Outcome:
        errors.print(f"{step.title}, at most {limit:.0f} s")
        return run(step, limit)

    def keep(outcomes: list[Outcome]) -> None:
        _write(json_file or draft_file(outcomes), outcomes, seconds)

    outcomes = run_steps(STEPS, seconds=seconds, skip=skip, run=told, after=keep)
    file = json_file or final_file(outcomes)
    _write(file, outcomes, seconds)
    if file not in (json_file, draft_file(outcomes)):
        draft_file(outcomes).unlink(missing_ok=True)
    _print(outcomes, file)
    return outcomes


def _write(file: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, as_json(outcomes, seconds=seconds))


def _print(outcomes: Sequence[Outcome], file: Path) -> None:
    for outcome in outcomes:
        if outcome.step == "bench" and outcome.result:
            console.print(_times(outcome.result))
    table = Table(title="gpu-check")
    for name in ("step", "verdict", "seconds", "what it found"):
        table.add_column(name)
    for outcome in outcomes:
        verdict = Text(outcome.verdict, style=_STYLES.get(outcome.verdict, ""))
        table.add_row(outcome.step, verdict, f"{outcome.seconds:.0f}", Text(outcome.reason[:_REASON_CHARS]))
    console.print(table)
    console.print(_verdict(outcomes))
    console.print(f"wrote {file}")


def _verdict(outcomes: Sequence[Outcome]) -> Text:
    if not succeeded(outcomes):
        bad = ", ".join(f"{one.step} {one.verdict}" for one in outcomes if one.verdict not in ("green", "skipped"))
        return Text(f"RED: {bad or 'nothing was run'}", style="bold red")
    if not proves(outcomes):
        return Text("GREEN, but it proves nothing: check and bytes were not run", style="yellow")
    return Text("GREEN: the device gives the CPU's bits", style="bold green")


def _times(result: dict[str, Any]) -> Table:
    """A layer's times, contiguous, and the pages as multiples of it."""
    table = Table(title=f"microseconds of a layer; copy {result['copy_bandwidth'] / 1e9:,.0f} GB/s")
    table.add_column("work")
    for name in ("contiguous", "of copy", "pages, to contiguous"):
        table.add_column(name, justify="right")
    for work in _TOLD_WORKS:
        by_page = {
            one["page"]: one for one in result["timings"] if (one["work"], one["kernel"]) == (work, _TOLD_KERNEL)
        }
        if first := by_page.pop(CONTIGUOUS, None):
            pages = ", ".join(f"{page}: {one['ratio']:.3f}" for page, one in by_page.items())
            table.add_row(work, f"{first['median_us']:.1f}", f"{first['fraction']:.0%}", pages)
    return table
