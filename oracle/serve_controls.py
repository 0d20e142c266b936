"""Faults that `kvproof serve-check` plants: each check must go red for its own."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..fast import LaunchError, PageError, PromptFileError, StreamError, read_prompt, write_prompt
from ..reference.geometry import Rope
from ..reference.layout import Part
from ..reference.results import Bf16Array
from .serve_ground import (
    After,
    Ground,
    forced_drafts,
    keep_one_more,
    leaves,
    page_test,
    read_rows,
    write_rows,
    write_table,
)
from .serve_plan import Request
from .serve_session import Kept, Session
from .serve_trace import Trace, compare_traces

PAGE = 16
CONTROL_TOKENS = 16
LONG_CONTROL_TOKENS = 4
RESTORED = 4000
"""Positions of a long prompt that are restored."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A planted fault.

    Attributes:
        fault: in words.
        seen: by what: the first tensor that differs, or the error that was raised; None if nothing saw it.
        text: whether the generated text differs too.
    """

    fault: str
    seen: str | None
    text: bool


Plant = Callable[[], Trace]


def controls(ground: Ground, check: str) -> Iterator[Control]:
    """Plant each fault of a check, one by one."""
    return (_LONG_CONTROLS if ground.plan.long else _CONTROLS)[check](ground)


def _judge(ground: Ground, fault: str, request: Request, plant: Plant) -> Control:
    try:
        found = compare_traces(plant(), ground.wants[request.name])
    except (StreamError, PageError, LaunchError, PromptFileError) as error:
        return Control(fault=fault, seen=type(error).__name__, text=False)
    return Control(fault=fault, seen=next(iter(found.tensors), None), text=found.tokens_differ)


def _short(ground: Ground) -> Request:
    """A prompt of more than four pages, if there is one: small, but beyond the sparse budget."""
    far = [request for request in ground.text if len(request.tokens) >= 4 * PAGE - 2]
    return min(far or ground.text, key=lambda request: len(request.tokens))


def _drafted(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    wrong = forced_drafts(ground.model, ground.wants[request.name], turns=[0])  # so that blocks are taken back
    faults = (
        ("a refuted draft is kept", keep_one_more),
        ("a rollback leaves the keys", leaves("keys")),
        ("a rollback leaves a pooled row", leaves("pooled")),
    )
    for fault, settle in faults:

        def plant(settle: object = settle) -> Trace:
            return ground.solo(request, draft=wrong, page_size=PAGE, settle=settle, watched=True)[0]

        yield _judge(ground, fault, request, plant)


def _concurrent(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    other = max(ground.text, key=lambda one: -abs(len(one.tokens) - 2 * len(request.tokens)))

    def plant() -> Trace:
        server = ground.server(request, streams=2, context=max(request.end, other.end), page_size=PAGE)
        ours, theirs = (
            server.open(one.tokens, tokens=one.limit, rope=one.rope, number=one.number) for one in (request, other)
        )
        server.step([ours, theirs])
        table = np.array(ours.live.pages, np.int32)
        table[len(table) // 2] = theirs.live.pages[0]
        write_table(ours.live, table)
        return ground.finish(server, ours)

    yield _judge(ground, "a neighbour's page in the table", request, plant)


def _resumed(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    kept = ground.prepared(request, len(request.tokens) // 4 * 4 - 1, page_size=PAGE)

    def resume(kept: Kept) -> Trace:
        server = ground.server(request, page_size=48)
        session = server.open(request.tokens, tokens=request.limit, rope=request.rope, kept=kept, number=request.number)
        return ground.finish(server, session)

    changes: tuple[tuple[Part, int], ...] = (("pooled", 0), ("index_keys", -1), ("keys", 5))
    for part, row in changes:
        fault = f"another row {row} of the state's {part}"
        yield _judge(ground, fault, request, functools.partial(resume, _changed(kept, part, row)))

    def from_file() -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state"
            write_prompt(kept.saved, file)
            data = bytearray(file.read_bytes())
            data[-100] ^= 1
            file.write_bytes(data)
            return resume(dataclasses.replace(kept, saved=read_prompt(file)))

    yield _judge(ground, "a flipped bit of the file", request, from_file)


def _changed(kept: Kept, part: Part, row: int) -> Kept:
    first, *others = kept.saved.layers
    rows = first.part(part).copy()
    rows[row] = _other(rows[row])
    layers = (dataclasses.replace(first, **{part: rows}), *others)
    return dataclasses.replace(kept, saved=dataclasses.replace(kept.saved, layers=layers))


def _other(rows: Bf16Array) -> Bf16Array:
    """Rows that are surely different: negated, and zeros made ones."""
    wide = rows.astype(np.float32)
    changed: Bf16Array = np.where(wide == 0, 1.0, -4.0 * wide).astype(rows.dtype)
    return changed


def _chunked(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    chunk = ground.plan.geometry.block * 4 + 1
    block = ground.plan.geometry.block

    def after(session: Session) -> None:
        """Forget the raw indexer keys of the block that the chunk's end cuts."""
        length = session.live.lengths[0]
        if length == chunk:
            first = length // block * block
            rows = read_rows(session.live, 0, "index_keys", first, length)
            write_rows(session.live, 0, "index_keys", first, _other(rows))

    yield _judge(
        ground,
        "the block that a chunk's end cuts is pooled from other keys",
        request,
        lambda: ground.solo(request, chunk=chunk, after=after, limit=CONTROL_TOKENS)[0],
    )


