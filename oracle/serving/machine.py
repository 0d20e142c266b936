"""A rule-based state machine over page pools: Hypothesis mixes all that a server does and shrinks what goes wrong.

    StreamMachine.TestCase                                our streams, at once
    stream_machine(lambda: DelayedEngine()).TestCase      on several queues, whose work runs as late as it may

Streams arrive, share rounds, draft and roll back at every edge, are saved, restored into other pages and page sizes,
run out of pages, and end; `StreamWorld` checks each step against solo streams.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ...fast import MOST_DRAFTS, Engine, default_engine
from .delayed import DelayedEngine
from .world import ROPES, Draft, Pair, Saved, StreamWorld

MOST_STREAMS = 6
MOST_ROWS = 20

_which = st.integers(0, 2**16)
_queue = st.integers(0, 1)


class StreamMachine(RuleBasedStateMachine):
    """What a server does, in any order."""

    engine: Callable[[], Engine] = staticmethod(default_engine)
    context = 72

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.saved: list[Saved] = []

    @initialize(sizes=st.lists(st.sampled_from([None, 4, 8, 12, 20]), min_size=1, max_size=2), seed=st.integers(0, 7))
    def start(self, sizes: list[int | None], seed: int) -> None:
        """One or two pools, of which one has 2 streams' room."""
        engine = self.engine()
        self.world = StreamWorld(
            engine,
            page_sizes=sizes,
            streams=2,
            context=self.context,
            seed=seed,
            folder=Path(self._folder.name),
            check_every=None if isinstance(engine, DelayedEngine) else 1,
        )

    def teardown(self) -> None:
        """Every stream once more, then its pages back: none is lost."""
        if hasattr(self, "world") and self.world.sound:
            self.world.check()
            for pair in list(self.world.live):
                self.world.end(pair)
            self.world.check()
        self._folder.cleanup()

    @precondition(lambda self: len(self.world.live) < MOST_STREAMS)
    @rule(pool=_which, rope=st.sampled_from(sorted(ROPES)), seed=st.integers(0, 40), queue=_queue)
    def arrive(self, pool: int, rope: str, seed: int, queue: int) -> None:
        """A new stream, in any pool."""
        self.world.arrive(pool % len(self.world.pools), rope, seed, queue=queue)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), count=st.integers(1, 3), queue=_queue, after=_queue)
    def step(self, data: st.DataObject, count: int, queue: int, after: int) -> None:
        """A round: prompts of some beside drafts of others."""
        drafts: list[tuple[Pair, Draft]] = []
        chosen = self._some(data, count)
        for pair in chosen:
            room = self.context - len(pair.rows)
            if room and pair.stream.pool is chosen[0].stream.pool:
                drafts.append((pair, self._draft(data, room)))
        if drafts:
            self.world.round(drafts, queue=queue, after=after)

    @precondition(lambda self: self.world.live)
    @rule(which=_which, share=st.integers(1, 100), queue=_queue)
    def forget(self, which: int, share: int, queue: int) -> None:
        """Roll a stream back by some of its rows, perhaps all."""
        pair = self._pair(which)
        if pair.rows:
            self.world.forget(pair, max(1, len(pair.rows) * share // 100), queue=queue)

    @precondition(lambda self: self.world.live)
    @rule(which=_which, positions=st.integers(1, MOST_ROWS), queue=_queue)
    def reserve(self, which: int, positions: int, queue: int) -> None:
        """Take pages ahead for some more positions."""
        pair = self._pair(which)
        self.world.reserve(pair, min(self.context, len(pair.rows) + positions), queue=queue)

    @precondition(lambda self: self.world.live)
    @rule(which=_which, share=st.integers(1, 100), queue=_queue)
    def save(self, which: int, share: int, queue: int) -> None:
        """Save a stream up to some position."""
        pair = self._pair(which)
        if pair.rows:
            self.saved = [*self.saved[-2:], self.world.save(pair, max(1, len(pair.rows) * share // 100), queue=queue)]

    @precondition(lambda self: self.saved and len(self.world.live) < MOST_STREAMS)
    @rule(which=_which, pool=_which, queue=_queue)
    def restore(self, which: int, pool: int, queue: int) -> None:
        """A stream from a saved state, in any pool."""
        self.world.restore(self.saved[which % len(self.saved)], pool % len(self.world.pools), queue=queue)

    @precondition(lambda self: self.world.live)
    @rule(which=_which, queue=_queue)
    def end(self, which: int, queue: int) -> None:
        """A stream ends."""
        self.world.end(self._pair(which), queue=queue)

    @precondition(lambda self: self.world.live)
    @rule()
    def check_all(self) -> None:
        """Every stream, also those that had no part in what happened."""
        self.world.check()

    def _pair(self, which: int) -> Pair:
        return self.world.live[which % len(self.world.live)]

    def _some(self, data: st.DataObject, count: int) -> list[Pair]:
        chosen = data.draw(
            st.lists(
                st.integers(0, len(self.world.live) - 1),
                min_size=1,
                max_size=min(count, len(self.world.live)),
                unique=True,
            )
        )
        return [self.world.live[i] for i in chosen]

    def _draft(self, data: st.DataObject, room: int) -> Draft:
        """A prompt's piece, or a pending token with up to 3 drafts of which any number stands."""
        if data.draw(st.booleans()):
            return Draft(kept=data.draw(st.integers(1, min(MOST_ROWS, room))))
        drafts = data.draw(st.integers(0, min(MOST_DRAFTS, room - 1)))
        refuted = data.draw(st.integers(0, drafts))
        speculative = data.draw(st.integers(0, max(0, drafts - 1)))
        return Draft(kept=1 + drafts - refuted, refuted=refuted, speculative=speculative)


def stream_machine(engine: Callable[[], Engine] | None = None) -> type[StreamMachine]:
    """The machine over engines of one's own, a fresh one for each run; run its `TestCase`."""
    return type("StreamMachine", (StreamMachine,), {"engine": staticmethod(engine or default_engine)})
