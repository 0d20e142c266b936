"""The `kvproof` command."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import typer
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits

from ..fast import ORDERS, Backend, CacheError, CompileError, Engine, HostBackend, NoDeviceError, backend_for
from ..fast.engine import BackendChoice
from ..fast.sources import FAMILIES
from ..reference.geometry import PRESETS, Geometry
from .accuracy_report import PEER, accuracy_json, measure, print_accuracy
from .bench import ROUNDS, Timing, bench
from .cases import PAGE_SIZES, QUICK, at_check, cases
from .compiled.cli import records_app
from .compiled.cubin import CubinError
from .contract import Plan, check
from .diagnosis import diagnose
from .digests import Comparison, Digests, compare, digests, digests_json
from .digests import read as read_digests
from .digests import write as write_digests
from .fixture_set import holds_set
from .fixture_verify import Finding, verify_set
from .fixtures import DEFAULT_FORMS, DEFAULT_PAGES, FORMS, Recipe, write
from .gpu.cli import gpu_check_command
from .gpu.kernels import cuda_variants
from .judge import load_failure, load_window_failure, wrong_elements
from .memory import FastKernels
from .operations import OPERATIONS
from .peer import Verdict, verify
from .planted.fault_report import matrix_json, mutants_json, print_matrix, print_mutants
from .planted.faults import chosen as chosen_faults
from .planted.hunt import hunt
from .planted.mutant_judge import portable
from .planted.mutants import mutants, run_mutants, sample
from .planted.reference_judge import print_reference_mutants, run_reference_mutants
from .planted.reference_mutants import reference_mutants, reference_texts
from .report import GATES, Report, write_json
from .serving.bench import bench_serve, print_serve
from .serving.cli import serve_check_command
from .terminal import Json, choose, console, errors, geometry_named, progress, require_writable
from .variants import TIMEOUT_S, Variant, host_variants

MISUSE = 2
QUICK_PAGES = (16, 48)
BACKENDS = get_args(BackendChoice)

app = typer.Typer(
    help="Proves that a paged key/value cache gives an attention kernel's contiguous bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
fixtures_app = typer.Typer(help="Files of inputs and outputs.", no_args_is_help=True)
app.add_typer(fixtures_app, name="fixtures")
app.add_typer(records_app, name="records")

_Found = TypeVar("_Found", Finding, Verdict)


def main() -> None:
    """Entry point; exits 0 when green, 1 when red, 2 when something cannot be run as asked."""
    try:
        app()
    except (ValueError, OSError, CompileError, CacheError, CubinError, NoDeviceError) as error:
        errors.print(Text(f"kvproof: {error}", style="red"))
        sys.exit(MISUSE)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"kvproof {version('kvproof')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Prove a paged attention kernel right, on this machine's CPU or its GPU."""


@app.command("check")
def check_command(
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "flash_next",
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    page: Annotated[
        list[int] | None, typer.Option(help=f"Page size in positions; may be repeated. Default {PAGE_SIZES}.")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"Where the kernels run: {', '.join(BACKENDS)}.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the data, the shuffled tables and thread orders.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Cases {', '.join(QUICK)} at pages {QUICK_PAGES}.")] = False,
    json_file: Json = None,
) -> None:
    """Check that every kernel reads a paged cache exactly like a contiguous one, gate by gate."""
    choice = cast(BackendChoice, choose("--backend", backend, BACKENDS))
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be 0 or more")
    shape = at_check(geometry_named(geometry))
    known = {c.name: c for c in cases(shape)}
    chosen = tuple(choose("--case", name, tuple(known)) for name in case or (QUICK if quick else known))
    pages = tuple(page or (QUICK_PAGES if quick else PAGE_SIZES))
    plan = Plan(
        geometry=shape,
        cases=tuple(known[name] for name in chosen),
        page_sizes=pages,
        seed=seed,
        replay=f"kvproof check --geometry {geometry} --case {{case}} --page {{page}} --backend {backend} --seed {seed}",
    )
    require_writable(json_file)
    variants, facts = _run_on(backend_for(choice), seed)
    report = Report(facts={**_facts(plan), **facts})
    run_check(plan, variants, report)
    print_report(plan, report)
    if json_file is not None:
        report.write(json_file)
    raise typer.Exit(0 if report.green else 1)


