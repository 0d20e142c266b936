"""What a page pool tells of its pages at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """A pool's pages at one moment.

    Attributes:
        pages: all of them; each is free or used.
        free, used: pages.
        draining: free pages whose last work has not ended; what takes them runs behind it.
        high_water: the most that were ever used at once.
        positions: that the used pages hold rows of.
        fragmentation: share of the used pages' positions that hold no row, 0 where none is used.
    """

    pages: int
    free: int
    used: int
    draining: int
    high_water: int
    positions: int
    fragmentation: float
