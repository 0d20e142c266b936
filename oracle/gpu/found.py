"""What a step of `kvproof gpu-check` is given, and what it gives: its time, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
"""The checkout, where tests and fixtures lie."""

SAVE_EVERY_S = 5.0

Verdict = Literal["green", "red", "skipped", "cut"]
"""Of a step: "cut" where its time was up before its end, and nothing red was found until then."""


class TimeUpError(Exception):
    """A step's time is up."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a step found.

    Attributes:
        verdict: of the step.
        reason: in words, in one line.
        result: everything else, for JSON.
    """

    verdict: Verdict
    reason: str
    result: Mapping[str, Any] = field(default_factory=dict)


class Clock:
    """The time that a step has, and the file that it tells its progress to.

    Args:
        seconds: until the time is up.
        save: takes what was found so far.
    """

    def __init__(self, seconds: float, save: Callable[[Found], None] = lambda found: None) -> None:
        self._end = time.monotonic() + seconds
        self._save = save
        self._saved = time.monotonic()

    def left(self) -> float:
        """Seconds until the time is up, negative after it."""
        return self._end - time.monotonic()

    def save(self, result: Mapping[str, Any], *, now: bool = False) -> None:
        """Keep what was found so far, but not too often; raise TimeUpError where the time is up."""
        if now or time.monotonic() - self._saved > SAVE_EVERY_S:
            self._saved = time.monotonic()
            self._save(Found(verdict="cut", reason="its time was up before its end", result=result))
        if self.left() <= 0:
            raise TimeUpError