@fixtures_app.command("write")
def write_command(
    folder: Annotated[Path, typer.Argument(help="New or empty folder, or a set written before, which is replaced.")],
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny",
    case: Annotated[
        list[str] | None, typer.Option(help=f"A case of `check`; may be repeated. Default {QUICK}.")
    ] = None,
    page: Annotated[
        list[int] | None, typer.Option(help=f"Page size in positions; may be repeated. Default {DEFAULT_PAGES}.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; may be repeated. Default {DEFAULT_FORMS}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the data and the shuffled tables.")] = 0,
) -> None:
    """Write inputs, expected bits and bounds for kernels in any language: safetensors files and a manifest."""
    shape = at_check(geometry_named(geometry))
    known = {c.name: c for c in cases(shape)}
    chosen = {choose("--case", name, tuple(known)) for name in case or QUICK}
    forms = {choose("--layout", name, FORMS) for name in layout or DEFAULT_FORMS}
    recipe = Recipe(
        geometry=shape,
        cases=tuple(c for name, c in known.items() if name in chosen),
        page_sizes=tuple(sorted(set(page or DEFAULT_PAGES))),
        forms=tuple(form for form in FORMS if form in forms),
        seed=seed,
    )
    kernels = host_variants(seed=0)[0].kernels
    with progress(None, "write") as advance:
        written = write(folder, recipe, kernels, progress=advance)
    for file in written:
        console.print(f"{file.stat().st_size:>12} {file}")


@fixtures_app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="What `fixtures write` wrote, or peer files such as fixtures/peer.")],
    json_file: Json = None,
) -> None:
    """Hold the reference and the kernels against fixture files, ours or an independent implementation's."""
    require_writable(json_file)
    kernels = host_variants(seed=0)[0].kernels
    found: Sequence[Finding | Verdict]
    if holds_set(folder):
        found = findings = _followed(verify_set(folder, kernels))
        _print_findings(findings)
    else:
        found = verdicts = _followed(verify(folder, kernels))
        _print_verdicts(verdicts)
    green = all(one.message is None for one in found)
    if json_file is not None:
        write_json(
            json_file, {"format": "kvproof fixtures verify", "green": green, "verdicts": [asdict(one) for one in found]}
        )
    raise typer.Exit(0 if green else 1)


@fixtures_app.command("digests")
def digests_command(
    geometry: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(PRESETS)}; may be repeated. Default all.")
    ] = None,
    file: Annotated[Path, typer.Option(help="The recorded digests.")] = Path("fixtures/digests.json"),
    update: Annotated[bool, typer.Option("--update", help="Record what the kernels give now.")] = False,
    json_file: Json = None,
) -> None:
    """Hold a digest of each kernel's bits against the recorded one, so that a change of arithmetic is deliberate."""
    names = tuple(dict.fromkeys(choose("--geometry", name, tuple(PRESETS)) for name in geometry or PRESETS))
    require_writable(json_file)
    recorded = read_digests(file, new=update)
    host = HostBackend(timeout_s=TIMEOUT_S)
    variant = host_variants(seed=0, backend=host)[0]
    found = {name: _digests_of(geometry_named(name), variant) for name in names}
    compared = [one for name in names for one in compare(name, recorded.get(name), found[name])]
    if update:
        write_digests(file, recorded | found)
    green = _print_digests(host.compiler.name, found, compared, file if update else None)
    if json_file is not None:
        write_json(json_file, digests_json(found, compared))
    raise typer.Exit(0 if green or update else 1)


def _digests_of(geometry: Geometry, variant: Variant) -> Digests:
    shape = at_check(geometry)
    with progress(len(FAMILIES) + len(cases(shape)), "digests") as advance:
        variant.prepare(shape, lambda family: advance(f"compiled {family}"))
        return digests(shape, variant.kernels, progress=lambda case: advance(f"{shape.name}: {case}"))


@app.command("explain")
def explain_command(
    file: Annotated[Path, typer.Argument(help="A failure that a test saved, such as .kvproof/failures/NAME.json.")],
) -> None:
    """Say which misreading of the cache explains a saved failure."""
    window = load_window_failure(file)
    if window is not None:
        console.print(Text(f"{window['gate']}: {window['diagnosis']}", style="red"))
        for told in window["failures"]:
            console.print(Text(f"{told['gate']} {told['kernel']}: {told['message']}\n  {told['where']}"))
        console.print(f"example: {window['example']}")
        return
    failure = load_failure(file)
    console.print(Text(f"{failure.gate}: {failure.difference}", style="red"))
    console.print(f"case: {failure.case}")
    found = None if failure.gate == "controls" else diagnose(failure.case, failure.got, failure.arithmetic)
    console.print(Text(f"diagnosis: {found or failure.diagnosis}", style="bold"))
    for line in wrong_elements(failure.case, failure.got, failure.arithmetic):
        console.print(line)


