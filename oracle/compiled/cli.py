"""The `kvproof records` commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ...fast.engine import GPU_THREADS
from ...fast.nvrtc import NVRTC_VARIABLE, NvrtcError, find_nvrtc
from ...reference.geometry import PRESETS, Geometry
from ..report import write_json
from ..terminal import Json, choose, console, geometry_named, progress, require_writable
from .claims import Proof, prove
from .cubin import CubinError, Resources, find_tools
from .lookups import Lookups, lookups
from .records import (
    SMS,
    Change,
    Measured,
    compare,
    dynamic_shared,
    measure,
    occupancy_of,
    read,
    recorded_toolkits,
    require_sms,
    write,
)
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
    require_tools()
    started = time.monotonic()
    measured = [_measured(one, shape, sms) for one in _toolkits(toolkit)]
    changes = [change for one in measured for change in compare(read(one.toolkit, one.geometry), one, sms)]
    for one in measured:
        console.print(_register_table(one, sms, changes))
    _print_changes(changes)
    unchecked = not_checked([one.toolkit for one in measured], geometry)
    if unchecked:
        left_out = "; ".join(f"{name} ({why})" for name, why in unchecked.items())
        console.print(Text(f"not checked here: {left_out}", style="yellow"))
    green = _print_verdict(measured, sms, changes, time.monotonic() - started)
    if json_file is not None:
        write_json(json_file, _as_json(measured, changes, unchecked, green))
    raise typer.Exit(0 if green else 1)


@records_app.command("update")
def update_command(geometry: GeometryOption = "flash_next", toolkit: ToolkitOption = None) -> None:
    """Write the records of the installed toolkits anew, and print what changed."""
    shape = geometry_named(geometry)
    require_tools()
    for one in _toolkits(toolkit):
        found = _measured(one, shape, SMS)
        changes = compare(read(found.toolkit, found.geometry), found)
        _print_changes(changes)
        console.print(f"{found.toolkit}: {len(changes)} differences; wrote {write(found)}")


@records_app.command("show")
def show_command(geometry: GeometryOption = "flash_next", sm: SmOption = None, toolkit: ToolkitOption = None) -> None:
    """Print what each kernel takes, how much of each SM it fills, and what its compiled code proves."""
    shape, sms = geometry_named(geometry), _sms(sm)
    require_tools()
    broken = _print_lookups(lookups(shape, positions=shape.budget + 4 * shape.block - 1, rows=4 * shape.block + 1))
    for one in _toolkits(toolkit):
        found = _measured(one, shape, sms)
        console.print(_resource_table(found, shape, sms))
        with progress(None, "prove") as advance:
            proofs = prove(one, shape, sms, advance)
        console.print(_proof_table(one, proofs))
        broken = _print_broken(proofs) or broken
    raise typer.Exit(1 if broken else 0)


def require_tools() -> None:
    """Raise ValueError where what the records need is not installed, all of it in one message."""
    if os.environ.get(NVRTC_VARIABLE):
        find_nvrtc()  # says what is wrong with what was chosen
    tools = {"NVRTC": find_nvrtc, "cuobjdump with nvdisasm beside it": find_tools}
    if missing := [name for name, find in tools.items() if not _is_installed(find)]:
        raise ValueError(
            f"the records need {' and '.join(missing)}, which nothing here has: in the checkout, run "
            "`pip install -e '.[test]'`"
        )


def _is_installed(find: Callable[[], object]) -> bool:
    try:
        find()
    except (NvrtcError, CubinError):
        return False
    return True


def not_checked(checked: Sequence[str], geometry: str) -> dict[str, str]:
    """Why each toolkit that has a record of this geometry, and was not checked, was not."""
    here = {one.name for one in toolkits()}
    others = [name for name in recorded_toolkits() if name not in checked and read(name, geometry) is not None]
    return {name: "left out by --toolkit" if name in here else "no such toolkit" for name in others}


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


def _as_json(
    measured: Sequence[Measured], changes: Sequence[Change], unchecked: dict[str, str], green: bool
) -> dict[str, Any]:
    return {
        "format": "kvproof records check",
        "version": 1,
        "green": green,
        "not_checked": unchecked,
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


_TESTS = "tests/unit/test_compiled_code.py (NVRTC, three SMs)"

_COLUMNS: tuple[tuple[str, Callable[[Proof], int]], ...] = (
    ("fp32 .rn", lambda proof: proof.ptx.fp32),
    ("of these FMA", lambda proof: proof.ptx.fma),
    ("fp64 .rn", lambda proof: proof.ptx.double),
    ("not .rn", lambda proof: len({*proof.ptx.unrounded, *proof.ptx.narrow, *proof.ptx.approximate})),
    ("table reads", lambda proof: proof.ptx.table_reads),
    ("one place", lambda proof: proof.ptx.kept_reads),
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
    verdict = (
        f"RED: {len(broken)} claims of this table do not hold"
        if broken
        else f"GREEN: every claim of this table holds, {len(proofs)} times; not in it, and left to {_TESTS}: that FMAs "
        "stand where the source names one, and that the paged form loads and sums as the contiguous one"
    )
    console.print(Text(verdict, style="bold red" if broken else "bold green"))
    return bool(broken)


def _print_lookups(found: Mapping[str, Lookups]) -> bool:
    """Whether a kernel looks up more or less than is due."""
    wrong = [
        f"{kernel} looks up the page table {one.found.sum():,} times, {one.due.sum():,} are due; they differ at page "
        f"{int((one.found != one.due).argmax())}"
        for kernel, one in found.items()
        if not one.agree
    ]
    for sentence in wrong:
        console.print(Text(sentence, style="red"))
    if not wrong:
        told = f"GREEN: {', '.join(found)} look up each row once, chunks each key once per tile, counted on the CPU"
        console.print(Text(told, style="bold green"))
    return bool(wrong)
