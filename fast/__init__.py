"""The CUDA kernels, one function each, named and ordered as in `kvproof.reference`.

They run on this machine's CPU, the sources in cuda/ compiled as C++ over the fiber runtime in host/, or on a GPU.
"""

from .backend import Argument, Backend, Fence, LaunchError, Module, NoDeviceError, Pointer, Source
from .capture import Capture, CaptureError, capture
from .chunks import chunks, chunks_ahead
from .compiler import CacheError, CompileError
from .cuda_backend import CudaBackend
from .drafts import MOST_DRAFTS, Settled, accepted, settle
from .engine import Engine, backend_for, default_engine
from .gate import gate
from .host_backend import ORDERS, HostBackend
from .merge import merge
from .nvrtc import NvrtcError
from .page_pool import PageError, PagePool, PoolExhaustedError, PoolStatistics
from .pool import pool
from .prep import prep
from .prompt_cache import PromptError, SavedPrompt, restore, save
from .prompt_file import read_prompt, write_prompt
from .prompt_header import PromptFileError
from .prompt_rows import SavedLayer
from .round import Round, append
from .scores import scores
from .select import select
from .sources import KernelSources
from .stream import Stream, StreamError
from .window import window

__all__ = [
    "MOST_DRAFTS",
    "ORDERS",
    "Argument",
    "Backend",
    "CacheError",
    "Capture",
    "CaptureError",
    "CompileError",
    "CudaBackend",
    "Engine",
    "Fence",
    "HostBackend",
    "KernelSources",
    "LaunchError",
    "Module",
    "NoDeviceError",
    "NvrtcError",
    "PageError",
    "PagePool",
    "Pointer",
    "PoolExhaustedError",
    "PoolStatistics",
    "PromptError",
    "PromptFileError",
    "Round",
    "SavedLayer",
    "SavedPrompt",
    "Settled",
    "Source",
    "Stream",
    "StreamError",
    "accepted",
    "append",
    "backend_for",
    "capture",
    "chunks",
    "chunks_ahead",
    "default_engine",
    "gate",
    "merge",
    "pool",
    "prep",
    "read_prompt",
    "restore",
    "save",
    "scores",
    "select",
    "settle",
    "window",
    "write_prompt",
]
