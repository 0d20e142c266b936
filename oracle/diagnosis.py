"""Diagnosis: which misreading of the cache reproduces a wrong result.

Pages and rows are substituted in the float64 reference until one of the substitutions explains the first wrong row:
the result lies within the bound of what the reference gives when it misreads the cache in that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .attention import Array, AttentionCase, Part
from .bounds import Arithmetic

MOST = 20_000
"""Substitutions tried at most."""

PARTS: tuple[Part, ...] = ("keys", "values")


@dataclass(frozen=True, eq=False)
class Misreading:
    """One way to misread the cache.

    Attributes:
        sentence: what was done instead, in words.
        keys, values: offsets of the rows that are read in place of the right ones.
    """

    sentence: str
    keys: Array
    values: Array


def diagnose(case: AttentionCase, got: Array, arithmetic: Arithmetic) -> str | None:
    """The misreading that gives the first wrong row of a result, in one sentence; None if none that is tried does.

    Args:
        got: [rows, QH, D], what the kernel gave.
    """
    row = _first_wrong_row(case, got, arithmetic)
    if row is None:
        return (
            "every row is within its bound, so the right keys were read: the order of the sums depends on the pages, "
            "the neighbours or the run"
        )
    stream, inner, _ = case.rows[row]
    reader = _Reader(case, stream)
    for tried, misreading in enumerate(_misreadings(case, row)):
        if tried >= MOST:
            break
        if reader.explains(row, misreading, got[row], arithmetic):
            return f"stream {stream}, row {inner}: {misreading.sentence}"
    return None


def _first_wrong_row(case: AttentionCase, got: Array, arithmetic: Arithmetic) -> int | None:
    for row in range(len(case.rows)):
        if (case.row_bound(row, arithmetic).fraction(got[row]) > 1).any():
            return row
    return None


class _Reader:
    """Reads rows of an arena at any offset."""

    def __init__(self, case: AttentionCase, stream: int) -> None:
        self.case = case
        self.arena = case.buffers()

    def rows(self, part: str, offsets: Array) -> Array | None:
        """[n, KH, D]; None where an offset lies outside the arena."""
        case = self.case
        m = case.layout.part("keys")
        at = offsets[:, None] + np.arange(case.kv_heads) * m.head_stride
        if len(at) and (at.min() < 0 or at.max() + case.head_dim > len(self.arena[part])):
            return None
        return np.asarray(self.arena[part][at[..., None] + np.arange(case.head_dim)])

    def explains(self, row: int, misreading: Misreading, got: Array, arithmetic: Arithmetic) -> bool:
        keys, values = self.rows("keys", misreading.keys), self.rows("values", misreading.values)
        if keys is None or values is None:
            return False
        with np.errstate(all="ignore"):
            bound = self.case.row_bound(row, arithmetic, keys, values)
            return bool((bound.fraction(got) <= 1).all())


def _misreadings(case: AttentionCase, row: int) -> Iterator[Misreading]:
    """Misreadings of one row's keys, the likeliest first."""
    yield from _other_tables(case, row)
    yield from _other_lengths(case, row)
    yield from _other_sizes(case, row)
    yield from _other_pages(case, row)


def _read(case: AttentionCase, sentence: str, table: Array, positions: Array) -> Misreading:
    """Positions read through another table."""
    return Misreading(sentence, *(_offsets(case, part, table, positions) for part in PARTS))


def _offsets(case: AttentionCase, part: Part, table: Array, positions: Array) -> Array:
    page = np.asarray(table)[np.minimum(positions // case.page_size, len(table) - 1)]
    m = case.layout.part(part)
    return np.asarray(m.base + page * m.page_stride + positions % case.page_size * m.row_stride)


def _other_tables(case: AttentionCase, row: int) -> Iterator[Misreading]:
    stream, _, count = case.rows[row]
    own, table, positions = np.array(case.tables[stream]), case.page_table(), np.arange(count)
    yield _read(case, "the page table was ignored", np.arange(len(case.order)), positions)
    for other in range(len(case.lengths)):
        if other != stream:
            yield _read(case, f"the page table of stream {other} was used", table[other], positions)
    entries = np.arange(len(own))
    for step, told in ((1, "one entry too far"), (-1, "one entry too early")):
        shifted = table[stream][np.clip(entries + step, 0, table.shape[1] - 1)]
        yield _read(case, f"the page table was read {told}", shifted, positions)
    for step, told in ((1, "after"), (-1, "before")):
        sentence = f"the page {told} the one that the table names was read"
        yield _read(case, sentence, np.clip(own + step, 0, len(case.order) - 1), positions)


def _other_lengths(case: AttentionCase, row: int) -> Iterator[Misreading]:
    stream, inner, count = case.rows[row]
    table = case.page_table()[stream]
    length, n = case.lengths[stream], case.page_size
    lengths = (
        (length, "the row read the keys behind it: the mask is not causal"),
        (count + 1, "one row past the last key was read as well"),
        (count - 1, "the last key was left out"),
        (-(-count // n) * n, "the whole last page was read, its stale tail included"),
        (count // n * n, "the last, partly filled page was left out"),
        (-(-length // n) * n, "the stream's whole last page was read, its stale tail included"),
        (inner + 1, "keys were bounded by the row's place in its window, not by its position"),
    )
    tried = {count}
    for keys, sentence in lengths:
        if keys not in tried and 0 <= keys <= len(table) * n:
            tried.add(keys)
            yield _read(case, sentence, table, np.arange(keys))


def _other_sizes(case: AttentionCase, row: int) -> Iterator[Misreading]:
    stream, _, count = case.rows[row]
    table, positions, n = case.page_table()[stream], np.arange(count), case.page_size
    natural = n * case.kv_heads * case.head_dim

    def sized(sentence: str, size: int, stride: int) -> Misreading:
        page = table[np.minimum(positions // size, len(table) - 1)]
        maps = [case.layout.part(part) for part in PARTS]
        return Misreading(sentence, *(m.base + page * stride + positions % size * m.row_stride for m in maps))

    stride = case.layout.page_elements
    for size, told in ((2 * n, "twice"), (n // 2, "half")):
        if size:
            yield sized(f"pages were taken to be {told} as large, for the table entry", size, stride)
            scaled = stride * size // n
            yield sized(f"pages were taken to be {told} as large, for the table entry and the stride", size, scaled)
    if stride != natural:
        yield sized("pages were taken to follow each other without the gap between them", n, natural)


def _other_pages(case: AttentionCase, row: int) -> Iterator[Misreading]:
    """One logical page read from another physical page: keys and values, then one of them alone."""
    stream, _, count = case.rows[row]
    own, positions = np.array(case.tables[stream]), np.arange(count)
    right = {part: _offsets(case, part, own, positions) for part in PARTS}
    kinds: tuple[tuple[str, tuple[Part, ...]], ...] = (
        ("logical page {} was read", PARTS),
        ("the keys of logical page {} were read", ("keys",)),
        ("the values of logical page {} were read", ("values",)),
    )
    for told, parts in kinds:
        for entry in range(-(-count // case.page_size)):
            for page in range(len(case.order)):
                if page == own[entry]:
                    continue
                wrong = own.copy()
                wrong[entry] = page
                at = {part: _offsets(case, part, wrong, positions) if part in parts else right[part] for part in PARTS}
                sentence = f"{told.format(entry)} from physical {page}; the table says {own[entry]}"
                yield Misreading(sentence, at["keys"], at["values"])
