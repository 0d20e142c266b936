"""Prompts that are served together: they arrive, share rounds, are suspended and resumed, and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...fast import PageError, PoolExhaustedError
from .plan import Request
from .server import Server
from .session import Kept, Session
from .trace import Trace

MOST_FUTILE = 100
"""Times that pages may run out without a round in between."""


@dataclass(kw_only=True)
class Together:
    """What happened while prompts were served together.

    Attributes:
        traces: by prompt name.
        shared: rounds of several streams.
        mixed: rounds in which one stream read its prompt while another decoded.
        beside: rounds in which one with an image stood beside one of text alone.
        suspended: streams that were saved, closed and resumed later.
        exhausted: rounds for which the pages did not suffice.
        accepted: of all sessions.
    """

    traces: dict[str, Trace]
    shared: int = 0
    mixed: int = 0
    beside: int = 0
    suspended: int = 0
    exhausted: int = 0
    accepted: tuple[int, ...] = ()


def serve_together(
    server: Server, requests: Sequence[Request], rng: np.random.Generator, after: Callable[[], None] | None = None
) -> Together:
    """Serve prompts that arrive, share rounds, are suspended when pages run out or at random, and end."""
    waiting: list[tuple[Request, Session | None, Kept | None]] = [(request, None, None) for request in requests]
    at_work: dict[str, Session] = {}
    futile = 0
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
                futile += 1
                waiting.append((request, session, kept))
        if futile > MOST_FUTILE:
            raise PageError(f"pages ran out {futile} times in a row, though one prompt at a time has room")
        chosen = [name for name in at_work if rng.random() < 0.8] or list(at_work)[:1]
        if not chosen:  # none could be resumed
            continue
        sessions = [at_work[name] for name in chosen]
        reading = {session.generated > 0 for session in sessions}
        try:
            server.step(sessions)
        except PoolExhaustedError:
            found.exhausted += 1
            futile += 1
            put_away(list(at_work)[int(rng.integers(len(at_work)))])
            continue
        futile = 0
        found.shared += len(sessions) > 1
        found.beside += len({by_name[name].image for name in chosen}) > 1
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
