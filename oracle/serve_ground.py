"""How the prompts of a serve-check are run: alone, together, through scattered pages, and with bytes changed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..fast import MOST_DRAFTS, PoolExhaustedError, Settled, Stream, settle
from ..fast.engine import Engine
from ..fast.page_runs import runs
from ..fast.page_sizes import PAGE_TEST
from ..reference.geometry import CHUNK
from ..reference.layout import Part
from ..reference.results import Bf16Array
from .serve_model import ServeModel
from .serve_plan import Request, ServePlan, media_requests, text_requests
from .serve_session import Kept, Session
from .serve_trace import Trace
from .server import DraftFunction, Server, Settle

After = Callable[[Session], None]
"""Called after each round of a session."""


class Ground:
    """Everything that a check stands on.

    Args:
        plan: what is served.
        engine: where.
        wants: the plain contiguous run of each prompt, by its name.

    Attributes:
        text, media: the prompts.
        chunk: of the plain run, for a long prompt's memory; None reads prompts at once.
        replay: command line that runs the check again.
        kept: states of long prompts, which are costly to compute.
        model: what serves them.
    """

    def __init__(self, plan: ServePlan, engine: Engine, wants: dict[str, Trace] | None = None) -> None:
        self.plan = plan
        self.engine = engine
        self.wants = wants if wants is not None else {}
        self.model = ServeModel(plan.geometry, seed=plan.seed)
        self.text = text_requests(plan, self.model)
        self.media = [] if plan.long else media_requests(plan, self.model)
        self.chunk = CHUNK if plan.long else None
        self.kept: dict[str, Kept] = {}
        self.replay = ""

    def rng(self, *key: int) -> np.random.Generator:
        """Random numbers of the plan's seed."""
        return np.random.Generator(np.random.PCG64([self.plan.seed, *key]))

    def server(self, request: Request, **options: Any) -> Server:
        """A server with room for one prompt."""
        options.setdefault("chunk", self.chunk)
        options = {"streams": 1, "context": request.end, "engine": self.engine, **options}
        return Server(self.model, **options)

    def solo(
        self,
        request: Request,
        *,
        limit: int | None = None,
        after: After | None = None,
        scattered: bool = False,
        watched: bool = False,
        **options: Any,
    ) -> tuple[Trace, Session]:
        """Serve a prompt alone.

        Args:
            limit: tokens, if fewer than the prompt's.
            scattered: whether its pages are shuffled among free ones.
            watched: whether the rows behind the last are looked at after each round.
            options: of the server.
        """
        server = self.server(request, **options)
        tokens = min(limit or request.limit, request.limit)
        session = server.open(request.tokens, tokens=tokens, rope=request.rope, number=request.number)
        if scattered:
            scatter(server, session, self.rng(request.number, server.pool.page_size))
        return self.finish(server, session, after, watched=watched), session

    def finish(self, server: Server, session: Session, after: After | None = None, *, watched: bool = False) -> Trace:
        """Serve an open session to its end, alone."""
        while not session.done:
            server.step([session])
            if after is not None:
                after(session)
            if watched:
                session.trace.look_behind(session.live)
        return server.end(session)

    def prepared(self, request: Request, positions: int | None = None, **options: Any) -> Kept:
        """The state behind a prompt's first positions, all but its last token's when None."""
        server = self.server(request, **options)
        session = server.open(request.tokens, tokens=1, rope=request.rope, number=request.number)
        while not session.done:
            server.step([session])
        kept = server.keep(session, len(request.tokens) - 1 if positions is None else positions)
        server.drop(session)
        return kept


@dataclass(kw_only=True)
class Together:
    """What happened while prompts were served together.

    Attributes:
        traces: by prompt name.
        shared: rounds of several streams.
        mixed: rounds in which one stream read its prompt while another decoded.
        suspended: streams that were saved, closed and resumed later.
        exhausted: rounds for which the pages did not suffice.
        accepted: of all sessions.
    """

    traces: dict[str, Trace]
    shared: int = 0
    mixed: int = 0
    suspended: int = 0
    exhausted: int = 0
    accepted: tuple[int, ...] = ()


