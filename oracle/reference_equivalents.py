"""Mutants of the reference that change no result, and why: each was looked at."""

from __future__ import annotations

from collections.abc import Mapping

from .equivalent_mutants import Key

EQUIVALENT: Mapping[str, tuple[Key, ...]] = {}
"""Reasons, each with the mutants that it holds for."""

_BY_KEY = {key: reason for reason, keys in EQUIVALENT.items() for key in keys}


def reason_of(file: str, text: str, old: str, new: str, nth: int) -> str | None:
    """Why this change of a source line changes nothing; None where a test should see it."""
    return _BY_KEY.get((file, text, old, new, nth))
