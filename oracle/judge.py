"""Judging a plain paged attention kernel of anyone's on one case, gate by gate.

bits      the same bits with the pages in order, with each stream alone, and when called again
bound     within the error bound of the float64 reference
memory    no argument changed; nothing read that is not the stream's (poisoned rows change no bit)
controls  a planted row or a swapped table, proved effective on the reference, must change the result
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .arithmetic import FP32, Arithmetic
from .attention import Array, AttentionCase
from .attention_controls import effective_control
from .compare import Site, compare_bits, compare_bound
from .diagnosis import diagnose
from .report import write_json

Kernel = Callable[..., Any]

FORMAT = "kvproof failure"
WINDOW_FORMAT = "kvproof window failure"
FAILURES = "KVPROOF_FAILURES"
"""Environment variable that moves the folder of saved failures."""

UNEXPLAINED = "no substitution of pages or rows that was tried explains it"
READ_RIGHT = (
    "every row is within its bound, so the right keys were read: the order of the sums depends on the pages, the "
    "neighbours or the run"
)
READ_WRONG = "a row that may not be read was read: what it holds changes the result"
SHOWN_ELEMENTS = 5

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
    given, arenas = case.build()
    watched = {**given, **arenas}
    before = {name: array.copy() for name, array in watched.items()}
    got = run(given)
    for name, array in before.items():
        if not np.array_equal(_words(array), _words(watched[name])):
            run.broken(
                "memory", f"the kernel changed its argument {name}", got, "the kernel wrote to what it only reads"
            )
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
        control = effective_control(self.case, bound, self.arithmetic)
        if control is None:
            return
        try:
            with np.errstate(all="ignore"):
                changed = self(control.arguments)
        except Exception:  # a kernel that refuses wrong arguments has seen them
            return
        if (bound.fraction(changed) <= 1).all():
            difference = f"{control.name} changes the reference's answer, but not the kernel's"
            self.broken(
                "controls",
                difference,
                got,
                f"the result may not follow from the {control.changes}: this control left it as it was",
            )

    def broken(self, gate: str, difference: str, got: Array, diagnosis: str | None = None) -> None:
        __tracebackhide__ = True
        case, shown = self._clear(got)
        diagnosis = diagnosis or diagnose(case, shown, self.arithmetic)
        if diagnosis is None:
            diagnosis = READ_RIGHT if gate == "bits" else READ_WRONG if gate == "memory" else UNEXPLAINED
        failure = SavedFailure(
            gate=gate, difference=difference, diagnosis=diagnosis, case=case, got=shown, arithmetic=self.arithmetic
        )
        replay = save_failure(failure) if self.save else None
        shown_elements = wrong_elements(case, shown, self.arithmetic) if diagnosis == UNEXPLAINED else []
        lines = (f"{gate}: {difference}", *shown_elements, f"case: {self.case}")
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
    return np.array(result, order="C", copy=True)  # the kernel may use its buffer again


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedFailure:
    """A broken gate as it is kept: the case, the kernel's result, and what was said of it."""

    gate: str
    difference: str
    diagnosis: str | None
    case: AttentionCase
    got: Array
    arithmetic: Arithmetic


def wrong_elements(case: AttentionCase, got: Array, arithmetic: Arithmetic) -> list[str]:
    """The first elements outside their bounds, in words."""
    bound = case.bound(arithmetic)
    found = np.argwhere(bound.fraction(got) > 1)[:SHOWN_ELEMENTS]
    return [
        f"  row {r}, head {h}, element {e}: got {float(got[r, h, e]):.6g}, allowed is {bound.low[r, h, e]:.6g} to "
        f"{bound.high[r, h, e]:.6g}"
        for r, h, e in found
    ]


def failure_file() -> Path:
    """Where the failure of the running test is kept: one file per test, whatever folder it lies in."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "kernel").removesuffix(" (call)")
    name = re.sub(r"[^\w.-]+", "-", test.rsplit("::", 1)[-1]).strip("-")[:80]
    digest = hashlib.sha256(test.encode()).hexdigest()[:8]
    return Path(os.environ.get(FAILURES) or ".kvproof/failures") / f"{name}-{digest}.json"


def keep(values: dict[str, Any]) -> str:
    """Write a failure; returns the command that explains it, or why it could not be kept."""
    file = failure_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, values)
    except OSError as error:
        return f"not saved: {error}; set ${FAILURES} to a folder that can be written"
    return f"kvproof explain {shlex.quote(str(file))}"


def save_failure(failure: SavedFailure) -> str:
    """Keep a failure, one per test; returns the command that explains it, or why it could not be kept."""
    bits = base64.b64encode(np.ascontiguousarray(failure.got).view(np.uint8).tobytes()).decode()
    return keep(
        {
            "format": FORMAT,
            "version": 1,
            "gate": failure.gate,
            "difference": failure.difference,
            "diagnosis": failure.diagnosis,
            "case": failure.case.as_json(),
            "arithmetic": asdict(failure.arithmetic),
            "result": bits,
        }
    )


def load_failure(file: Path) -> SavedFailure:
    """Read a saved failure.

    Raises:
        ValueError: the file is no such failure, or of a version that this kvproof does not read.
    """
    try:
        saved = json.loads(file.read_text())
        if saved["format"] != FORMAT or saved["version"] != 1:
            raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
        case = AttentionCase.from_json(saved["case"])
        q = case.arguments()["q"]
        return SavedFailure(
            gate=saved["gate"],
            difference=saved["difference"],
            diagnosis=saved["diagnosis"],
            case=case,
            arithmetic=Arithmetic(**saved["arithmetic"]),
            got=np.frombuffer(base64.b64decode(saved["result"]), q.dtype).reshape(q.shape),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a failure that kvproof saved: {error}") from None


def load_window_failure(file: Path) -> dict[str, Any] | None:
    """A saved failure of the block-sparse form as it was written; None where the file is something else."""
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(saved, dict) and saved.get("format") == WINDOW_FORMAT and saved.get("version") == 1
    return saved if whole else None


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
