"""Faults that `kvproof serve-check` plants: each check must go red for its own, where it must."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...fast import read_prompt, settle, write_prompt
from ...reference.geometry import Rope
from ...reference.layout import Part
from ...reference.results import Bf16Array
from .ground import After, Ground, forced_drafts, page_test
from .judge import Control, Fault, judge
from .plan import Request, shortened
from .plants import keep_one_more, leaves, read_rows, write_rows, write_table
from .server import Settle
from .session import Kept, Session
from .trace import Trace

PAGE = 16
CONTROL_TOKENS = 16
LONG_CONTROL_TOKENS = 4
RESTORED = 4000
"""Positions of a long prompt that are restored."""


def controls(ground: Ground, check: str) -> Iterator[Control]:
    """Plant each fault of a check, one by one."""
    return (_LONG_CONTROLS if ground.plan.long else _CONTROLS)[check](ground)


def _short(ground: Ground) -> Request:
    """A prompt of more than four pages, if there is one: small, but beyond the sparse budget."""
    far = [request for request in ground.text if len(request.tokens) >= 4 * PAGE - 2]
    return shortened(min(far or ground.text, key=lambda request: len(request.tokens)), CONTROL_TOKENS)


def _drafted(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    wrong = forced_drafts(ground.model, ground.wants[request.name], turns=[0])  # so that blocks are taken back

    def serve(settle: Settle = settle) -> Trace:
        return ground.solo(request, draft=wrong, page_size=PAGE, settle=settle, watched=True)[0]

    behind = "rows behind the last"
    faults = [
        Fault(words="a refuted draft is kept", expected="tokens", plant=lambda: serve(keep_one_more)),
        Fault(words="a rollback leaves the keys", expected=behind, plant=lambda: serve(leaves("keys"))),
        Fault(words="a rollback leaves a pooled row", expected=behind, plant=lambda: serve(leaves("pooled"))),
    ]
    return judge(ground, request, serve, faults)


Change = Callable[[Session, Session], None]
"""Done to two sessions behind their first round."""


def _two(ground: Ground, ours: Request, theirs: Request, change: Change | None = None, **options: Any) -> Trace:
    """Serve two prompts round by round together, as long as the first has tokens left."""
    context = max(ours.end, theirs.end)
    with ground.serving(ours, streams=2, context=context, page_size=PAGE, **options) as server:
        one, other = ground.open(server, ours), ground.open(server, theirs)
        server.step([one, other])
        if change is not None:
            change(one, other)
        while not one.done:
            server.step([session for session in (one, other) if not session.done])
        server.drop(other)
        return server.end(one)


def _concurrent(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    other = max(ground.text, key=lambda one: -abs(len(one.tokens) - 2 * len(request.tokens)))

    def neighbour(ours: Session, theirs: Session) -> None:
        table = np.array(ours.live.pages, np.int32)
        table[len(table) // 2] = theirs.live.pages[0]
        write_table(ours.live, table)

    fault = Fault(
        words="a neighbour's page in the table",
        expected="layer 0 output",
        plant=lambda: _two(ground, request, other, neighbour),
    )
    return judge(ground, request, lambda: _two(ground, request, other), [fault])


def _resumed(ground: Ground) -> Iterator[Control]:
    request = _short(ground)
    kept = ground.prepared(request, len(request.tokens) // 4 * 4 - 1, page_size=PAGE)

    def resume(kept: Kept) -> Trace:
        with ground.serving(request, page_size=48) as server:
            return ground.finish(server, ground.open(server, request, kept))

    def from_file(flipped: int) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state"
            write_prompt(kept.saved, file)
            data = bytearray(file.read_bytes())
            data[-100] ^= flipped
            file.write_bytes(data)
            return resume(dataclasses.replace(kept, saved=read_prompt(file)))

    changes: tuple[tuple[Part, int], ...] = (("pooled", 0), ("index_keys", -1), ("keys", 5))
    faults = [_another_row(part, row, kept, resume) for part, row in changes]
    yield from judge(ground, request, lambda: resume(kept), faults)
    fault = Fault(words="a flipped bit of the file", expected="PromptFileError", plant=lambda: from_file(1))
    yield from judge(ground, request, lambda: from_file(0), [fault])


def _another_row(part: Part, row: int, kept: Kept, resume: Callable[[Kept], Trace]) -> Fault:
    words = f"another row {row} of the state's {part}"
    return Fault(words=words, expected=f"layer 0 {part}", plant=lambda: resume(_changed(kept, part, row)))


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
    block = ground.plan.geometry.block
    chunk = block * 4 + 1

    def forget(session: Session) -> None:
        """Other raw indexer keys in the block that the chunk's end cuts."""
        length = session.live.lengths[0]
        if length == chunk:
            first = length // block * block
            rows = read_rows(session.live, 0, "index_keys", first, length)
            write_rows(session.live, 0, "index_keys", first, _other(rows))

    def serve(after: After | None = None) -> Trace:
        return ground.solo(request, chunk=chunk, after=after)[0]

    words = "the block that a chunk's end cuts is pooled from other keys"
    fault = Fault(words=words, expected="layer 0 pooled", plant=lambda: serve(forget))
    return judge(ground, request, serve, [fault])