@app.command("bench")
def bench_command(
    rounds: Annotated[
        int | None, typer.Option(help=f"Times that each contender runs, in turns. Default {ROUNDS}.")
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="How tight the bounds are, instead of times: a minute, in a checkout.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="What streams cost beside the kernels, in time and memory, instead.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Time rows side by side at Flash Next geometry: contiguous, paged, NumPy, and PyTorch or Triton if there."""
    if rounds is not None and (rounds < 1 or accuracy):
        allowed = "left out with --accuracy, which times nothing" if accuracy else "at least 1"
        raise ValueError(f"--rounds is {rounds}; it must be {allowed}")
    if accuracy and serve:
        raise ValueError("--accuracy and --serve are given; give one of them")
    require_writable(json_file)
    if accuracy:
        raise typer.Exit(0 if _accuracy(json_file) else 1)
    if serve:
        _bench_serve(rounds or ROUNDS, json_file)
        return
    with progress(None, "bench") as advance:
        timings, absent = bench(rounds=rounds or ROUNDS, progress=advance)
    _print_timings(timings, absent)
    if json_file is not None:
        write_json(json_file, {"format": "kvproof bench", "timings": [asdict(t) for t in timings], "absent": absent})


def _bench_serve(rounds: int, json_file: Path | None) -> None:
    with progress(None, "bench") as advance:
        costs, sizes = bench_serve(rounds, advance)
    print_serve(console, costs, sizes)
    if json_file is not None:
        found = {"append": [asdict(cost) for cost in costs], "memory": [asdict(size) for size in sizes]}
        write_json(json_file, {"format": "kvproof bench serve", **found})


def _accuracy(json_file: Path | None) -> bool:
    with progress(None, "accuracy") as advance, threadpool_limits(1):
        found = measure(FastKernels(Engine()), peer=PEER, progress=advance)
    green = print_accuracy(console, found)
    if json_file is not None:
        write_json(json_file, accuracy_json(found))
    return green


@app.command("faults")
def faults_command(
    only: Annotated[list[str] | None, typer.Option(help="Only this entry, such as F09; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn examples.")] = 0,
    jobs: Annotated[int, typer.Option(help="Faults at a time.")] = 2,
    json_file: Json = None,
) -> None:
    """Plant each fault of the catalogue: the gate that should see it must go red, and green without it."""
    faults = chosen_faults(only or ())
    _require_jobs(seed, jobs)
    require_writable(json_file)
    started = time.monotonic()
    with progress(len(faults), "faults") as advance:
        found = hunt(faults, seed=seed, jobs=jobs, progress=lambda one: advance(f"{one.fault.id} {one.fault.title}"))
    green = print_matrix(console, found, time.monotonic() - started)
    if json_file is not None:
        write_json(json_file, matrix_json(found, seed))
    raise typer.Exit(0 if green else 1)


@app.command("mutants")
def mutants_command(
    reference: Annotated[
        bool, typer.Option("--reference", help="Mutants of the reference, seen by tests/meta; in a checkout.")
    ] = False,
    file: Annotated[
        list[str] | None, typer.Option(help="Only this source, such as pool.cu or pool.py; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many, drawn by the seed.")] = None,
    seed: Annotated[int, typer.Option(help="Of the mutants drawn.")] = 0,
    jobs: Annotated[int, typer.Option(help="Mutants at a time.")] = 2,
    json_file: Json = None,
) -> None:
    """Change each operator, index, comparison, constant and barrier of the kernels in turn: something must see it."""
    _require_jobs(seed, jobs)
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; it must be at least 1")
    every = reference_mutants(reference_texts(), file or ()) if reference else mutants(portable(), file or ())
    drawn = sample(list(every), limit, seed=seed)
    require_writable(json_file)
    started = time.monotonic()
    run, tell = (run_reference_mutants, print_reference_mutants) if reference else (run_mutants, print_mutants)
    with progress(len(drawn), "mutants") as advance:
        judged = run(drawn, jobs=jobs, progress=lambda one: advance(f"{one.mutant}: {one.status}"))
    tell(console, judged, time.monotonic() - started)
    if json_file is not None:
        write_json(json_file, mutants_json(judged, seed))
    raise typer.Exit(1 if any(one.status == "survived" for one in judged) else 0)


app.command("gpu-check")(gpu_check_command)
app.command("serve-check")(serve_check_command)


def _require_jobs(seed: int, jobs: int) -> None:
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be 0 or more")
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")


def run_check(plan: Plan, variants: Sequence[Variant], report: Report) -> None:
    """Compile, then run a plan, with a progress bar on a terminal."""
    total = plan.steps(len(variants)) + len(FAMILIES) * len(variants)
    with progress(total, "check") as advance, threadpool_limits(1):
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
        return Text("not judged" if kernel in report.not_judged else "-", style="dim")
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


def _followed(found: Iterator[_Found]) -> list[_Found]:
    """All of them, with a progress bar."""
    kept = []
    with progress(None, "verify") as advance, threadpool_limits(1):
        for one in found:
            advance(f"{one.file} {one.tensor}")
            kept.append(one)
    return kept


def _print_findings(findings: list[Finding]) -> None:
    table = Table(title="files of expected results")
    for name in ("file", "kernel"):
        table.add_column(name)
    for name in ("comparisons", "file to reference / bound", ""):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.file, finding.kernel), []).append(finding)
    last = None
    for (file, kernel), both in groups.items():
        bad = sum(f.message is not None for f in both)
        mark = Text(f"{bad} RED" if bad else "ok", style="red" if bad else "green")
        worst = max(f.worst for f in both)
        table.add_row("" if file == last else file, kernel, str(len(both)), f"{worst:.3g}", mark)
        last = file
    console.print(table)
    red = [f for f in findings if f.message is not None]
    for finding in red:
        console.print(Text(f"{finding.file}, {finding.check}: {finding.message}", style="red"))
    files = len({f.file for f in findings})
    console.print(
        Text(
            f"RED: {len(red)} of {len(findings)} comparisons failed, in {files} files"
            if red
            else f"GREEN: {len(findings)} comparisons, in {files} files: the kernels' bits, and the reference's bounds",
            style="bold red" if red else "bold green",
        )
    )


def _print_digests(
    compiler: str, found: dict[str, Digests], compared: list[Comparison], recorded_in: Path | None
) -> bool:
    """The table, each difference in words, and the verdict; returns whether all is as it was recorded."""
    table = Table(title=f"digests of the kernels' bits, by {compiler}")
    for name in ("kernel", *found):
        table.add_column(name)
    for kernel in dict.fromkeys(one.kernel for one in compared):
        states = {name: [c for c in compared if (c.geometry, c.kernel) == (name, kernel)] for name in found}
        table.add_row(kernel, *(_digest_cell(found[name], kernel, of) for name, of in states.items()))
    console.print(table)
    differing = [one for one in compared if one.state != "same"]
    for one in differing:
        console.print(Text(str(one), style="red"))
    every = {(one.geometry, one.kernel) for one in compared}
    count = f"{len({(one.geometry, one.kernel) for one in differing})} of {len(every)} digests"
    if recorded_in is not None:
        console.print(Text(f"recorded in {recorded_in}: {count} changed", style="bold"))
    elif differing:
        told = (
            f"RED: {count} are not as recorded; if that is meant, accept it with "
            "`kvproof fixtures digests --update`, and commit the file with the reason"
        )
        console.print(Text(told, style="bold red"))
    else:
        console.print(Text(f"GREEN: {len(every)} digests as recorded", style="bold green"))
    return not differing


def _digest_cell(found: Digests, kernel: str, compared: list[Comparison]) -> Text:
    """A kernel's digest over all cases, where they are as recorded; else how they differ."""
    differing = [f"{one.state} ({len(one.cases)})" for one in compared if one.state != "same"]
    if differing or not compared:
        return Text(", ".join(differing), style="bold red")
    return Text(f"same {found.whole(kernel)}", style="green")


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


def _run_on(backend: Backend, seed: int) -> tuple[tuple[Variant, ...], dict[str, Any]]:
    """The variants of a backend, and what a report says of it."""
    if backend.name != "host":
        return cuda_variants(backend), {"backend": backend.name, "compiler": backend.describe()}
    host = HostBackend(timeout_s=TIMEOUT_S)
    facts = {"compiler": host.compiler.name, "flags": list(host.flags), "thread_orders": list(ORDERS)}
    return host_variants(seed=seed, backend=host), {"backend": host.name, **facts}


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "kvproof": version("kvproof"),
        "numpy": version("numpy"),
        "machine": f"{platform.system()} {platform.machine()}",
        "geometry": asdict(plan.geometry),
        "cases": [asdict(case) for case in plan.cases],
        "page_sizes": list(plan.page_sizes),
        "seed": plan.seed,
    }
