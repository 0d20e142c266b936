"""Kernels on a GPU: CUDA C++ compiled by NVRTC, launched through CuPy on the caller's current stream.

Nothing is waited for and nothing is copied, but in `upload`, `download` and `synchronize`. A kernel that fails does so
while the CPU is elsewhere: it shows at one of these, or wherever else the caller waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..reference.arrays import Place, require_place
from .arguments import Signature
from .backend import (
    Argument,
    Dim3,
    Fence,
    Launch,
    LaunchError,
    Parameter,
    Pointer,
    Recorder,
    Source,
)
from .compiler import CACHE_VARIABLE, CacheError, cache_folder
from .cupy_device import CupyDevice
from .module import LoadedModule
from .nvrtc import Compiled, Nvrtc

PLAIN_SHARED_BYTES = 48 * 1024
"""Shared memory of a block, static and dynamic together, that needs no leave."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_FILL_BYTES, _FILL_THREADS, _FILL_BLOCKS = 4, 256, 1024
_FILL = Source(
    "fill",
    r"""
extern "C" __global__ void fill(unsigned* to, unsigned long long count, unsigned value) {
  const unsigned long long step = blockDim.x * gridDim.x;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) to[i] = value;
}
""",
)
"""Our own, as CuPy compiles its own with headers of the CUDA toolkit."""

