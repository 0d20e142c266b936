"""The runs of a serve-check: every way in which its prompts are served."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...fast import PageError, read_prompt, write_prompt
from ...reference.geometry import CHUNK, TILE
from ..cases import PAGE_SIZES
from .audit import audit
from .controls import PAGE, RESTORED, long_state
from .ground import Ground, forced_drafts, page_test
from .plan import Request, shortened
from .served import Requests, Run, Serve, Served, accept, require, require_drafts, require_turns
from .server import Server
from .session import Session
from .together import Together, serve_together
from .trace import Trace

CHUNKS = (17, TILE, 130, CHUNK)
CHUNKED_TOKENS = 8
LONG_CHUNK = 320
LOOK_EVERY = 8
"""Rounds of several prompts from one account of their pages to the next."""

Traces = Iterator[tuple[Request, Trace]]


def _text(ground: Ground) -> Sequence[Request]:
    return ground.text


def _images(ground: Ground) -> Sequence[Request]:
    return ground.media


def _images_beside_text(ground: Ground) -> Sequence[Request]:
    """All images, and as many prompts of text as are no longer than the longest of them."""
    longest = max(request.end for request in ground.media)
    return [*ground.media, *(request for request in ground.text if request.end <= longest)]


def _own_head(**options: Any) -> Serve:
    """Alone, drafted by the model's own head."""

    def serve(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
        for request in requests:
            trace, session = ground.solo(request, draft="head", **options)
            accept(served, session.accepted)
            yield request, trace
        require_drafts(ground, served)

    return serve


def _forced(**options: Any) -> Serve:
    """Drafts of which 0 to 3 stand in turns."""

    def serve(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
        for request in requests:
            draft = forced_drafts(ground.model, ground.wants[request.name])
            trace, session = ground.solo(request, draft=draft, watched=True, **options)
            accept(served, session.accepted)
            yield request, trace
        require_turns(ground, served)

    return serve


def _together(*, short: bool, draft: str | None) -> Serve:
    """All prompts in one arena.

    Args:
        short: whether it has about half the pages that they need together.
    """

    def serve(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
        context = max(request.end for request in requests)
        needed = sum(-(-request.end // PAGE) for request in requests)
        streams = max(1, needed // (2 * -(-context // PAGE))) if short else len(requests)
        options: dict[str, Any] = {"context": context, "page_size": PAGE, "chunk": TILE, "draft": draft}
        with ground.serving(requests[0], streams=streams, **options) as server:
            order = ground.rng(13, len(requests)).permutation(len(requests))
            arrivals = [requests[i] for i in order]
            found = serve_together(server, arrivals, ground.rng(3, streams), _looking(server))
            for request in requests:
                yield request, found.traces[request.name]
        if draft:
            accept(served, found.accepted)
            require_drafts(ground, served)
        _require_together(ground, served, found, requests, short)

    return serve


def _looking(server: Server) -> Callable[[], None]:
    """Accounts for every page and byte between two rounds, now and then, on the host."""
    rounds = itertools.count()

    def look() -> None:
        if next(rounds) % LOOK_EVERY or server.pool.engine.backend.device is not None:
            return
        problems = audit(server.pool, [session.live for session in server.sessions])
        if problems:
            raise PageError(problems[0])

    return look


def _require_together(
    ground: Ground, served: Served, found: Together, requests: Sequence[Request], short: bool
) -> None:
    served.detail = (
        f"{found.shared} rounds shared, {found.mixed} of prompt and decode, {found.suspended} suspended, "
        f"{found.exhausted} times out of pages"
    )
    require(ground, served, found.shared, "no round had several streams")
    require(ground, served, found.mixed, "no round had a prompt of one stream beside a decode of another")
    if short:
        require(ground, served, found.exhausted, "pages never ran out")
        require(ground, served, found.suspended, "no stream was suspended")
    images = [request for request in requests if request.image]
    if images:
        scattered = sum(found.traces[request.name].scattered for request in images)
        served.detail += f", {found.beside} of image and text, {scattered} images over scattered pages"
        require(ground, served, found.beside, "no round had an image beside text")
        require(ground, served, scattered, "no image's page table was out of order")


def _resumed_prefix(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
    """The beginning of each prompt is saved in 16-position pages, and restored in memory into 48-position ones."""
    most = 0
    for request in requests:
        length = len(request.tokens)
        positions = length - 1 if request.number % 2 == 0 else int(ground.rng(5, request.number).integers(1, length))
        kept = ground.prepared(request, positions, page_size=PAGE, streams=2)
        most = max(most, positions)
        with ground.serving(request, page_size=48) as server:
            yield request, ground.finish(server, ground.open(server, request, kept))
    served.detail = f"up to {most:,} positions restored"


def _resumed_session(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
    """Half way through its text a session is saved to a file, and goes on in a contiguous cache."""
    moved = 0
    with tempfile.TemporaryDirectory() as folder:
        for request in requests:
            with (
                ground.serving(request, page_size=128, draft="head") as here,
                ground.serving(request, draft="head") as there,
            ):
                session = ground.open(here, request)
                while session.generated < request.limit // 2:
                    here.step([session])
                before = sum(session.accepted)
                if not session.done:
                    _move(session, here, there, Path(folder) / "state.safetensors")
                trace = ground.finish(there if session in there.sessions else here, session)
            moved += sum(session.accepted) > before
            accept(served, session.accepted)
            yield request, trace
    served.detail = f"{moved} sessions drafted after they had moved"
    require(ground, served, moved, "no session drafted after it had moved")


def _move(session: Session, here: Server, there: Server, file: Path) -> None:
    kept = here.suspend(session)
    write_prompt(kept.saved, file)
    there.resume(session, replace(kept, saved=read_prompt(file, geometry=here.model.geometry)))


def _chunked(chunk: int) -> Serve:
    """The prompt in pieces, and a few tokens."""

    def serve(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
        cuts: list[tuple[Request, int]] = []
        for request in requests:

            def after(session: Session, request: Request = request) -> None:
                if session.live.length < session.prompt:
                    cuts.append((request, session.live.length))

            yield request, ground.solo(request, chunk=chunk, after=after)[0]
        cut = len({request.name for request, _ in cuts})
        served.detail = f"{cut} prompts cut"
        require(ground, served, cut, f"no prompt was read in pieces of {chunk}")
        images = sum(_inside_image(request, position) for request, position in cuts)
        if any(request.image for request in requests):
            served.detail += f", {images} times inside an image"
            require(ground, served, images, "no image was cut")

    return serve


def _inside_image(request: Request, position: int) -> bool:
    """Whether a cut before a position has rows of one image on either side: they stand at one time."""
    return request.image and bool(request.rope.triples[position - 1, 0] == request.rope.triples[position, 0])


def _few(requests: Requests) -> Requests:
    return lambda ground: [shortened(request, CHUNKED_TOKENS) for request in requests(ground)]


def _paged(page: int) -> Serve:
    """Plainly, through a shuffled table in an arena that is larger than the stream."""

    def serve(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
        scattered = 0
        for request in requests:
            trace, _ = ground.solo(request, page_size=page, streams=2, scattered=True)
            scattered += trace.scattered
            yield request, trace
        require(ground, served, scattered == len(requests), "a page table was in order")

    return serve


def _page_test(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
    """The plain run itself, with the environment changed and nothing else."""
    scattered = 0
    for request in requests:
        with page_test(PAGE):
            trace = ground.solo(request)[0]
        scattered += trace.scattered
        yield request, trace
    require(ground, served, scattered == len(requests), "the page test did not page the caches out of order")


RUNS: dict[str, dict[str, Run]] = {
    "drafted": {
        "own head": Run(serve=_own_head(), requests=_text),
        "0 to 3 in turns, page 16": Run(serve=_forced(page_size=PAGE), requests=_text),
    },
    "concurrent": {
        "plain": Run(serve=_together(short=False, draft=None), requests=_text),
        "drafted, short of pages": Run(serve=_together(short=True, draft="head"), requests=_text),
    },
    "resumed": {
        "memory, page 16 to 48": Run(serve=_resumed_prefix, requests=_text),
        "file, page 128 to contiguous, drafted": Run(serve=_resumed_session, requests=_text),
    },
    "chunked": {f"chunk {chunk}": Run(serve=_chunked(chunk), requests=_few(_text)) for chunk in CHUNKS},
    "media": {
        "own head, page 16": Run(serve=_own_head(page_size=PAGE), requests=_images),
        "0 to 3 in turns": Run(serve=_forced(), requests=_images),
        "chunk 17": Run(serve=_chunked(17), requests=_few(_images)),
        "resumed, page 16 to 48": Run(serve=_resumed_prefix, requests=_images),
        "beside text, drafted, short of pages": Run(
            serve=_together(short=True, draft="head"), requests=_images_beside_text
        ),
    },
    "paged": {f"page {page}": Run(serve=_paged(page), requests=_text) for page in PAGE_SIZES},
    "page-test": {"page 16": Run(serve=_page_test, requests=_text)},
}


def _long_drafted(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
    """Paged, in other chunks; the head's drafts and forced ones in turns."""
    for request in requests:
        forced = forced_drafts(ground.model, ground.wants[request.name])
        with ground.serving(request, page_size=PAGE, chunk=LONG_CHUNK, draft=forced) as server:
            session = ground.open(server, request)
            while not session.done:
                server.draft = forced if sum(session.accepted) % 2 else "head"
                server.step([session])
            ground.kept[request.name] = server.keep(session, min(RESTORED, len(request.tokens) - 1))
            accept(served, session.accepted)
            yield request, server.end(session)
    require_turns(ground, served)


def _long_resumed(ground: Ground, served: Served, requests: Sequence[Request]) -> Traces:
    for request in requests:
        kept = long_state(ground, request)
        served.detail = f"{kept.saved.positions:,} positions restored"
        with ground.serving(request, page_size=48, draft="head") as server:
            session = ground.open(server, request, kept)
            trace = ground.finish(server, session)
        accept(served, session.accepted)
        yield request, trace
    require_drafts(ground, served)


LONG_RUNS: dict[str, dict[str, Run]] = {
    "drafted": {"page 16, head and 0 to 3 in turns": Run(serve=_long_drafted, requests=_text)},
    "resumed": {"memory, page 16 to 48, drafted": Run(serve=_long_resumed, requests=_text)},
}
