"""Captured launches: a replay gives the eager bits, and a batch over one reused page table keeps to its own streams.

Two checks, of launches that are captured on a CPU and replayed while memory and pages change hands around them:

- replays: decode steps, each captured in two parts, over memory that is poisoned and handed out again as soon as nobody
  holds it. Between the parts a prompt of another shape runs and freed memory is churned; then others hold all of it.
- batch: steps of up to three streams, captured with all their rows over one page table. The batch shrinks and grows,
  and streams that come take the pages of those that went.

The truth is each stream alone, eager, in a contiguous cache.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import fast
from ..fast import Capture, CompileError, Engine, LaunchError, capture
from ..reference.geometry import TEXT, Geometry, Weights
from ..reference.layout import BF16, PARTS, LayerCache, Layout, Part
from ..reference.results import Bf16Array, Prepared
from .cases import weights_of
from .compare import Site, compare_bits
from .memory import changed
from .operations import AXES
from .report import Failure, Report
from .scene import Scene
from .variants import Variant

CAPTURED = "captured"
"""How reports call it."""

STEPS = 5
"""Positions that are decoded, the last ones of a stream's pages."""

ENTRIES = 3
"""Pages of a stream."""

BATCH_ROWS = 3
"""Rows that a batch is captured with."""

LIVE: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0,), (0, 3), (0, 3, 4), (4,))
"""Streams of the batch at each step; a stream is let in one step before its first, onto pages of those that went."""

_STREAMS = 1 + max(map(max, LIVE))
_SLACK_PAGES = 2

Table: TypeAlias = npt.NDArray[np.int32]
Judge: TypeAlias = Callable[[str, str, str | None], None]


# ---- memory that changes hands ----

POISON = 0xFF
"""What memory holds that nobody does: NaN, and -1."""

HELD = 0x55
"""What memory holds that another holds."""

_ALIGNMENT = 256
_MEMORY_BYTES = 1 << 28  # of addresses: only what is touched is there


