"""The benchmark of `kvproof gpu-check`: each kernel and a layer end to end, contiguous and paged, in turns.

What is timed is a captured step, so that a replay is one launch of a CUDA graph and Python is no part of it. A step
goes through several layers of one arena, as a model's decode step does: together they read a multiple of the GPU's last
cache, which otherwise would answer instead of memory. The caches hold N(0, 1) rows; that the results are right is not
shown here, but by the steps before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ... import fast
from ...fast import Backend, Capture, Engine, capture
from ...reference.geometry import TEXT, Geometry, Weights
from ...reference.layout import BF16, LayerCache, Layout
from ...reference.results import Bf16Array, Window
from ..cases import weights_of
from .bytes import KERNELS, bytes_of
from .memory import spread

STREAMS = (1, 2, 4, 8)
KEYS = (2048, 8192, 31744)
"""Positions that a stream holds: 2k, where a row is dense, 8k and 31k, where it is sparse."""
PROMPT_ROWS = 64

CONTIGUOUS = 0
PAGES = (CONTIGUOUS, 16, 256)
"""Page sizes in positions; contiguous caches come first."""

ROUNDS = 8
"""Rounds of turns; a round takes each layout twice."""

SPREAD = 4
"""A step reads at least so many times what the last cache holds."""
MOST_LAYERS = 64
MOST_BYTES = 3 << 30
"""Of one layout's caches, where the device has room for them."""
LAYOUTS_AT_ONCE = 4
"""Shares of free memory: caches of three layouts lie there together, and results and PyTorch's take the fourth."""

COPY_BYTES = 1 << 30
COPIES = 20

_SAMPLE = 16_777_213
"""Elements of N(0, 1) that caches are filled with, again and again; a prime, so that no two rows are alike."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is timed: the last rows of each stream.

    Attributes:
        streams: each with a cache of its own, one after another.
        rows: of each stream's window.
        keys: positions that each stream holds after its window.
    """

    streams: int
    rows: int
    keys: int

    @property
    def name(self) -> str:
        """In words."""
        what = "decode" if self.rows == 1 else f"{self.rows}-row window"
        return f"{what}, {self.streams} stream{'s' if self.streams > 1 else ''}, {self.keys:,} keys"


def works() -> tuple[Work, ...]:
    """Decode of 1 to 8 streams and a prompt window, at each length."""
    decode = [Work(streams=streams, rows=1, keys=keys) for streams in STREAMS for keys in KEYS]
    return (*decode, *(Work(streams=1, rows=PROMPT_ROWS, keys=keys) for keys in KEYS))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One kernel at one work and layout.

    Attributes:
        work: its name.
        kernel: of `bytes.KERNELS`.
        page: positions of a page, 0 where contiguous.
        layers: that a timed step went through.
        median_us, fastest_us: of one layer, all streams, in microseconds.
        bytes: that one layer must move, all streams.
        bandwidth: bytes a second.
        fraction: of the measured bandwidth of a copy.
        ratio: the median as a multiple of the contiguous one.
    """

    work: str
    kernel: str
    page: int
    layers: int
    median_us: float
    fastest_us: float
    bytes: int
    bandwidth: float
    fraction: float
    ratio: float


class Timer(Protocol):
    """Times work on a device."""

    def milliseconds(self, work: Callable[[], None]) -> float:
        """How long the device was busy with the work."""
        ...

    def copier(self, size: int) -> Callable[[], None]:
        """Work that copies so many bytes from one place of the device's memory to another."""
        ...


