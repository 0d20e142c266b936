"""Kernels on the CPU: CUDA C++ compiled by a C++ compiler, over the fiber runtime in `host/`."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..reference.arrays import HOST
from .arguments import Signature
from .backend import Dim3, Launch, LaunchError, Parameter, PassedFence, Source
from .compiler import Build, Compiler, build, find_compiler
from .module import LoadedModule

Order: TypeAlias = Literal["forward", "reverse", "shuffle"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")

BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fno-semantic-interposition",
    "-fstack-clash-protection",  # a deep stack meets its guard page
)
_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?([A-Za-z_]\w*)\s*\("
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Parameter(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("align", ctypes.c_uint), ("kind", ctypes.c_char)]


class _Entry(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("offsets", ctypes.POINTER(ctypes.c_uint)),
        ("count", ctypes.c_uint),
        ("anchor", ctypes.c_void_p),
        ("anchor_offset", ctypes.c_ulonglong),
        ("local_bytes", ctypes.c_ulonglong),
        ("block_ns", ctypes.c_double),
    ]


class _Error(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint),
        ("block", _Dim),
        ("thread", _Dim),
        ("has_thread", ctypes.c_uint),
        ("message", ctypes.c_char * 1000),
    ]


_LAUNCH = struct.Struct("@6IQIIQd")  # KvpLaunch


def find_entries(text: str) -> tuple[str, ...]:
    """Names of the `extern "C" __global__` functions of a CUDA text, in order."""
    return tuple(dict.fromkeys(_ENTRY.findall(_COMMENT.sub(" ", text))))


@functools.cache
def _host_text(name: str) -> str:
    return (resources.files(__package__) / "host" / name).read_text()


class Runtime:
    """The compiled fiber runtime, one per compiler and flags."""

    def __init__(self, compiler: Compiler, flags: tuple[str, ...]) -> None:
        files = {name: _host_text(name) for name in ("runtime.h", "runtime.cpp")}
        # Not for this very CPU: the switch of threads knows which registers there are.
        plain = tuple(flag for flag in flags if not flag.startswith("-m"))
        path = build(Build("runtime", files, "runtime.cpp", plain), compiler)
        self.key = path.stem
        library = ctypes.CDLL(str(path))
        self.launch = library.kvp_launch
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        self.launch.restype = ctypes.c_int
        self.find_local = library.kvp_find_local
        self.find_local.argtypes = [ctypes.c_void_p]
        self.find_local.restype = None
        library.kvp_runtime.restype = ctypes.c_void_p
        self.table = library.kvp_runtime()


@functools.cache
def _runtime(compiler: Compiler, flags: tuple[str, ...], cache: str | None) -> Runtime:
    del cache  # part of the key only: a moved cache builds anew
    return Runtime(compiler, flags)


_runtime_lock = threading.Lock()


class _HostEntry:
    """One kernel: how its arguments are packed, and what the runtime calls."""

    def __init__(self, name: str, library: ctypes.CDLL, runtime: Runtime) -> None:
        describe = getattr(library, f"kvp_parameters_{name}")
        describe.restype = ctypes.POINTER(_Parameter)
        count = ctypes.c_uint()
        described = describe(ctypes.byref(count))
        parameters = [
            Parameter(described[i].kind.decode(), described[i].size, described[i].align) for i in range(count.value)
        ]
        self.signature = Signature(name, parameters, HOST)
        self._offsets = (ctypes.c_uint * max(count.value, 1))(*self.signature.offsets)
        self._record = _Entry(
            call=ctypes.cast(getattr(library, f"kvp_entry_{name}"), ctypes.c_void_p),
            name=name.encode(),
            offsets=self._offsets,
            count=count.value,
            anchor=ctypes.cast(library.kvp_anchor, ctypes.c_void_p),
        )
        runtime.find_local(ctypes.byref(self._record))
        self.address = ctypes.addressof(self._record)


class HostModule(LoadedModule[_HostEntry]):
    """A kernel family compiled for this CPU; a launch waits for its kernel."""

    def __init__(self, source: Source, backend: HostBackend, path: str) -> None:
        runtime = backend.runtime
        library = ctypes.CDLL(path)
        library.kvp_bind.argtypes = [ctypes.c_void_p]
        library.kvp_bind(runtime.table)
        super().__init__(source, {name: _HostEntry(name, library, runtime) for name in find_entries(source.text)})
        self._backend = backend
        self._launch = runtime.launch

    def _prepared(self, kernel: _HostEntry, grid: Dim3, block: Dim3, shared: int, packed: bytes) -> Launch:
        backend = self._backend
        config = _LAUNCH.pack(
            *grid, *block, shared, backend.order_code, backend.workers, backend.seed, backend.timeout_s
        )
        return functools.partial(self._run, kernel, config, packed)

    def _run(self, kernel: _HostEntry, config: bytes, packed: bytes) -> None:
        error = _Error()
        if self._launch(kernel.address, config, packed, ctypes.byref(error)):
            where = (error.block.x, error.block.y, error.block.z)
            thread = (error.thread.x, error.thread.y, error.thread.z) if error.has_thread else None
            name = kernel.signature.entry
            raise LaunchError(name, where, thread, error.message.decode(errors="replace"))


class LaunchList:
    """A recorder that keeps launches and runs none."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []

    def add(self, launch: Launch) -> None:
        self._launches.append(launch)

    def finish(self) -> Launch:
        return functools.partial(_run_all, tuple(self._launches))

    def discard(self) -> None:
        self._launches.clear()


