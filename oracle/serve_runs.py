"""The runs of a serve-check: every way in which its prompts are served."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..fast import read_prompt, write_prompt
from ..reference.geometry import CHUNK, TILE
from .cases import PAGE_SIZES
from .serve_controls import PAGE, RESTORED, Control, long_state
from .serve_ground import Ground, Together, forced_drafts, page_test, serve_together
from .serve_plan import Request
from .serve_session import Session
from .serve_trace import Trace
from .server import Server

CHUNKS = (17, TILE, 130, CHUNK)
CHUNKED_TOKENS = 8
LONG_CHUNK = 320


@dataclass(frozen=True, kw_only=True)
class ServeFailure:
    """One prompt that was served differently.

    Attributes:
        check, run, prompt: which.
        message: what differs, and where.
        replay: the command line that runs it again.
    """

    check: str
    run: str
    prompt: str
    message: str
    replay: str


@dataclass(kw_only=True)
class Served:
    """What one run of a check found.

    Attributes:
        check, run: which.
        prompts, tokens, bytes: compared.
        seconds: that it took.
        accepted: how often 0, 1, 2 and 3 drafts of three stood.
        detail: what else is told of it.
        failures: [] where all is equal.
        controls: faults planted.
    """

    check: str
    run: str
    prompts: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    accepted: tuple[int, ...] = ()
    detail: str = ""
    failures: list[ServeFailure] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether all is equal and every fault was seen."""
        return not self.failures and all(control.seen is not None for control in self.controls)


Runner: TypeAlias = Callable[[Ground, Served], Iterator[tuple[Request, Trace]]]
"""Serves prompts; what else it finds it writes down."""


def accept(served: Served, accepted: Sequence[int]) -> None:
    """Add to how often 0, 1, 2 and 3 drafts stood."""
    before = served.accepted or (0,) * len(accepted)
    served.accepted = tuple(a + b for a, b in zip(before, accepted, strict=True))


def fail(served: Served, prompt: str, message: str, replay: str) -> None:
    """Note a failure."""
    served.failures.append(
        ServeFailure(check=served.check, run=served.run, prompt=prompt, message=message, replay=replay)
    )


def _solo(requests: Callable[[Ground], Sequence[Request]], **options: Any) -> Runner:
    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        for request in requests(ground):
            trace, session = ground.solo(request, **options)
            if options.get("draft"):
                accept(served, session.accepted)
            yield request, trace

    return run


def _text(ground: Ground) -> Sequence[Request]:
    return ground.text


def _images(ground: Ground) -> Sequence[Request]:
    return ground.media


def _forced(requests: Callable[[Ground], Sequence[Request]], **options: Any) -> Runner:
    """Drafts of which 0 to 3 stand in turns."""

    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        for request in requests(ground):
            draft = forced_drafts(ground.model, ground.wants[request.name])
            trace, session = ground.solo(request, draft=draft, watched=True, **options)
            accept(served, session.accepted)
            yield request, trace

    return run


