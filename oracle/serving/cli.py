"""The `kvproof serve-check` command."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated, cast, get_args

import typer
from rich.table import Table
from rich.text import Text

from ...fast import HostBackend, backend_for
from ...fast.engine import BackendChoice
from ...reference.geometry import PRESETS
from ..report import write_json
from ..terminal import Json, choose, console, geometry_named, progress, require_writable
from .check import BASELINE, CHECKS, as_json, check_names
from .plan import PROMPTS, TOKENS, ServePlan, at_serving
from .run import Setting, serve_all, steps
from .served import CONTROLS, Served

BACKENDS = get_args(BackendChoice)
KEPT = 5
"""Failures told in words for each run; all are counted."""


def serve_check_command(
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny",
    prompts: Annotated[
        int | None, typer.Option(help=f"Prompts of each check. Default {PROMPTS}; 1 at flash_next, of 4,096 tokens.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="That each prompt generates.")] = TOKENS,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Only this check, of {', '.join(CHECKS)}; may be repeated.")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"Where the kernels run: {', '.join(BACKENDS)}.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the model, the prompts, the tables and the schedule.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes, on the host at a small geometry. Default: the CPUs there are.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Serve a small language model in every way, and compare tokens, outputs and caches bit for bit."""
    setting = _setting(geometry, prompts, tokens, only or (), backend, seed, jobs)
    require_writable(json_file)
    started = time.monotonic()
    with progress(steps(setting), "serve-check") as advance:
        found = serve_all(setting, advance)
    green = all(one.green for one in found)
    seconds = time.monotonic() - started
    _print(setting, found, green, seconds)
    if json_file is not None:
        facts = {"backend": setting.backend, "jobs": setting.jobs, "seconds": seconds}
        write_json(json_file, as_json(setting.plan, found, facts, green))
    raise typer.Exit(0 if green else 1)


def _setting(
    geometry: str, prompts: int | None, tokens: int, only: Sequence[str], backend: str, seed: int, jobs: int | None
) -> Setting:
    shape = at_serving(geometry_named(geometry))
    plan = ServePlan(geometry=shape, seed=seed, tokens=tokens)
    plan = ServePlan(
        geometry=shape,
        seed=seed,
        tokens=tokens,
        prompts=prompts if prompts is not None else 1 if plan.long else PROMPTS,
    )
    names = tuple(check_names(plan))
    chosen = tuple(name for name in names if not only or name in {choose("--only", one, names) for one in only})
    choice = cast(BackendChoice, choose("--backend", backend, BACKENDS))
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")
    if plan.long or not isinstance(backend_for(choice), HostBackend):
        jobs = 1
    return Setting(
        plan=plan,
        checks=chosen,
        backend=choice,
        jobs=jobs or len(os.sched_getaffinity(0)),
        replay=f"kvproof serve-check --geometry {geometry} --only {{check}} --prompts {plan.prompts} --tokens {tokens} "
        f"--backend {backend} --seed {seed}",
    )


def _print(setting: Setting, found: Sequence[Served], green: bool, seconds: float) -> None:
    plan = setting.plan
    names = {BASELINE: "what all are held against", **check_names(plan)}
    table = Table(title=f"served alike: {plan.geometry.name}, {plan.geometry.layers} layers, seed {plan.seed}")
    for name in ("check", "run"):
        table.add_column(name)
    for name in ("prompts", "generated", "bytes", "drafts that stood: 0 1 2 3", "seconds", "verdict"):
        table.add_column(name, justify="right")
    last = None
    for one in found:
        name = "" if one.check == last else names[one.check]
        table.add_row(name, one.run, *_cells(one), _verdict(one))
        last = one.check
    console.print(table)
    _print_controls(found)
    for failure in [f for one in found for f in one.failures[:KEPT]]:
        console.print(Text(f"{failure.check}, {failure.run}, {failure.prompt}: {failure.message}", style="red"))
        console.print(Text(f"  replay: {failure.replay}"))
    _print_verdict(setting, found, green, seconds)


def _cells(one: Served) -> tuple[str, ...]:
    stood = " ".join(map(str, one.accepted))
    counts = ("", "", "") if one.run == CONTROLS else (str(one.prompts), f"{one.tokens:,}", f"{one.bytes:,}")
    if one.check == BASELINE:
        counts = (*counts[:2], "")
    return (*counts, stood, f"{one.seconds:.1f}")


def _verdict(one: Served) -> Text:
    if one.run == CONTROLS:
        seen = sum(control.green for control in one.controls)
        failed = f", {len(one.failures)} failures" if one.failures else ""
        return Text(f"{seen} of {len(one.controls)} seen{failed}", style="green" if one.green else "bold red")
    if one.failures:
        return Text(f"{len(one.failures)} failures", style="bold red")
    return Text("" if one.check == BASELINE else "equal", style="green")


def _print_controls(found: Sequence[Served]) -> None:
    table = Table(title="controls: planted faults, and what saw them")
    for name in ("check", "fault", "must be seen in", "text too"):
        table.add_column(name)
    for one in found:
        for control in one.controls:
            told = control.expected if control.green else f"{control.expected}: NOT SEEN"
            seen = Text(told, style="green" if control.green else "bold red")
            table.add_row(one.check, control.fault, seen, "yes" if control.text else "")
    console.print(table)
    for one in found:
        for control in one.controls:
            if control.problem:
                console.print(Text(f"{one.check}, {control.fault}: {control.problem}", style="red"))
        if one.detail:
            console.print(f"{one.check}, {one.run}: {one.detail}")


def _print_verdict(setting: Setting, found: Sequence[Served], green: bool, seconds: float) -> None:
    took = f"({seconds:.1f} s, {setting.jobs} processes)" if setting.jobs > 1 else f"({seconds:.1f} s)"
    differences = sum(len(one.failures) for one in found)
    blind = sum(not control.green for one in found for control in one.controls)
    size = sum(one.bytes for one in found)
    verdict = (
        f"GREEN: {size:,} bytes of {len(setting.checks)} checks are as alone, plain and contiguous"
        if green
        else f"RED: {differences} failures, {blind} planted faults not seen where they must be"
    )
    console.print(Text(f"{verdict} {took}", style="bold green" if green else "bold red"))