def _media(ground: Ground) -> Iterator[Control]:
    request = shortened(ground.media[0], CONTROL_TOKENS)
    rope = request.rope
    late = Rope(mode="media", delta=rope.delta + 1, triples=rope.triples)
    triples = rope.triples.copy()
    inside = len(triples) // 3 + 1  # the image's second position
    triples[inside, 2] += 1
    moved = Rope(mode="media", delta=rope.delta, triples=triples)

    def serve(rope: Rope = rope) -> Trace:
        return ground.solo(dataclasses.replace(request, rope=rope))[0]

    keys = "layer 0 keys"
    faults = [
        Fault(words="a delta that is one too large", expected=keys, plant=lambda: serve(late)),
        Fault(words="one image position one to the right", expected=keys, plant=lambda: serve(moved)),
        Fault(words="the image read as text", expected=keys, plant=lambda: serve(Rope())),
    ]
    yield from judge(ground, request, serve, faults)
    other = _short(ground)

    def exchange(ours: Session, theirs: Session) -> None:
        ours.live.rope, theirs.live.rope = theirs.live.rope, ours.live.rope

    fault = Fault(
        words="two streams of a round change places in their ropes",
        expected=keys,
        plant=lambda: _two(ground, request, other, exchange, chunk=inside),
    )
    yield from judge(ground, request, lambda: _two(ground, request, other, chunk=inside), [fault])


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

    def forget(session: Session) -> None:
        if session.generated == 1:
            rows = read_rows(session.live, 0, "values", 0, PAGE)
            write_rows(session.live, 0, "values", 0, _other(rows))

    def serve(after: After | None = None) -> Trace:
        return ground.solo(request, page_size=PAGE, streams=2, scattered=True, after=after)[0]

    output = "layer 0 output"
    faults = [
        Fault(words="two table entries change places", expected=output, plant=lambda: serve(_swapping())),
        Fault(words="an old page holds other values", expected=output, plant=lambda: serve(forget)),
    ]
    return judge(ground, request, serve, faults)


def _page_test(ground: Ground) -> Iterator[Control]:
    request = _short(ground)

    def identity(session: Session) -> None:
        if session.generated == 1:
            session.live.reserve(session.live.pool.context)  # else the next page would stand in the table twice
            write_table(session.live, np.arange(len(session.live.pages), dtype=np.int32))

    def serve(after: After | None = None) -> Trace:
        with page_test(PAGE):
            return ground.solo(request, after=after)[0]

    fault = Fault(words="a kernel that ignores its table", expected="layer 0 output", plant=lambda: serve(identity))
    return judge(ground, request, serve, [fault])


def long_state(ground: Ground, request: Request) -> Kept:
    """The state of a long prompt's first positions, computed once."""
    if request.name not in ground.kept:
        positions = min(RESTORED, len(request.tokens) - 1)
        ground.kept[request.name] = ground.prepared(request, positions, page_size=PAGE)
    return ground.kept[request.name]


def _long_run(ground: Ground, request: Request, kept: Kept, after: After | None = None, **options: Any) -> Trace:
    """The end of a long prompt, and a few tokens."""
    with ground.serving(request, page_size=PAGE, **options) as server:
        return ground.finish(server, ground.open(server, request, kept), after)


def _long_drafted(ground: Ground) -> Iterator[Control]:
    request = shortened(ground.text[0], LONG_CONTROL_TOKENS)
    kept = long_state(ground, request)

    def serve(settle: Settle = settle, after: After | None = None) -> Trace:
        forced = forced_drafts(ground.model, ground.wants[request.name])
        return _long_run(ground, request, kept, after, draft=forced, settle=settle)

    faults = [
        Fault(words="a refuted draft is kept", expected="tokens", plant=lambda: serve(keep_one_more)),
        Fault(
            words="two table entries change places", expected="layer 0 output", plant=lambda: serve(after=_swapping())
        ),
    ]
    return judge(ground, request, serve, faults)


def _long_resumed(ground: Ground) -> Iterator[Control]:
    request = shortened(ground.text[0], LONG_CONTROL_TOKENS)
    kept = long_state(ground, request)

    def resume(kept: Kept) -> Trace:
        return _long_run(ground, request, kept)

    return judge(ground, request, lambda: resume(kept), [_another_row("pooled", 0, kept, resume)])


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
