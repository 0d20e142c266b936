"""`kvproof bench --serve`: what streams cost beside the kernels, in time and in memory."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...fast import Engine, HostBackend, PagePool, Stream
from ...fast.backend import Launch
from ...reference.geometry import FLASH_NEXT, TINY, Geometry
from ...reference.layout import BF16
from ..cases import weights_of

WINDOW = 64
CONTEXT = 4608
POSITIONS = 40_000
PAGE_SIZES = (None, 16)


class TimedEngine(Engine):
    """An engine on the host that adds up the seconds of its launches.

    Attributes:
        seconds: inside kernels.
    """

    seconds = 0.0

    def _submit(self, launch: Launch, arrays: Any) -> None:
        started = time.perf_counter()
        super()._submit(launch, arrays)
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class AppendCost:
    """A window of WINDOW rows over all layers at Flash Next geometry.

    Attributes:
        page_size: None where contiguous.
        kernels_ms, python_ms: medians of the time inside launches, and of all the rest.
        share: median of the rest as a fraction of the kernels'.
        least: the smallest such fraction: another process on the machine may spoil any one.
    """

    page_size: int | None
    kernels_ms: float
    python_ms: float
    share: float
    least: float


@dataclass(frozen=True, kw_only=True)
class StreamMemory:
    """What a stream of POSITIONS positions takes beyond the arena: bytes, and bytes per page."""

    page_size: int
    pages: int
    bytes: int
    per_page: float


def append_cost(page_size: int | None, rounds: int, geometry: Geometry = FLASH_NEXT) -> AppendCost:
    """Time windows of one stream, one after the other."""
    rng = np.random.Generator(np.random.PCG64(0))
    engine = TimedEngine(HostBackend())
    engine.prepare(geometry)
    shape = (WINDOW, geometry.projection_width)
    projections = [rng.standard_normal(shape, dtype=np.float32).astype(BF16) for _ in range(geometry.layers)]
    weights = [weights_of(geometry, rng) for _ in range(geometry.layers)]
    pool = PagePool(geometry, streams=1, context=CONTEXT, page_size=page_size, engine=engine)
    taken = []
    with Stream(pool, weights) as stream:
        stream.append(projections)
        for _ in range(min(rounds, CONTEXT // WINDOW - 1)):
            engine.seconds = 0.0
            started = time.perf_counter()
            stream.append(projections)
            whole = time.perf_counter() - started
            taken.append((engine.seconds, whole - engine.seconds))
    shares = [rest / kernels for kernels, rest in taken]
    return AppendCost(
        page_size=page_size,
        kernels_ms=1e3 * statistics.median(kernels for kernels, _ in taken),
        python_ms=1e3 * statistics.median(rest for _, rest in taken),
        share=statistics.median(shares),
        least=min(shares),
    )


def stream_memory(page_size: int) -> StreamMemory:
    """Count what Python and NumPy allocate for a stream, its table and its pages."""
    rng = np.random.Generator(np.random.PCG64(0))
    pool = PagePool(TINY, streams=1, context=POSITIONS, page_size=page_size)
    weights = [weights_of(TINY, rng) for _ in range(TINY.layers)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        stream = Stream(pool, weights)
        stream.reserve(POSITIONS)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    pages = len(stream.pages)
    stream.close()
    return StreamMemory(page_size=page_size, pages=pages, bytes=size, per_page=size / pages)


def bench_serve(rounds: int, progress: Callable[[str], None]) -> tuple[list[AppendCost], list[StreamMemory]]:
    """Measure both."""
    costs = []
    for page_size in PAGE_SIZES:
        progress(f"append, page {page_size}")
        costs.append(append_cost(page_size, rounds))
    progress("memory")
    return costs, [stream_memory(page_size) for page_size in (4, 16, 64)]


def print_serve(console: Console, costs: list[AppendCost], sizes: list[StreamMemory]) -> None:
    """Both tables."""
    table = Table(title=f"a window of {WINDOW} rows on {FLASH_NEXT.layers} layers, {FLASH_NEXT.name}: ms")
    for name in ("cache", "kernels", "all else", "share", "least"):
        table.add_column(name, justify="right")
    for cost in costs:
        name = "contiguous" if cost.page_size is None else f"page {cost.page_size}"
        table.add_row(name, f"{cost.kernels_ms:.1f}", f"{cost.python_ms:.1f}", f"{cost.share:.1%}", f"{cost.least:.1%}")
    console.print(table)
    table = Table(title=f"a stream of {POSITIONS:,} positions beyond its arena: bytes")
    for name in ("page", "pages", "bytes", "of a page"):
        table.add_column(name, justify="right")
    for size in sizes:
        table.add_row(str(size.page_size), f"{size.pages:,}", f"{size.bytes:,}", f"{size.per_page:.0f}")
    console.print(table)
