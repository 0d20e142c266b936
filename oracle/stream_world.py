"""Streams over page pools, each beside a solo one that must agree with it to the bit.

A solo stream is contiguous, alone in its pool, and never sees a refuted draft, another stream or a saved state: it is
appended the kept rows and nothing else. `StreamWorld` does what a server does, one operation a call, and checks after
each; `stream_machine` lets Hypothesis choose the operations, `oracle.stream_load` a generator of random numbers.

A row's projection is told by its conversation, layer, position and version: a refuted draft is another version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import fast
from ..fast import Engine, PagePool, PoolExhaustedError, Round, Stream
from ..reference.geometry import TEXT, TINY, Geometry, Rope, Weights
from ..reference.layout import BF16, PARTS
from .audit import audit, guarded_pool
from .cases import weights_of
from .compare import Site, compare_bits

Gate: TypeAlias = Literal["bits", "memory", "validation"]
"""What sees a fault: bits that differ from a solo's, the account of pages and rows, or what an operation says."""

WORLD = replace(TINY, name="tiny, 3 layers", layers=3)
"""Two main layers and a draft head's."""

BANK = 509
"""Projection rows that all rows are taken from; a prime."""

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


@dataclass(frozen=True)
class Row:
    """One row of a conversation: which text it belongs to, and which version of the position it is."""

    seed: int
    version: int


@dataclass(eq=False)
class Pair:
    """A stream, and its solo.

    Attributes:
        rows: the kept row of each position, the same on every layer.
        solo_rows: of them, those that the solo has.
    """

    number: int
    stream: Stream
    solo: Stream
    rope: str
    seed: int
    rows: list[Row] = field(default_factory=list)
    solo_rows: int = 0


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
    """What a round gave for positions pos0 to end - 1 of a stream, layer by layer; not yet judged."""

    pair: Pair
    pos0: int
    end: int
    queue: int
    outputs: list[Any]


