"""The launch interface that every backend has.

A kernel family is one `Source`. A backend loads it into a `Module`, whose entries are launched with a grid, a block,
dynamic shared memory and arguments, exactly as the CUDA driver launches them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
"""Dynamic shared memory of a block, in bytes: no GPU has more."""
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)

Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """One family of kernels as text.

    Attributes:
        name: the family; its text is called `<name>.cu` in messages.
        text: CUDA C++. Entries are `extern "C" __global__ void NAME(...)`, their parameters taken by value.
        headers: text by the name that `#include "..."` uses.
        defines: preprocessor definitions; a value of None or "" defines the bare name.
    """

    name: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)
    defines: Mapping[str, int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an element of an array, as an argument of a kernel.

    Attributes:
        array: where it points into; None is the null pointer.
        offset: elements from the array's first.
    """

    array: Any
    offset: int = 0


Argument: TypeAlias = Pointer | np.generic | ctypes.Structure
"""A pointer; a NumPy scalar, whose type is exactly the parameter's; or a structure passed by value."""


class LaunchError(RuntimeError):
    """A kernel failed while it ran.

    Attributes:
        kernel: its entry.
        block: index (x, y, z) of the block that failed, None where none had started.
        thread: index (x, y, z) of a thread to blame, None where the whole block is.
        reason: what it did.
    """

    def __init__(self, kernel: str, block: Dim3 | None, thread: Dim3 | None, reason: str) -> None:
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.reason = reason
        where = f"kernel {kernel}"
        if block is not None:
            where += f", block {block}"
        if thread is not None:
            where += f", thread {thread}"
        super().__init__(f"{where}: {reason}")


class Module(Protocol):
    """A loaded source."""

    @property
    def entries(self) -> tuple[str, ...]:
        """Names that can be launched."""
        ...

    def launch(
        self,
        entry: str,
        *,
        grid: Dim3 | int,
        block: Dim3 | int,
        args: Sequence[Argument],
        shared: int = 0,
    ) -> None:
        """Run an entry over a grid of blocks.

        Args:
            entry: the kernel's name.
            grid: blocks in x, y, z.
            block: threads of a block in x, y, z.
            args: one per parameter.
            shared: dynamic shared memory of each block, in bytes.

        Raises:
            KeyError: there is no such entry.
            TypeError: an argument is not of its parameter's type.
            ValueError: a size is out of range; nothing was launched.
            LaunchError: the kernel failed.
        """
        ...


class Backend(Protocol):
    """Where kernels run."""

    @property
    def name(self) -> str:
        """How `--backend` and messages call it."""
        ...

    def load(self, source: Source) -> Module:
        """Compile a source, or find it compiled."""
        ...

    def load_all(self, sources: Sequence[Source], progress: Callable[[Source], None] | None = None) -> Sequence[Module]:
        """Load several sources at once; `progress` is called, in any thread, as each is ready."""
        ...

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A fresh array that kernels can be given, holding anything."""
        ...


def as_dim3(value: Dim3 | int) -> Dim3:
    """A grid or block with its missing sizes 1."""
    if isinstance(value, tuple) and len(value) == 3:
        return value
    if isinstance(value, int):
        return (value, 1, 1)
    raise ValueError(f"{value!r} is not a size: give an integer, or a tuple (x, y, z)")


def check_sizes(entry: str, grid: Dim3, block: Dim3, shared: int) -> None:
    """Raise ValueError unless CUDA would launch these sizes."""
    if not (0 < grid[0] <= _MAX_GRID[0] and 0 < grid[1] <= _MAX_GRID[1] and 0 < grid[2] <= _MAX_GRID[2]):
        raise ValueError(f"{entry}: grid {grid} is out of range; each size is at least 1 and at most {_MAX_GRID}")
    if not (0 < block[0] <= _MAX_BLOCK[0] and 0 < block[1] <= _MAX_BLOCK[1] and 0 < block[2] <= _MAX_BLOCK[2]):
        raise ValueError(f"{entry}: block {block} is out of range; each size is at least 1 and at most {_MAX_BLOCK}")
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        raise ValueError(f"{entry}: block {block} has {threads} threads; at most {MAX_THREADS} are allowed")
    if not 0 <= shared <= MAX_SHARED_BYTES:
        raise ValueError(f"{entry}: {shared} bytes of dynamic shared memory; 0 to {MAX_SHARED_BYTES} are allowed")


def address_of(array: Any) -> int:
    """Address of an array's first element, on the host or, for a device array, on the device."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
