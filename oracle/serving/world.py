"""Streams over page pools, each beside a solo one that must agree with it to the bit.

`StreamWorld` does what a server does, one operation a call, and checks after each, or later: a check makes all queues
wait. `machine` lets Hypothesis choose the operations, `load` random
numbers. A solo (`solo`) never sees a refuted draft, another stream or a saved state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ... import fast
from ...fast import Engine, PagePool, PoolExhaustedError, Round, Settled, Stream
from ...reference.geometry import TEXT, TINY, Geometry, Rope
from ...reference.layout import PARTS
from ..compare import Site, compare_bits
from .audit import audit, guarded_pool
from .solo import Model, Row, Solo

Gate: TypeAlias = Literal["bits", "memory", "validation"]
"""What sees a fault: bits that differ from a solo's, the account of pages and rows, or what an operation says."""

WORLD = replace(TINY, name="tiny, 3 layers", layers=3)
"""Two main layers and a draft head's."""

ROPES: dict[str, Rope] = {
    "text": TEXT,
    "delta": Rope(mode="delta", delta=-3),
    "media": Rope(
        mode="media",
        delta=-4,
        triples=np.array([(0, 0, 0), (1, 1, 1), *((2, 2 + i // 3, 2 + i % 3) for i in range(6)), (5, 5, 5)], np.int32),
    ),
}
"""Text, a shifted text, and an image of 2 by 3 rows behind two words."""


class StreamFaultError(AssertionError):
    """A stream does not have its solo's bits, the account of pages does not add up, or an operation says wrong things.

    Attributes:
        gate: that saw it.
    """

    def __init__(self, gate: Gate, message: str) -> None:
        self.gate: Gate = gate
        super().__init__(message)


@dataclass(eq=False)
class Pair:
    """A stream, and its solo.

    Attributes:
        rows: the kept row of each position, the same on every layer.
        edits: how often it was rolled back behind its text, which then goes on with other rows.
    """

    number: int
    stream: Stream
    solo: Solo
    rope: str
    seed: int
    rows: list[Row] = field(default_factory=list)
    edits: int = 0


@dataclass(frozen=True)
class Saved:
    """A saved state, and what it holds."""

    prompt: Any
    rows: tuple[Row, ...]
    rope: str
    seed: int


@dataclass(frozen=True)
class Draft:
    """One stream's part of a round: rows that stay, refuted drafts behind them, and speculative rows of its head.

    The head runs no further ahead than the window did, whose pages therefore suffice.
    """

    kept: int
    refuted: int = 0
    speculative: int = 0


@dataclass(frozen=True)
class _Due:
    """What a round gave for a stream's rows from pos0 on, layer by layer and each on its queue; not yet judged."""

    pair: Pair
    pos0: int
    rows: tuple[Row, ...]
    outputs: list[tuple[int, Any]]


class StreamWorld:
    """Pools of several page sizes over one engine, and the streams in them.

    Args:
        engine: of the pools; the solos run on the default engine.
        page_sizes: one pool each; None is contiguous.
        streams, context: of each pool; see `PagePool`.
        folder: where states are written to files; in memory only when None.
        check_every: operations from one check to the next; None leaves checks to the caller. Every check makes all
            queues wait, so it is none where work is to pile up.

    Attributes:
        sound: False once an operation has failed: what follows from it is no news.
        done: what was done, in numbers.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        geometry: Geometry = WORLD,
        page_sizes: Sequence[int | None] = (8, 12),
        streams: int = 3,
        context: int = 72,
        seed: int = 0,
        folder: Path | None = None,
        check_every: int | None = 1,
    ) -> None:
        self.model = Model(geometry, seed)
        self.geometry = geometry
        self.folder = folder
        self.main = tuple(range(geometry.layers - 1))
        self.head = geometry.layers - 1
        self.engine = engine
        self.pools = [
            guarded_pool(geometry, streams=streams, context=context, page_size=n, engine=engine) for n in page_sizes
        ]
        self._queues = hasattr(engine.backend, "queue")
        self._check_every = check_every
        self._unchecked = 0
        self._due: list[_Due] = []
        self.live: list[Pair] = []
        self.sound = True
        self.done = {"rows": 0, "drafts": 0, "forgotten": 0, "restored": 0, "exhausted": 0}
        self._count = 0

    # ---- operations ----

    def arrive(self, pool: int, rope: str, seed: int, *, queue: int = 0) -> Pair:
        """A stream that holds nothing."""
        with self._operation(queue):
            pair = self._pair(Stream(self.pools[pool], self.model.weights, rope=ROPES[rope]), rope, seed)
        self.live.append(pair)
        return pair

    def round(self, drafts: Sequence[tuple[Pair, Draft]], *, queue: int = 0, after: int = 0) -> bool:
        """A round of several streams: a window each, its refuted drafts rolled back, then the head's rows.

        Args:
            queue: of the windows.
            after: queue of what follows them.

        Returns:
            False where the pages did not suffice, and nothing changed.
        """
        before = self._state()
        pairs = [pair for pair, _ in drafts]
        windows = [self._window(pair, draft) for pair, draft in drafts]
        with self._operation(queue):
            try:
                gated = self._attend(pairs, windows, self.main)
            except PoolExhaustedError:
                self._unchanged(before)
                return False
            with self._on(after):
                heads = [self._settle(pair, draft, rows) for (pair, draft), rows in zip(drafts, windows, strict=True)]
            for (pair, draft), outputs, head in zip(drafts, gated, heads, strict=True):
                given = [*((queue, output) for output in outputs), (after, head)]
                self._due.append(_Due(pair, len(pair.rows) - draft.kept, tuple(pair.rows), given))
            self.done["rows"] += sum(draft.kept for _, draft in drafts)
            self.done["drafts"] += sum(draft.refuted for _, draft in drafts)
            self._soon(pairs)
        return True

    def forget(self, pair: Pair, rows: int, *, queue: int = 0) -> None:
        """Roll a stream's last rows back on every layer, as an edited text does; it goes on with others."""
        with self._operation(queue):
            self._roll_back(pair, len(pair.rows) - rows, rows, range(self.geometry.layers))
            del pair.rows[len(pair.rows) - rows :]
            pair.edits += 1
            self.done["forgotten"] += rows
            self._soon([pair])

    def reserve(self, pair: Pair, positions: int, *, queue: int = 0) -> bool:
        """Take pages ahead; False where they do not suffice, and nothing changed."""
        before = self._state()
        with self._operation(queue):
            try:
                pair.stream.reserve(positions)
            except PoolExhaustedError:
                self._unchanged(before)
                return False
            self._soon([pair])
        return True

    def save(self, pair: Pair, positions: int, *, queue: int = 0) -> Saved:
        """Save a stream's first positions; the stream goes on."""
        with self._operation(queue):
            prompt = fast.save(pair.stream, positions)
            if self.folder is not None:
                path = self.folder / "state.safetensors"
                fast.write_prompt(prompt, path)
                prompt = fast.read_prompt(path)
        return Saved(prompt, tuple(pair.rows[:positions]), pair.rope, pair.seed)

    def restore(self, saved: Saved, pool: int, *, queue: int = 0) -> Pair | None:
        """A stream from a saved state, in any pool; None where the pages do not suffice, and nothing changed."""
        before = self._state()
        with self._operation(queue):
            try:
                stream = fast.restore(self.pools[pool], saved.prompt, self.model.weights)
            except PoolExhaustedError:
                self._unchanged(before)
                return None
            pair = self._pair(stream, saved.rope, saved.seed)
            pair.rows = list(saved.rows)
            self.live.append(pair)
            self.done["restored"] += len(pair.rows)
            self._soon([pair])
        return pair

    def end(self, pair: Pair, *, queue: int = 0) -> None:
        """Close a stream; its pages are poisoned, and are somebody else's next."""
        self.live.remove(pair)
        with self._operation(queue):
            pair.stream.close()
            self._soon([])

    @contextlib.contextmanager
    def _operation(self, queue: int) -> Iterator[None]:
        """One operation on a queue; the world is sound behind it only if it raises nothing."""
        self.sound = False
        with self._on(queue):
            yield
        self.sound = True

    # ---- checks ----

    def check(self, pairs: Sequence[Pair] | None = None) -> None:
        """What rounds gave, the account of pages and guards, and the caches of these streams (all when None)."""
        self._unchecked = 0
        self._judge(self._due)
        self._due = []
        self._synchronize()
        for number, pool in enumerate(self.pools):
            found = audit(pool, [pair.stream for pair in self.live if pair.stream.pool is pool])
            if found:
                raise StreamFaultError("memory", f"pool {number}: {found[0]} ({len(found)} findings)")
            self._count_pages(number, pool)
        for pair in self.live:
            if pair.stream.untidy:
                raise StreamFaultError("memory", f"{pair.stream} has rows or pages to be tidied, though nothing failed")
        for pair in self.live if pairs is None else pairs:
            self._same_cache(pair)

    def _soon(self, pairs: Sequence[Pair]) -> None:
        """Check these streams, or all after several operations, if it is time."""
        self._unchecked += 1
        if self._check_every == 1:
            self.check(pairs)
        elif self._check_every is not None and self._unchecked >= self._check_every:
            self.check()

    def _count_pages(self, number: int, pool: PagePool) -> None:
        """The pool's statistics against a count of its streams' pages."""
        streams = [pair.stream for pair in self.live if pair.stream.pool is pool]
        used, positions = (sum(counts) for counts in ([len(s.pages) for s in streams], [s.length for s in streams]))
        told = pool.statistics()
        wanted = (pool.layout.pages, pool.layout.pages - used, used, 0, positions)
        if (told.pages, told.free, told.used, told.draining, told.positions) != wanted or told.high_water < used:
            raise StreamFaultError("memory", f"pool {number} says {told}; its streams hold {used} pages")

    def _judge(self, dues: Sequence[_Due]) -> None:
        """Kept rows of each layer against the solo's, which is appended them now."""
        for due in dues:
            wanted = due.pair.solo.outputs(due.rows, due.pos0)
            site = Site(stream=due.pair.number, pos0=due.pos0, cache=None)
            for layer, ((queue, outputs), want) in enumerate(zip(due.outputs, wanted, strict=True)):
                with self._on(queue):
                    got = self.engine.download(outputs)[: len(want)]
                difference = compare_bits(f"layer {layer} gated", got, want, ("row", "head", "element"), site)
                if difference is not None:
                    where = f"{due.pair.stream}, rows {due.pos0} to {len(due.rows) - 1}"
                    raise StreamFaultError("bits", f"{where}: {difference}")

    def _same_cache(self, pair: Pair) -> None:
        lengths = (len(pair.rows),) * self.geometry.layers
        if pair.stream.lengths != lengths:
            raise StreamFaultError("memory", f"{pair.stream} holds {pair.stream.lengths} positions, not {lengths}")
        pair.solo.hold(pair.rows)
        for layer in range(self.geometry.layers) if pair.rows else ():
            got, want = pair.stream.cache(layer), pair.solo.cache(layer)
            for part in PARTS:
                rows = np.arange(len(pair.rows) // (self.geometry.block if part == "pooled" else 1))
                site = Site(stream=pair.number, pos0=0, cache=got)
                axes = ("position", "head", "element")
                difference = compare_bits(
                    f"layer {layer} cache.{part}", got.read(part, rows), want.read(part, rows), axes, site
                )
                if difference is not None:
                    raise StreamFaultError("bits", f"{pair.stream}: {difference}")

    def _state(self) -> list[tuple[Any, ...]]:
        return [(pair.stream.lengths, pair.stream.pages) for pair in self.live]

    def _unchanged(self, before: list[tuple[Any, ...]]) -> None:
        self.done["exhausted"] += 1
        if self._state() != before:
            raise StreamFaultError("memory", f"what failed changed lengths or pages: {before} became {self._state()}")
        self._soon(self.live)

    # ---- steps ----

    def _window(self, pair: Pair, draft: Draft) -> list[Row]:
        """Rows that stay, then refuted ones, which no text has."""
        end = len(pair.rows)
        kept = [Row(pair.seed, 8 + pair.edits) for _ in range(draft.kept)]
        return kept + [Row(pair.seed, 1 + (end + i) % 7) for i in range(draft.refuted)]

    def _attend(self, pairs: Sequence[Pair], windows: Sequence[list[Row]], layers: Sequence[int]) -> list[list[Any]]:
        """A round; for each stream the gated rows of each layer."""
        starts = [pair.stream.lengths[layers[0]] for pair in pairs]
        rounds = [(pair.stream, len(rows)) for pair, rows in zip(pairs, windows, strict=True)]
        results = []
        with Round(rounds, layers=layers) as step:
            for layer in layers:
                given = [
                    self._given(self.model.projection(rows, pos0, layer))
                    for rows, pos0 in zip(windows, starts, strict=True)
                ]
                results.append([result.gated for result in step.attend(layer, given)])
        return [[layer[i] for layer in results] for i in range(len(pairs))]

    def _given(self, array: npt.NDArray[Any]) -> Any:
        """The array where kernels read it; an upload waits, and is needed on a device only."""
        return array if self.engine.backend.device is None else self.engine.upload(array)

    def _settle(self, pair: Pair, draft: Draft, window: list[Row]) -> Any:
        """Roll refuted drafts back, let the head run ahead and back, and give it the kept rows."""
        tokens = list(range(1, len(window)))  # of the drafts; the model says another behind the last that stands
        greedy = [*tokens[: draft.kept - 1], 0, *tokens[draft.kept :], 0][: len(window)]
        settled = fast.settle(pair.stream, tokens, greedy, layers=self.main)
        wanted = Settled(accepted=draft.kept - 1, tokens=tuple(greedy[: draft.kept]), removed=draft.refuted)
        if settled != wanted:
            raise StreamFaultError("validation", f"{pair.stream} settled as {settled}, not as {wanted}")
        pos0 = len(pair.rows)
        pair.rows += window[: draft.kept]
        if draft.speculative:
            ahead = [Row(pair.seed, 5)] * draft.speculative
            self._attend([pair], [ahead], [self.head])
            self._roll_back(pair, pos0, draft.speculative, [self.head])
        return self._attend([pair], [window[: draft.kept]], [self.head])[0][0]

    def _roll_back(self, pair: Pair, length: int, rows: int, layers: Sequence[int]) -> None:
        """Roll back, and take the stream at its word: it must say that it removed these rows on each layer."""
        removed = pair.stream.roll_back(length, layers=layers)
        if removed != (rows,) * len(layers):
            raise StreamFaultError(
                "validation", f"{pair.stream} was to forget {rows} positions on layers {layers}; it says {removed}"
            )

    def _pair(self, stream: Stream, rope: str, seed: int) -> Pair:
        self._count += 1
        solo = Solo(self.model, rope=ROPES[rope], context=stream.pool.context, engine=fast.default_engine())
        return Pair(self._count, stream, solo, rope, seed)

    @contextlib.contextmanager
    def _on(self, queue: int) -> Iterator[None]:
        """Work goes to this queue, where the backend has several."""
        backend: Any = self.engine.backend
        with backend.queue(queue) if self._queues else contextlib.nullcontext():
            yield

    def _synchronize(self) -> None:
        backend: Any = self.engine.backend
        if self._queues:
            backend.synchronize()
