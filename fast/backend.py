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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        kinds: what it may be: "p" a pointer, "s" a structure, or a number of NumPy's kind "i", "u", "f" or "b";
            several where the compiled code does not tell them apart.
        size, align: in bytes.
    """

    kinds: str
    size: int
    align: int


class LaunchError(RuntimeError):
    """A kernel could not be launched, or failed while it ran.

    Attributes:
        kernel: its entry.
        block: index (x, y, z) of the block that failed, None where none had started.
        thread: index (x, y, z) of a thread to blame, None where the whole block is.
        reason: what it did.
        device: the GPU that it was launched on, "" on the host.
    """

    def __init__(self, kernel: str, block: Dim3 | None, thread: Dim3 | None, reason: str, *, device: str = "") -> None:
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.reason = reason
        self.device = device
        where = f"kernel {kernel}" + (f" on {device}" if device else "")
        if block is not None:
            where += f", block {block}"
        if thread is not None:
            where += f", thread {thread}"
        super().__init__(f"{where}: {reason}")


class NoDeviceError(RuntimeError):
    """CUDA cannot be used here; the message says what is missing and how to get it."""


Launch: TypeAlias = Callable[[], None]
"""A launch whose arguments are packed: calling it runs it, again and again, with the same addresses and numbers."""


class Module(Protocol):
    """A loaded source; backends derive from it."""

    @property
    def entries(self) -> tuple[str, ...]:
        """Names that can be launched."""
        ...

    def parameters(self, entry: str) -> tuple[Parameter, ...]:
        """What one of them takes."""
        ...

    def bind(
        self,
        entry: str,
        *,
        grid: Dim3 | int,
        block: Dim3 | int,
        args: Sequence[Argument],
        shared: int = 0,
    ) -> Launch:
        """Check and pack a launch of an entry over a grid of blocks; the arrays must outlive it.

        Args:
            entry: the kernel's name.
            grid: blocks in x, y, z.
            block: threads of a block in x, y, z.
            args: one per parameter.
            shared: dynamic shared memory of each block, in bytes.

        Raises:
            KeyError: there is no such entry.
            TypeError: an argument is not of its parameter's type.
            ValueError: a size is out of range.
        """
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
        """Bind a launch and run it.

        Raises:
            KeyError, TypeError, ValueError: as `bind`; nothing was launched.
            LaunchError: the kernel failed.
        """
        self.bind(entry, grid=grid, block=block, args=args, shared=shared)()


class Recorder(Protocol):
    """Takes launches down, from when it is made until it is finished or discarded."""

    def add(self, launch: Launch) -> None:
        """The next launch."""
        ...

    def finish(self) -> Launch:
        """End the recording; what is returned runs all of it.

        Raises:
            RuntimeError: what was done meanwhile cannot be recorded.
        """
        ...

    def discard(self) -> None:
        """End the recording and forget it."""
        ...


class Fence(Protocol):
    """A place in a queue of work."""

    def done(self) -> bool:
        """Whether everything before it has ended."""
        ...

    def order(self) -> None:
        """Let what is submitted from now on, to whatever queue is current, run behind it; nothing waits here."""
        ...


class PassedFence:
    """The fence of a backend whose work has ended when a call returns."""

    def done(self) -> bool:
        return True

    def order(self) -> None:
        return None


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

    @property
    def device(self) -> int | None:
        """Number of the CUDA device that arrays must lie on; None on the host."""
        ...

    def describe(self) -> str:
        """What runs the kernels, for reports: the backend's name, and its compiler or its device."""
        ...

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A fresh array that kernels can be given, holding anything."""
        ...

    def fill(self, array: Any, value: float) -> None:
        """Set every element of an array of `empty`."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy, which kernels can be given, of a NumPy array."""
        ...

    def download(self, array: Any) -> npt.NDArray[Any]:
        """A NumPy copy of an array that kernels were given, behind every launch so far."""
        ...

    def zero(self, array: Any) -> None:
        """Set every byte of an array, or of a contiguous part of one, to 0, behind every launch so far."""
        ...

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Set an array, or a contiguous part of one, to NumPy values like it, behind every launch so far.

        The values may change as soon as it returns.
        """
        ...

    def fence(self) -> Fence:
        """What tells when everything that is submitted by now has ended."""
        ...

    def recorder(self) -> Recorder:
        """Begin to record launches."""
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
