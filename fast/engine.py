"""Where the kernels run: a backend, the sources it compiles, and how many threads a block gets."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.geometry import Geometry
from ..reference.layout import LayerCache, Part
from .backend import Argument, Backend, Dim3, Module, Pointer, Source, address_of
from .host_backend import HostBackend
from .sources import FAMILIES, KernelSources

HOST_THREADS = 16
"""Threads of a block on a CPU: one fiber does more before the next takes over."""
GPU_THREADS = 192


class Pages(ctypes.Structure):
    """The by-value page argument of every kernel that touches a cache (cuda/pages.cuh)."""

    _fields_ = (("table", ctypes.c_void_p), ("page_elements", ctypes.c_longlong), ("positions", ctypes.c_int))


class Engine:
    """Compiles each kernel family once per geometry and launches it.

    Args:
        backend: `HostBackend()` when None.
        sources: the packaged kernels when None.
        threads: of a block; the backend's best when None. No result depends on it.
        gpu_split: share the work among a block's threads as on a GPU, also on a CPU, where that is slower: neighbouring
            threads then take neighbouring pieces, and need every barrier that they need there.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        sources: KernelSources | None = None,
        threads: int | None = None,
        gpu_split: bool = False,
    ) -> None:
        self.backend = backend if backend is not None else HostBackend()
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
        """Launch one entry of a family over a grid of blocks; see `Module.launch`."""
        module = self._modules.get((family, geometry))
        if module is None:
            module = self._modules[family, geometry] = self.backend.load(self._source(family, geometry))
        module.launch(entry, grid=grid, block=(self.threads, 1, 1), args=args, shared=shared)

    def _source(self, family: str, geometry: Geometry) -> Source:
        return self.sources.family(family, geometry, threads=self.threads, gpu_split=self.gpu_split)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A fresh array for a kernel to fill."""
        array: npt.NDArray[Any] = self.backend.empty(shape, dtype)
        return array

    def full(self, shape: Sequence[int], dtype: npt.DTypeLike, value: float) -> npt.NDArray[Any]:
        """A fresh array that holds `value` where no kernel writes."""
        array = self.empty(shape, dtype)
        array[...] = value
        return array


@functools.cache
def default_engine() -> Engine:
    """The engine that the functions of `kvproof.fast` use when none is given."""
    return Engine()


def page_argument(cache: LayerCache) -> Pages:
    """The page argument of a cache; no table where it is contiguous."""
    table = None if cache.table is None else address_of(cache.table)
    return Pages(table, cache.layout.page_elements, cache.layout.page_size)


def part_pointer(cache: LayerCache, part: Part) -> Pointer:
    """The cache pointer of a part: its layer's place in page 0."""
    return Pointer(cache.buffer, cache.layout.part(cache.layer, part).base)


def int32(value: int) -> np.int32:
    """An int argument."""
    return np.int32(value)