class ReusedMemory:
    """Memory that is poisoned as soon as nobody holds it, and handed out again, the lowest first."""

    def __init__(self, size: int = _MEMORY_BYTES) -> None:
        self._bytes = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._free = [(0, size)]
        self._top = 0
        self._rests = False
        self._resting: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Inside the `with` block freed memory is poisoned, but handed out again only behind it."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False
            self._free = _joined([*self._free, *self._resting])
            self._resting.clear()

    def take(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A poisoned array, given back when the last view of it goes.

        Raises:
            MemoryError: nothing is left that is large enough.
        """
        kind = np.dtype(dtype)
        size = int(np.prod(tuple(shape), dtype=np.int64)) * kind.itemsize
        room = max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
        number = next((n for n, (_, length) in enumerate(self._free) if length >= room), None)
        if number is None:
            raise MemoryError(f"no {size} bytes in a row are left of the memory for captured launches")
        start, length = self._free[number]
        self._free[number : number + 1] = [(start + room, length - room)] if length > room else []
        self._top = max(self._top, start + room)
        raw = self._at(start, room)
        raw[:] = POISON
        weakref.finalize(raw, self._give_back, start, room).atexit = False
        return raw[:size].view(kind).reshape(tuple(shape))

    def hold_freed(self) -> list[npt.NDArray[np.uint8]]:
        """Arrays over all memory that was given back, as another holds it: every byte is HELD."""
        holes = [min(start + length, self._top) - start for start, length in self._free if start < self._top]
        held = [self.take((length,), np.uint8) for length in holes]
        for array in held:
            array[:] = HELD
        return held

    def _at(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._bytes, np.uint8, count=size, offset=start)

    def _give_back(self, start: int, size: int) -> None:
        self._at(start, size)[:] = POISON
        if self._rests:
            self._resting.append((start, size))
        else:
            self._free = _joined([*self._free, (start, size)])


def _joined(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces (start, length) in order, neighbours in one."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(pieces):
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


class ReusingEngine(Engine):
    """An engine like another, whose outputs lie in `ReusedMemory`."""

    def __init__(self, like: Engine) -> None:
        super().__init__(like.backend, sources=like.sources, threads=like.threads, gpu_split=like.gpu_split)
        self.memory = ReusedMemory()

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A poisoned array."""
        return self.memory.take(shape, dtype)


# ---- streams ----


@dataclass(frozen=True, kw_only=True, eq=False)
class Streams:
    """Streams of ENTRIES pages each, whose last STEPS positions are decoded.

    Attributes:
        geometry, weights: of every stream.
        engine: whose kernels run.
        history: per stream, the rows that it would hold if it were never decoded: [end, heads, width] of each part.
        projections: per stream, bf16 [STEPS, projection_width].
        layout: of the arena.
        order: its pages in the order in which they are handed out.
    """

    geometry: Geometry
    weights: Weights
    engine: Engine
    history: tuple[dict[Part, Bf16Array], ...]
    projections: tuple[Bf16Array, ...]
    layout: Layout
    order: Table

    @property
    def end(self) -> int:
        """Positions of a stream's pages."""
        return ENTRIES * self.layout.page_size

    def position(self, step: int) -> int:
        """Of the row that a step decodes."""
        return self.end - STEPS + step

    def cache(self, buffer: Bf16Array, table: Table | None, *, stable: bool = False) -> LayerCache:
        """The checked layer of a stream: in the arena, or contiguous where there is no table."""
        layout = self.layout if table is not None else Layout.contiguous(self.geometry, self.end)
        return LayerCache(
            buffer=buffer, layout=layout, layer=self.geometry.layers - 1, table=table, table_is_stable=stable
        )

    def fill(self, cache: LayerCache, stream: int, step: int) -> None:
        """Store what a stream holds before a step: its rows and their pooled rows."""
        cached = self.position(step)
        for part, rows in self.history[stream].items():
            cache.write(part, np.arange(cached), rows[:cached])
        fast.pool(self.geometry, self.weights, cache, 0, cached, TEXT, engine=self.engine)

    def row(self, stream: int, step: int) -> Bf16Array:
        """The projection of a step's row: [1, projection_width]."""
        return self.projections[stream][step : step + 1]

    def alone(self, stream: int, steps: Sequence[int]) -> tuple[list[Bf16Array], LayerCache]:
        """The truth: the steps of one stream, eager, in a contiguous cache; their gated rows and what it then holds."""
        cache = self.cache(Layout.contiguous(self.geometry, self.end).zeros(), None)
        self.fill(cache, stream, steps[0])
        gated = [self._window(cache, self.row(stream, step), self.position(step)) for step in steps]
        return gated, cache

    def prompt(self, stream: int, rows: int) -> Bf16Array:
        """The truth of a stream's first rows, run as one window."""
        cache = self.cache(Layout.contiguous(self.geometry, self.end).zeros(), None)
        return self._window(cache, self.projections[stream][:rows], 0)

    def _window(self, cache: LayerCache, projection: Bf16Array, pos0: int) -> Bf16Array:
        return fast.window(self.geometry, self.weights, cache, projection, pos0, TEXT, engine=self.engine).gated


def page_size_of(geometry: Geometry) -> int:
    """Positions of a page: three hold STEPS sparse rows, all in the last."""
    blocks = -(-(geometry.budget + geometry.block + STEPS - 1) // (ENTRIES * geometry.block))
    return geometry.block * max(blocks, -(-STEPS // geometry.block))


def make_streams(geometry: Geometry, like: Engine, *, seed: int) -> Streams:
    """N(0, 1) streams, and an engine with the kernels of another."""
    rng = np.random.Generator(np.random.PCG64([seed, 0x636170]))
    pages = (BATCH_ROWS + 1) * ENTRIES + _SLACK_PAGES
    layout = Layout(geometry=geometry, page_size=page_size_of(geometry), pages=pages)
    parts = {part: layout.part(0, part) for part in PARTS[:3]}
    end = ENTRIES * layout.page_size
    return Streams(
        geometry=geometry,
        weights=weights_of(geometry, rng),
        engine=Engine(like.backend, sources=like.sources, threads=like.threads, gpu_split=like.gpu_split),
        history=tuple(
            {part: _normal(rng, (end, shape.heads, shape.width)) for part, shape in parts.items()}
            for _ in range(_STREAMS)
        ),
        projections=tuple(_normal(rng, (STEPS, geometry.projection_width)) for _ in range(_STREAMS)),
        layout=layout,
        order=rng.permutation(pages).astype(np.int32),
    )


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Bf16Array:
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)


# ---- the check ----


def check_captured(
    geometry: Geometry, variants: Sequence[Variant], report: Report, *, seed: int = 0, replay: str = ""
) -> None:
    """Capture launches of the first variant's engine, replay them, and judge bits and memory.

    Only an engine's kernels on a CPU are judged: nothing captures others, or their memory is not ours to poison.

    Args:
        report: takes the findings, as kernel CAPTURED.
        replay: the command line that runs this again.
    """
    engine = getattr(variants[0].kernels, "engine", None)
    if not isinstance(engine, Engine) or engine.backend.name != "host":
        return

    def judge(gate: str, where: str, message: str | None) -> None:
        if message is None:
            report.passed(gate, CAPTURED)
        else:
            report.failed(Failure(gate=gate, kernel=CAPTURED, where=where, message=message, replay=replay))

    streams = make_streams(geometry, engine, seed=seed)
    for what, part in (("replays", check_replays), ("batch", check_batch)):
        try:
            part(streams, judge)
        except (LaunchError, CompileError, ValueError) as error:
            judge("bits", f"captured {what}", str(error))


def _compare(got: Bf16Array, want: Bf16Array, stream: int, pos0: int, cache: LayerCache) -> str | None:
    found = compare_bits(
        f"{CAPTURED}.gated", got, want, AXES["gate.gated"], Site(stream=stream, pos0=pos0, cache=cache)
    )
    return None if found is None else str(found)


# ---- replays over memory that changes hands ----

_PROMPT_ROWS = 3
_DECODED, _OTHER = 0, 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A decode step captured in two parts; of its outputs only the last is held."""

    lists: Capture
    attention: Capture
    gated: Bf16Array

    def replay(self, between: Callable[[], None] = lambda: None) -> Bf16Array:
        self.lists.replay()
        between()
        self.attention.replay()
        return self.gated.copy()


def check_replays(streams: Streams, judge: Judge) -> None:
    """Replay each step twice: around a prompt and churned memory, and while others hold all freed memory."""
    engine = ReusingEngine(streams.engine)
    want, _ = streams.alone(_DECODED, range(STEPS))
    prompt = streams.prompt(_OTHER, _PROMPT_ROWS)
    tables = [streams.order[number * ENTRIES :][:ENTRIES].copy() for number in (_DECODED, _OTHER)]
    arena = np.full(streams.layout.elements, np.nan, BF16)
    cache = streams.cache(arena, tables[_DECODED], stable=True)
    streams.fill(cache, _DECODED, 0)
    with engine.memory.rest():  # else the steps would share what one of them lets go, and nobody else could have it
        steps = [_capture_step(streams, engine, cache, step) for step in range(STEPS)]

    def prompt_and_churn() -> None:
        other = streams.cache(arena, tables[_OTHER])
        rows = streams.projections[_OTHER][:_PROMPT_ROWS]
        got = fast.window(streams.geometry, streams.weights, other, rows, 0, TEXT, engine=engine).gated
        where = f"captured replays, a prompt of {_PROMPT_ROWS} rows between the parts of a step"
        judge("bits", where, _compare(got, prompt, _OTHER, 0, other))
        engine.memory.hold_freed()

    def judge_replay(step: int, where: str, between: Callable[[], None] = lambda: None) -> None:
        pos0 = streams.position(step)
        try:
            message = _compare(steps[step].replay(between), want[step], _DECODED, pos0, cache)
        except LaunchError as error:
            message = f"stream {_DECODED}, row 0, position {pos0}: {error}"
        judge("bits", where, message)

    for step in range(STEPS):
        where = f"captured replays, position {streams.position(step)}"
        judge_replay(step, f"{where}, after a prompt and with freed memory poisoned", prompt_and_churn)
        where = f"{where}, with freed memory held by others"
        held = engine.memory.hold_freed()
        judge_replay(step, where)
        judge("memory", where, _stored_into(held, streams.position(step)))
        del held


def _capture_step(streams: Streams, engine: Engine, cache: LayerCache, step: int) -> _Step:
    g, row, pos0 = streams.geometry, streams.row(_DECODED, step), streams.position(step)
    with capture(engine) as first:
        prepared: Prepared = fast.prep(g, streams.weights, cache, row, pos0, TEXT, engine=engine)
        fast.pool(g, streams.weights, cache, pos0, 1, TEXT, engine=engine)
        lists = fast.select(g, fast.scores(g, cache, prepared.iq, pos0, engine=engine), pos0, engine=engine)
    with capture(engine) as second:
        out = fast.merge(g, fast.chunks(g, cache, prepared.q, lists, engine=engine), engine=engine)
        gated = fast.gate(g, out, row, engine=engine)
    return _Step(lists=first, attention=second, gated=gated)


def _stored_into(held: Sequence[npt.NDArray[np.uint8]], pos0: int) -> str | None:
    """The first byte of others' memory that a replay changed."""
    for number, array in enumerate(held):
        differs = array != HELD
        if differs.any():
            return (
                f"the replay of stream {_DECODED}, row 0, position {pos0} stored into memory that another holds: "
                f"{int(differs.sum())} bytes of array {number} of {len(held)} ({len(array)} bytes) changed, the first "
                f"at byte {int(differs.argmax())}"
            )
    return None


# ---- a batch over one page table ----


class Batch:
    """Steps of up to BATCH_ROWS streams: each position is captured once, with all rows, over one page table.

    A row without a stream is computed too, like the padding of a CUDA graph: from a projection of zeros, over pages of
    its own that belong to no stream.

    Attributes:
        tables: int32 [BATCH_ROWS, ENTRIES], changed in place.
        scratch: pages for the rows without a stream.
    """

    def __init__(self, streams: Streams, arena: Bf16Array, scratch: Table) -> None:
        engine = ReusingEngine(streams.engine)
        self.scratch = scratch
        self.tables: Table = np.tile(scratch, (BATCH_ROWS, 1))
        self._rows = np.zeros((BATCH_ROWS, 1, streams.geometry.projection_width), BF16)
        caches = [streams.cache(arena, table, stable=True) for table in self.tables]
        self._captures: list[Capture] = []
        self._gated: list[list[Bf16Array]] = []
        for step in range(STEPS):
            with capture(engine) as captured:
                windows = [
                    fast.window(
                        streams.geometry,
                        streams.weights,
                        cache,
                        row,
                        streams.position(step),
                        TEXT,
                        engine=engine,
                    )
                    for cache, row in zip(caches, self._rows, strict=True)
                ]
            self._captures.append(captured)
            self._gated.append([window.gated for window in windows])

    def run(self, step: int, tables: Sequence[Table], rows: Sequence[Bf16Array]) -> list[Bf16Array]:
        """One step of these streams' tables and projections, in the batch's first rows; their gated rows."""
        for row in range(BATCH_ROWS):
            if row < len(tables):
                self.tables[row], self._rows[row] = tables[row], rows[row]
            else:
                self.clear(row)
                self._rows[row] = 0
        self._captures[step].replay()
        return [gated.copy() for gated in self._gated[step][: len(tables)]]

    def clear(self, row: int) -> None:
        """Turn a row of the table to pages that belong to no stream."""
        self.tables[row] = self.scratch


@dataclass(frozen=True, kw_only=True, eq=False)
class _Served:
    """The batch's arena: what it holds, what it should hold, and whose its pages are."""

    streams: Streams
    arena: Bf16Array
    want: Bf16Array
    scratch: Table
    free: list[int]
    tables: dict[int, Table]

    def admit(self, stream: int, step: int) -> None:
        """Give a stream the pages that have been free for longest, and what it holds before a step."""
        table = self.tables[stream] = np.array([self.free.pop(0) for _ in range(ENTRIES)], np.int32)
        self.streams.fill(self.streams.cache(self.arena, table), stream, step)
        self._expect(table)

    def end(self, stream: int) -> None:
        """Take a stream's pages back, to be handed out first."""
        self.free[:0] = self.tables.pop(stream).tolist()

    def expect_row(self, stream: int, step: int, alone: LayerCache) -> None:
        """A step stores a stream's row, and the pooled row of a block that it completes."""
        cache, pos = self.streams.cache(self.want, self.tables[stream]), self.streams.position(step)
        block = self.streams.geometry.block
        rows: dict[Part, int] = dict.fromkeys(PARTS[:3], pos)
        if not (pos + 1) % block:
            rows["pooled"] = pos // block
        for part, at in rows.items():
            cache.write(part, [at], alone.read(part, [at]))

    def damage(self, batch: Batch, live: int) -> str | None:
        """What the arena holds that it should not, whose it is, and which row of the batch names that page."""
        self._expect(self.scratch)
        message = changed(self._scene(self.arena), self._scene(self.want))
        if message is None:
            return None
        differs = self.arena.view(np.uint16) != self.want.view(np.uint16)
        page = int(differs.argmax()) // self.streams.layout.page_elements
        named = np.argwhere(batch.tables == page).tolist()
        idle = [(row, entry) for row, entry in named if row >= live]
        told = [
            f"row {row} of the batch, which has {'no' if row >= live else 'a'} stream, names it in table entry {entry}"
            for row, entry in idle or named
        ]
        self.want[:] = self.arena  # told once
        return f"{message}; {'; '.join(told) or 'no row of the batch names this page'}"

    def _expect(self, pages: Table) -> None:
        size = self.streams.layout.page_elements
        self.want.reshape(-1, size)[pages] = self.arena.reshape(-1, size)[pages]

    def _scene(self, buffer: Bf16Array) -> Scene:
        none = np.zeros(0, np.int32)
        tables = tuple(self.tables.get(stream, none) for stream in range(_STREAMS))
        return Scene(
            geometry=self.streams.geometry,
            layouts=(self.streams.layout,) * _STREAMS,
            buffers=(buffer,) * _STREAMS,
            tables=tables,
            owned=tables,
        )


def check_batch(streams: Streams, judge: Judge) -> None:
    """Run the steps of LIVE: rows have their stream's bits, and a step changes no other row of the arena."""
    truth = {
        stream: streams.alone(stream, [step for step, live in enumerate(LIVE) if stream in live])
        for stream in range(_STREAMS)
    }
    arena = np.full(streams.layout.elements, np.nan, BF16)
    scratch = streams.order[:ENTRIES].copy()
    free = streams.order[ENTRIES:].tolist()
    served = _Served(streams=streams, arena=arena, want=arena.copy(), scratch=scratch, free=free, tables={})
    batch = Batch(streams, arena, scratch)
    done: set[int] = set()
    for step, live in enumerate(LIVE):
        for stream in [s for s in served.tables if s in done and s not in live]:
            served.end(stream)
        for first in (step, step + 1):
            for stream in LIVE[first] if first < STEPS else ():
                if stream not in served.tables:
                    served.admit(stream, first)
        done |= set(live)
        _check_batch_step(served, batch, step, truth, judge)


def _check_batch_step(
    served: _Served, batch: Batch, step: int, truth: dict[int, tuple[list[Bf16Array], LayerCache]], judge: Judge
) -> None:
    streams, live, pos0 = served.streams, LIVE[step], served.streams.position(step)
    tables = [served.tables[stream] for stream in live]
    names = ", ".join(map(str, live))
    where = f"captured batch, step {step} at position {pos0}: {len(live)} of {BATCH_ROWS} rows live (streams {names})"
    try:
        got = batch.run(step, tables, [streams.row(stream, step) for stream in live])
    except LaunchError as error:
        judge("bits", where, str(error))
        return
    for row, stream in enumerate(live):
        gated, alone = truth[stream]
        want = gated[sum(stream in earlier for earlier in LIVE[:step])]
        message = _compare(got[row], want, stream, pos0, streams.cache(served.arena, tables[row]))
        judge("bits", where, None if message is None else f"row {row} of the batch: {message}")
        served.expect_row(stream, step, alone)
    judge("memory", where, served.damage(batch, len(live)))
