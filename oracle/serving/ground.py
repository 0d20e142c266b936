"""How the prompts of a serve-check are run, and what their pools must look like when they are over."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...fast import MOST_DRAFTS, PageError, PagePool
from ...fast.engine import Engine
from ...fast.page_sizes import PAGE_TEST
from ...reference.geometry import CHUNK
from .audit import audit, guarded_pool
from .model import ServeModel
from .plan import Request, ServePlan, media_requests, shortened, text_requests
from .server import DraftFunction, Server
from .session import Kept, Session
from .trace import Trace, in_order

After = Callable[[Session], None]
"""Called after each round of a session."""


class LeftOverError(PageError):
    """A pool is not as it was made, though all that it served is over."""


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
        """A server with room for one prompt; on the host over a guarded pool, but for a long prompt's size."""
        options.setdefault("chunk", self.chunk)
        guarded = not self.plan.long and self.engine.backend.device is None
        pool = guarded_pool if guarded else PagePool
        options = {"streams": 1, "context": request.end, "engine": self.engine, "pool": pool, **options}
        return Server(self.model, **options)

    @contextmanager
    def serving(self, request: Request, **options: Any) -> Iterator[Server]:
        """A server whose sessions end inside the block.

        Raises:
            LeftOverError: a page was not given back, or bytes changed that are nobody's.
        """
        server = self.server(request, **options)
        yield server
        problems = left_over(server.pool)
        if problems:
            raise LeftOverError("; ".join(problems[:MOST_TOLD]))

    def solo(
        self,
        request: Request,
        *,
        after: After | None = None,
        scattered: bool = False,
        watched: bool = False,
        **options: Any,
    ) -> tuple[Trace, Session]:
        """Serve a prompt alone.

        Args:
            scattered: whether its pages are shuffled among free ones.
            watched: whether the rows behind the last are looked at after each round.
            options: of the server.
        """
        with self.serving(request, **options) as server:
            session = self.open(server, request)
            if scattered:
                scatter(server, session, self.rng(request.number, server.pool.page_size))
            return self.finish(server, session, after, watched=watched), session

    def open(self, server: Server, request: Request, kept: Kept | None = None) -> Session:
        """A session for a prompt, or for what follows a state of its beginning."""
        return server.open(request.tokens, tokens=request.limit, rope=request.rope, kept=kept, number=request.number)

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
        with self.serving(request, **options) as server:
            session = self.open(server, shortened(request, 1))
            while not session.done:
                server.step([session])
            kept = server.keep(session, len(request.tokens) - 1 if positions is None else positions)
            server.drop(session)
        return kept


MOST_TOLD = 3
"""Problems of a pool that one message tells."""


def left_over(pool: PagePool) -> list[str]:
    """What is wrong with a pool that no stream uses any more; [] where every page is back, and untouched since."""
    if pool.engine.backend.device is None:
        return audit(pool, [])
    used = pool.layout.pages - pool.free
    return pool.audit() + ([f"{used} of {pool.layout.pages} pages were not given back"] if used else [])


class _Spoiler:
    """Holds pages so that others get scattered ones."""

    length = 0


def scatter(server: Server, session: Session, rng: np.random.Generator) -> None:
    """Give a new session all its pages now, out of order: each is the only free one when it is taken.

    Raises:
        ValueError: there is only one page, so that there is only one order.
    """
    pool, spoiler, stream = server.pool, _Spoiler(), session.live
    needed = pool.pages_for(pool.context)
    if pool.free < 2:
        raise ValueError(f"the pool has {pool.free} free pages; scattering needs at least 2: make it for more streams=")
    held = list(pool.take(spoiler, pool.free))
    while in_order(held[:needed]):
        rng.shuffle(held)
    for count in range(1, needed + 1):
        pool.give_back(spoiler, [held.pop(0)])
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
