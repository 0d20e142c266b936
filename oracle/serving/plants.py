"""How the controls of a serve-check change a stream: its rows, its page table, or the settlement of its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...fast import Settled, Stream, settle
from ...fast.page_runs import runs
from ...reference.layout import Part
from ...reference.results import Bf16Array
from .server import Settle


def read_rows(stream: Stream, layer: int, part: Part, first: int, end: int) -> Bf16Array:
    """Rows of a stream's cache, on the host, bf16 [rows, elements]."""
    pool = stream.pool
    width = pool.layout.part(layer, part).row_stride
    found = [
        pool.engine.download(pool.arena[where]).reshape(-1, width)
        for where, _, _ in runs(pool.layout, stream.pages, layer, part, first, end)
    ]
    rows: Bf16Array = np.concatenate(found)
    return rows


def write_rows(stream: Stream, layer: int, part: Part, first: int, rows: Bf16Array) -> None:
    """Change rows of a stream's cache."""
    pool = stream.pool
    for where, start, end in runs(pool.layout, stream.pages, layer, part, first, first + len(rows)):
        pool.engine.backend.write(pool.arena[where], rows[start - first : end - first].reshape(-1))


def write_table(stream: Stream, table: npt.NDArray[np.int32]) -> None:
    """Change the first entries of a stream's page table, and nothing else."""
    entries = stream.cache(0).table
    assert entries is not None
    stream.pool.engine.backend.write(entries[: len(table)], table)


def keep_one_more(
    stream: Stream, drafts: Sequence[int], greedy: Sequence[int], *, layers: Sequence[int] | None = None
) -> Settled:
    """A settlement that keeps the first refuted draft."""
    said = list(greedy)
    for i, draft in enumerate(drafts):
        if draft != said[i]:
            said[i] = draft
            break
    return settle(stream, drafts, said, layers=layers)


def leaves(part: Part) -> Settle:
    """A settlement whose rollback leaves the refuted rows of one part where they are."""

    def settle_and_leave(
        stream: Stream, drafts: Sequence[int], greedy: Sequence[int], *, layers: Sequence[int] | None = None
    ) -> Settled:
        block = stream.pool.geometry.block if part == "pooled" else 1
        end = stream.lengths[0] // block
        first = max(0, end - len(drafts))
        rows = {layer: read_rows(stream, layer, part, first, end) for layer in layers or () if end > first}
        settled = settle(stream, drafts, greedy, layers=layers)
        held = len(stream.pages) * stream.pool.page_size // block
        for layer, left in rows.items():
            kept = stream.lengths[0] // block - first
            write_rows(stream, layer, part, first + kept, left[kept : held - first])
        return settled

    return settle_and_leave
