"""Planted faults of a serve-check: each beside the same run without it, and seen where it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .ground import Ground
from .plan import Request
from .trace import Compared, Trace, compare_traces

Plant: TypeAlias = Callable[[], Trace]
"""Serves a prompt, with a fault or without."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted.

    Attributes:
        words: that tell it.
        expected: the tensor that must differ, or the name of the error that must be raised.
        plant: a run with it.
    """

    words: str
    expected: str
    plant: Plant


@dataclass(frozen=True, kw_only=True)
class Control:
    """What came of a planted fault.

    Attributes:
        fault: in words.
        expected: the tensor that must differ, or the name of the error that must be raised.
        seen: the tensors that differ, the first first, or the name of the error that was raised.
        text: whether the generated text differs too.
        problem: why it does not count; "" where it does.
    """

    fault: str
    expected: str
    seen: tuple[str, ...] = ()
    text: bool = False
    problem: str = ""

    @property
    def green(self) -> bool:
        """Whether it was seen where it must be."""
        return self.expected in self.seen and not self.problem


def judge(ground: Ground, request: Request, twin: Plant, faults: Sequence[Fault]) -> Iterator[Control]:
    """Plant faults one by one; none counts unless the same run without it, the twin, is equal to the plain one."""
    try:
        found = _compared(ground, request, twin)
        problem = f"without the fault: {found.differences[0]}" if found.differences else ""
    except Exception as error:  # whatever it is, a fault would not be what makes the difference
        problem = f"without the fault: {type(error).__name__}: {error}"
    for fault in faults:
        if problem:
            yield Control(fault=fault.words, expected=fault.expected, problem=problem)
        else:
            yield _planted(ground, request, fault)


def _planted(ground: Ground, request: Request, fault: Fault) -> Control:
    try:
        found = _compared(ground, request, fault.plant)
    except Exception as error:
        seen = type(error).__name__
        problem = "" if seen == fault.expected else f"{seen}: {error}"
        return Control(fault=fault.words, expected=fault.expected, seen=(seen,), problem=problem)
    problem = "" if fault.expected in found.tensors else f"seen in {', '.join(found.tensors) or 'nothing'}"
    return Control(
        fault=fault.words, expected=fault.expected, seen=found.tensors, text=found.tokens_differ, problem=problem
    )


def _compared(ground: Ground, request: Request, plant: Plant) -> Compared:
    return compare_traces(plant(), ground.wants[request.name], tokens=request.end)
