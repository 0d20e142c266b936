"""Diagnosis: which misreading of the cache reproduces a wrong result.

Pages and rows are substituted in the float64 reference until one of the substitutions explains the first wrong row:
the result lies within the bound of what the reference gives when it misreads the cache in that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from .arithmetic import Arithmetic
from .attention import Array, AttentionCase, Part

MOST = 20_000
"""Substitutions tried at most."""

PARTS: tuple[Part, ...] = ("keys", "values")


@dataclass(frozen=True, kw_only=True, eq=False)
class Misreading:
    """One way to get a row wrong.

    Attributes:
        sentence: what was done instead, in words.
        keys, values: offsets of the rows that are read in place of the right ones.
        scale: of the scores, in place of the right one.
        interleaved: query head h reads key/value head h % kv_heads, in place of h // group.
    """

    sentence: str
    keys: Array
    values: Array
    scale: float | None = None
    interleaved: bool = False


def diagnose(case: AttentionCase, got: Array, arithmetic: Arithmetic) -> str | None:
    """What explains the first wrong row of a result, and every other wrong row of its stream, in one sentence.

    None where no row is wrong, or where nothing that is tried explains them.

    Args:
        got: [rows, QH, D], what the kernel gave.
    """
    wrong = [row for row in range(len(case.rows)) if (case.row_bound(row, arithmetic).fraction(got[row]) > 1).any()]
    if not wrong:
        return None
    stream, inner, _ = case.rows[wrong[0]]
    others = [row for row in wrong[1:] if case.rows[row][0] == stream]
    reader = _Reader(case, arithmetic)
    for misreading in islice(_misreadings(case, wrong[0]), MOST):
        if reader.explains(wrong[0], misreading, got) and all(
            reader.explains_alike(row, misreading.sentence, got) for row in others
        ):
            return f"stream {stream}, row {inner}: {misreading.sentence}"
    return None


class _Reader:
    """Reads rows of an arena at any offset."""

    def __init__(self, case: AttentionCase, arithmetic: Arithmetic) -> None:
        self.case = case
        self.arithmetic = arithmetic
        self.arena = case.buffers()

    def rows(self, part: Part, offsets: Array) -> Array | None:
        """[n, KH, D]; None where an offset lies outside the arena."""
        case = self.case
        at = offsets[:, None] + np.arange(case.kv_heads) * case.layout.part(part).head_stride
        if len(at) and (at.min() < 0 or at.max() + case.head_dim > len(self.arena[part])):
            return None
        return np.asarray(self.arena[part][at[..., None] + np.arange(case.head_dim)])

    def explains(self, row: int, misreading: Misreading, got: Array) -> bool:
        """Whether a row of the result is what the misreading gives."""
        keys, values = self.rows("keys", misreading.keys), self.rows("values", misreading.values)
        if keys is None or values is None:
            return False
        heads = np.arange(self.case.query_heads)
        if misreading.interleaved:  # as if the heads stood in another order
            heads = heads.reshape(-1, self.case.kv_heads).T.ravel()
        with np.errstate(all="ignore"):
            bound = self.case.row_bound(row, self.arithmetic, keys, values, scale=misreading.scale, heads=heads)
            return bool((bound.fraction(got[row][heads]) <= 1).all())

    def explains_alike(self, row: int, sentence: str, got: Array) -> bool:
        """Whether the same misreading explains another row; a sentence that the row has no room for does not object."""
        alike = [m for m in islice(_misreadings(self.case, row), MOST) if m.sentence == sentence]
        return not alike or self.explains(row, alike[0], got)


def _misreadings(case: AttentionCase, row: int) -> Iterator[Misreading]:
    """Misreadings of one row's keys, the likeliest first."""
    yield from _other_tables(case, row)
    yield from _other_lengths(case, row)
    yield from _other_sizes(case, row)
    yield from _other_sums(case, row)
    yield from _other_pages(case, row)


def _other_sums(case: AttentionCase, row: int) -> Iterator[Misreading]:
    """The right rows, put to another use."""
    stream, _, count = case.rows[row]
    own, positions = np.array(case.tables[stream]), np.arange(count)
    keys, values = (_offsets(case, part, own, positions) for part in PARTS)
    if case.head_dim > 1:
        yield Misreading(sentence="the scores were not scaled", keys=keys, values=values, scale=1.0)
        by_width = 1.0 / case.head_dim
        yield Misreading(sentence="the scores were scaled by 1 / head_dim", keys=keys, values=values, scale=by_width)
    if 1 < case.kv_heads < case.query_heads:
        sentence = "query heads were dealt to the key/value heads in turn, not in groups"
        yield Misreading(sentence=sentence, keys=keys, values=values, interleaved=True)


def _read(
    case: AttentionCase,
    sentence: str,
    table: Array,
    positions: Array,
    *,
    only: Part | None = None,
    own: Array | None = None,
) -> Misreading:
    """Positions read through another table; only keys or values, if one is named, the other through its own."""
    at = {
        part: _offsets(case, part, own if own is not None and only not in (None, part) else table, positions)
        for part in PARTS
    }
    return Misreading(sentence=sentence, keys=at["keys"], values=at["values"])


def _offsets(case: AttentionCase, part: Part, table: Array, positions: Array) -> Array:
    page = np.asarray(table)[np.minimum(positions // case.page_size, len(table) - 1)]
    m = case.layout.part(part)
    return np.asarray(m.base + page * m.page_stride + positions % case.page_size * m.row_stride)


def _other_tables(case: AttentionCase, row: int) -> Iterator[Misreading]:
    stream, _, count = case.rows[row]
    own, positions = np.array(case.tables[stream]), np.arange(count)
    kinds: tuple[tuple[str, Part | None], ...] = (("", None), (" for the keys", "keys"), (" for the values", "values"))
    for sentence, table in _wrong_tables(case, stream):
        for told, only in kinds:
            yield _read(case, sentence + told, table, positions, only=only, own=own)


def _wrong_tables(case: AttentionCase, stream: int) -> Iterator[tuple[str, Array]]:
    own, table = np.array(case.tables[stream]), case.page_table()
    yield "the page table was ignored", np.arange(len(case.order))
    for other in range(len(case.lengths)):
        if other != stream:
            yield f"the page table of stream {other} was used", table[other]
    entries = np.arange(len(own))
    for step, told in ((1, "one entry too far"), (-1, "one entry too early")):
        yield f"the page table was read {told}", table[stream][np.clip(entries + step, 0, table.shape[1] - 1)]
    for step, told in ((1, "after"), (-1, "before")):
        moved = np.clip(own + step, 0, len(case.order) - 1)
        yield f"the page {told} the one that the table names was read", moved


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
        keys, values = (m.base + page * stride + positions % size * m.row_stride for m in maps)
        return Misreading(sentence=sentence, keys=keys, values=values)

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
                yield Misreading(sentence=sentence, keys=at["keys"], values=at["values"])
