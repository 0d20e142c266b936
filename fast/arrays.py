"""Whole arguments and results between the host and a device: every array of a dataclass at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..reference.arrays import describe

T = TypeVar("T")


def map_arrays(value: T, change: Callable[[Any], Any]) -> T:
    """The value with every array in it changed: an array itself, or a dataclass with arrays among its fields."""
    if describe(value) is not None:
        return cast(T, change(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_arrays(item, change) for name, item in old.items()}
    changed = {name: item for name, item in new.items() if item is not old[name]}
    return cast(T, dataclasses.replace(cast(Any, value), **changed)) if changed else value
