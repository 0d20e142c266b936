"""A GPU that there is not: `CudaBackend` over the CPU's fibers, for what can be proved of it without one.

The kernels' PTX is NVRTC's own and tells the parameters; a launch takes the packed bytes apart again and runs the same
kernel on the CPU. Like a GPU, it is never waited for: a launch is put in a queue, which only a download, an upload and
a wait run. Its arrays can be described and nothing else, so whatever looks into one before fails.
"""

from __future__ import annotations

import ctypes
import json
import weakref

import numpy as np
from kvproof.fast import CudaBackend, HostBackend, Pointer, Source
from kvproof.fast.nvrtc import Compiled, Nvrtc
from kvproof.reference.layout import BF16

ARCH = "sm_90"
NUMBER = 0
DATA_OFFSET, DEVICE_OFFSET, CODE_OFFSET, BYTE_OFFSET_OFFSET = 0, 8, 20, 40
"""In bytes, of DLTensor's data, device, type code and byte offset."""


class DeviceArray:
    """An array on the device, as CuPy, PyTorch and Numba describe theirs."""

    def __init__(self, memory, *, number=NUMBER, read_only=False, base=None):
        self._memory = memory
        self._number = number
        self._read_only = read_only
        self._base = base

    def __array__(self, *args, **kwargs):
        raise AssertionError("a device array was read by the host")

    def __getitem__(self, index):
        return DeviceArray(self._memory[index], number=self._number, base=self)

    @property
    def shape(self):
        return self._memory.shape

    @property
    def __cuda_array_interface__(self):
        address = self._memory.ctypes.data
        strides = None if self._memory.flags.c_contiguous else self._memory.strides
        kind = self._memory.dtype.str
        return {
            "shape": self.shape,
            "typestr": kind,
            "strides": strides,
            "data": (address, self._read_only),
            "version": 3,
            "stream": 1,
        }

    def __dlpack_device__(self):
        return (2, self._number)


class DlpackArray:
    """An array on the device that DLPack alone tells of."""

    def __init__(self, memory, *, number=NUMBER, byte_offset=0):
        self._memory = memory
        self._number = number
        self._byte_offset = byte_offset
        self.streams = []

    def __dlpack_device__(self):
        return (2, self._number)

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        is_bf16 = self._memory.dtype == BF16
        capsule = (self._memory.view(np.uint16) if is_bf16 else self._memory).__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        tensor = get(capsule, b"dltensor")
        ctypes.c_uint64.from_address(tensor + DATA_OFFSET).value -= self._byte_offset
        ctypes.c_uint64.from_address(tensor + BYTE_OFFSET_OFFSET).value += self._byte_offset
        (ctypes.c_int32 * 2).from_address(tensor + DEVICE_OFFSET)[:] = (2, self._number)
        if is_bf16:
            ctypes.c_uint8.from_address(tensor + CODE_OFFSET).value = 4
        return capsule


class FiberCompiler:
    """NVRTC's PTX, and for a cubin the source."""

    def __init__(self):
        self._nvrtc = Nvrtc()
        self.version = self._nvrtc.version
        self.options = ("for the fibers",)
        self.compiled = []

    def compile(self, source, arch):
        self.compiled.append(source.name)
        given = [source.name, source.text, dict(source.headers), dict(source.defines)]
        return Compiled(ptx=self._nvrtc.compile(source, arch).ptx, cubin=json.dumps(given).encode())


class FiberGpu:
    """What `CudaBackend` asks of a GPU."""

    number = NUMBER
    name = "fibers"
    arch = ARCH
    shared_limit = 99 * 1024

    def __init__(self):
        self._host = HostBackend()
        self._functions = []
        self._queue = []
        self._memory = []  # of arrays that are gone: nothing is reused before the queue has run
        self.recording = None
        self.allowed = []

    def load(self, cubin):
        name, text, headers, defines = json.loads(cubin)
        return self._host.load(Source(name, text, headers, defines))

    def function(self, module, entry):
        self._functions.append((module, entry))
        return len(self._functions)

    def shared_bytes(self, function):
        return 1024, 48 * 1024

    def allow_shared(self, function, size):
        self.allowed.append(size)

    def launch(self, function, grid, block, shared, parameters):
        module, entry = self._functions[function - 1]
        args = [_argument(parameters, i, kind) for i, kind in enumerate(module.parameters(entry))]
        self.submit(module.bind(entry, grid=grid, block=block, args=args, shared=shared))

    def submit(self, work):
        (self._queue if self.recording is None else self.recording).append(work)

    def empty(self, shape, dtype):
        return self._array(np.empty(shape, dtype))

    def _array(self, memory):
        array = DeviceArray(memory)
        weakref.finalize(array, self._memory.append, memory)
        return array

    def upload(self, array):
        self.synchronize()
        return self._array(array.copy())

    def download(self, array):
        self.synchronize()
        return array._memory.copy()

    def zero(self, array):
        self.submit(lambda: array._memory.view(np.uint8).fill(0))

    def write(self, array, values):
        values = values.copy()
        self.submit(lambda: np.copyto(array._memory, values))

    def fence(self):
        return FiberFence(self)

    def synchronize(self):
        assert self.recording is None, "waited for the device while it records"
        while self._queue:
            self._queue.pop(0)()
        self._memory.clear()

    def recorder(self):
        return FiberRecorder(self)


class FiberFence:
    """A place in the one queue."""

    def __init__(self, gpu):
        self._gpu = gpu
        self._last = gpu._queue[-1] if gpu._queue else None

    def done(self):
        return self._last not in self._gpu._queue

    def order(self):
        pass


class FiberRecorder:
    """A stream that takes launches down."""

    def __init__(self, gpu):
        self._gpu = gpu
        self._taken = gpu.recording = []

    def add(self, launch):
        launch()

    def finish(self):
        self._gpu.recording = None
        return lambda: [self._gpu.submit(work) for work in self._taken]

    def discard(self):
        self._gpu.recording = None


def fiber_backend():
    """A `CudaBackend` on the fibers."""
    return CudaBackend(gpu=FiberGpu(), compiler=FiberCompiler())


def _argument(parameters, i, parameter):
    """Argument i of a launch, read where the driver would read it."""
    place = ctypes.c_void_p.from_address(parameters + i * ctypes.sizeof(ctypes.c_void_p)).value
    raw = ctypes.string_at(place, parameter.size)
    if parameter.kinds == "p":
        address = int.from_bytes(raw, "little")
        return Pointer(np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(address)) if address else None)
    if parameter.kinds == "s":
        return type(
            "Struct", (ctypes.Structure,), {"_fields_": [("raw", ctypes.c_uint8 * parameter.size)]}
        ).from_buffer_copy(raw)
    return np.frombuffer(raw, f"{parameter.kinds}{parameter.size}")[0]
