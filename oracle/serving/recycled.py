"""Memory that is handed on as CuPy hands it on: at once, to the next request like it on the same queue.

That is safe among the tasks of one queue, which run in order. Whoever lets go of an array that another queue has still
to read or write is found out, because somebody else's values stand there by then.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_UNIT = 512
"""Sizes are rounded up to as many bytes, so that arrays of similar shapes follow each other in one place."""


class _Loan:
    """What all views of an array keep alive; its block is free once it is gone."""

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__


class _Address:
    """An array's memory, which this does not keep."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.__array_interface__ = array.__array_interface__


class RecycledMemory:
    """Arrays of several queues. What was lent is never given back to the system, so that late tasks find memory."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[npt.NDArray[np.uint8]]] = {}

    def empty(self, queue: int, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array, holding what stands there."""
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        size = math.prod(extents) * np.dtype(dtype).itemsize
        if not size:
            return np.empty(extents, dtype)
        units = -(-size // _UNIT)
        # Memory of a kind stays of that kind: what reads too early finds numbers, which are seldom a crash.
        blocks = self._free.setdefault((queue, units, np.dtype(dtype), len(extents)), [])
        block = blocks.pop() if blocks else np.zeros(units * _UNIT, np.uint8)
        loan = _Loan(block)
        weakref.finalize(loan, blocks.append, block).atexit = False
        return np.asarray(loan)[:size].view(dtype).reshape(extents)


def is_lent(array: object) -> bool:
    """Whether an array lies in recycled memory."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, _Loan)


def by_address(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Where an array lies, as a queued task knows it: of recycled memory a view that does not keep it."""
    if not is_lent(array):
        return array
    return np.asarray(_Address(array)).view(array.dtype)
