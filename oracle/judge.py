"""Judging a plain paged attention kernel of anyone's on one case, gate by gate.

bits      the same bits with the pages in order, with each stream alone, and when called again
bound     within the error bound of the float64 reference
memory    no argument changed; nothing read that is not the stream's (poisoned rows change no bit)
controls  a planted row or a swapped table, proved effective on the reference, must change the result
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .attention import Array, AttentionCase
from .attention_controls import effective_control
from .bounds import FP32, Arithmetic
from .compare import Site, compare_bits, compare_bound
from .diagnosis import diagnose
from .report import write_json

Kernel = Callable[..., Any]

FAILURES = "KVPROOF_FAILURES"
"""Environment variable that moves the folder of saved failures."""

_AXES = ("row", "head", "element")


class ContractError(AssertionError):
    """A kernel broke the contract.

    Attributes:
        gate: which gate saw it.
        diagnosis: what explains the result, in one sentence, or None.
        replay: the command that explains it again, or None.
    """

    def __init__(self, gate: str, lines: Sequence[str], *, diagnosis: str | None, replay: str | None) -> None:
        self.gate = gate
        self.diagnosis = diagnosis
        self.replay = replay
        told = [f"diagnosis: {diagnosis}"] if diagnosis else []
        again = [f"replay: {replay}"] if replay else []
        super().__init__("\n".join([*lines, *told, *again]))


def judge(
    kernel: Kernel, case: AttentionCase, *, arithmetic: Arithmetic = FP32, batch_bits: bool = True, save: bool = True
) -> float:
    """Hold a kernel to the contract on one case.

    Args:
        kernel: takes the arguments of `oracle.attention`, NumPy arrays; returns the result as a NumPy array or as
            anything with `__dlpack__` or `__array__`.
        arithmetic: what the kernel's arithmetic promises.
        batch_bits: a stream's bits may not depend on its neighbours; False for engines that split work by the batch.
        save: keep a failure in `$KVPROOF_FAILURES` (else `.kvproof/failures`), for `kvproof explain`.

    Returns:
        The largest error as a fraction of its bound, at most 1.

    Raises:
        ContractError: the kernel broke a gate.
        TypeError: the kernel's result is no array of the right dtype and shape.
    """
    __tracebackhide__ = True
    run = _Run(kernel, case, arithmetic, save)
    given = case.arguments()
    before = {name: array.copy() for name, array in given.items()}
    got = run(given)
    for name, array in before.items():
        if not np.array_equal(_words(array), _words(given[name])):
            run.broken("memory", f"the kernel changed its argument {name}", got)
    worst, difference = compare_bound("result", got, case.bound(arithmetic), _AXES, _site(case, 0))
    if difference is not None:
        gate = "bound" if np.isfinite(got.astype(np.float64)).all() or case.fill == "zero" else "memory"
        run.broken(gate, _told(case, str(difference)), got)
    run.control(got)
    run.same("bits", "called again", got, run(case.arguments()))
    run.same("bits", "with its pages in order", got, run(case.contiguous().arguments()))
    if case.fill != "zero":
        run.same("memory", "over zeros where nothing may be read", got, run(replace(case, fill="zero").arguments()))
    if batch_bits and len(case.lengths) > 1:
        start = case.query_start
        for stream in range(len(case.lengths)):
            alone = got.copy()
            alone[start[stream] : start[stream + 1]] = run(case.alone(stream).arguments())
            run.same("bits", f"with stream {stream} alone", got, alone)
    return worst


@dataclass(frozen=True, eq=False)
class _Run:
    kernel: Kernel
    case: AttentionCase
    arithmetic: Arithmetic
    save: bool

    def __call__(self, given: dict[str, Array]) -> Array:
        return as_result(self.kernel(*given.values()), given["q"])

    def same(self, gate: str, what: str, got: Array, want: Array) -> None:
        __tracebackhide__ = True
        difference = compare_bits("result", got, want, _AXES, _site(self.case, 0))
        if difference is not None:
            self.broken(gate, f"{_told(self.case, str(difference))}, where `want` is the kernel itself {what}", got)

    def control(self, got: Array) -> None:
        """One control, proved effective on the reference, must turn the comparison red."""
        __tracebackhide__ = True
        bound = self.case.bound(self.arithmetic)
        control = effective_control(self.case, bound)
        if control is None:
            return
        with np.errstate(all="ignore"):
            changed = self(control.arguments)
        if (bound.fraction(changed) <= 1).all():
            difference = f"{control.name} changes the reference's answer, but not the kernel's"
            self.broken("controls", difference, got, f"the result does not follow from the {control.changes}")

    def broken(self, gate: str, difference: str, got: Array, diagnosis: str | None = None) -> None:
        __tracebackhide__ = True
        case, shown = self._clear(got)
        diagnosis = diagnosis or diagnose(case, shown, self.arithmetic)
        failure = SavedFailure(gate=gate, difference=difference, diagnosis=diagnosis, case=case, got=shown)
        replay = save_failure(failure) if self.save else None
        lines = (f"{gate}: {difference}", f"case: {self.case}")
        raise ContractError(gate, lines, diagnosis=diagnosis, replay=replay)

    def _clear(self, got: Array) -> tuple[AttentionCase, Array]:
        """The case with telling data in the place of poison, and its result: NaN says that it was read, not where."""
        if self.case.fill in ("zero", "other"):
            return self.case, got
        case = replace(self.case, fill="other")
        return case, self(case.arguments())


def as_result(result: Any, q: Array) -> Array:
    """A kernel's result as a NumPy array of q's dtype and shape.

    Raises:
        TypeError: it is something else; the message says what.
    """
    if not isinstance(result, np.ndarray):
        if not hasattr(result, "__dlpack__") and not hasattr(result, "__array__"):
            raise TypeError(f"the kernel returned a {type(result).__name__}; it must return an array")
        result = np.from_dlpack(result) if hasattr(result, "__dlpack__") else np.asarray(result)
    if result.shape != q.shape or result.dtype != q.dtype:
        raise TypeError(
            f"the kernel returned {result.dtype} {list(result.shape)}; it must return {q.dtype} {list(q.shape)}, "
            "rows, query heads and head_dim as in q"
        )
    return np.ascontiguousarray(result)


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedFailure:
    """A broken gate as it is kept: the case, the kernel's result, and what was said of it."""

    gate: str
    difference: str
    diagnosis: str | None
    case: AttentionCase
    got: Array