class StreamWorld:
    """Pools of several page sizes over one engine, and the streams in them.

    Args:
        engine: of the pools.
        solo: engine of the solo streams; the default engine when None.
        page_sizes: one pool each; None is contiguous.
        streams, context: of each pool; see `PagePool`.
        folder: where states are written to files; in memory only when None.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        solo: Engine | None = None,
        geometry: Geometry = WORLD,
        page_sizes: Sequence[int | None] = (8, 12),
        streams: int = 3,
        context: int = 72,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = geometry
        self.folder = folder
        self.main = tuple(range(geometry.layers - 1))
        self.head = geometry.layers - 1
        self.weights: list[Weights] = [weights_of(geometry, rng) for _ in range(geometry.layers)]
        self.bank = rng.standard_normal((BANK, geometry.projection_width), dtype=np.float32).astype(BF16)
        self.engine = engine
        self.pools = [
            guarded_pool(geometry, streams=streams, context=context, page_size=n, engine=engine) for n in page_sizes
        ]
        self._solo_engine = solo or fast.default_engine()
        self._queues = hasattr(engine.backend, "queue")
        self._due: list[_Due] = []
        self.live: list[Pair] = []
        self.done = {"rows": 0, "drafts": 0, "restored": 0, "exhausted": 0}
        self._count = 0

    # ---- operations ----

    def arrive(self, pool: int, rope: str, seed: int) -> Pair:
        """A stream that holds nothing."""
        pair = self._pair(Stream(self.pools[pool], self.weights, rope=ROPES[rope]), rope, seed)
        self.live.append(pair)
        return pair

    def round(self, drafts: Sequence[tuple[Pair, Draft]], *, queue: int = 0) -> bool:
        """A round of several streams: a window each, its refuted drafts rolled back, then the head's rows.

        Returns:
            False where the pages did not suffice, and nothing changed.
        """
        before = self._state()
        pairs = [pair for pair, _ in drafts]
        windows = [self._window(pair, draft) for pair, draft in drafts]
        with self._on(queue):
            try:
                gated = self._attend(pairs, windows, self.main)
            except PoolExhaustedError:
                self._unchanged(before)
                return False
            for (pair, draft), rows, outputs in zip(drafts, windows, gated, strict=True):
                head = self._settle(pair, draft, rows)
                self._due.append(_Due(pair, len(pair.rows) - draft.kept, len(pair.rows), queue, [*outputs, head]))
        self.done["rows"] += sum(draft.kept for _, draft in drafts)
        self.done["drafts"] += sum(draft.refuted for _, draft in drafts)
        self._soon(pairs)
        return True

    def save(self, pair: Pair, positions: int, *, queue: int = 0) -> Saved:
        """Save a stream's first positions; the stream goes on."""
        with self._on(queue):
            prompt = fast.save(pair.stream, positions)
        if self.folder is not None:
            path = self.folder / "state.safetensors"
            fast.write_prompt(prompt, path)
            prompt = fast.read_prompt(path)
        return Saved(prompt, tuple(pair.rows[:positions]), pair.rope, pair.seed)

    def restore(self, saved: Saved, pool: int, *, queue: int = 0) -> Pair | None:
        """A stream from a saved state, in any pool; None where the pages do not suffice, and nothing changed."""
        before = self._state()
        try:
            with self._on(queue):
                stream = fast.restore(self.pools[pool], saved.prompt, self.weights)
        except PoolExhaustedError:
            self._unchanged(before)
            return None
        pair = self._pair(stream, saved.rope, saved.seed)
        pair.rows = list(saved.rows)
        fast.append([(pair.solo, self._projections(pair.rows, 0))])
        pair.solo_rows = len(pair.rows)
        self.live.append(pair)
        self.done["restored"] += len(pair.rows)
        self._soon([pair])
        return pair

    def end(self, pair: Pair, *, queue: int = 0) -> None:
        """Close a stream; its pages are poisoned, and are somebody else's next."""
        self.live.remove(pair)
        with self._on(queue):
            pair.stream.close()
        self._judge([due for due in self._due if due.pair is pair])
        self._due = [due for due in self._due if due.pair is not pair]
        pair.solo.close()

    # ---- checks ----

    def check(self, pairs: Sequence[Pair] | None = None) -> None:
        """What rounds gave, the account of pages and guards, and the caches of these streams (all when None)."""
        self._judge(self._due)
        self._due = []
        self._synchronize()
        for number, pool in enumerate(self.pools):
            found = audit(pool, [pair.stream for pair in self.live if pair.stream.pool is pool])
            if found:
                raise StreamFaultError("memory", f"pool {number}: {found[0]} ({len(found)} findings)")
        for pair in self.live:
            if pair.stream.untidy:
                raise StreamFaultError("memory", f"{pair.stream} has rows or pages to be tidied, though nothing failed")
        for pair in self.live if pairs is None else pairs:
            self._same_cache(pair)

    def _soon(self, pairs: Sequence[Pair]) -> None:
        """Check at once where work is done at once; on queues, let it pile up."""
        if not self._queues:
            self.check(pairs)

    def _judge(self, dues: Sequence[_Due]) -> None:
        """Kept rows of each layer against the solo's, which is appended them now."""
        for due in dues:
            want = fast.append([(due.pair.solo, self._projections(due.pair.rows[: due.end], due.pos0))])[0]
            due.pair.solo_rows = due.end
            site = Site(stream=due.pair.number, pos0=due.pos0, cache=None)
            for layer, outputs in enumerate(due.outputs):
                with self._on(due.queue):
                    got = self.engine.download(outputs)[: due.end - due.pos0]
                difference = compare_bits(
                    f"layer {layer} gated", got, want[layer].gated, ("row", "head", "element"), site
                )
                if difference is not None:
                    raise StreamFaultError("bits", f"{due.pair.stream}, rows {due.pos0} to {due.end - 1}: {difference}")

    def _same_cache(self, pair: Pair) -> None:
        lengths = (len(pair.rows),) * self.geometry.layers
        if pair.stream.lengths != lengths:
            raise StreamFaultError("memory", f"{pair.stream} holds {pair.stream.lengths} positions, not {lengths}")
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
        kept = [Row(pair.seed, 0) for _ in range(draft.kept)]
        return kept + [Row(pair.seed, 1 + (end + i) % 7) for i in range(draft.refuted)]

    def _attend(self, pairs: Sequence[Pair], windows: Sequence[list[Row]], layers: Sequence[int]) -> list[list[Any]]:
        """A round; for each stream the gated rows of each layer."""
        starts = [pair.stream.lengths[layers[0]] for pair in pairs]
        rounds = [(pair.stream, len(rows)) for pair, rows in zip(pairs, windows, strict=True)]
        results = []
        with Round(rounds, layers=layers) as step:
            for layer in layers:
                given = [
                    self._given(self._projection(rows, pos0, layer)) for rows, pos0 in zip(windows, starts, strict=True)
                ]
                results.append([result.gated for result in step.attend(layer, given)])
        return [[layer[i] for layer in results] for i in range(len(pairs))]

    def _given(self, array: npt.NDArray[Any]) -> Any:
        """The array where kernels read it; an upload waits, and is needed on a device only."""
        return array if self.engine.backend.device is None else self.engine.upload(array)

    def _settle(self, pair: Pair, draft: Draft, window: list[Row]) -> Any:
        """Roll refuted drafts back, let the head run ahead and back, and give it the kept rows."""
        if draft.kept <= fast.MOST_DRAFTS + 1 and draft.refuted:
            drafts = [row.version for row in window[1:]]
            greedy = [*drafts[: draft.kept - 1], -1, *drafts[draft.kept :], -1][: len(window)]
            fast.settle(pair.stream, drafts, greedy, layers=self.main)
        elif draft.refuted:
            self._roll_back(pair, len(pair.rows) + draft.kept, draft.refuted, self.main)
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

    def _projections(self, rows: Sequence[Row], pos0: int) -> list[npt.NDArray[Any]]:
        """Every layer's projection of the rows from pos0 on."""
        return [self._projection(rows[pos0:], pos0, layer) for layer in range(self.geometry.layers)]

    def _projection(self, rows: Sequence[Row], pos0: int, layer: int) -> npt.NDArray[Any]:
        at = [(row.seed * 131 + (pos0 + i) * 37 + layer * 11 + row.version * 197) % BANK for i, row in enumerate(rows)]
        projection: npt.NDArray[Any] = self.bank[at]
        return projection

    def _pair(self, stream: Stream, rope: str, seed: int) -> Pair:
        self._count += 1
        alone = PagePool(self.geometry, streams=1, context=stream.pool.context, engine=self._solo_engine)
        return Pair(self._count, stream, Stream(alone, self.weights, rope=ROPES[rope]), rope, seed)

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
