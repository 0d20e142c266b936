"""Where a cache row lies: one address map for contiguous and paged caches (SPEC section 3).

A row of a cache part (keys, values, indexer keys, pooled rows) lies at

    base + page * page_stride + row_in_page * row_stride + head * head_stride

in elements, where `page` is `table[row // rows_per_page]`, or no page at all without a table. Other
engines' layouts are the same map with other strides. Offsets are int64: an arena may pass 2**31 elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .arrays import BF16 as BF16
from .arrays import Place, place_of, require_array, shape_of
from .geometry import Geometry, IntArray

Part = Literal["keys", "values", "index_keys", "pooled"]
PARTS: tuple[Part, ...] = ("keys", "values", "index_keys", "pooled")


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Addresses of one cache part, in elements.

    Attributes:
        base: offset of row 0 of page 0.
        page_stride, row_stride, head_stride: steps to the next page, row and head.
        rows_per_page: rows that one page holds.
        heads, width: shape of one row.
    """

    base: int
    page_stride: int
    row_stride: int
    head_stride: int
    rows_per_page: int
    heads: int
    width: int

    def offsets(self, rows: npt.ArrayLike, table: npt.NDArray[np.int32] | None) -> IntArray:
        """Element offset of each (row, head): int64 [len(rows), heads]."""
        index = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        if table is None:
            start = self.base + index * self.row_stride
        else:
            page = table[index // self.rows_per_page].astype(np.int64)
            start = self.base + page * self.page_stride + (index % self.rows_per_page) * self.row_stride
        return start[:, None] + np.arange(self.heads, dtype=np.int64) * self.head_stride

    def locate(self, offset: int) -> tuple[int, int, int, int] | None:
        """The (page, row in page, head, element) that an element offset belongs to; None outside this part."""
        page, inside = divmod(offset - self.base, self.page_stride)
        # The larger step is the outer one; of equal steps, that which is taken more than once.
        if (self.head_stride, self.heads) > (self.row_stride, self.rows_per_page):
            head, inside = divmod(inside, self.head_stride)
            row, element = divmod(inside, self.row_stride)
        else:
            row, inside = divmod(inside, self.row_stride)
            head, element = divmod(inside, self.head_stride)
        if offset < self.base or row >= self.rows_per_page or head >= self.heads or element >= self.width:
            return None
        return page, row, head, element


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The arena of SPEC section 3: `pages` pages of `page_size` positions, each holding every layer.

    A layer's part of a page is its keys, values and indexer keys of `page_size` positions, then the
    pooled rows of `page_size / block` blocks. A contiguous cache is an arena of one page that has no table.

    Raises:
        ValueError: a page size that is not a positive multiple of the block, or no pages.
    """

    geometry: Geometry
    page_size: int
    pages: int = 1

    def __post_init__(self) -> None:
        for name in ("page_size", "pages"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), (int, np.integer)):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be an integer")
        block = self.geometry.block
        if self.page_size < 1 or self.page_size % block:
            raise ValueError(
                f"page size {self.page_size} does not hold whole blocks; it must be a positive multiple of the "
                f"block, {block} (for example {max(1, self.page_size // block + 1) * block})"
            )
        if self.pages < 1:
            raise ValueError(f"an arena of {self.pages} pages; it must have at least one")

    @classmethod
    def contiguous(cls, geometry: Geometry, capacity: int) -> Layout:
        """One run of at least `capacity` positions, rounded up to whole blocks."""
        return cls(geometry=geometry, page_size=-(-capacity // geometry.block) * geometry.block)

    @property
    def layer_elements(self) -> int:
        """Elements of one layer's part of a page."""
        g = self.geometry
        return self.page_size * (2 * g.kv_heads * g.head_dim + g.index_dim) + self.page_size // g.block * g.index_dim

    @property
    def page_elements(self) -> int:
        """Elements of a whole page, over all layers."""
        return self.layer_elements * self.geometry.layers

    @property
    def elements(self) -> int:
        """Elements of the whole arena."""
        return self.page_elements * self.pages

    def part(self, layer: int, part: Part) -> RowMap:
        """The address map of one part of one layer."""
        g = self.geometry
        if not 0 <= layer < g.layers:
            raise ValueError(f"layer {layer} does not exist; geometry {g.name!r} has layers 0 to {g.layers - 1}")
        n, wide = self.page_size, g.kv_heads * g.head_dim
        start = {"keys": 0, "values": n * wide, "index_keys": 2 * n * wide, "pooled": 2 * n * wide + n * g.index_dim}
        indexer = part in ("index_keys", "pooled")
        return RowMap(
            base=layer * self.layer_elements + start[part],
            page_stride=self.page_elements,
            row_stride=g.index_dim if indexer else wide,
            head_stride=g.index_dim if indexer else g.head_dim,
            rows_per_page=n // g.block if part == "pooled" else n,
            heads=1 if indexer else g.kv_heads,
            width=g.index_dim if indexer else g.head_dim,
        )

    def zeros(self) -> npt.NDArray[np.generic]:
        """A zeroed arena: bf16 [elements]."""
        return np.zeros(self.elements, BF16)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCache:
    """One layer of one stream's cache: a buffer, its layout, and the stream's page table.

    Buffer and table lie both on the host or both on one device. What they hold is read from the host only.

    Attributes:
        buffer: bf16 [layout.elements]; shared with other layers and streams.
        layout: how the buffer is laid out.
        layer: which layer.
        table: int32 [n], physical page of each logical page; None reads the buffer contiguously.
            Entries past the stream's pages may hold anything.
        table_is_stable: the caller's promise that the table is one array for as long as a captured launch reads it,
            changed in place only.
    """

    buffer: npt.NDArray[np.generic]
    layout: Layout
    layer: int = 0
    table: npt.NDArray[np.int32] | None = None
    table_is_stable: bool = False

    def __post_init__(self) -> None:
        self.require_place(place_of(self.buffer))
        if self.table is None and self.layout.pages != 1:
            raise ValueError(
                f"an arena of {self.layout.pages} pages is read through a page table, but none is given; "
                "pass table=, or use Layout.contiguous"
            )
        self.layout.part(self.layer, "keys")

    @property
    def device(self) -> int | None:
        """Number of the CUDA device that the buffer lies on, None on the host."""
        return place_of(self.buffer).device

    def require_place(self, place: Place) -> None:
        """Raise unless buffer and table are arrays that lie in `place`; see `require_array`."""
        require_array("cache buffer", self.buffer, BF16, (self.layout.elements,), place)
        if self.table is not None:
            require_array("page table", self.table, np.int32, (None,), place)

    def require(self, end: int) -> None:
        """Raise ValueError unless positions 0 to end - 1 all lie in the arena, each page named once.

        Entries of a table on a device are not looked at.
        """
        self.require_room(end)
        if self.table is not None and self.device is None:
            self._require_pages(self.table[: -(-end // self.layout.page_size)])

    def require_room(self, end: int) -> None:
        """Raise ValueError unless there is room for positions 0 to end - 1, whatever pages the table names."""
        n = self.layout.page_size
        if self.table is None:
            if end > n:
                raise ValueError(f"position {end - 1} does not fit a contiguous cache of {n} positions")
            return
        live, (entries,) = -(-end // n), shape_of(self.table)
        if live > entries:
            raise ValueError(
                f"position {end - 1} needs {live} pages of {n} positions, but the page table has {entries} "
                f"entries; grow the table to {live}"
            )

    def _require_pages(self, used: npt.NDArray[np.int32]) -> None:
        if not len(used):
            return
        if not 0 <= used.min() <= used.max() < self.layout.pages:
            outside = np.flatnonzero((used < 0) | (used >= self.layout.pages))
            raise ValueError(
                f"page table entry {outside[0]} names page {used[outside[0]]}; the arena has pages 0 to "
                f"{self.layout.pages - 1}"
            )
        if np.bincount(used).max() > 1:
            page = int(np.bincount(used).argmax())
            first, second = np.flatnonzero(used == page)[:2]
            raise ValueError(
                f"page table entries {first} and {second} both name page {page}; a page may hold one logical page of "
                "one stream"
            )

    def offsets(self, part: Part, rows: npt.ArrayLike) -> IntArray:
        """Element offset in the buffer of each (row, head) of a part: int64 [len(rows), heads].

        Raises:
            TypeError: the cache lies on a device.
        """
        if self.device is not None:
            raise TypeError(
                "this cache lies on a CUDA device, where kernels alone read and write it; copy its buffer and its "
                "table to the host first"
            )
        return self.layout.part(self.layer, part).offsets(rows, self.table)

    def read(self, part: Part, rows: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """Copy rows out: bf16 [len(rows), heads, width]."""
        at = self.offsets(part, rows)
        width = self.layout.part(self.layer, part).width
        return np.lib.stride_tricks.sliding_window_view(self.buffer, width)[at]

    def write(self, part: Part, rows: npt.ArrayLike, values: npt.NDArray[np.generic]) -> None:
        """Store bf16 rows [len(rows), heads, width]."""
        at = self.offsets(part, rows)
        width = self.layout.part(self.layer, part).width
        view = np.lib.stride_tricks.sliding_window_view(self.buffer, width, writeable=True)
        view[at] = values


KvStyle = Literal["nhd", "hnd", "interleaved_nhd", "interleaved_hnd"]
KV_STYLES: tuple[KvStyle, ...] = ("nhd", "hnd", "interleaved_nhd", "interleaved_hnd")


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Keys and values as other engines page them: one layer, any dtype.

    "nhd" is [pages, page, heads, dim] and "hnd" [pages, heads, page, dim], keys and values in arrays of their own;
    "interleaved_nhd" and "interleaved_hnd" are [pages, 2, ...], keys then values, in one. `padding` elements stand
    unused behind each page.

    Raises:
        ValueError: a style that is not among these, or a size below 1.
    """

    style: KvStyle
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    padding: int = 0

    def __post_init__(self) -> None:
        if self.style not in KV_STYLES:
            raise ValueError(f"cache style is {self.style!r}; it must be one of {', '.join(KV_STYLES)}")
        for name in ("pages", "page_size", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.padding < 0:
            raise ValueError(f"padding is {self.padding}; it must be 0 or more")

    @property
    def interleaved(self) -> bool:
        """Whether keys and values share an array."""
        return self.style.startswith("interleaved")

    @property
    def page_elements(self) -> int:
        """Elements from one page to the next."""
        return (2 if self.interleaved else 1) * self._half + self.padding

    @property
    def elements(self) -> int:
        """Elements of one array."""
        return self.pages * self.page_elements

    @property
    def _half(self) -> int:
        return self.page_size * self.kv_heads * self.head_dim

    def part(self, part: Literal["keys", "values"]) -> RowMap:
        """The address map of keys or values in their array."""
        hnd = self.style.endswith("hnd")
        return RowMap(
            base=self._half if self.interleaved and part == "values" else 0,
            page_stride=self.page_elements,
            row_stride=self.head_dim if hnd else self.kv_heads * self.head_dim,
            head_stride=self.page_size * self.head_dim if hnd else self.head_dim,
            rows_per_page=self.page_size,
            heads=self.kv_heads,
            width=self.head_dim,
        )

    def view(self, array: npt.NDArray[Any], part: Literal["keys", "values"]) -> npt.NDArray[Any]:
        """The part as engines see it: [pages, page, heads, dim] or [pages, heads, page, dim], a view of its array."""
        m, item = self.part(part), array.dtype.itemsize
        strides = [m.page_stride, m.row_stride, m.head_stride, 1]
        shape = [self.pages, self.page_size, self.kv_heads, self.head_dim]
        if self.style.endswith("hnd"):
            strides[1], strides[2] = strides[2], strides[1]
            shape[1], shape[2] = shape[2], shape[1]
        return np.lib.stride_tricks.as_strided(array[m.base :], shape, [s * item for s in strides])
