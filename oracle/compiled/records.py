"""Resource records (gate 5): what every kernel takes on every SM, by toolkit, and what changed against the record.

A record is a reviewable JSON file of one toolkit under fast/cuda/records/. A kernel or SM that has none, another count
of registers, shared memory or barriers, other options of the compiler, and any local memory at all is red. Another code
size, or another build of the compiler, is told, no more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...fast.engine import GPU_THREADS
from ...fast.sources import FAMILIES, KernelSources, staged_bytes
from ...reference.geometry import Geometry
from .cubin import Resources
from .occupancy import LIMITS, Occupancy, occupancy
from .toolkits import Built, Job, Toolkit, build, each

SMS = tuple(LIMITS)
"""The architectures that have records."""

FORMAT = "kvproof records"
VERSION = 1

TOLD = ("code_bytes", "build")
"""Fields whose change is told, and not red: of `Resources`, and the compiler's exact build."""

FORBIDDEN = ("stack_bytes", "local_bytes", "spill_bytes")
"""Fields that must be 0, whatever the record says: the kernels keep everything in registers and shared memory."""

Kernels = Mapping[str, Mapping[str, Resources]]
"""Resources by kernel and SM."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one toolkit makes of the kernels at one geometry.

    Attributes:
        toolkit: its name, such as "nvrtc-12.9".
        build: its exact version, such as "V12.9.86".
        options: that it compiled with.
        geometry: its name.
        threads: of a block.
        kernels: what each takes.
    """

    toolkit: str
    build: str
    options: tuple[str, ...]
    geometry: str
    threads: int
    kernels: Kernels


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is not as recorded, or that no record allows.

    Attributes:
        toolkit, kernel, sm: where; `kernel` and `sm` are "" where the whole record is meant.
        field: of `Resources`, or "threads", "options" or "build" of the record; "" where the kernel or SM
            itself is missing.
        recorded, found: its values; None where there is none.
        red: whether it fails the check.
        message: what it is, in a sentence.
    """

    toolkit: str
    kernel: str
    sm: str
    field: str
    recorded: int | None
    found: int | None
    red: bool
    message: str


class RecordError(ValueError):
    """A record file is not one; the message names it."""


def jobs_of(toolkit: Toolkit, geometry: Geometry, sms: Sequence[str]) -> list[Job]:
    """Every family for every SM, as the kernels are launched on a GPU."""
    sources = [KernelSources().family(name, geometry, threads=GPU_THREADS) for name in FAMILIES]
    return [Job(toolkit=toolkit, source=source, arch=sm) for source in sources for sm in sms]


def measure(
    toolkit: Toolkit, geometry: Geometry, sms: Sequence[str] = SMS, progress: Callable[[str], None] | None = None
) -> Measured:
    """Compile the packaged kernels, and read what they take.

    Args:
        sms: some of `SMS`.
        progress: told each compilation's name when it is there.

    Raises:
        ValueError: an SM is not one of `SMS`.
        CompileError: the compiler refused a source.
        CubinError: its machine code could not be read.
    """
    require_sms(sms)
    jobs = jobs_of(toolkit, geometry, sms)
    built = each(build, jobs, progress)
    kernels: dict[str, dict[str, Resources]] = {}
    for job, made in zip(jobs, built, strict=True):
        for name, kernel in made.kernels.items():
            kernels.setdefault(name, {})[job.arch] = kernel.resources
    return Measured(
        toolkit=toolkit.name,
        build=build_of(built[0]),
        options=toolkit.options,
        geometry=geometry.name,
        threads=GPU_THREADS,
        kernels=kernels,
    )


def require_sms(sms: Sequence[str]) -> None:
    """Raise ValueError unless these SMs have records."""
    for sm in sms:
        if sm not in SMS:
            raise ValueError(f"SM {sm!r} has no record; it must be one of {', '.join(SMS)}")


def build_of(built: Built) -> str:
    """A compiler's exact version, from the head of its PTX."""
    found = re.search(r"release [\d.]+, (V[\d.]+)", built.ptx)
    return found[1] if found else "unknown"


def folder() -> Path:
    """Where the records lie in the package."""
    return Path(str(files("kvproof.fast"))) / "cuda" / "records"


def recorded_toolkits(place: Path | None = None) -> list[str]:
    """The names of the toolkits that have a file of records, such as "nvrtc-12.9"."""
    return sorted(file.stem for kind in ("nvrtc", "nvcc") for file in (place or folder()).glob(f"{kind}-*.json"))


