"""Diagnosis for the block-sparse form: which misreading of the page table reproduces a kernel's wrong row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..reference.geometry import IntArray
from ..reference.layout import LayerCache, Part
from .compare import bits
from .operations import AHEAD, BY_NAME, Call, Operation, Outputs, Results, one_row, row_of

Table = npt.NDArray[np.int32] | None
"""A page table; None reads the rows as if they were contiguous."""

SECONDS = 10.0
"""Time spent on one diagnosis at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Misread(LayerCache):
    """A cache read through wrong tables: `wrong` for the parts in it, the cache's own for the others."""

    wrong: Mapping[Part, Table] = field(default_factory=dict)

    def require(self, end: int) -> None:
        """Anything goes."""

    def offsets(self, part: Part, rows: npt.ArrayLike) -> IntArray:
        """Element offsets through the part's table."""
        return self.layout.part(self.layer, part).offsets(rows, self.wrong.get(part, self.table))


def misread(cache: LayerCache, wrong: Mapping[Part, Table]) -> Misread:
    """A cache read through wrong tables."""
    return Misread(buffer=cache.buffer, layout=cache.layout, layer=cache.layer, table=cache.table, wrong=wrong)


def diagnose_rows(
    operation: Operation, call: Call, given: Results, cache: LayerCache, tables: Sequence[Table], got: Outputs
) -> str | None:
    """What explains the first wrong row of an operation that reads a paged cache; None if nothing that is tried does.

    Args:
        given: results before it.
        cache: what it read.
        tables: of all streams of the arena.
        got: what it gave.
    """
    if cache.table is None or operation.stores or operation.name not in READERS:
        return None
    plain = BY_NAME[AHEAD.get(operation.name, operation.name)]
    answers = {name.replace(operation.name, plain.name, 1): array for name, array in got.items()}
    row = _first_wrong(call, given, operation, got)
    if row is None:
        return None
    one, before = one_row(call, given, row)
    wanted = {
        name: row_of(call, name, array, row, one, nk=int(given["select.nk"][row])) for name, array in answers.items()
    }
    started = time.monotonic()
    for sentence, wrong in _misreadings(plain, call, cache, tables):
        if time.monotonic() - started > SECONDS:
            return None
        if _explains(plain, one, before, misread(cache, wrong), wanted):
            return f"stream {call.stream}, row {row}, layer {cache.layer}: {sentence}"
    return None


READERS: dict[str, tuple[Part, ...]] = {
    "scores": ("pooled",),
    "chunks": ("keys", "values"),
    "chunks_ahead": ("keys", "values"),
    "dense": ("keys", "values"),
    "dense_ahead": ("keys", "values"),
}
"""Operations that read the cache, and the parts they read."""


def _first_wrong(call: Call, given: Results, operation: Operation, got: Outputs) -> int | None:
    """The first row of the window of which some output differs from the truth."""
    wrong = []
    for name, array in got.items():
        differs = (bits(array) != bits(given[name])).reshape(len(array), -1).any(axis=1)
        wrong += [int(row) + call.rows - len(array) for row in np.flatnonzero(differs)]
    return min(wrong, default=None)


def _explains(operation: Operation, call: Call, given: Results, cache: Misread, wanted: Outputs) -> bool:
    try:
        with np.errstate(all="ignore"):
            bound = operation.bound(call, given, cache)
            return all((bound[name].fraction(array) <= 1).all() for name, array in wanted.items())
    except (IndexError, ValueError):
        return False


def _misreadings(
    operation: Operation, call: Call, cache: LayerCache, tables: Sequence[Table]
) -> Iterator[tuple[str, dict[Part, Table]]]:
    """Sentences and wrong tables, the likeliest first."""
    table = cache.table
    assert table is not None
    parts = READERS[operation.name]
    pages = cache.layout.pages
    live = -(-call.end // cache.layout.page_size)

    def whole(wrong: npt.NDArray[np.integer]) -> dict[Part, Table]:
        return dict.fromkeys(parts, np.asarray(wrong, np.int32))

    yield "the page table was ignored, rows read as if contiguous", dict.fromkeys(parts)
    yield "the page table was ignored", whole(np.arange(len(table)))
    for stream, other in enumerate(tables):
        if stream != call.stream and other is not None:
            yield f"the page table of stream {stream} was used", whole(other)
    for step, told in ((1, "one entry too far"), (-1, "one entry too early")):
        yield f"the page table was read {told}", whole(table[np.clip(np.arange(len(table)) + step, 0, len(table) - 1)])
    for step, told in ((1, "after"), (-1, "before")):
        sentence = f"the page {told} the one that the table names was read"
        yield sentence, whole(np.clip(table + step, 0, pages - 1))
    choices: list[tuple[str, tuple[Part, ...]]] = [("logical page {} was read", parts)]
    if len(parts) > 1:
        choices += [(f"the {part} of logical page {{}} were read", (part,)) for part in parts]
    for told, chosen in choices:
        for entry in range(live):
            for page in range(pages):
                if page == table[entry]:
                    continue
                wrong = table.copy()
                wrong[entry] = page
                sentence = f"{told.format(entry)} from physical {page}; the table says {table[entry]}"
                yield sentence, dict.fromkeys(chosen, wrong)
