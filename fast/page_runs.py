"""Runs of rows in an arena: where neighbouring rows of a cache part lie next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..reference.layout import Layout, Part


def runs(
    layout: Layout, pages: Sequence[int], layer: int, part: Part, first: int, end: int
) -> Iterator[tuple[slice, int, int]]:
    """Rows first to end - 1 of a part, page by page: the arena's elements, and the rows [from, to) that they are.

    Args:
        pages: physical page of each logical page.
    """
    rows = layout.part(layer, part)
    while first < end:
        logical, inside = divmod(first, rows.rows_per_page)
        count = min(end - first, rows.rows_per_page - inside)
        start = rows.base + pages[logical] * rows.page_stride + inside * rows.row_stride
        yield slice(start, start + count * rows.row_stride), first, first + count
        first += count


def part_rows(layout: Layout, part: Part, positions: int) -> int:
    """Rows of a part that this many positions complete."""
    return positions // layout.geometry.block if part == "pooled" else positions
