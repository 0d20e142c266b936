"""Arguments of a kernel, checked against its parameters and packed as the compiled code takes them."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.arrays import Place, require_place
from .backend import Argument, Parameter, Pointer

_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


class Signature:
    """The parameters of one kernel.

    Args:
        entry: the kernel's name, for messages.
        place: where its pointers must point.

    Attributes:
        offsets: of each parameter in the packed bytes.
    """

    def __init__(self, entry: str, parameters: Sequence[Parameter], place: Place) -> None:
        self.entry = entry
        self.parameters = tuple(parameters)
        self.place = place
        offsets: list[int] = []
        layout, end = "=", 0
        for parameter in self.parameters:
            start = -(-end // parameter.align) * parameter.align
            layout += f"{start - end}x{parameter.size}s"
            offsets.append(start)
            end = start + parameter.size
        self.offsets = tuple(offsets)
        self._layout = struct.Struct(layout)

    def pack(self, args: Sequence[Argument]) -> bytes:
        """The arguments as bytes, each at its offset.

        Raises:
            TypeError: an argument is not of its parameter's type, or points to the wrong kind of memory.
            ValueError: a pointer lies outside its array, or its array on another device.
        """
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.entry} takes {len(self.parameters)} arguments, not {len(args)}")
        return self._layout.pack(*map(self._value, range(len(args)), args, self.parameters))

    def _value(self, i: int, argument: Argument, parameter: Parameter) -> bytes:
        if type(argument) is Pointer and "p" in parameter.kinds:
            return self._address(i, argument).to_bytes(_POINTER_BYTES, sys.byteorder)
        if isinstance(argument, np.generic) and argument.dtype.kind in parameter.kinds:
            raw = argument.data.tobytes()
        elif isinstance(argument, ctypes.Structure) and "s" in parameter.kinds:
            raw = bytes(argument)
        else:
            raw = b""
        if len(raw) == parameter.size:
            return raw
        raise TypeError(f"{self.entry}: argument {i} is {_describe(argument)}; the parameter is {_expected(parameter)}")

    def _address(self, i: int, pointer: Pointer) -> int:
        if pointer.array is None:
            return 0
        if type(pointer.array) is np.ndarray and self.place.device is None:  # most of a launch's cost is here
            size, itemsize, address = pointer.array.size, pointer.array.itemsize, host_address(pointer.array)
        else:
            facts = require_place(f"{self.entry}: argument {i}", pointer.array, self.place)
            size, itemsize, address = math.prod(facts.shape), facts.dtype.itemsize, facts.address
        if not 0 <= pointer.offset <= size:
            raise ValueError(f"{self.entry}: argument {i} points to element {pointer.offset} of an array of {size}")
        return address + int(pointer.offset) * itemsize


def host_address(array: npt.NDArray[Any]) -> int:
    """Address of a NumPy array's first element, in half the time that `__array_interface__` takes."""
    capsule = array.__array_struct__
    return ctypes.c_size_t.from_address(_capsule_pointer(capsule, None) + _DATA).value


class _ArrayInterface(ctypes.Structure):
    """PyArrayInterface: https://numpy.org/doc/stable/reference/arrays.interface.html#c-struct-access."""

    _fields_ = (
        ("two", ctypes.c_int),
        ("nd", ctypes.c_int),
        ("typekind", ctypes.c_char),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("descr", ctypes.c_void_p),
    )


_DATA = _ArrayInterface.data.offset
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _describe(argument: object) -> str:
    if isinstance(argument, np.generic):
        return f"a NumPy {argument.dtype}"
    if isinstance(argument, ctypes.Structure):
        return f"a structure {type(argument).__name__} of {ctypes.sizeof(argument)} bytes"
    return f"a {type(argument).__name__}"


def _expected(parameter: Parameter) -> str:
    if parameter.kinds == "s":
        return f"a structure of {parameter.size} bytes: give a ctypes.Structure of that size"
    bits = 8 * parameter.size
    names = {"i": f"numpy.int{bits}", "u": f"numpy.uint{bits}", "f": f"numpy.float{bits}", "b": "numpy.bool_"}
    given = [names[kind] for kind in parameter.kinds if kind in names]
    what = ["a number"] if given else []
    if "p" in parameter.kinds:
        what.insert(0, "a pointer")
        given.insert(0, "Pointer(array)")
    return f"{' or '.join(what)}: give {' or '.join(given)}"
