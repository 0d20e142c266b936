"""Rows of a stream between its pages and the contiguous form on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.layout import BF16, PARTS, Layout, Part
from ..reference.results import Bf16Array
from .page_pool import PagePool
from .page_runs import part_rows, runs
from .stream import Stream


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SavedLayer:
    """One layer of a saved prompt, NumPy bf16.

    Attributes:
        keys, values: [positions, KH, D], keys rotated.
        index_keys: [positions, 1, DI], raw: the next block is pooled from them.
        pooled: [positions // block, 1, DI].
    """

    keys: Bf16Array
    values: Bf16Array
    index_keys: Bf16Array
    pooled: Bf16Array

    def __repr__(self) -> str:
        return f"SavedLayer({len(self.keys)} positions, {len(self.pooled)} pooled rows)"

    def part(self, part: Part) -> Bf16Array:
        """The rows of a part."""
        rows: Bf16Array = getattr(self, part)
        return rows


def rows_shape(layout: Layout, part: Part, positions: int) -> tuple[int, int, int]:
    """Rows, heads and width of a part that this many positions fill."""
    rows = layout.part(0, part)
    return part_rows(layout, part, positions), rows.heads, rows.width


def _parts_of(layout: Layout, page: npt.NDArray[Any]) -> dict[Part, npt.NDArray[Any]]:
    """A page on the host by its parts: views, bf16 [layers, rows of a page, heads, width]."""
    layers = page.reshape(layout.geometry.layers, layout.layer_elements)
    found = {}
    for part in PARTS:
        rows = layout.part(0, part)
        end = rows.base + rows.rows_per_page * rows.row_stride
        found[part] = layers[:, rows.base : end].reshape(len(layers), rows.rows_per_page, rows.heads, rows.width)
    return found


def read_rows(stream: Stream, positions: int) -> tuple[SavedLayer, ...]:
    """The first rows of every layer, out of the stream's pages: whole pages at once, of the last one the used rows."""
    pool, layout = stream.pool, stream.pool.layout
    layers = range(layout.geometry.layers)
    found = {part: np.empty((len(layers), *rows_shape(layout, part, positions)), BF16) for part in PARTS}
    whole = positions // layout.page_size
    for logical in range(whole):
        for part, rows in _parts_of(layout, _read(pool, pool.page(stream.pages[logical]))).items():
            first = logical * rows.shape[1]
            found[part][:, first : first + rows.shape[1]] = rows
    for layer, part, where, chosen in _last_runs(stream, positions):
        target = found[part][layer, chosen]
        target[...] = _read(pool, pool.arena[where]).reshape(target.shape)
    for array in found.values():
        array.flags.writeable = False
    return tuple(SavedLayer(**{part: found[part][layer] for part in PARTS}) for layer in layers)


def write_rows(stream: Stream, layers: Sequence[SavedLayer], positions: int) -> None:
    """Store the first rows of every layer in the stream's pages: whole pages at once, of the last one nothing else."""
    pool, layout, write = stream.pool, stream.pool.layout, stream.pool.engine.backend.write
    whole = positions // layout.page_size
    page = np.empty(layout.page_elements if whole else 0, BF16)
    for logical in range(whole):
        for part, space in _parts_of(layout, page).items():
            first = logical * space.shape[1]
            for layer, rows in enumerate(layers):
                space[layer] = rows.part(part)[first : first + space.shape[1]]
        write(pool.page(stream.pages[logical]), page)
    for i, part, where, chosen in _last_runs(stream, positions):
        write(pool.arena[where], layers[i].part(part)[chosen].reshape(-1))


def _last_runs(stream: Stream, positions: int) -> Iterator[tuple[int, Part, slice, slice]]:
    """Of a page that is not full, each layer and part: the arena's elements, and the rows that they are."""
    layout = stream.pool.layout
    whole = positions // layout.page_size * layout.page_size
    for layer in range(layout.geometry.layers):
        for part in PARTS:
            first, end = (part_rows(layout, part, n) for n in (whole, positions))
            for where, begin, stop in runs(layout, stream.pages, layer, part, first, end):
                yield layer, part, where, slice(begin, stop)


def _read(pool: PagePool, array: Any) -> npt.NDArray[Any]:
    """A contiguous part of the arena on the host: itself where the host may look at it, else a copy."""
    engine = pool.engine
    found: npt.NDArray[Any] = array if engine.place.may_read else engine.backend.download(array)
    return found
