"""`kvproof fixtures digests`: a short digest of the bits that each kernel gives, kept where a diff shows it.

Each case of `kvproof check` is run contiguously, and each kernel's outputs are hashed. The bits depend on no compiler,
flag, thread order or CPU (SPEC section 5), so a recorded digest changes with the arithmetic alone, or with the inputs,
which have a digest of their own. docs/digests.md says when to record anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from ..reference.geometry import Geometry, Weights
from ..reference.layout import PARTS
from .cases import CHECK_LAYERS, CaseData, cases, fill
from .operations import OPERATIONS, Array, Kernels, calls_of, close_scores
from .peer import FixtureError
from .report import write_json
from .scene import Workspace, contiguous, with_pooled

FORMAT = "kvproof digests"
VERSION = 1

SEED = 0
"""Of the data; recorded digests are of this one."""

LAYER = CHECK_LAYERS - 1
"""The layer that the kernels are run on."""

INPUTS = "inputs"
"""What stands in a kernel's place for the data of a case."""

TAKES: dict[str, tuple[str, ...]] = {
    "prep": (),
    "pool": (),  # prep stores the indexer keys as they are, so they are inputs
    "scores": ("prep", "pool"),
    "select": ("scores",),
    "chunks": ("prep", "select"),
    "chunks_ahead": ("prep", "select"),
    "merge": ("chunks",),
    "gate": ("merge",),
    "dense": ("prep",),
    "dense_ahead": ("prep",),
    "select_close": (),
}
"""Kernels whose results, handed over or stored, each is given; all are given the inputs."""

_HEX = 16
_DIGEST = re.compile(rf"[0-9a-f]{{{_HEX}}}")

ByCase = Mapping[str, str]
"""A digest for each case: the first 16 hexadecimal digits of a SHA-256."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """The digests at one geometry.

    Attributes:
        inputs: of what each case gives: weights, history, projection, rotary positions.
        kernels: by kernel, of its outputs from those inputs.
    """

    inputs: ByCase
    kernels: Mapping[str, ByCase]

    @property
    def by_name(self) -> dict[str, ByCase]:
        """Inputs and kernels alike."""
        return {INPUTS: self.inputs, **self.kernels}

    def whole(self, name: str) -> str:
        """One digest of a kernel, or of the inputs, over all cases."""
        found = sorted(self.by_name[name].items())
        return _short(hashlib.sha256("".join(f"{case} {digest}\n" for case, digest in found).encode()))

    def as_json(self) -> dict[str, Any]:
        """For a file, sorted by name."""
        kernels = {name: dict(sorted(self.kernels[name].items())) for name in sorted(self.kernels)}
        return {"inputs": dict(sorted(self.inputs.items())), "kernels": kernels}


State = Literal["same", "CHANGED", "other inputs", "not recorded", "gone"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one kernel's digests compare with the recorded ones.

    Attributes:
        geometry, kernel: which; kernel is "inputs" for the data.
        state: "CHANGED": other bits from the same inputs; "other inputs": other bits, but it was given others;
            "gone": recorded, but not run any more.
        cases: of this state.
    """

    geometry: str
    kernel: str
    state: State
    cases: tuple[str, ...]

    def __str__(self) -> str:
        drawn = self.kernel == INPUTS and self.state == "CHANGED"
        what = _OTHER_DATA if drawn else _MEANING[self.state]
        return f"{self.kernel} at {self.geometry}, case {', '.join(self.cases)}: {what}"


_MEANING: dict[State, str] = {
    "same": "as recorded",
    "CHANGED": "other bits from the same inputs, so its arithmetic changed",
    "other inputs": "other bits, but it was given other inputs than those recorded",
    "not recorded": "nothing is recorded",
    "gone": "recorded, but not run any more",
}
_OTHER_DATA = (
    f"other data than recorded: the cases changed, or NumPy {np.__version__} draws them otherwise on this machine; "
    "this alone says nothing about a kernel"
)


def digests(
    geometry: Geometry,
    kernels: Kernels,
    *,
    before: Kernels | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Digests:
    """Run every kernel over every case of `kvproof check`, contiguously, and hash what it gives.

    Args:
        geometry: with the layers of a checked arena (`cases.at_check`).
        kernels: whose bits are hashed.
        before: whose results each kernel is given, so that a change of one does not reach the next; the hashed
            kernels' own when None.
        progress: called with each case, before it is run.
    """
    inputs: dict[str, str] = {}
    found: dict[str, dict[str, str]] = {operation.name: {} for operation in OPERATIONS}
    with threadpool_limits(1):
        for case in cases(geometry):
            progress(case.name)
            data = with_pooled(fill(geometry, case, seed=SEED))
            inputs[case.name] = _of_inputs(data)
            for name, digest in _of_kernels(data, kernels, before).items():
                found[name][case.name] = digest
    return Digests(inputs=inputs, kernels=found)


def _of_inputs(data: CaseData) -> str:
    digest = hashlib.sha256(repr(asdict(data.geometry)).encode())
    for field in fields(Weights):
        _add(digest, field.name, getattr(data.weights, field.name))
    for stream, call in zip(data.streams, calls_of(data), strict=True):
        digest.update(repr((call.pos0, call.dense_rows, call.rope.mode, call.rope.delta)).encode())
        given = {"projection": stream.projection, "triples": stream.rope.triples, "close": close_scores(call)}
        given |= {part: stream.history[LAYER][part] for part in PARTS}
        for name, array in given.items():
            _add(digest, f"stream{call.stream}.{name}", array)
    return _short(digest)


def _of_kernels(data: CaseData, kernels: Kernels, before: Kernels | None) -> dict[str, str]:
    scene = contiguous(data, Workspace())
    running = {operation.name: hashlib.sha256() for operation in OPERATIONS}
    for call in calls_of(data):
        cache = scene.cache(call.stream, LAYER)
        given: dict[str, Array] = {}
        for operation in OPERATIONS:
            outputs = operation.run(kernels, call, given, cache, cache)
            for name, array in outputs.items():
                tensor = name.removeprefix(f"{operation.name}.")  # chunks and chunks_ahead must look alike
                _add(running[operation.name], f"stream{call.stream}.{tensor}", array)
            if before is not None:  # after the hashed kernel, so that what is stored is theirs too
                outputs = operation.run(before, call, given, cache, cache)
            given.update(outputs)
    return {name: _short(digest) for name, digest in running.items()}


def _add(digest: Any, name: str, array: Array) -> None:
    # What a kernel leaves out holds what the host put there: the NaN 0x7fc00000, or -1.
    digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
    digest.update(array.tobytes())


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:_HEX])


