"""The CUDA kernels, one function each, named and ordered as in `kvproof.reference`.

They run on this machine's CPU, the sources in cuda/ compiled as C++ over the fiber runtime in host/, or on a GPU.
"""

from .backend import Argument, Backend, LaunchError, Module, NoDeviceError, Pointer, Source
from .capture import Capture, CaptureError, capture
from .chunks import chunks, chunks_ahead
from .compiler import CacheError, CompileError
from .cuda_backend import CudaBackend
from .engine import Engine, backend_for, default_engine
from .gate import gate
from .host_backend import ORDERS, HostBackend
from .merge import merge
from .nvrtc import NvrtcError
from .pool import pool
from .prep import prep
from .scores import scores
from .select import select
from .sources import KernelSources
from .window import window

__all__ = [
    "ORDERS",
    "Argument",
    "Backend",
    "CacheError",
    "Capture",
    "CaptureError",
    "CompileError",
    "CudaBackend",
    "Engine",
    "HostBackend",
    "KernelSources",
    "LaunchError",
    "Module",
    "NoDeviceError",
    "NvrtcError",
    "Pointer",
    "Source",
    "backend_for",
    "capture",
    "chunks",
    "chunks_ahead",
    "default_engine",
    "gate",
    "merge",
    "pool",
    "prep",
    "scores",
    "select",
    "window",
]
