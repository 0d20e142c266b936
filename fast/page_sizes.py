"""Sizes of a page pool's arena, and the page test that overrides them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..reference.geometry import Geometry
from ..reference.layout import Layout

PAGE_TEST = "KVPROOF_PAGE_TEST"
"""Environment variable of the page test: positions of a page."""


def arena_layout(geometry: Geometry, *, streams: int, context: int, page_size: int | None = None) -> Layout:
    """The layout of a pool's arena, for these arguments of `PagePool`; $KVPROOF_PAGE_TEST has its say.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is out of its range, or $KVPROOF_PAGE_TEST is.
    """
    streams, context = as_count("streams", streams, least=1), as_count("context", context, least=1)
    test = page_test_size()
    if test is not None:
        size = _require_page_test(geometry, test)
    elif page_size is not None:
        size = as_count("page_size", page_size, least=1)
    else:
        size = Layout.contiguous(geometry, context).page_size
    return Layout(geometry=geometry, page_size=size, pages=streams * -(-context // size))


def as_count(name: str, value: Any, *, least: int = 0) -> int:
    """A size as Python's own integer, which does not wrap around.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less than `least`.
    """
    count = as_integer(name, value)
    if count < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
    return count


def as_integer(name: str, value: Any) -> int:
    """An integer as Python's own.

    Raises:
        TypeError: it is none; a bool is none either.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    return int(value)


def page_test_size() -> int | None:
    """Positions of a page in the page test; None where it is off.

    Raises:
        ValueError: $KVPROOF_PAGE_TEST is no number above 0.
    """
    given = os.environ.get(PAGE_TEST, "")
    if not given:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"${PAGE_TEST} is {given!r}; it must be the positions of a page, a multiple of the block")
    return int(given)


def _require_page_test(geometry: Geometry, size: int) -> int:
    if size % geometry.block:
        raise ValueError(
            f"${PAGE_TEST} is {size}, which does not hold whole blocks; give a multiple of the block, {geometry.block}"
        )
    return size