def read(toolkit: str, geometry: str, place: Path | None = None) -> Measured | None:
    """The record of a toolkit at a geometry; None where there is none.

    Args:
        place: the folder of records; the package's when None.

    Raises:
        RecordError: the file is no record.
    """
    file = (place or folder()) / f"{toolkit}.json"
    if not file.exists():
        return None
    try:
        raw = json.loads(file.read_text())
        if (raw["format"], raw["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
        at = raw["geometries"].get(geometry)
        return None if at is None else _measured(raw, geometry, at)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} is no record: {error!r}; write it again with `kvproof records update`") from None


def _measured(raw: dict[str, Any], geometry: str, at: dict[str, Any]) -> Measured:
    return Measured(
        toolkit=raw["toolkit"],
        build=raw["build"],
        options=tuple(raw["options"]),
        geometry=geometry,
        threads=at["threads"],
        kernels={name: {sm: Resources(**one) for sm, one in sms.items()} for name, sms in at["kernels"].items()},
    )


def write(measured: Measured, place: Path | None = None) -> Path:
    """Write a record, whole or not at all, beside those of the toolkit's other geometries; returns its file."""
    file = (place or folder()) / f"{measured.toolkit}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    others = _others(file, measured)
    at = {"threads": measured.threads, "kernels": _sorted_kernels(measured.kernels)}
    record = {
        "format": FORMAT,
        "version": VERSION,
        "toolkit": measured.toolkit,
        "build": measured.build,
        "options": list(measured.options),
        "geometries": dict(sorted({**others, measured.geometry: at}.items())),
    }
    draft = file.with_suffix(f".{os.getpid()}.part")
    try:
        draft.write_text(_text(record))
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def _others(file: Path, measured: Measured) -> dict[str, Any]:
    """What the file holds of other geometries, where it was measured with the same build; nothing of a damaged file."""
    try:
        raw = json.loads(file.read_text())
        if (raw["build"], raw["options"]) != (measured.build, list(measured.options)):
            return {}
        return {name: at for name, at in raw["geometries"].items() if name != measured.geometry}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sorted_kernels(kernels: Kernels) -> dict[str, dict[str, dict[str, int]]]:
    return {name: {sm: asdict(kernels[name][sm]) for sm in SMS if sm in kernels[name]} for name in sorted(kernels)}


def _text(record: dict[str, Any]) -> str:
    """JSON with one SM to a line, so that a difference reads well."""
    text = json.dumps(record, indent=2)
    return re.sub(r'(\{)\n\s+("registers"[^}]*?)\n\s+\}', lambda m: f"{m[1]}{' '.join(m[2].split())}}}", text) + "\n"


def compare(recorded: Measured | None, found: Measured, sms: Sequence[str] = SMS) -> list[Change]:
    """Everything that differs between a record and what was found at these SMs, and all local memory."""
    if recorded is None:
        return [_no_record(found), *_forbidden(found)]
    changes = [*_missing(recorded, found, sms), *_forbidden(found)]
    for name in sorted(set(recorded.kernels) & set(found.kernels)):
        for sm in sms:
            before, now = recorded.kernels[name].get(sm), found.kernels[name].get(sm)
            if before is not None and now is not None:
                changes += _changed(recorded, found, name, sm, before, now)
    if recorded.threads != found.threads:
        changes.append(_threads(recorded, found))
    if recorded.options != found.options:
        changes.append(_options(recorded, found))
    if recorded.build != found.build:
        changes.append(_build(recorded, found))
    return changes


def _no_record(found: Measured) -> Change:
    message = f"no record at {found.geometry}: run `kvproof records update`"
    return _change(found, "", "", "", None, None, message)


def _threads(recorded: Measured, found: Measured) -> Change:
    message = f"recorded with {recorded.threads} threads to a block, found {found.threads}"
    return _change(found, "", "", "threads", recorded.threads, found.threads, message)


def _options(recorded: Measured, found: Measured) -> Change:
    message = f"recorded with the options {' '.join(recorded.options)}, found with {' '.join(found.options)}"
    return _change(found, "", "", "options", None, None, message)


def _build(recorded: Measured, found: Measured) -> Change:
    message = f"recorded with the build {recorded.build}, found with {found.build}"
    return _change(found, "", "", "build", None, None, message)


def _missing(recorded: Measured, found: Measured, sms: Sequence[str]) -> Iterator[Change]:
    for name in sorted(set(recorded.kernels) | set(found.kernels)):
        for sm in sms:
            before, now = recorded.kernels.get(name, {}).get(sm), found.kernels.get(name, {}).get(sm)
            if before is None and now is not None:
                yield _change(found, name, sm, "", None, None, f"{name} on {sm} has no record")
            elif before is not None and now is None:
                yield _change(found, name, sm, "", None, None, f"{name} on {sm} is recorded, but there is none")


def _forbidden(found: Measured) -> Iterator[Change]:
    for name, sms in sorted(found.kernels.items()):
        for sm, one in sms.items():
            for field in FORBIDDEN:
                if value := getattr(one, field):
                    message = f"{name} on {sm} has {value} {_words(field)}; it may have none"
                    yield _change(found, name, sm, field, 0, value, message)


def _changed(
    recorded: Measured, found: Measured, name: str, sm: str, before: Resources, now: Resources
) -> Iterator[Change]:
    built = "" if recorded.build == found.build else f" (recorded with {recorded.build}, found with {found.build})"
    for field in (one.name for one in fields(Resources)):
        old, new = getattr(before, field), getattr(now, field)
        if old != new and not (field in FORBIDDEN and new):
            message = f"{name} on {sm} has {new} {_words(field)}, recorded {old}{built}"
            yield _change(found, name, sm, field, old, new, message)


def _change(
    found: Measured, kernel: str, sm: str, field: str, old: int | None, new: int | None, message: str
) -> Change:
    return Change(
        toolkit=found.toolkit,
        kernel=kernel,
        sm=sm,
        field=field,
        recorded=old,
        found=new,
        red=field not in TOLD,
        message=f"{found.toolkit}: {message}",
    )


def _words(field: str) -> str:
    """A field in words: "shared_bytes" is "bytes of shared memory"."""
    kind, _, unit = field.partition("_")
    if not unit:
        return field
    return {"shared": "bytes of shared memory", "local": "bytes of local memory", "spill": "bytes of spills"}.get(
        kind, f"bytes of {kind}"
    )


def dynamic_shared(kernel: str, geometry: Geometry) -> int:
    """Dynamic shared memory that a kernel is launched with, in bytes."""
    return staged_bytes(geometry) if kernel.startswith("fn_attn_chunks") else 0


def occupancy_of(kernel: str, sm: str, resources: Resources, geometry: Geometry, threads: int) -> Occupancy:
    """How much of an SM a kernel fills, with the dynamic shared memory that it is launched with."""
    shared = resources.shared_bytes + dynamic_shared(kernel, geometry)
    return occupancy(sm, threads=threads, registers=resources.registers, shared_bytes=shared)
