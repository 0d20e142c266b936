"""A stream's page table: one array for as long as the stream lives, so that captured launches may read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .engine import Engine

NO_PAGE = -1
"""Where a table that the host may look at names no page: what reads it is refused."""


class PageTable:
    """The physical page of each logical page, changed in place, behind what is submitted by then.

    Entries of logical pages that the stream does not hold name no page where calls look at tables before they launch.
    Elsewhere, on a device or while work is late, nobody would see the entry, and a kernel would follow it out of the
    arena: there they name page 0, or what they named last.

    Args:
        engine: whose kernels read it.
        entries: how many.

    Attributes:
        array: int32 [entries], in the engine's memory.
    """

    def __init__(self, engine: Engine, entries: int) -> None:
        self._backend = engine.backend
        self._looked_at = engine.place.may_read
        self.array: Any = self._backend.empty((entries,), np.int32)
        if self._looked_at:
            self.disown(0)
        else:
            self._backend.zero(self.array)

    def enter(self, first: int, pages: Sequence[int]) -> None:
        """Name these pages as the logical pages from `first` on."""
        self._backend.write(self.array[first : first + len(pages)], np.array(pages, np.int32))

    def disown(self, first: int) -> None:
        """Logical pages from `first` on are nobody's: a captured step or a cache that outlives them is refused."""
        entries = self.array[first:]
        if self._looked_at and len(entries):
            self._backend.write(entries, np.full(len(entries), NO_PAGE, np.int32))