def _run_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


class HostBackend:
    """Runs kernels on this machine's CPU.

    Args:
        order: in which the threads of a block, and the blocks, run between two barriers.
        seed: of order "shuffle", which is drawn anew at each barrier.
        workers: CPU threads that share the blocks; all that this process may use when None.
        compiler: `find_compiler()` when None; nothing is compiled before the first `load`.
        flags: compiler flags after the backend's own.
        timeout_s: CPU seconds that a launch may keep one worker busy; 0 for no limit.
        portable_fibers: switch threads through <ucontext.h>, as on CPUs without a switch of their own.

    Raises:
        ValueError: an option is out of its range.
    """

    name = "host"
    device = None

    def __init__(
        self,
        *,
        order: Order = "forward",
        seed: int = 0,
        workers: int | None = None,
        compiler: Compiler | None = None,
        flags: Sequence[str] = (),
        timeout_s: float = 0.0,
        portable_fibers: bool = False,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; it must fit 64 bits, unsigned")
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be 0 (no limit) or more")
        self.order: Order = order
        self.order_code = ORDERS.index(order)
        self.seed = seed
        self.workers = workers or _available_cpus()
        self.timeout_s = float(timeout_s)
        self.flags = (*BASE_FLAGS, *flags, *(("-DKVP_PORTABLE_FIBERS",) if portable_fibers else ()))
        self._compiler = compiler
        self._modules: dict[tuple[object, ...], HostModule] = {}
        self._lock = threading.Lock()

    def with_order(self, order: Order, seed: int = 0) -> HostBackend:
        """This backend with another order of threads; what it has loaded is not compiled again."""
        other = HostBackend(
            order=order, seed=seed, workers=self.workers, compiler=self._compiler, timeout_s=self.timeout_s
        )
        other.flags = self.flags
        return other

    @property
    def compiler(self) -> Compiler:
        """The compiler in use."""
        return self._compiler or find_compiler()

    @property
    def runtime(self) -> Runtime:
        """The fiber runtime, compiled at the first use."""
        with _runtime_lock:
            return _runtime(self.compiler, self.flags, os.environ.get("KVPROOF_CACHE_DIR"))

    def load(self, source: Source) -> HostModule:
        """Compile a source, or find it compiled.

        Raises:
            CompileError: the compiler refused it.
            CacheError: the cache folder cannot be written.
            ValueError: it has no entry, or a header's name is not a plain file name.
        """
        key = (source.name, source.text, *sorted(source.headers.items()), *sorted(map(str, source.defines.items())))
        with self._lock:
            if key in self._modules:
                return self._modules[key]
        module = HostModule(source, self, self._build(source))
        with self._lock:
            return self._modules.setdefault(key, module)

    def load_all(self, sources: Sequence[Source], progress: Callable[[Source], None] | None = None) -> list[HostModule]:
        """Load several sources, compiling on all CPUs; `progress` is called as each is ready."""

        def load_one(source: Source) -> HostModule:
            module = self.load(source)
            if progress is not None:
                progress(source)
            return module

        if len(sources) <= 1:
            return [load_one(source) for source in sources]
        with ThreadPoolExecutor(max_workers=min(len(sources), _available_cpus())) as pool:
            return list(pool.map(load_one, sources))

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A fresh array, holding anything."""
        return np.empty(shape, dtype)

    def fill(self, array: npt.NDArray[Any], value: float) -> None:
        """Set every element."""
        array[...] = value

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy."""
        return array.copy()

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy."""
        return array.copy()

    def zero(self, array: npt.NDArray[Any]) -> None:
        """Set every byte to 0."""
        array.view(np.uint8).fill(0)

    def write(self, array: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Set every element."""
        array[...] = values

    def fence(self) -> PassedFence:
        """Whatever was submitted has ended."""
        return PassedFence()

    def recorder(self) -> LaunchList:
        """Begin to record launches; none runs until they are replayed."""
        return LaunchList()

    def describe(self) -> str:
        """The backend's name and its compiler."""
        return f"{self.name} ({self.compiler.name})"

    def _build(self, source: Source) -> str:
        entries = find_entries(source.text)
        if not entries:
            raise ValueError(f'{source.name}.cu has no kernel: none is declared `extern "C" __global__ void NAME(...)`')
        main = f"{source.name}.cu"
        files: dict[str, str] = {name: _host_text(name) for name in ("runtime.h", "cuda.h")}
        for name, text in ((main, source.text), *source.headers.items()):
            if "/" in name or name in files:
                raise ValueError(f"{name!r} cannot name a file of {source.name}: give a plain name that is not taken")
            files[name] = text
        files[main] += "\n" + "".join(f"KVP_EXPORT({name})\n" for name in entries)
        # A module is bound to one runtime, so another runtime's is another module.
        defines = {"KVP_RUNTIME_KEY": f"{self.runtime.key}", **source.defines}
        flags = (*self.flags, *map(_define, defines, defines.values()), "-I.", "-include", "cuda.h")
        return str(build(Build(source.name, files, main, flags), self.compiler))


def _define(name: str, value: int | str | None) -> str:
    return f"-D{name}" if value in (None, "") else f"-D{name}={value}"


def _available_cpus() -> int:
    return len(os.sched_getaffinity(0))


__all__ = ["ORDERS", "HostBackend", "HostModule", "Order", "find_entries"]