def _together(*, short: bool, draft: str | None) -> Runner:
    """All prompts in one arena.

    Args:
        short: whether it has about half the pages that they need together.
    """

    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        context = max(request.end for request in ground.text)
        needed = sum(-(-request.end // PAGE) for request in ground.text)
        streams = max(1, needed // (2 * -(-context // PAGE))) if short else len(ground.text)
        server = ground.server(
            ground.text[0], streams=streams, context=context, page_size=PAGE, chunk=TILE, draft=draft
        )
        found = serve_together(server, ground.text, ground.rng(3, streams))
        _tell_together(ground, served, found, server.pool.audit(), short)
        for request in ground.text:
            yield request, found.traces[request.name]

    return run


def _tell_together(ground: Ground, served: Served, found: Together, audit: Sequence[str], short: bool) -> None:
    served.detail = (
        f"{found.shared} rounds shared, {found.mixed} of prompt and decode, {found.suspended} suspended, "
        f"{found.exhausted} times out of pages"
    )
    if any(found.accepted):
        accept(served, found.accepted)
    problems = list(audit)
    if not (found.exhausted and found.suspended if short else found.shared):
        what = "pages never ran out" if short else "no round had several streams"
        problems.append(f"{what}: the run is not effective; serve more --prompts or --tokens")
    for problem in problems:
        fail(served, "all", problem, ground.replay)


def _resumed_prefix(requests: Callable[[Ground], Sequence[Request]]) -> Runner:
    """The beginning of each prompt is saved in 16-position pages, and restored in memory into 48-position ones."""

    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        most = 0
        for request in requests(ground):
            length = len(request.tokens)
            positions = (
                length - 1 if request.number % 2 == 0 else int(ground.rng(5, request.number).integers(1, length))
            )
            kept = ground.prepared(request, positions, page_size=PAGE, streams=2)
            most = max(most, positions)
            server = ground.server(request, page_size=48)
            session = server.open(
                request.tokens, tokens=request.limit, rope=request.rope, kept=kept, number=request.number
            )
            yield request, ground.finish(server, session)
        served.detail = f"up to {most:,} positions restored"

    return run


def _resumed_session(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
    """Half way through its text a session is saved to a file, and goes on in a contiguous cache."""
    with tempfile.TemporaryDirectory() as folder:
        for request in ground.text:
            here = ground.server(request, page_size=128, draft="head")
            there = ground.server(request, draft="head")
            session = here.open(request.tokens, tokens=request.limit, rope=request.rope, number=request.number)
            while session.generated < request.limit // 2:
                here.step([session])
            if not session.done:
                _move(session, here, there, Path(folder) / "state.safetensors")
            trace = ground.finish(there if session in there.sessions else here, session)
            yield request, trace


def _move(session: Session, here: Server, there: Server, file: Path) -> None:
    kept = here.suspend(session)
    write_prompt(kept.saved, file)
    there.resume(session, replace(kept, saved=read_prompt(file, geometry=here.model.geometry)))


def _chunked(chunk: int, requests: Callable[[Ground], Sequence[Request]], limit: int | None = None) -> Runner:
    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        for request in requests(ground):
            yield request, ground.solo(request, chunk=chunk, limit=limit)[0]

    return run


def _paged(page: int) -> Runner:
    """Plainly, through a shuffled table in an arena that is larger than the stream."""

    def run(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
        shuffled = False
        for request in ground.text:
            trace, _ = ground.solo(request, page_size=page, streams=2, scattered=True)
            table = trace.places[0].table
            entries = -(-request.end // page)
            shuffled |= table is not None and bool((np.diff(table[:entries]) < 0).any())
            yield request, trace
        longest = max(request.end for request in ground.text)
        if longest > 4 * page and not shuffled:
            fail(served, "all", "no page table was out of order: the run is not effective", ground.replay)

    return run


def _page_test(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
    """The plain run itself, with the environment changed and nothing else."""
    for request in ground.text:
        with page_test(PAGE):
            trace = ground.solo(request)[0]
        table = trace.places[0].table
        if table is None:
            fail(served, request.name, "the page test did not page the caches: it is not effective", ground.replay)
        yield request, trace


RUNS: dict[str, dict[str, Runner]] = {
    "drafted": {
        "own head": _solo(_text, draft="head"),
        "0 to 3 in turns, page 16": _forced(_text, page_size=PAGE),
    },
    "concurrent": {
        "plain": _together(short=False, draft=None),
        "drafted, short of pages": _together(short=True, draft="head"),
    },
    "resumed": {
        "memory, page 16 to 48": _resumed_prefix(_text),
        "file, page 128 to contiguous, drafted": _resumed_session,
    },
    "chunked": {f"chunk {chunk}": _chunked(chunk, _text, CHUNKED_TOKENS) for chunk in CHUNKS},
    "media": {
        "own head, page 16": _solo(_images, draft="head", page_size=PAGE),
        "0 to 3 in turns": _forced(_images),
        "chunk 17": _chunked(17, _images, CHUNKED_TOKENS),
        "resumed, page 16 to 48": _resumed_prefix(_images),
    },
    "paged": {f"page {page}": _paged(page) for page in PAGE_SIZES},
    "page-test": {"page 16": _page_test},
}


def _long_drafted(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
    """Paged, in other chunks; the head's drafts and forced ones in turns."""
    for request in ground.text:
        forced = forced_drafts(ground.model, ground.wants[request.name])
        server = ground.server(request, page_size=PAGE, chunk=LONG_CHUNK, draft=forced)
        session = server.open(request.tokens, tokens=request.limit, rope=request.rope, number=request.number)
        while not session.done:
            server.draft = forced if sum(session.accepted) % 2 else "head"
            server.step([session])
        ground.kept[request.name] = server.keep(session, min(RESTORED, len(request.tokens) - 1))
        accept(served, session.accepted)
        yield request, server.end(session)


def _long_resumed(ground: Ground, served: Served) -> Iterator[tuple[Request, Trace]]:
    for request in ground.text:
        kept = long_state(ground, request)
        server = ground.server(request, page_size=48, draft="head")
        session = server.open(request.tokens, tokens=request.limit, rope=request.rope, kept=kept, number=request.number)
        served.detail = f"{kept.saved.positions:,} positions restored"
        yield request, ground.finish(server, session)


LONG_RUNS: dict[str, dict[str, Runner]] = {
    "drafted": {"page 16, head and 0 to 3 in turns": _long_drafted},
    "resumed": {"memory, page 16 to 48, drafted": _long_resumed},
}
