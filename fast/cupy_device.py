"""One GPU through CuPy: modules, launches, memory and graphs. What is unproved without a GPU is all in here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.arrays import describe
from .backend import Dim3, Launch, NoDeviceError

_INSTALL = "in a checkout, run `pip install -e '.[cuda12]'`, or '.[cuda13]' for a driver of CUDA 13"


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NoDeviceError(f"CuPy does not load ({error}): {_INSTALL}") from None
    return cupy


class CupyDevice:
    """A CUDA device.

    Args:
        number: as CUDA counts; CuPy's current device when None.

    Attributes:
        number, name, arch, shared_limit: see `cuda_backend.Gpu`.

    Raises:
        NoDeviceError: CuPy is not installed, no driver answers, or there is no device.
        ValueError: there is no device of this number.
    """

    def __init__(self, number: int | None = None) -> None:
        self._cupy = _import_cupy()
        runtime = self._cupy.cuda.runtime
        try:
            count = int(runtime.getDeviceCount())
        except RuntimeError as error:
            raise NoDeviceError(
                f"no CUDA driver answers ({error}): install NVIDIA's driver, or run the kernels on the host"
            ) from None
        if not count:
            raise NoDeviceError("the CUDA driver knows no device: look at `nvidia-smi` and $CUDA_VISIBLE_DEVICES")
        self.number = int(runtime.getDevice()) if number is None else number
        if not 0 <= self.number < count:
            raise ValueError(f"there is no CUDA device {number}; there are devices 0 to {count - 1}")
        self.name = runtime.getDeviceProperties(self.number)["name"].decode()
        self.arch = f"sm_{self._here().compute_capability}"
        attribute = runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
        self.shared_limit = int(runtime.deviceGetAttribute(attribute, self.number))

    def _here(self) -> Any:
        """The device, to be made current by `with`."""
        return self._cupy.cuda.Device(self.number)

    def load(self, cubin: bytes) -> Any:
        """Load compiled code."""
        with self._here():
            module = self._cupy.cuda.function.Module()
            module.load(cubin)
            return module

    def function(self, module: Any, entry: str) -> int:
        """The handle of a kernel; it lives as long as its module."""
        with self._here():
            return int(self._cupy.cuda.driver.moduleGetFunction(module.ptr, entry))

    def shared_bytes(self, function: int) -> tuple[int, int]:
        """Shared memory of a kernel, and what a launch may give it beside that, in bytes."""
        driver = self._cupy.cuda.driver
        with self._here():
            static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            dynamic = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function)
        return int(static), int(dynamic)

    def allow_shared(self, function: int, size: int) -> None:
        """Let launches give a kernel this much dynamic shared memory."""
        driver = self._cupy.cuda.driver
        with self._here():
            driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)

    def launch(self, function: int, grid: Dim3, block: Dim3, shared: int, parameters: int) -> None:
        """Launch on the current stream."""
        with self._here():
            stream = self._cupy.cuda.get_current_stream()
            self._cupy.cuda.driver.launchKernel(function, *grid, *block, shared, stream.ptr, parameters, 0)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A fresh CuPy array, holding anything."""
        with self._here():
            return self._cupy.empty(shape, np.dtype(dtype))

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A CuPy copy of a NumPy array; it waits for the copy."""
        copy = self.empty(array.shape, array.dtype)
        with self._here():
            stream = self._cupy.cuda.get_current_stream()
            if array.size:
                copy.set(np.ascontiguousarray(array), stream=stream)
            stream.synchronize()
        return copy

    def download(self, array: Any) -> npt.NDArray[Any]:
        """A NumPy copy of a device array; it waits for the current stream."""
        with self._here():
            copy: npt.NDArray[Any] = self._view(array).get()
        return copy

    def zero(self, array: Any) -> None:
        """Set every byte of a contiguous array to 0, on the current stream."""
        with self._here():
            view = self._view(array)
            view.data.memset_async(0, view.nbytes)

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Copy NumPy values into a contiguous array, on the current stream.

        Pageable memory is staged before the copy's call returns (CUDA Runtime API, "API synchronization behavior"), so
        the values may change then.
        """
        with self._here():
            self._view(array).set(np.ascontiguousarray(values), stream=self._cupy.cuda.get_current_stream())

    def fence(self) -> EventFence:
        """An event on the current stream."""
        with self._here():
            return EventFence(self._cupy, self.number)

    def _view(self, array: Any) -> Any:
        """Any device array as a CuPy array over the same memory."""
        cupy = self._cupy
        if isinstance(array, cupy.ndarray):
            return array
        facts = describe(array)
        if facts is None or facts.device is None:
            raise TypeError(f"a {type(array).__name__} is no device array")
        size = int(np.prod(facts.shape, dtype=np.int64)) * facts.dtype.itemsize
        memory = cupy.cuda.UnownedMemory(facts.address, size, array, self.number)
        return cupy.ndarray(facts.shape, facts.dtype, cupy.cuda.MemoryPointer(memory, 0), strides=facts.strides)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        with self._here():
            self._cupy.cuda.get_current_stream().synchronize()

    def recorder(self) -> GraphRecorder:
        """Begin to record launches into a graph."""
        return GraphRecorder(self._cupy, self.number)


class EventFence:
    """An event recorded on the stream that is current when it is made."""

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._number = cupy, number
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record()

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return bool(self._event.done)

    def order(self) -> None:
        """Let the current stream wait for it, on the device."""
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.get_current_stream().wait_event(self._event)


class GraphRecorder:
    """Records this thread's launches into a CUDA graph: while it does, a stream of its own is current.

    Memory comes from a pool of the graph's own, so that what is freed inside is never given to anyone else.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._number = cupy, number
        self._pool = cupy.cuda.MemoryPool()
        with contextlib.ExitStack() as stack:
            stack.enter_context(cupy.cuda.Device(number))
            self._stream = cupy.cuda.Stream(non_blocking=True)
            stack.enter_context(self._stream)
            stack.enter_context(cupy.cuda.using_allocator(self._pool.malloc))
            self._stream.begin_capture()
            self._current = stack.pop_all()

    def add(self, launch: Launch) -> None:
        """Launch on the recording stream, which takes it down and runs nothing."""
        launch()

    def finish(self) -> Launch:
        """The graph's launch, on the stream that is current then."""
        with self._current:
            graph = self._stream.end_capture()
        return functools.partial(self._replay, graph)

    def discard(self) -> None:
        """End the recording and forget it."""
        with self._current, contextlib.suppress(RuntimeError):  # what broke it, perhaps, is on its way already
            self._stream.end_capture()

    def _replay(self, graph: Any) -> None:
        """Launch the graph; this recorder keeps the memory that it uses."""
        with self._cupy.cuda.Device(self._number):
            graph.launch()