def compare(geometry: str, recorded: Digests | None, found: Digests) -> tuple[Comparison, ...]:
    """Hold a geometry's digests against the recorded ones: one comparison for each kernel and state.

    Args:
        recorded: None where the geometry is not recorded at all.
    """
    known = {} if recorded is None else recorded.by_name
    compared = []
    for kernel in dict.fromkeys((*found.by_name, *known)):
        by_state: dict[State, list[str]] = {}
        for case in dict.fromkeys((*found.by_name.get(kernel, {}), *known.get(kernel, {}))):
            by_state.setdefault(_state(kernel, case, known, found.by_name), []).append(case)
        compared += [
            Comparison(geometry=geometry, kernel=kernel, state=state, cases=tuple(names))
            for state, names in by_state.items()
        ]
    return tuple(compared)


def _state(kernel: str, case: str, known: Mapping[str, ByCase], found: Mapping[str, ByCase]) -> State:
    def same(name: str) -> bool:
        return known.get(name, {}).get(case) == found.get(name, {}).get(case)

    if case not in found.get(kernel, {}):
        return "gone"
    if case not in known.get(kernel, {}):
        return "not recorded"
    if same(kernel):
        return "same"
    takes = () if kernel == INPUTS else (INPUTS, *TAKES[kernel])
    return "CHANGED" if all(map(same, takes)) else "other inputs"


def digests_json(found: Mapping[str, Digests], compared: Sequence[Comparison]) -> dict[str, Any]:
    """For machines: the digests by geometry, and how each compares."""
    return {
        "format": "kvproof fixtures digests",
        "version": VERSION,
        "green": all(one.state == "same" for one in compared),
        "digests": {name: one.as_json() for name, one in found.items()},
        "compared": [asdict(one) | {"message": str(one)} for one in compared],
    }


def write(path: Path, recorded: Mapping[str, Digests]) -> None:
    """Write digests by geometry, sorted, whole or not at all.

    Raises:
        FixtureError: the folder is missing; nothing was written.
    """
    _require_folder(path)
    geometries = {name: recorded[name].as_json() for name in sorted(recorded)}
    write_json(path, {"format": FORMAT, "version": VERSION, "geometries": geometries})


def read(path: Path, *, new: bool = False) -> dict[str, Digests]:
    """The recorded digests, by geometry.

    Args:
        new: a file that is missing from its folder records nothing yet.

    Raises:
        FixtureError: the file is missing, damaged, of another format or version; the message says where.
    """
    if new and not path.exists():
        _require_folder(path)
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FixtureError(
            f"{path}: there is no such file; run where it is, name it with --file, or record it with --update"
        ) from None
    except (ValueError, OSError) as error:
        raise FixtureError(f"{path}: not a readable JSON file: {error}") from None
    name = found.get("format") if isinstance(found, dict) else None
    if name != FORMAT:
        raise FixtureError(f"{path}: its format is {name!r}; it must be {FORMAT!r}, as `fixtures digests` writes it")
    if found.get("version") != VERSION:
        raise FixtureError(
            f"{path}: is of version {found.get('version')!r}, and this kvproof reads version {VERSION}; "
            "use the kvproof that wrote it, or delete it and record anew with --update"
        )
    geometries = _object(f"{path}: geometries", found.get("geometries"))
    return {name: _digests_from(f"{path}: geometries.{name}", value) for name, value in geometries.items()}


def _require_folder(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FixtureError(f"{path}: there is no folder {folder}; make it first")


def _digests_from(where: str, value: Any) -> Digests:
    entry = _object(where, value)
    if entry.keys() != {"inputs", "kernels"}:
        raise FixtureError(f"{where} has {', '.join(entry) or 'nothing'}; it must have inputs and kernels")
    kernels = _object(f"{where}.kernels", entry["kernels"])
    return Digests(
        inputs=_by_case(f"{where}.inputs", entry["inputs"]),
        kernels={name: _by_case(f"{where}.kernels.{name}", cases_of) for name, cases_of in kernels.items()},
    )


def _by_case(where: str, value: Any) -> ByCase:
    entry = _object(where, value)
    for case, digest in entry.items():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise FixtureError(f"{where}.{case} is {digest!r}; it must be {_HEX} hexadecimal digits")
    return entry


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FixtureError(f"{where} is {value!r:.80}; it must be an object")
    return value