class CupyTimer:
    """Times by CUDA events on the current stream."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def milliseconds(self, work: Callable[[], None]) -> float:
        """The time between an event before the work and one after it."""
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end))

    def copier(self, size: int) -> Callable[[], None]:
        """An asynchronous copy between two arrays."""
        there, here = (self._cupy.empty(size, np.uint8) for _ in range(2))
        return lambda: there.data.copy_from_device_async(here.data, size)


def abba(names: Sequence[Any], rounds: int) -> Iterator[Any]:
    """The names forwards, then backwards, so that a drift of the clock meets all alike; so many times."""
    for _ in range(rounds):
        yield from names
        yield from reversed(names)


def copy_bandwidth(timer: Timer, size: int = COPY_BYTES) -> float:
    """Bytes a second that a copy on the device reads and writes together, the median of several."""
    copy = timer.copier(size)
    timer.milliseconds(copy)
    taken = statistics.median(timer.milliseconds(copy) for _ in range(COPIES))
    return 2 * size / (taken * 1e-3)


def in_turns(steps: Mapping[Any, Callable[[], None]], timer: Timer, rounds: int = ROUNDS) -> dict[Any, list[float]]:
    """Milliseconds of each step, taken in ABBA order after one run of each."""
    for step in steps.values():
        timer.milliseconds(step)
    taken: dict[Any, list[float]] = {name: [] for name in steps}
    for name in abba(tuple(steps), rounds):
        taken[name].append(timer.milliseconds(steps[name]))
    return taken


def most_bytes(free_bytes: int) -> int:
    """What one layout's caches may take on a device that has so much free."""
    return min(MOST_BYTES, free_bytes // LAYOUTS_AT_ONCE)


def cache_bytes(geometry: Geometry, work: Work) -> int:
    """What one layer of a work's streams takes in one layout, pages of `PAGES` filled up."""
    keys = -(-work.keys // max(PAGES)) * max(PAGES)
    return work.streams * Layout.contiguous(replace(geometry, layers=1), keys).elements * BF16.itemsize


def layers_for(geometry: Geometry, work: Work, last_cache: int, most: int = MOST_BYTES) -> int:
    """Layers that a step goes through, so that it reads `SPREAD` times the GPU's last cache; memory may allow fewer.

    Args:
        last_cache: its bytes.
        most: that one layout's caches may take, in bytes.
    """
    held = cache_bytes(geometry, work)
    asked = work.streams * bytes_of("window", geometry, rows=work.rows, keys=work.keys)
    fresh = min(asked, held)  # the rows of a window ask for the same keys again
    wanted = min(MOST_LAYERS, max(2, -(-SPREAD * last_cache // fresh)))
    return max(1, min(wanted, most // held))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bench:
    """One work over one layout, ready to be captured.

    Attributes:
        caches: of every layer and stream.
        made: what a window over the first of them gives, for kernels that are timed alone.
    """

    engine: Engine
    geometry: Geometry
    weights: Weights
    projection: Bf16Array
    pos0: int
    caches: tuple[LayerCache, ...]
    made: Window

    def run(self, kernel: str, cache: LayerCache) -> None:
        """Launch one kernel, or what several do together, for one stream and layer."""
        g, made, engine = self.geometry, self.made, self.engine
        rows = made.q.shape[0]
        match kernel:
            case "prep":
                fast.prep(g, self.weights, cache, self.projection, self.pos0, TEXT, engine=engine)
            case "pool":
                fast.pool(g, self.weights, cache, self.pos0, rows, TEXT, engine=engine)
            case "scores":
                fast.scores(g, cache, made.iq, self.pos0, engine=engine)
            case "select":
                fast.select(g, made.scores, self.pos0, engine=engine)
            case "chunks":
                fast.chunks(g, cache, made.q, made.lists, engine=engine)
            case "chunks_ahead":
                fast.chunks_ahead(g, cache, made.q, made.lists, engine=engine)
            case "merge":
                fast.merge(g, made.partials, engine=engine)
            case "gate":
                fast.gate(g, made.out, self.projection, engine=engine)
            case "attention":
                fast.merge(g, fast.chunks(g, cache, made.q, made.lists, engine=engine), engine=engine)
            case "window":
                fast.window(g, self.weights, cache, self.projection, self.pos0, TEXT, engine=engine)

    def captured(self, kernel: str) -> Capture:
        """The kernel over every layer and stream, as one step."""
        with capture(self.engine) as step:
            for cache in self.caches:
                self.run(kernel, cache)
        return step


def _bench(engine: Engine, geometry: Geometry, work: Work, page: int, sample: Any) -> _Bench:
    rng = np.random.Generator(np.random.PCG64(work.keys))
    weights = engine.upload(weights_of(geometry, rng))
    rows = rng.standard_normal((work.rows, geometry.projection_width), dtype=np.float32).astype(BF16)
    projection, pos0 = engine.upload(rows), work.keys - work.rows
    caches = _caches(engine, geometry, work, page, sample)
    made = fast.window(geometry, weights, caches[0], projection, pos0, TEXT, engine=engine)
    return _Bench(
        engine=engine,
        geometry=geometry,
        weights=weights,
        projection=projection,
        pos0=pos0,
        caches=caches,
        made=made,
    )


def _caches(engine: Engine, geometry: Geometry, work: Work, page: int, sample: Any) -> tuple[LayerCache, ...]:
    """Every layer of every stream: buffers of their own where contiguous, else one arena through shuffled tables."""
    if page == CONTIGUOUS:
        layout = Layout.contiguous(geometry, work.keys)
        buffers = [spread(engine.backend, sample, layout.elements) for _ in range(work.streams)]
        tables: list[Any] = [None] * work.streams
    else:
        pages = -(-work.keys // page)
        layout = Layout(geometry=geometry, page_size=page, pages=pages * work.streams)
        buffers = [spread(engine.backend, sample, layout.elements)] * work.streams
        order = np.random.Generator(np.random.PCG64(page)).permutation(layout.pages).astype(np.int32)
        tables = [engine.upload(order[stream :: work.streams].copy()) for stream in range(work.streams)]
    return tuple(
        LayerCache(buffer=buffer, layout=layout, layer=layer, table=table, table_is_stable=True)
        for layer in range(geometry.layers)
        for buffer, table in zip(buffers, tables, strict=True)
    )


def sample_of(backend: Backend, elements: int = _SAMPLE) -> Any:
    """N(0, 1) elements on the device, bf16, that caches are filled with."""
    rng = np.random.Generator(np.random.PCG64(0))
    return backend.upload(rng.standard_normal(elements, dtype=np.float32).astype(BF16))


def measure(
    engine: Engine,
    geometry: Geometry,
    work: Work,
    timer: Timer,
    *,
    sample: Any,
    copied: float,
    layers: int,
    rounds: int = ROUNDS,
    kernels: Sequence[str] = KERNELS,
) -> list[Timing]:
    """Time kernels at one work, the layouts in turns.

    Args:
        sample: of `sample_of`.
        copied: the bandwidth of a copy, in bytes a second.
        layers: that a step goes through.
    """
    shape = replace(geometry, layers=layers)
    benches = {page: _bench(engine, shape, work, page, sample) for page in PAGES}
    found: list[Timing] = []
    for kernel in kernels:
        steps = {page: bench.captured(kernel) for page, bench in benches.items()}
        taken = in_turns({page: step.replay for page, step in steps.items()}, timer, rounds)
        moved = work.streams * bytes_of(kernel, geometry, rows=work.rows, keys=work.keys)
        found += _timings(work, kernel, taken, moved, copied, layers)
    return found


def _timings(
    work: Work, kernel: str, taken: Mapping[int, list[float]], moved: int, copied: float, layers: int
) -> Iterator[Timing]:
    base = statistics.median(taken[CONTIGUOUS])
    for page, times in taken.items():
        median = statistics.median(times)
        bandwidth = moved * layers / (median * 1e-3)
        yield Timing(
            work=work.name,
            kernel=kernel,
            page=page,
            layers=layers,
            median_us=median / layers * 1e3,
            fastest_us=min(times) / layers * 1e3,
            bytes=moved,
            bandwidth=bandwidth,
            fraction=bandwidth / copied,
            ratio=median / base,
        )
