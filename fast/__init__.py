"""The CUDA kernels, one function each, named and ordered as in `kvproof.reference`.

They run on this machine's CPU: the sources in cuda/ compiled as C++, over the fiber runtime in host/.
"""

from .backend import Argument, Backend, LaunchError, Module, Pointer, Source
from .chunks import chunks, chunks_ahead
from .compiler import CacheError, CompileError
from .engine import Engine, default_engine
from .gate import gate
from .host_backend import ORDERS, HostBackend
from .merge import merge
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
    "CompileError",
    "Engine",
    "HostBackend",
    "KernelSources",
    "LaunchError",
    "Module",
    "Pointer",
    "Source",
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
