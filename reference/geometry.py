"""What the kernels are shaped by: the model's geometry, its weights and its rotary positions.

Symbols are those of SPEC section 1. Every kernel, in `reference`, `fast` and `oracle`, takes these
frozen dataclasses; they are validated here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from .arrays import HOST, Place, place_of, require_array, shape_of

CHUNK = 512
"""Keys of one partial: a row's key list is cut into chunks by list index."""
TILE = 64
"""Keys of one online-softmax step inside a chunk."""

MAX_POSITION = 2**31 - 1
"""Positions, key lists and page tables are int32."""

LANES = 8
"""Elements that one 16-byte load brings; every width is a multiple of it."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of one attention family.

    Attributes:
        name: how `--geometry` and messages call it.
        query_heads, kv_heads: heads of grouped-query attention; each key/value head serves
            `group` query heads.
        head_dim: width of a query, key or value head, in elements.
        index_heads, index_dim: the indexer's query heads and their width; it has one key head.
        block: positions pooled into one indexer row.
        top_blocks: blocks that a sparse row reads.
        rotary_half: rotated pairs per head; dims from `2 * rotary_half` on pass through.
        mrope_sections: pairs that the (t, h, w) axes of a media row own.
        layers: attention layers that keep a cache.
        rope_theta, eps: base of the rotary frequencies; epsilon of the RMS norms.

    Raises:
        ValueError: a field is out of its range; the message names it and what is allowed.
    """

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    block: int
    top_blocks: int
    rotary_half: int
    mrope_sections: tuple[int, int, int]
    layers: int
    rope_theta: float = 1e7
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in (
            "query_heads",
            "kv_heads",
            "head_dim",
            "index_heads",
            "index_dim",
            "block",
            "top_blocks",
            "rotary_half",
            "layers",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"geometry {self.name!r}: {name} is {value!r}; it must be a positive integer")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"geometry {self.name!r}: {self.query_heads} query heads do not divide among {self.kv_heads} "
                "key/value heads; query_heads must be a multiple of kv_heads"
            )
        for name in ("head_dim", "index_dim"):
            width = getattr(self, name)
            if width % LANES:
                raise ValueError(
                    f"geometry {self.name!r}: {name} is {width}; rows are read 16 bytes at a time, so it must be a "
                    f"multiple of {LANES}"
                )
            if 2 * self.rotary_half > width:
                raise ValueError(
                    f"geometry {self.name!r}: {2 * self.rotary_half} rotated dims do not fit {name} {width}; "
                    f"rotary_half may be at most {width // 2}"
                )
        if not (self.eps > 0 and self.rope_theta > 0):
            raise ValueError(
                f"geometry {self.name!r}: eps is {self.eps} and rope_theta {self.rope_theta}; both must be above 0"
            )
        if len(self.mrope_sections) != 3 or min(self.mrope_sections) < 0:
            raise ValueError(
                f"geometry {self.name!r}: mrope_sections is {self.mrope_sections}; it must be three counts (t, h, w)"
            )
        if sum(self.mrope_sections) != self.rotary_half:
            raise ValueError(
                f"geometry {self.name!r}: mrope_sections {self.mrope_sections} add up to {sum(self.mrope_sections)}; "
                f"they must add up to rotary_half, {self.rotary_half}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def budget(self) -> int:
        """Positions that a sparse row's blocks hold."""
        return self.block * self.top_blocks

    @property
    def list_capacity(self) -> int:
        """Entries kept for one row's key list: the budget and an unfinished tail."""
        return self.budget + self.block

    @property
    def projection_width(self) -> int:
        """Elements of one projection row: queries and gates, keys, values, indexer queries, indexer key."""
        return (
            2 * self.query_heads * self.head_dim
            + 2 * self.kv_heads * self.head_dim
            + (self.index_heads + 1) * self.index_dim
        )

    def inv_freq(self) -> npt.NDArray[np.float32]:
        """Rotary frequencies, fp32 [rotary_half]: `rope_theta ** (-i / rotary_half)`."""
        exponent = -np.arange(self.rotary_half, dtype=np.float64) / self.rotary_half
        return (self.rope_theta**exponent).astype(np.float32)


FLASH_NEXT = Geometry(
    name="flash_next",
    query_heads=24,
    kv_heads=2,
    head_dim=256,
    index_heads=4,
    index_dim=128,
    block=4,
    top_blocks=512,
    rotary_half=32,
    mrope_sections=(11, 11, 10),
    layers=13,
)
"""Qwen3.8 Flash Next: 12 attention layers and the one of its MTP draft head."""

TINY = Geometry(
    name="tiny",
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    index_heads=2,
    index_dim=32,
    block=4,
    top_blocks=4,
    rotary_half=8,
    mrope_sections=(3, 3, 2),
    layers=2,
)
"""The smallest geometry with every mechanism in it; what property runs use."""

PRESETS: dict[str, Geometry] = {g.name: g for g in (FLASH_NEXT, TINY)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Norm weights and rotary frequencies of one layer, all fp32.

    Attributes:
        q_scale, k_scale: [head_dim], weights of the query and key norms.
        i_scale, pool_scale: [index_dim], weights of the indexer-query and pooled-row norms.
        inv_freq: [rotary_half].
    """

    q_scale: npt.NDArray[np.float32]
    k_scale: npt.NDArray[np.float32]
    i_scale: npt.NDArray[np.float32]
    pool_scale: npt.NDArray[np.float32]
    inv_freq: npt.NDArray[np.float32]

    def require(self, geometry: Geometry, place: Place = HOST) -> None:
        """Raise unless every array is fp32, has the geometry's shape and lies in `place`; see `require_array`."""
        widths = {
            "q_scale": geometry.head_dim,
            "k_scale": geometry.head_dim,
            "i_scale": geometry.index_dim,
            "pool_scale": geometry.index_dim,
            "inv_freq": geometry.rotary_half,
        }
        for name, width in widths.items():
            require_array(f"weights.{name}", getattr(self, name), np.float32, (width,), place)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rope:
    """Where a row stands on the rotary axes (SPEC section 2, prep).

    Attributes:
        mode: "text" (the position itself), "delta" (position + delta) or "media" (the row's triple;
            rows from `len(triples)` on use position + delta).
        delta: added to the position outside "text".
        triples: int32 [media_length, 3], the (t, h, w) positions of a media prompt.
    """

    mode: Literal["text", "delta", "media"] = "text"
    delta: int = 0
    triples: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 3), np.int32))

    def __post_init__(self) -> None:
        if self.mode not in ("text", "delta", "media"):
            raise ValueError(f"rope mode is {self.mode!r}; it must be 'text', 'delta' or 'media'")
        if isinstance(self.delta, bool) or not isinstance(self.delta, (int, np.integer)):
            raise TypeError(f"rope delta is a {type(self.delta).__name__}; it must be an integer")
        if not -MAX_POSITION <= self.delta <= MAX_POSITION:
            raise ValueError(f"rope delta is {self.delta}; it must fit int32")
        if self.mode == "text" and self.delta:
            raise ValueError(f"rope mode 'text' takes no delta, but it is {self.delta}; use mode 'delta'")
        shape = require_array("rope triples", self.triples, np.int32, (None, 3), place_of(self.triples))
        if self.mode == "media" and not shape[0]:
            raise ValueError("rope mode 'media' needs the prompt's (t, h, w) triples, but none are given")
        if self.mode != "media" and shape[0]:
            raise ValueError(f"rope mode {self.mode!r} takes no triples, but {shape[0]} are given; use 'media'")

    @property
    def media_length(self) -> int:
        """Positions of the media prompt."""
        return shape_of(self.triples)[0]

    def require(self, place: Place = HOST) -> None:
        """Raise unless the triples lie in `place`; there are none outside "media"."""
        if self.mode == "media":
            require_array("rope triples", self.triples, np.int32, (None, 3), place)


TEXT = Rope()
"""Plain text: a row's rotary position is its position."""