_NAMED_LAUNCHES = 8
"""Launches that are named when a device fails behind them."""

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(\.ptr)?[^,\[]*(?:\[(\d+)\])?")
_KINDS = {
    ("u", 1): "iub",
    ("u", 2): "iu",
    ("u", 4): "iu",
    ("u", 8): "piu",
    ("s", 1): "i",
    ("s", 2): "i",
    ("s", 4): "i",
    ("s", 8): "i",
    ("f", 4): "f",
    ("f", 8): "f",
}
"""What a PTX type may have been in the source: NVRTC writes signed integers, pointers and bools as unsigned ones."""


def find_parameters(ptx: str) -> dict[str, tuple[Parameter, ...]]:
    """The entries of a PTX text, and the parameters of each.

    Raises:
        ValueError: a parameter is of a type that no kernel here takes.
    """
    return {entry: tuple(map(_parameter, _split(listed))) for entry, listed in _ENTRY.findall(ptx)}


def _split(listed: str) -> list[str]:
    return [item.strip() for item in listed.split(",") if item.strip()]


def _parameter(text: str) -> Parameter:
    found = _PARAMETER.match(text)
    if found is None:
        raise ValueError(f"PTX parameter {text!r} is not understood")
    align, kind, bits, is_pointer, count = found.groups()
    size = int(bits) // 8
    if count is not None:
        return Parameter("s", size * int(count), int(align or size))
    kinds = "p" if is_pointer else _KINDS.get((kind, size))
    if kinds is None:
        raise ValueError(f"PTX parameter {text!r} is of a type that no kernel here takes")
    return Parameter(kinds, size, size)


class GpuCompiler(Protocol):
    """What compiles for a GPU: `Nvrtc`."""

    @property
    def version(self) -> str: ...

    @property
    def options(self) -> tuple[str, ...]: ...

    def compile(self, source: Source, arch: str) -> Compiled: ...


class Gpu(Protocol):
    """What reaches one GPU: `CupyDevice`."""

    @property
    def number(self) -> int:
        """Of the device, as CUDA counts."""
        ...

    @property
    def name(self) -> str:
        """As its driver calls it."""
        ...

    @property
    def arch(self) -> str:
        """Its architecture, such as "sm_90"."""
        ...

    @property
    def shared_limit(self) -> int:
        """Shared memory that a block may have, in bytes."""
        ...

    def load(self, cubin: bytes) -> Any:
        """A module of compiled code."""
        ...

    def function(self, module: Any, entry: str) -> int:
        """The handle of one of its kernels."""
        ...

    def shared_bytes(self, function: int) -> tuple[int, int]:
        """Shared memory of a kernel, in bytes: what it has, and what a launch may give it beside that."""
        ...

    def allow_shared(self, function: int, size: int) -> None:
        """Let launches give it this much."""
        ...

    def launch(self, function: int, grid: Dim3, block: Dim3, shared: int, parameters: int) -> None:
        """Launch on the current stream; `parameters` is the address of an array of the arguments' addresses."""
        ...

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any: ...

    def upload(self, array: npt.NDArray[Any]) -> Any: ...

    def download(self, array: Any) -> npt.NDArray[Any]: ...

    def zero(self, array: Any) -> None:
        """Set every byte to 0, on the current stream."""
        ...

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Copy host values in, on the current stream; they may change when it returns."""
        ...

    def fence(self) -> Fence:
        """An event on the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait for the current stream."""
        ...

    def recorder(self) -> Recorder: ...


class _Kernel:
    """One entry of a loaded module."""

    def __init__(self, entry: str, parameters: Sequence[Parameter], gpu: Gpu, module: Any) -> None:
        self.signature = Signature(entry, parameters, Place(device=gpu.number))
        self.function = gpu.function(module, entry)
        self.static_shared, dynamic = gpu.shared_bytes(self.function)
        self.dynamic_shared = min(dynamic, PLAIN_SHARED_BYTES - self.static_shared)


class CudaModule(LoadedModule[_Kernel]):
    """A kernel family loaded into a GPU; each run of a launch goes to the stream that is current then.

    Args:
        launched: takes the name of each kernel that is launched.
    """

    def __init__(self, source: Source, compiled: Compiled, gpu: Gpu, launched: deque[str]) -> None:
        try:
            self._module = gpu.load(compiled.cubin)
            kernels = {
                entry: _Kernel(entry, parameters, gpu, self._module)
                for entry, parameters in find_parameters(compiled.ptx).items()
            }
        except RuntimeError as error:
            raise LaunchError(
                f"{source.name}.cu", None, None, f"it does not load: {error}", device=_device_name(gpu)
            ) from None
        super().__init__(source, kernels)
        self._gpu = gpu
        self._launched = launched

    def _prepared(self, kernel: _Kernel, grid: Dim3, block: Dim3, shared: int, packed: bytes) -> Launch:
        held = ctypes.create_string_buffer(packed)
        start = ctypes.addressof(held)
        offsets = kernel.signature.offsets
        addresses = (ctypes.c_void_p * max(1, len(offsets)))(*(start + offset for offset in offsets))
        self._allow_shared(kernel, shared)
        return functools.partial(self._run, kernel, grid, block, shared, addresses, held)

    def _allow_shared(self, kernel: _Kernel, shared: int) -> None:
        if shared <= kernel.dynamic_shared:
            return
        entry, limit = kernel.signature.entry, self._gpu.shared_limit - kernel.static_shared
        if shared > limit:
            raise ValueError(f"{entry}: {shared} bytes of dynamic shared memory; {self._gpu.name} has room for {limit}")
        with _told(entry, self._gpu):
            self._gpu.allow_shared(kernel.function, shared)
        kernel.dynamic_shared = shared

    def _run(
        self, kernel: _Kernel, grid: Dim3, block: Dim3, shared: int, addresses: ctypes.Array[Any], held: object
    ) -> None:
        del held  # kept, as the addresses point into it
        with _told(kernel.signature.entry, self._gpu):
            self._gpu.launch(kernel.function, grid, block, shared, ctypes.addressof(addresses))
        self._launched.append(kernel.signature.entry)


@contextlib.contextmanager
def _told(kernel: str, gpu: Gpu) -> Iterator[None]:
    """An error of the driver as a LaunchError of this kernel on this device."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(kernel, None, None, str(error), device=_device_name(gpu)) from None


def _device_name(gpu: Gpu) -> str:
    return f"CUDA device {gpu.number} ({gpu.name})"


class CudaBackend:
    """Runs kernels on a GPU.

    Arrays are any device arrays: CuPy's, or whatever offers `__cuda_array_interface__` or DLPack. Outputs are CuPy's.

    Args:
        device: its number, as CUDA counts; CuPy's current device when None.
        gpu: what reaches the device; CuPy when None.
        compiler: what compiles for it; `Nvrtc()` when None.

    Raises:
        NoDeviceError: CuPy, a driver or a device is missing; the message says which, and what to install.
        NvrtcError: NVRTC is missing.
        ValueError: there is no device of this number.
    """

    name = "cuda"

    def __init__(
        self, device: int | None = None, *, gpu: Gpu | None = None, compiler: GpuCompiler | None = None
    ) -> None:
        self._gpu: Gpu = gpu or CupyDevice(device)
        self._compiler: GpuCompiler = compiler or Nvrtc()
        self._modules: dict[str, CudaModule] = {}
        self._launched: deque[str] = deque(maxlen=_NAMED_LAUNCHES)
        self._lock = threading.Lock()

    @property
    def device(self) -> int:
        """Number of the device."""
        return self._gpu.number

    @property
    def arch(self) -> str:
        """What is compiled for, such as "sm_90"."""
        return self._gpu.arch

    def describe(self) -> str:
        """The backend's name, its device and its compiler."""
        return f"{self.name} ({_device_name(self._gpu)}, {self.arch}, NVRTC {self._compiler.version})"

    def load(self, source: Source) -> CudaModule:
        """Compile a source, or find it compiled, and load it.

        Raises:
            NvrtcError: NVRTC refused it.
            LaunchError: the device does not take it.
            CacheError: the cache folder cannot be written.
        """
        key = self._key(source)
        with self._lock:
            if key in self._modules:
                return self._modules[key]
        module = CudaModule(source, self._compiled(source, key), self._gpu, self._launched)
        with self._lock:
            return self._modules.setdefault(key, module)

    def load_all(self, sources: Sequence[Source], progress: Callable[[Source], None] | None = None) -> list[CudaModule]:
        """Load several sources; `progress` is called as each is ready."""
        modules = []
        for source in sources:
            modules.append(self.load(source))
            if progress is not None:
                progress(source)
        return modules

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A fresh CuPy array, holding anything."""
        return self._gpu.empty(shape, dtype)

    def fill(self, array: Any, value: float) -> None:
        """Set every element of an array of 4-byte elements, on the current stream.

        Raises:
            TypeError, ValueError: it is not on this device, or its elements are of another size.
            LaunchError: the launch failed.
        """
        facts = require_place("array", array, Place(device=self.device))
        if facts.dtype.itemsize != _FILL_BYTES:
            raise ValueError(f"an array of {facts.dtype} cannot be filled; elements must have {_FILL_BYTES} bytes")
        count = math.prod(facts.shape)
        pattern = np.frombuffer(np.array(value, facts.dtype).tobytes(), np.uint32)[0]
        if count:
            blocks = min(-(-count // _FILL_THREADS), _FILL_BLOCKS)
            args: list[Argument] = [Pointer(array), np.uint64(count), pattern]
            self.load(_FILL).launch("fill", grid=blocks, block=_FILL_THREADS, args=args)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A CuPy copy of a NumPy array; it waits for the copy, and so for the current stream.

        Raises:
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            return self._gpu.upload(array)

    def download(self, array: Any) -> npt.NDArray[Any]:
        """A NumPy copy of a device array; it waits for the current stream.

        Raises:
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            return self._gpu.download(array)

    def zero(self, array: Any) -> None:
        """Set every byte of an array, or of a contiguous part of one, to 0, on the current stream.

        Raises:
            TypeError, ValueError: it is not on this device.
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            self._gpu.zero(array)

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Set an array, or a contiguous part of one, to NumPy values, on the current stream.

        Raises:
            TypeError: it is not on a device.
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            self._gpu.write(array, values)

    def fence(self) -> Fence:
        """An event on the current stream.

        Raises:
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            return self._gpu.fence()

    def synchronize(self) -> None:
        """Wait for the current stream.

        Raises:
            LaunchError: a kernel that was launched before has failed.
        """
        with self._told_late():
            self._gpu.synchronize()

    def recorder(self) -> Recorder:
        """Begin to record launches into a CUDA graph; none runs until it is replayed."""
        return self._gpu.recorder()

    @contextlib.contextmanager
    def _told_late(self) -> Iterator[None]:
        """An error that shows behind the launches as a LaunchError of the last ones."""
        try:
            yield
        except RuntimeError as error:
            last = list(self._launched) or ["none"]
            reason = f"it failed, or one launched before it ({', '.join(last[:-1]) or 'none'}): {error}"
            raise LaunchError(last[-1], None, None, reason, device=_device_name(self._gpu)) from None

    def _key(self, source: Source) -> str:
        what = [
            source.name,
            source.text,
            sorted(source.headers.items()),
            sorted((name, str(value)) for name, value in source.defines.items()),
            self.arch,
            self._compiler.version,
            self._compiler.options,
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    def _compiled(self, source: Source, key: str) -> Compiled:
        path = cache_folder() / "cuda" / f"{source.name}-{self.arch}-{key}.bin"
        found = _read(path)
        if found is None:
            found = self._compiler.compile(source, self.arch)
            _write(path, found)
        return found


# ---- compiled code on disk: a digest of the rest, the length of the PTX, the PTX, the cubin ----


def _read(path: Path) -> Compiled | None:
    """What is kept there, None where there is nothing, or not what was written."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    digest, body = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    return Compiled(ptx=body[8:end].decode(), cubin=body[end:])


def _write(path: Path, compiled: Compiled) -> None:
    ptx = compiled.ptx.encode()
    body = len(ptx).to_bytes(8, "little") + ptx + compiled.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_bytes(hashlib.sha256(body).digest() + body)
            os.replace(made, path)  # whole or not at all: processes share the folder
    except OSError as error:
        raise CacheError(
            f"cannot write compiled kernels to {path.parent}: {error.strerror or error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
