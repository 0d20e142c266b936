"""The float64 definition of every kernel (SPEC section 2), in plain NumPy, and the cache layouts they read through.

One function per kernel, named and ordered as in `kvproof.fast`. Values are float64 throughout; they are rounded to
bf16 exactly where the kernels store bf16, and nowhere else. The rotary angle alone is an fp32 product, as models are
trained with it.
"""

from .attention import attention, paged_attention
from .chunks import chunks
from .gate import gate
from .geometry import FLASH_NEXT, PRESETS, TEXT, TINY, Geometry, Rope, Weights
from .layout import KV_STYLES, KvLayout, LayerCache, Layout
from .merge import merge
from .pool import pool
from .prep import prep
from .results import KeyLists, Partials, Prepared, Window
from .scores import scores
from .select import select
from .window import window

__all__ = [
    "FLASH_NEXT",
    "KV_STYLES",
    "PRESETS",
    "TEXT",
    "TINY",
    "Geometry",
    "KeyLists",
    "KvLayout",
    "LayerCache",
    "Layout",
    "Partials",
    "Prepared",
    "Rope",
    "Weights",
    "Window",
    "attention",
    "chunks",
    "gate",
    "merge",
    "paged_attention",
    "pool",
    "prep",
    "scores",
    "select",
    "window",
]