def serve_together(
    server: Server, requests: Sequence[Request], rng: np.random.Generator, after: Callable[[], None] | None = None
) -> Together:
    """Serve prompts that arrive, share rounds, are suspended when pages run out or at random, and end."""
    waiting: list[tuple[Request, Session | None, Kept | None]] = [(request, None, None) for request in requests]
    at_work: dict[str, Session] = {}
    found = Together(traces={})
    accepted = np.zeros(4, np.int64)
    by_name = {request.name: request for request in requests}

    def put_away(name: str) -> None:
        session = at_work.pop(name)
        if not session.live.length:  # it has not begun
            server.drop(session)
            waiting.append((by_name[name], None, None))
            return
        found.suspended += 1
        waiting.append((by_name[name], session, server.suspend(session)))

    while waiting or at_work:
        if waiting and (len(at_work) < 2 or rng.random() < 0.5):
            request, session, kept = waiting.pop(0)
            try:
                at_work[request.name] = _admit(server, request, session, kept)
            except PoolExhaustedError:
                found.exhausted += 1
                waiting.append((request, session, kept))
        chosen = [name for name in at_work if rng.random() < 0.8] or list(at_work)[:1]
        if not chosen:  # none could be resumed
            continue
        sessions = [at_work[name] for name in chosen]
        reading = {session.generated > 0 for session in sessions}
        try:
            server.step(sessions)
        except PoolExhaustedError:
            found.exhausted += 1
            put_away(list(at_work)[int(rng.integers(len(at_work)))])
            continue
        found.shared += len(sessions) > 1
        found.mixed += len(reading) > 1
        if after is not None:
            after()
        for name, session in zip(chosen, sessions, strict=True):
            if session.done:
                accepted += session.accepted
                found.traces[name] = server.end(at_work.pop(name))
            elif rng.random() < 0.02:
                put_away(name)
    found.accepted = tuple(accepted.tolist())
    return found


def _admit(server: Server, request: Request, session: Session | None, kept: Kept | None) -> Session:
    if session is None or kept is None:
        return server.open(request.tokens, tokens=request.limit, rope=request.rope, number=request.number)
    server.resume(session, kept)
    return session


class _Spoiler:
    """Holds pages so that others get scattered ones."""

    length = 0


def scatter(server: Server, session: Session, rng: np.random.Generator) -> None:
    """Give a new session all its pages now, shuffled: each is the only free one when it is taken."""
    pool, spoiler, stream = server.pool, _Spoiler(), session.live
    needed = pool.pages_for(pool.context)
    held = list(pool.take(spoiler, pool.free))
    rng.shuffle(held)
    for count in range(1, needed + 1):
        pool.give_back(spoiler, [held.pop()])
        stream.reserve(min(count * pool.page_size, pool.context))
    pool.give_back(spoiler, held)


def forced_drafts(model: ServeModel, want: Trace, turns: Sequence[int] = range(MOST_DRAFTS + 1)) -> DraftFunction:
    """Drafts of one session, of which so many stand, round after round."""
    stands = itertools.cycle(turns)

    def draft(session: Session, count: int) -> list[int]:
        start, right = len(session.tokens), next(stands)
        following = want.tokens[start : start + count]
        return [t if i < right else (t + 1) % model.vocabulary for i, t in enumerate(following)]

    return draft


@contextmanager
def page_test(positions: int) -> Iterator[None]:
    """What runs inside is under the page test."""
    before = os.environ.get(PAGE_TEST)
    os.environ[PAGE_TEST] = str(positions)
    try:
        yield
    finally:
        if before is None:
            del os.environ[PAGE_TEST]
        else:
            os.environ[PAGE_TEST] = before


# ---- faults that controls plant ----


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
