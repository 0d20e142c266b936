"""Bit comparison, and the one form in which every difference is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.layout import BF16, LayerCache
from ..reference.numerics import bf16
from .interval import Interval


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """Whose output is compared, so that a difference can name the page behind it.

    Attributes:
        stream: number of the stream.
        pos0: position of row 0 of the output; of the first stored row where the output is cache rows.
        cache: the cache that was read or written; None where no page is behind the output.
    """

    stream: int
    pos0: int
    cache: LayerCache | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first element that differs, and how many do.

    Attributes:
        tensor: name of the output, "kernel.tensor".
        stream: whose.
        index: (axis name, index) pairs.
        byte: offset of the first differing byte in the output.
        got, want: both values; got_bits, want_bits: their bits, as hexadecimal.
        differing, size: elements that differ, and all.
        position: position behind the element; page, entry, page_row: the physical page that holds it, the table entry
            that names it, and the row inside it; None without a table.
        bound: what was allowed, when a bound was broken.
    """

    tensor: str
    stream: int
    index: tuple[tuple[str, int], ...]
    byte: int
    got: float
    want: float
    got_bits: str
    want_bits: str
    differing: int
    size: int
    position: int | None = None
    page: int | None = None
    entry: int | None = None
    page_row: int | None = None
    bound: str | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in self.index)
        behind = "" if self.position is None else f", position {self.position}"
        if self.page is not None:
            behind += f" (page {self.page}, table entry {self.entry}, row {self.page_row} of the page)"
        allowed = "" if self.bound is None else f"; {self.bound}"
        return (
            f"{self.tensor}: stream {self.stream}, {where}, byte {self.byte}{behind}: got {self.got:.9g} "
            f"({self.got_bits}), want {self.want:.9g} ({self.want_bits}){allowed}; {self.differing} of {self.size} "
            "elements differ"
        )


def bits(array: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """An array's bits as unsigned integers of its width, same shape."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def compare_bits(
    tensor: str, got: npt.NDArray[Any], want: npt.NDArray[Any], axes: tuple[str, ...], site: Site
) -> Difference | None:
    """The first element whose bits differ, or None.

    Args:
        got, want: same shape and dtype.
        axes: a name for each axis; "row", "position", "block" and "pooled row" also say which position is behind.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(
            f"{tensor}: got {got.dtype} {list(got.shape)}, want {want.dtype} {list(want.shape)}; both must agree"
        )
    same = bits(got) == bits(want)
    if same.all():
        return None
    return _difference(tensor, got, want, ~same, axes, site)


def compare_bound(
    tensor: str, got: npt.NDArray[Any], bound: Interval, axes: tuple[str, ...], site: Site
) -> tuple[float, Difference | None]:
    """The largest error as a fraction of its bound, and the element that has it if that is above 1."""
    fraction = bound.fraction(got)
    worst = float(fraction.max(initial=0.0))
    if worst <= 1.0:
        return worst, None
    index = np.unravel_index(int(fraction.argmax()), fraction.shape)
    allowed = f"allowed is {bound.low[index]:.9g} to {bound.high[index]:.9g}"
    want = bf16(bound.value) if got.dtype == BF16 else bound.value.astype(got.dtype)
    only = np.zeros(fraction.shape, bool)
    only[index] = True
    found = _difference(tensor, got, want, only, axes, site, allowed, int((fraction > 1).sum()))
    return worst, found


def _difference(
    tensor: str,
    got: npt.NDArray[Any],
    want: npt.NDArray[Any],
    differs: npt.NDArray[np.bool_],
    axes: tuple[str, ...],
    site: Site,
    bound: str | None = None,
    count: int | None = None,
) -> Difference:
    flat = int(differs.argmax())
    index = np.unravel_index(flat, differs.shape)
    named = tuple(zip(axes, (int(i) for i in index), strict=True))
    size = got.dtype.itemsize
    got_word, want_word = int(bits(got)[index]), int(bits(want)[index])
    byte = flat * size
    if got_word != want_word:  # little-endian: the lowest differing byte comes first
        low = (got_word ^ want_word) & -(got_word ^ want_word)
        byte += (low.bit_length() - 1) // 8
    return Difference(
        tensor=tensor,
        stream=site.stream,
        index=named,
        byte=byte,
        got=float(got[index]),
        want=float(want[index]),
        got_bits=f"0x{got_word:0{2 * size}x}",
        want_bits=f"0x{want_word:0{2 * size}x}",
        differing=int(differs.sum()) if count is None else count,
        size=got.size,
        bound=bound,
        **_behind(dict(named), site),
    )


def _behind(index: dict[str, int], site: Site) -> dict[str, int]:
    """The position and page behind an element."""
    position = _position(index, site)
    if position is None:
        return {}
    if site.cache is None or site.cache.table is None:
        return {"position": position}
    entry, row = divmod(position, site.cache.layout.page_size)
    if entry >= len(site.cache.table):
        return {"position": position}
    return {"position": position, "page": int(site.cache.table[entry]), "entry": entry, "page_row": row}


def _position(index: dict[str, int], site: Site) -> int | None:
    if site.cache is not None and "block" in index:
        return index["block"] * site.cache.layout.geometry.block
    if site.cache is not None and "pooled row" in index:
        block = site.cache.layout.geometry.block
        return (site.pos0 // block + index["pooled row"]) * block
    if "row" in index:
        return site.pos0 + index["row"]
    if "position" in index:
        return site.pos0 + index["position"]
    return None