def save_failure(failure: SavedFailure) -> str | None:
    """Keep a failure, one per test; returns the command that explains it, or None where it cannot be kept."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "kernel").removesuffix(" (call)")
    name = re.sub(r"[^\w.-]+", "-", test.rsplit("/", 1)[-1]).strip("-")
    folder = Path(os.environ.get(FAILURES) or ".kvproof/failures")
    file = folder / f"{name}.json"
    bits = base64.b64encode(np.ascontiguousarray(failure.got).view(np.uint8).tobytes()).decode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            file,
            {
                "format": "kvproof failure",
                "version": 1,
                "gate": failure.gate,
                "difference": failure.difference,
                "diagnosis": failure.diagnosis,
                "case": failure.case.as_json(),
                "result": bits,
            },
        )
    except OSError:
        return None
    return f"kvproof explain {file}"


def load_failure(file: Path) -> SavedFailure:
    """Read a saved failure.

    Raises:
        ValueError: the file is no such failure, or of a version that this kvproof does not read.
    """
    try:
        saved = json.loads(file.read_text())
        if saved["format"] != "kvproof failure" or saved["version"] != 1:
            raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
        case = AttentionCase.from_json(saved["case"])
        q = case.arguments()["q"]
        return SavedFailure(
            gate=saved["gate"],
            difference=saved["difference"],
            diagnosis=saved["diagnosis"],
            case=case,
            got=np.frombuffer(base64.b64decode(saved["result"]), q.dtype).reshape(q.shape),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a failure that kvproof saved: {error}") from None


def _site(case: AttentionCase, stream: int) -> Site:
    return Site(stream=stream, pos0=0)


def _told(case: AttentionCase, difference: str) -> str:
    """The difference with the row's stream and place in it."""
    found = re.search(r"stream 0, row (\d+),(.*?), position \d+", difference)
    if found is None:
        return difference
    stream, row, count = case.rows[int(found[1])]
    place = f"stream {stream}, row {row} of its window ({count} keys),{found[2]}"
    return difference[: found.start()] + place + difference[found.end() :]


def _words(array: Array) -> Array:
    """An array's bits, whatever its strides."""
    return np.ascontiguousarray(array).view(np.uint8)
