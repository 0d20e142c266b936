"""The `kvproof records` commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..fast.engine import GPU_THREADS
from ..reference.geometry import PRESETS, Geometry
from .compiled_code import Proof, prove
from .cubin import Resources
from .records import SMS, Change, Measured, compare, dynamic_shared, measure, occupancy_of, read, require_sms, write
from .report import write_json
from .terminal import Json, choose, console, geometry_named, progress, require_writable
from .toolkits import Toolkit, toolkits

KINDS = ("nvrtc", "nvcc")

records_app = typer.Typer(help="What the compiled CUDA kernels take, and prove, without a GPU.", no_args_is_help=True)

GeometryOption = Annotated[str, typer.Option("--geometry", help=f"One of {', '.join(PRESETS)}.")]
SmOption = Annotated[
    list[str] | None, typer.Option("--sm", help=f"Only this SM, such as 90; may be repeated. Default {', '.join(SMS)}.")
]
ToolkitOption = Annotated[
    list[str] | None,
    typer.Option("--toolkit", help="Only nvrtc or nvcc; may be repeated. Default: NVRTC, and nvcc where there is one."),
]


@records_app.command("check")
def check_command(
    geometry: GeometryOption = "flash_next",
    sm: SmOption = None,
    toolkit: ToolkitOption = None,
    json_file: Json = None,
) -> None:
    """Compile every kernel for every SM, and compare registers, memory and barriers with the record."""
    shape, sms = geometry_named(geometry), _sms(sm)
    require_writable(json_file)
    started = time.monotonic()
    measured = [_measured(one, shape, sms) for one in _toolkits(toolkit)]
    changes = [change for one in measured for change in compare(read(one.toolkit, one.geometry), one, sms)]
    for one in measured:
        console.print(_register_table(one, sms, changes))
    _print_changes(changes)
    green = _print_verdict(measured, sms, changes, time.monotonic() - started)
    if json_file is not None:
        write_json(json_file, _as_json(measured, changes, green))
    raise typer.Exit(0 if green else 1)


@records_app.command("update")
def update_command(geometry: GeometryOption = "flash_next", toolkit: ToolkitOption = None) -> None:
    """Write the records of the installed toolkits anew, and print what changed."""
    shape = geometry_named(geometry)
    for one in _toolkits(toolkit):
        found = _measured(one, shape, SMS)
        changes = compare(read(found.toolkit, found.geometry), found)
        _print_changes(changes)
        console.print(f"{found.toolkit}: {len(changes)} differences; wrote {write(found)}")


@records_app.command("show")
def show_command(geometry: GeometryOption = "flash_next", sm: SmOption = None, toolkit: ToolkitOption = None) -> None:
    """Print what each kernel takes, how much of each SM it fills, and what its compiled code proves."""
    shape, sms = geometry_named(geometry), _sms(sm)
    broken = False
    for one in _toolkits(toolkit):
        found = _measured(one, shape, sms)
        console.print(_resource_table(found, shape, sms))
        with progress(None, "prove") as advance:
            proofs = prove(one, shape, sms, advance)
        console.print(_proof_table(one, proofs))
        broken = _print_broken(proofs) or broken
    raise typer.Exit(1 if broken else 0)


def _sms(chosen: Sequence[str] | None) -> tuple[str, ...]:
    sms = tuple(f"sm_{name.removeprefix('sm_')}" for name in chosen or SMS)
    require_sms(sms)
    return sms


def _toolkits(chosen: Sequence[str] | None) -> list[Toolkit]:
    kinds = [choose("--toolkit", kind, KINDS) for kind in chosen or KINDS]
    found = [one for one in toolkits() if one.kind in kinds]
    if chosen and len(found) < len(set(kinds)):
        raise ValueError("--toolkit is 'nvcc', but none is installed; put it on $PATH, or set $CUDA_HOME")
    return found


def _measured(toolkit: Toolkit, geometry: Geometry, sms: Sequence[str]) -> Measured:
    with progress(None, toolkit.name) as advance:
        return measure(toolkit, geometry, sms, advance)


def _register_table(found: Measured, sms: Sequence[str], changes: Sequence[Change]) -> Table:
    table = Table(title=f"registers of a thread, {found.toolkit} ({found.build}), {found.geometry}")
    table.add_column("kernel")
    for sm in sms:
        table.add_column(sm, justify="right")
    red = {(change.kernel, change.sm) for change in changes if change.red and change.toolkit == found.toolkit}
    for name, by_sm in sorted(found.kernels.items()):
        cells = (Text(str(by_sm[sm].registers), style="bold red" if (name, sm) in red else "green") for sm in sms)
        table.add_row(name, *cells)
    return table


def _print_changes(changes: Iterable[Change]) -> None:
    for change in changes:
        console.print(Text(change.message, style="red" if change.red else "yellow"))


def _print_verdict(measured: Sequence[Measured], sms: Sequence[str], changes: Sequence[Change], seconds: float) -> bool:
    red = sum(change.red for change in changes)
    kernels = sum(len(one.kernels) for one in measured)
    by = ", ".join(one.toolkit for one in measured)
    verdict = (
        f"RED: {red} things are not as recorded, or not allowed"
        if red
        else f"GREEN: {kernels} kernels on {len(sms)} SMs take what is recorded, nothing spills"
    )
    console.print(Text(f"{verdict}; {by} ({seconds:.1f} s)", style="bold red" if red else "bold green"))
    return not red


def _as_json(measured: Sequence[Measured], changes: Sequence[Change], green: bool) -> dict[str, Any]:
    return {
        "format": "kvproof records check",
        "version": 1,
        "green": green,
        "measured": [asdict(one) for one in measured],
        "changes": [asdict(one) for one in changes],
    }


def _resource_table(found: Measured, geometry: Geometry, sms: Sequence[str]) -> Table:
    table = Table(
        title=f"registers of a thread, and occupancy by blocks of {GPU_THREADS} threads with their shared bytes: "
        f"{found.toolkit}, {found.geometry}"
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("shared", justify="right", no_wrap=True)
    for sm in sms:
        table.add_column(sm, justify="right")
    for name, by_sm in sorted(found.kernels.items()):
        shared = by_sm[sms[0]].shared_bytes + dynamic_shared(name, geometry)
        table.add_row(name, str(shared), *(_filled(name, sm, by_sm[sm], geometry) for sm in sms))
    return table


def _filled(kernel: str, sm: str, resources: Resources, geometry: Geometry) -> str:
    filled = occupancy_of(kernel, sm, resources, geometry, GPU_THREADS)
    return f"{resources.registers}  {filled.fraction:.0%}"


def _proof_table(toolkit: Toolkit, proofs: Sequence[Proof]) -> Table:
    table = Table(title=f"proved from the compiled code, over all SMs: {toolkit.name}")
    table.add_column("kernel", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for kernel in dict.fromkeys(proof.kernel for proof in proofs):
        mine = [proof for proof in proofs if proof.kernel == kernel]
        table.add_row(kernel, *(_span(map(value, mine)) for _, value in _COLUMNS))
    return table


_COLUMNS: tuple[tuple[str, Callable[[Proof], int]], ...] = (
    ("fp32 .rn", lambda proof: proof.ptx.fp32),
    ("of these FMA", lambda proof: proof.ptx.fma),
    ("fp64 .rn", lambda proof: proof.ptx.double),
    ("not .rn", lambda proof: len(proof.ptx.unrounded) + len(proof.ptx.approximate)),
    ("table reads", lambda proof: proof.ptx.table_reads),
    ("one a key", lambda proof: proof.ptx.kept_reads),
    ("in load loops", lambda proof: proof.ptx.looping_reads),
    ("cache loads", lambda proof: sum(proof.sass.cache_loads.values())),
    ("bytes wide", lambda proof: min(proof.sass.cache_loads, default=0)),
    ("local memory", lambda proof: proof.sass.local),
)


def _span(values: Iterable[int]) -> str:
    """One value where all SMs agree, else from the least to the most."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _print_broken(proofs: Sequence[Proof]) -> bool:
    broken = [f"{proof.kernel} on {proof.sm}: {claim}" for proof in proofs for claim in proof.broken]
    for sentence in broken:
        console.print(Text(sentence, style="red"))
    verdict = f"RED: {len(broken)} claims do not hold" if broken else f"GREEN: every claim holds, {len(proofs)} times"
    console.print(Text(verdict, style="bold red" if broken else "bold green"))
    return bool(broken)
