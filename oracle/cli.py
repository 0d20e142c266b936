"""The `kvproof` command."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits

from ..fast import ORDERS, CacheError, CompileError, HostBackend
from ..fast.sources import FAMILIES
from ..reference.geometry import PRESETS, Geometry
from .bench import ROUNDS, Timing, bench
from .cases import PAGE_SIZES, QUICK, at_check, cases
from .contract import Plan, check
from .operations import OPERATIONS
from .peer import Verdict, verify
from .report import GATES, Report, write_json
from .variants import Variant, host_variants

MISUSE = 2
QUICK_PAGES = (16, 48)
BACKENDS = ("host",)

app = typer.Typer(
    help="Proves that a paged key/value cache gives an attention kernel's contiguous bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
fixtures_app = typer.Typer(help="Files of inputs and outputs.", no_args_is_help=True)
app.add_typer(fixtures_app, name="fixtures")

PIPE_WIDTH = 120
"""Columns of a table that no terminal shows."""


def _console(*, stderr: bool = False) -> Console:
    made = Console(stderr=stderr, soft_wrap=True)
    return made if made.is_terminal else Console(stderr=stderr, soft_wrap=True, width=PIPE_WIDTH)


console = _console()
errors = _console(stderr=True)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")]


def main() -> None:
    """Entry point; exits 0 when green, 1 when red, 2 when something cannot be run as asked."""
    try:
        app()
    except (ValueError, OSError, CompileError, CacheError) as error:
        errors.print(Text(f"kvproof: {error}", style="red"))
        sys.exit(MISUSE)


@app.callback()
def root() -> None:
    """Numbers are NumPy's float64; kernels run on this machine's CPU."""


@app.command("check")
def check_command(
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "flash_next",
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    page: Annotated[
        list[int] | None, typer.Option(help=f"Page size in positions; may be repeated. Default {PAGE_SIZES}.")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"Where the kernels run: {', '.join(BACKENDS)}.")] = "host",
    seed: Annotated[int, typer.Option(help="Of the data, the shuffled tables and thread orders.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Cases {', '.join(QUICK)} at pages {QUICK_PAGES}.")] = False,
    json_file: Json = None,
) -> None:
    """Check that every kernel reads a paged cache exactly like a contiguous one, gate by gate."""
    _choose("--backend", backend, BACKENDS)
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be 0 or more")
    shape = at_check(_geometry(geometry))
    known = {c.name: c for c in cases(shape)}
    chosen = tuple(_choose("--case", name, tuple(known)) for name in case or (QUICK if quick else known))
    pages = tuple(page or (QUICK_PAGES if quick else PAGE_SIZES))
    plan = Plan(
        geometry=shape,
        cases=tuple(known[name] for name in chosen),
        page_sizes=pages,
        seed=seed,
        replay=f"kvproof check --geometry {geometry} --case {{case}} --page {{page}} --backend {backend} --seed {seed}",
    )
    _require_writable(json_file)
    host = HostBackend()
    report = Report(facts=_facts(plan, host))
    run_check(plan, host_variants(seed=seed, backend=host), report)
    print_report(plan, report)
    if json_file is not None:
        report.write(json_file)
    raise typer.Exit(0 if report.green else 1)


@fixtures_app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="Folder of .safetensors files, such as fixtures/peer.")],
    json_file: Json = None,
) -> None:
    """Hold the reference and the kernels against files of an independent implementation."""
    _require_writable(json_file)
    kernels = host_variants(seed=0)[0].kernels
    verdicts: list[Verdict] = []
    with _progress(None, "verify") as advance, threadpool_limits(1):
        for verdict in verify(folder, kernels):
            advance(f"{verdict.file} {verdict.tensor}")
            verdicts.append(verdict)
    _print_verdicts(verdicts)
    green = all(v.message is None for v in verdicts)
    if json_file is not None:
        write_json(
            json_file, {"format": "kvproof fixtures verify", "green": green, "verdicts": [asdict(v) for v in verdicts]}
        )
    raise typer.Exit(0 if green else 1)


@app.command("bench")
def bench_command(
    rounds: Annotated[int, typer.Option(help="Times that each contender runs, in turns.")] = ROUNDS,
    json_file: Json = None,
) -> None:
    """Time rows side by side at Flash Next geometry: contiguous, paged, NumPy, and PyTorch or Triton if there."""
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; it must be at least 1")
    _require_writable(json_file)
    with _progress(None, "bench") as advance:
        timings, absent = bench(rounds=rounds, progress=advance)
    _print_timings(timings, absent)
    if json_file is not None:
        write_json(json_file, {"format": "kvproof bench", "timings": [asdict(t) for t in timings], "absent": absent})


def run_check(plan: Plan, variants: Sequence[Variant], report: Report) -> None:
    """Compile, then run a plan, with a progress bar on a terminal."""
    total = plan.steps(len(variants)) + len(FAMILIES) * len(variants)
    with _progress(total, "check") as advance, threadpool_limits(1):
        for variant in variants:
            variant.prepare(plan.geometry, lambda family: advance(f"compiled {family}"))
        check(plan, variants, report, advance)


def print_report(plan: Plan, report: Report) -> None:
    """The table of gates and kernels, the failures in words, and the verdict."""
    facts = report.facts
    console.print(
        f"[bold]{plan.geometry.name}[/bold] on {facts['backend']} ({facts['compiler']}), "
        f"{len(plan.cases)} cases, pages {', '.join(map(str, plan.page_sizes))}, seed {plan.seed}"
    )
    table = Table(title="checks passed, by gate and kernel")
    table.add_column("kernel")
    for gate in GATES:
        table.add_column(gate, justify="right")
    table.add_column("worst error / bound", justify="right")
    names = [operation.name for operation in OPERATIONS]
    for kernel in names + [k for k in dict.fromkeys(kernel for _, kernel in report.counts) if k not in names]:
        worst = [value for name, value in report.worst.items() if name.startswith(f"{kernel}.")]
        near = f"{max(worst):.3g}" if worst else ""
        table.add_row(kernel, *(_cell(report, gate, kernel) for gate in GATES), near)
    console.print(table)
    for failure in report.failures:
        console.print(Text(f"{failure.gate} {failure.kernel}: {failure.message}", style="red"))
        console.print(Text(f"  {failure.where}\n  replay: {failure.replay}"))
    failed = sum(count.failed for count in report.counts.values())
    passed = sum(count.passed for count in report.counts.values())
    verdict = (
        f"GREEN: paged equals contiguous, bit for bit, in all {passed} checks"
        if report.green
        else f"RED: {failed} of {passed + failed} checks failed"
    )
    console.print(Text(f"{verdict} ({report.seconds:.1f} s)", style="bold green" if report.green else "bold red"))


def _cell(report: Report, gate: str, kernel: str) -> Text:
    count = report.counts.get((gate, kernel))
    if count is None:
        return Text("-", style="dim")
    if count.failed:
        return Text(f"{count.failed} of {count.passed + count.failed} FAILED", style="bold red")
    return Text(str(count.passed), style="green")


def _print_verdicts(verdicts: list[Verdict]) -> None:
    table = Table(title="largest error, as a fraction of its bound")
    for name in ("file", "tensor"):
        table.add_column(name)
    for name in ("reference to file", "kernel to reference", "kernel to file", ""):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.file, verdict.tensor), []).append(verdict)
    last = None
    for (file, tensor), both in groups.items():
        bad = any(v.message for v in both)
        worst = (max(getattr(v, name) for v in both) for name in ("peer", "fast", "apart"))
        mark = Text("RED" if bad else "ok", style="red" if bad else "green")
        table.add_row("" if file == last else file, tensor, *(f"{x:.3g}" for x in worst), mark)
        last = file
    console.print(table)
    red = [v for v in verdicts if v.message]
    for verdict in red:
        console.print(Text(f"{verdict.file}, {verdict.form}: {verdict.message}", style="red"))
    files = len({v.file for v in verdicts})
    console.print(
        Text(
            f"{'RED' if red else 'GREEN'}: {len(verdicts) - len(red)} of {len(verdicts)} tensors within their bounds, "
            f"in {files} files, contiguous and through a shuffled page table",
            style="bold red" if red else "bold green",
        )
    )


def _print_timings(timings: list[Timing], absent: dict[str, str]) -> None:
    table = Table(title="medians of one run, contenders in turns")
    for name in ("work", "contender"):
        table.add_column(name)
    for name in ("median ms", "fastest ms", "to contiguous"):
        table.add_column(name, justify="right")
    last = None
    for timing in timings:
        table.add_row(
            "" if timing.work == last else timing.work,
            timing.contender,
            f"{timing.median_ms:.3f}",
            f"{timing.fastest_ms:.3f}",
            f"{timing.ratio:.3f}",
        )
        last = timing.work
    console.print(table)
    for name, why in absent.items():
        console.print(f"{name}: not measured, {why}")


def _geometry(name: str) -> Geometry:
    return PRESETS[_choose("--geometry", name, tuple(PRESETS))]


def _choose(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _require_writable(json_file: Path | None) -> None:
    """Fail before the work, not after it."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file}: there is no folder {json_file.absolute().parent}; make it first")


def _facts(plan: Plan, host: HostBackend) -> dict[str, Any]:
    return {
        "kvproof": version("kvproof"),
        "numpy": version("numpy"),
        "machine": f"{platform.system()} {platform.machine()}",
        "geometry": asdict(plan.geometry),
        "backend": host.name,
        "compiler": host.compiler.name,
        "flags": list(host.flags),
        "thread_orders": list(ORDERS),
        "cases": [asdict(case) for case in plan.cases],
        "page_sizes": list(plan.page_sizes),
        "seed": plan.seed,
    }


@contextmanager
def _progress(total: int | None, name: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, on a terminal only; yields a function to call before each step."""
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(step: str) -> None:
            progress.update(task, advance=1, description=step)

        yield advance