def _media(ground: Ground) -> Iterator[Control]:
    request = ground.media[0]
    rope = request.rope
    late = Rope(mode="media", delta=rope.delta + 1, triples=rope.triples)
    triples = rope.triples.copy()
    inside = len(triples) // 3 + 1
    triples[inside, 2] += 1
    moved = Rope(mode="media", delta=rope.delta, triples=triples)
    text = Rope()
    for fault, other in (
        ("a delta that is one too large", late),
        ("one image position one to the right", moved),
        ("the image read as text", text),
    ):
        wrong = dataclasses.replace(request, rope=other)

        def plant(wrong: Request = wrong) -> Trace:
            return ground.solo(wrong)[0]

        yield _judge(ground, fault, request, plant)


def _swapping() -> After:
    """Once, behind the prompt, the first entry of the table changes places with that of the last, partly filled page.

    Two full pages would take their pooled rows with them, so that the same keys would be read, in another order.
    """
    done: list[bool] = []

    def after(session: Session) -> None:
        last, filled = divmod(session.live.length, session.live.pool.page_size)
        if session.generated and filled and not done:
            done.append(True)
            table = np.array(session.live.pages, np.int32)
            table[[0, last]] = table[[last, 0]]
            write_table(session.live, table)

    return after


def _paged(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    yield _judge(
        ground,
        "two table entries change places",
        request,
        lambda: ground.solo(request, page_size=PAGE, streams=2, scattered=True, after=_swapping())[0],
    )

    def forget(session: Session) -> None:
        if session.generated == 1:
            rows = read_rows(session.live, 0, "values", 0, PAGE)
            write_rows(session.live, 0, "values", 0, _other(rows))

    yield _judge(
        ground,
        "an old page holds other values",
        request,
        lambda: ground.solo(request, page_size=PAGE, streams=2, scattered=True, after=forget)[0],
    )


def _page_test(ground: Ground) -> Iterator[Control]:
    request = _short(ground)

    def identity(session: Session) -> None:
        if session.generated == 1:
            session.live.reserve(session.live.pool.context)  # else the next page would stand in the table twice
            write_table(session.live, np.arange(len(session.live.pages), dtype=np.int32))

    def plant() -> Trace:
        with page_test(PAGE):
            return ground.solo(request, after=identity)[0]

    yield _judge(ground, "a kernel that ignores its table", request, plant)


def long_state(ground: Ground, request: Request) -> Kept:
    """The state of a long prompt's first positions, computed once."""
    if request.name not in ground.kept:
        positions = min(RESTORED, len(request.tokens) - 1)
        ground.kept[request.name] = ground.prepared(request, positions, page_size=PAGE)
    return ground.kept[request.name]


def _long_run(ground: Ground, request: Request, kept: Kept, after: After | None = None, **options: Any) -> Trace:
    """The end of a long prompt, and a few tokens."""
    server = ground.server(request, page_size=PAGE, **options)
    session = server.open(
        request.tokens, tokens=LONG_CONTROL_TOKENS, rope=request.rope, kept=kept, number=request.number
    )
    return ground.finish(server, session, after)


def _long_drafted(ground: Ground) -> Iterator[Control]:
    request = ground.text[0]
    kept, forced = long_state(ground, request), forced_drafts(ground.model, ground.wants[request.name])
    yield _judge(
        ground,
        "a refuted draft is kept",
        request,
        lambda: _long_run(ground, request, kept, draft=forced, settle=keep_one_more),
    )
    yield _judge(
        ground,
        "two table entries change places",
        request,
        lambda: _long_run(ground, request, kept, after=_swapping()),
    )


def _long_resumed(ground: Ground) -> Iterator[Control]:
    request = ground.text[0]
    changed = _changed(long_state(ground, request), "pooled", 0)
    yield _judge(ground, "another row 0 of the state's pooled", request, lambda: _long_run(ground, request, changed))


_CONTROLS: dict[str, Callable[[Ground], Iterator[Control]]] = {
    "drafted": _drafted,
    "concurrent": _concurrent,
    "resumed": _resumed,
    "chunked": _chunked,
    "media": _media,
    "paged": _paged,
    "page-test": _page_test,
}

_LONG_CONTROLS: dict[str, Callable[[Ground], Iterator[Control]]] = {
    "drafted": _long_drafted,
    "resumed": _long_resumed,
}
