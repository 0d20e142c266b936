"""Where the kernels run: a backend, the sources it compiles, and how many threads a block gets."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..reference.arrays import Place, describe
from ..reference.geometry import Geometry
from ..reference.layout import LayerCache, Layout, Part
from .arguments import host_address
from .arrays import T, map_arrays
from .backend import Argument, Backend, Dim3, Launch, Module, NoDeviceError, Pointer, Source
from .capture import active_capture
from .cuda_backend import CudaBackend
from .host_backend import HostBackend
from .sources import FAMILIES, KernelSources

HOST_THREADS = 16
"""Threads of a block on a CPU: one fiber does more before the next takes over."""
GPU_THREADS = 192

BackendChoice: TypeAlias = Literal["auto", "host", "cuda"]


class Pages(ctypes.Structure):
    """The by-value page argument of every kernel that touches a cache (cuda/pages.cuh)."""

    _fields_ = (("table", ctypes.c_void_p), ("page_elements", ctypes.c_longlong), ("positions", ctypes.c_int))


class Engine:
    """Compiles each kernel family once per geometry and launches it.

    Args:
        backend: one that is made already, or the name of one (see `backend_for`); the host when None.
        sources: the packaged kernels when None.
        threads: of a block; the backend's best when None. No result depends on it.
        gpu_split: share the work among a block's threads as on a GPU, also on a CPU, where that is slower: neighbouring
            threads then take neighbouring pieces, and need every barrier that they need there.
    """

    def __init__(
        self,
        backend: Backend | BackendChoice | None = None,
        *,
        sources: KernelSources | None = None,
        threads: int | None = None,
        gpu_split: bool = False,
    ) -> None:
        chosen = "host" if backend is None else backend
        self.backend: Backend = backend_for(chosen) if isinstance(chosen, str) else chosen
        self.sources = sources if sources is not None else KernelSources()
        self.gpu_split = gpu_split
        self.threads = threads or (HOST_THREADS if self.backend.name == "host" else GPU_THREADS)
        self._modules: dict[tuple[str, Geometry], Module] = {}

    def prepare(self, geometry: Geometry, progress: Callable[[str], None] | None = None) -> None:
        """Compile what is not yet compiled, in parallel; `progress` is given each family's name when it is ready."""
        missing = [name for name in FAMILIES if (name, geometry) not in self._modules]
        sources = [self._source(name, geometry) for name in missing]
        modules = self.backend.load_all(sources, None if progress is None else lambda source: progress(source.name))
        self._modules.update(((name, geometry), module) for name, module in zip(missing, modules, strict=True))

    def launch(
        self, geometry: Geometry, family: str, entry: str, *, grid: Dim3, args: Sequence[Argument], shared: int = 0
    ) -> None:
        """Launch one entry of a family over a grid of blocks, or capture that; see `Module.launch`."""
        module = self._modules.get((family, geometry))
        if module is None:
            module = self._modules[family, geometry] = self.backend.load(self._source(family, geometry))
        self._submit(module.bind(entry, grid=grid, block=(self.threads, 1, 1), args=args, shared=shared), args)

    def _submit(self, launch: Launch, arrays: Any) -> None:
        step = active_capture()
        if step is None:
            launch()
        else:
            step.add(self, launch, arrays)

    def _source(self, family: str, geometry: Geometry) -> Source:
        return self.sources.family(family, geometry, threads=self.threads, gpu_split=self.gpu_split)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A fresh array for a kernel to fill."""
        array: npt.NDArray[Any] = self.backend.empty(shape, dtype)
        return array

    def full(self, shape: Sequence[int], dtype: npt.DTypeLike, value: float) -> npt.NDArray[Any]:
        """A fresh array that holds `value` where no kernel writes."""
        array = self.empty(shape, dtype)
        self._submit(functools.partial(self.backend.fill, array, value), array)
        return array

    def upload(self, value: T) -> T:
        """Copies, which kernels can be given, of the NumPy arrays in a value: an array, or a dataclass such as Weights.

        Arrays that are shared are copied once for each place where they stand.
        """
        return map_arrays(value, self.backend.upload)

    def download(self, value: T) -> T:
        """NumPy copies of the arrays in a value, behind every launch so far."""
        return map_arrays(value, self.backend.download)

    @property
    def place(self) -> Place:
        """Where the arrays of a call must lie, and whether the call's checks may look at what they hold."""
        return Place(self.backend.device, active_capture() is None)

    def pages(self, cache: LayerCache, end: int | None) -> Pages:
        """The page argument of a cache that a launch reads up to position end - 1; no table where it is contiguous.

        Raises:
            CaptureError: the launch is captured, and the page table may move.
        """
        step = active_capture()
        if step is not None:
            step.keep_cache(cache, end or 0)
        return Pages(_address(cache.table), cache.layout.page_elements, cache.layout.page_size)

    def describe(self) -> str:
        """Which backend runs the kernels, and with what compiler or device."""
        return self.backend.describe()


def backend_for(choice: BackendChoice = "auto") -> Backend:
    """The backend of this name; "auto" takes CUDA where a device answers, else the host (`Backend.describe` tells).

    Raises:
        ValueError: there is no such backend.
        NoDeviceError: "cuda" is asked for, and no device answers; the message says what is missing.
    """
    if choice not in get_args(BackendChoice):
        raise ValueError(f"backend is {choice!r}; it must be one of {', '.join(get_args(BackendChoice))}")
    if choice == "host":
        return HostBackend()
    try:
        return CudaBackend()
    except NoDeviceError:
        if choice == "cuda":
            raise
    return HostBackend()


@functools.cache
def default_engine() -> Engine:
    """The engine that the functions of `kvproof.fast` use when none is given."""
    return Engine()


def part_pointer(cache: LayerCache, part: Part) -> Pointer:
    """The cache pointer of a part: its layer's place in page 0."""
    return Pointer(cache.buffer, _part_base(cache.layout, cache.layer, part))


@functools.lru_cache
def _part_base(layout: Layout, layer: int, part: Part) -> int:
    return int(layout.part(layer, part).base)


def _address(array: Any) -> int | None:
    """Address of an array wherever it lies; None for what is none."""
    if type(array) is np.ndarray:
        return host_address(array)
    facts = describe(array)
    return None if facts is None else facts.address


def int32(value: int) -> np.int32:
    """An int argument."""
    return np.int32(value)
