"""Load: many streams and thousands of random operations over pools that run out often, checked as they go."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...fast import MOST_DRAFTS, Engine
from .delayed import DelayedEngine
from .world import ROPES, Draft, Pair, Saved, StreamWorld

KINDS = {"arrive": 0.18, "round": 0.54, "forget": 0.05, "reserve": 0.03, "save": 0.05, "restore": 0.08, "end": 0.07}
"""Operations, and how often each is tried."""

CHECK_EVERY = 20
"""Operations of a large load, or of one on queues, between two checks of everything."""

SMALL = 16
"""Streams of a load that is checked after every operation."""

MOST_ROWS = 24
QUEUES = 2


def run_load(
    engine: Engine,
    *,
    operations: int = 10_000,
    streams: int = 64,
    seed: int = 0,
    folder: Path | None = None,
) -> StreamWorld:
    """Random operations over two pools which together have room for a third of the streams.

    Raises:
        StreamFaultError: a page was lost or shared, a guard changed, or a stream does not have its solo's bits.
    """
    rng = np.random.default_rng(seed)
    room = max(1, streams // 6)
    often = streams <= SMALL and not isinstance(engine, DelayedEngine)
    world = StreamWorld(
        engine,
        page_sizes=(8, 20),
        streams=room,
        context=96,
        seed=seed,
        folder=folder,
        check_every=1 if often else CHECK_EVERY,
    )
    saved: list[Saved] = []
    for _ in range(operations):
        _operate(world, rng, streams, saved)
    world.check()
    return world


def _operate(world: StreamWorld, rng: np.random.Generator, streams: int, saved: list[Saved]) -> None:
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    full = len(world.live) >= streams
    queue, after = (int(number) for number in rng.integers(QUEUES, size=2))
    if kind == "arrive" and not full:
        world.arrive(
            int(rng.integers(len(world.pools))), str(rng.choice(sorted(ROPES))), int(rng.integers(1000)), queue=queue
        )
    elif kind == "restore" and saved and not full:
        world.restore(saved[int(rng.integers(len(saved)))], int(rng.integers(len(world.pools))), queue=queue)
    elif kind == "save" and world.live:
        pair = _any(world, rng)
        if pair.rows:
            positions = int(rng.integers(1, len(pair.rows) + 1))
            saved[:] = [*saved[-7:], world.save(pair, positions, queue=queue)]
    elif kind == "forget" and world.live:
        pair = _any(world, rng)
        if pair.rows:
            world.forget(pair, int(rng.integers(1, len(pair.rows) + 1)), queue=queue)
    elif kind == "reserve" and world.live:
        pair = _any(world, rng)
        room = pair.stream.pool.context - len(pair.rows)
        world.reserve(pair, len(pair.rows) + int(rng.integers(0, room + 1)), queue=queue)
    elif kind == "end" and world.live:
        world.end(_any(world, rng), queue=queue)
    elif world.live:
        count = min(int(rng.integers(1, 5)), len(world.live))
        chosen = rng.choice(len(world.live), count, replace=False)
        drafts = [(pair, draft) for i in chosen if (draft := _draft(pair := world.live[i], rng)) is not None]
        if drafts:
            pool = drafts[0][0].stream.pool
            world.round([(pair, draft) for pair, draft in drafts if pair.stream.pool is pool], queue=queue, after=after)


def _any(world: StreamWorld, rng: np.random.Generator) -> Pair:
    return world.live[int(rng.integers(len(world.live)))]


def _draft(pair: Pair, rng: np.random.Generator) -> Draft | None:
    room = pair.stream.pool.context - len(pair.rows)
    if not room:
        return None
    if rng.random() < 0.4:
        return Draft(kept=int(rng.integers(1, min(MOST_ROWS, room) + 1)))
    drafts = int(rng.integers(0, min(MOST_DRAFTS, room - 1) + 1))
    refuted = int(rng.integers(0, drafts + 1))
    return Draft(kept=1 + drafts - refuted, refuted=refuted, speculative=int(rng.integers(0, max(1, drafts))))
