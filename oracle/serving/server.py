"""A small server over streams of one pool: what `kvproof serve-check` drives.

    server = Server(model, streams=8, context=4096, page_size=16, draft="head")
    session = server.open(prompt, tokens=32)
    while not session.done:
        server.step([session])
    trace = server.end(session)

A round is one window of each of its sessions: a chunk of a prompt, or the pending token and up to three drafts. Main
layers hold a row for each token but the pending one. The draft head's row p takes the main model's hidden row p and
token p + 1; it is run for the rows that are kept, so that between rounds all layers hold the same positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ...fast import MOST_DRAFTS, Engine, PagePool, Round, Settled, Stream, settle
from ...fast.prompt_cache import restore, save
from ...reference.geometry import TEXT, Rope
from ...reference.results import Bf16Array
from .model import Hidden, ServeModel
from .session import Kept, Session, Work
from .trace import Trace

DraftFunction: TypeAlias = Callable[[Session, int], Sequence[int]]
"""Guesses at most so many tokens that follow a session's pending one."""
Drafter: TypeAlias = Literal["head"] | DraftFunction | None


class Settle(Protocol):
    """How a window of drafts is settled: `fast.settle`."""

    def __call__(
        self, stream: Stream, drafts: Sequence[int], greedy: Sequence[int], *, layers: Sequence[int] | None = None
    ) -> Settled: ...


class Server:
    """Serves sessions from one pool.

    Args:
        model: what is served.
        streams, context, page_size, engine: of the pool.
        pool: what makes the pool, for example `audit.guarded_pool`.
        draft: "head" for the model's own draft head, a function in its place, or None to serve plainly.
        chunk: most rows of a prompt that one round reads; all when None.
        settle: another settlement of drafts, to plant a fault.

    Attributes:
        pool: where the streams' pages come from.
        sessions: that are open and not kept away.
    """

    def __init__(
        self,
        model: ServeModel,
        *,
        streams: int,
        context: int,
        page_size: int | None = None,
        engine: Engine | None = None,
        draft: Drafter = None,
        chunk: int | None = None,
        settle: Settle = settle,
        pool: Callable[..., PagePool] = PagePool,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1 row, or None for whole prompts")
        self.model = model
        self.pool = pool(model.geometry, streams=streams, context=context, page_size=page_size, engine=engine)
        self.draft = draft
        self.chunk = chunk
        self.sessions: list[Session] = []
        self._settle = settle
        self._weights = [self.pool.engine.upload(weights) for weights in model.weights]

    def open(
        self, prompt: Sequence[int], *, tokens: int, rope: Rope = TEXT, kept: Kept | None = None, number: int = 0
    ) -> Session:
        """A session for a prompt.

        Args:
            tokens: to generate.
            kept: a state of the prompt's beginning, to start from.

        Raises:
            ValueError: the prompt is empty, or does not begin with the kept tokens.
            PromptError, PageError: the state cannot be restored; nothing was taken.
        """
        if not len(prompt) or tokens < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens, and {tokens} to generate; both must be at least 1")
        session = Session(
            number=number,
            stream=None,
            tokens=[int(token) for token in prompt],
            prompt=len(prompt),
            limit=tokens,
            rope=rope,
            trace=Trace(stream=number, outputs=[[] for _ in range(self.model.geometry.layers)]),
        )
        if kept is None:
            session.stream = Stream(self.pool, self._weights, rope=self._placed(rope))
            self.sessions.append(session)
        else:
            self.resume(session, kept)
            session.trace.first = kept.saved.positions
        return session

    def step(self, sessions: Sequence[Session]) -> None:
        """One round: each session's next window. What raises takes all of it back.

        Raises:
            ValueError: a session is done or kept away.
            PoolExhaustedError: the pages do not suffice.
        """
        before = [session.live.lengths for session in sessions]
        for session in sessions:
            if session.done:
                raise ValueError(f"session {session.number} has its {session.limit} tokens; end it")
        try:
            work = self._start(sessions)
            self._run_main(work)
            self._run_head(work)
        except BaseException:
            for session, lengths in zip(sessions, before, strict=True):
                _return_to(session.live, lengths)
            raise
        for one in work:
            one.commit()

    def keep(self, session: Session, positions: int | None = None) -> Kept:
        """Save a session's positions, all when None; it goes on."""
        stream = session.live
        count = stream.lengths[0] if positions is None else positions
        return Kept(tokens=tuple(session.tokens[: count + 1]), saved=save(stream, count))

    def suspend(self, session: Session) -> Kept:
        """Save a session and close its stream; see `resume`."""
        kept = self.keep(session)
        self.drop(session)
        return kept

    def resume(self, session: Session, kept: Kept) -> None:
        """Restore a session's stream, here or in another server's pool.

        Raises:
            ValueError: it has a stream, its text does not begin with the kept tokens, or the state is not of all the
                positions that it has run.
            PromptError, PageError: the state cannot be restored; nothing was taken.
        """
        if session.stream is not None:
            raise ValueError(f"session {session.number} has a stream; suspend it first")
        count = len(kept.tokens)
        if tuple(session.tokens[:count]) != kept.tokens or count != kept.saved.positions + 1:
            raise ValueError(
                f"session {session.number} does not begin with the {count} tokens that were kept, which must be one "
                f"more than the state's {kept.saved.positions} positions"
            )
        if session.trace.end_of_outputs not in (0, kept.saved.positions):
            raise ValueError(
                f"session {session.number} has run {session.trace.end_of_outputs} positions; it goes on from a state "
                f"of as many, but this one has {kept.saved.positions}"
            )
        session.stream = restore(self.pool, kept.saved, self._weights, rope=self._placed(session.rope))
        session.head_hidden = session.draft = None
        self.sessions.append(session)

    def drop(self, session: Session) -> None:
        """Close a session's stream."""
        session.live.close()
        session.stream = None
        self.sessions.remove(session)

    def end(self, session: Session) -> Trace:
        """Close a session; what it gave, with its cache."""
        session.trace.tokens = list(session.tokens)
        session.trace.end(session.live)
        self.drop(session)
        return session.trace

    def _placed(self, rope: Rope) -> Rope:
        """The rope in the engine's memory."""
        return self.pool.engine.upload(rope) if rope.mode == "media" else rope

    # ---- a round ----

    def _start(self, sessions: Sequence[Session]) -> list[Work]:
        firsts = [session.live.lengths[0] for session in sessions]
        known = [session.tokens[first:][: self.chunk] for session, first in zip(sessions, firsts, strict=True)]
        drafts = self._drafts(sessions, [self._most_drafts(session) for session in sessions])
        return [
            Work(
                session=session,
                stream=session.live,
                first=first,
                known=tokens,
                drafts=guessed,
                hidden=self.model.embed(tokens + guessed),
            )
            for session, first, tokens, guessed in zip(sessions, firsts, known, drafts, strict=True)
        ]

    def _most_drafts(self, session: Session) -> int:
        """Drafts of a session's next window: none of a prompt, fewer near the last token and the context's end."""
        length = session.live.lengths[0]
        if self.draft is None or len(session.tokens) != length + 1 or not session.generated:
            return 0
        left = min(session.limit - session.generated - 1, self.pool.context - length - 1)
        return max(0, min(MOST_DRAFTS, left))

    def _drafts(self, sessions: Sequence[Session], most: Sequence[int]) -> list[list[int]]:
        if callable(self.draft):
            draft = self.draft
            return [list(draft(session, n))[:n] if n else [] for session, n in zip(sessions, most, strict=True)]
        return self._head_drafts(sessions, most)

    def _head_drafts(self, sessions: Sequence[Session], most: Sequence[int]) -> list[list[int]]:
        """The head's guesses: the first from its last row, each further one from a speculative row of its layer."""
        head = (self.model.head_layer,)
        drafts = [
            [session.draft] if n and session.draft is not None else []
            for session, n in zip(sessions, most, strict=True)
        ]
        hidden = [session.head_hidden for session in sessions]
        lengths = [session.live.lengths[head[0]] for session in sessions]
        for count in range(1, MOST_DRAFTS):
            more = [i for i, guessed in enumerate(drafts) if len(guessed) == count and most[i] > count]
            if not more:
                break
            inputs = [h for i in more if (h := hidden[i]) is not None]
            last = [drafts[i][-1] for i in more]
            rows, _ = self._head_rows([(sessions[i].live, 1) for i in more], np.concatenate(inputs), last)
            guessed_next = self.model.draft_tokens(rows, last, [lengths[i] + count for i in more])
            for i, row, token in zip(more, rows, guessed_next, strict=True):
                hidden[i] = row[None]
                drafts[i].append(int(token))
        for session, length in zip(sessions, lengths, strict=True):
            if session.live.lengths[head[0]] > length:
                session.live.roll_back(length, layers=head)
        return drafts

    def _run_main(self, work: Sequence[Work]) -> None:
        """The main layers over every window, and which of its rows are kept."""
        layers = self.model.main_layers
        windows = [(one.stream, len(one.window)) for one in work]
        hidden, outputs = self._layers(windows, layers, np.concatenate([one.hidden for one in work]))
        tokens = [token for one in work for token in one.window]
        positions = [one.first + i for one in work for i in range(len(one.window))]
        following = self.model.next_tokens(hidden, tokens, positions).tolist()
        end = 0
        for i, one in enumerate(work):
            first, end = end, end + len(one.window)
            one.hidden = hidden[first:end]
            one.outputs = [layer[i] for layer in outputs]
            self._keep_rows(one, following[first:end])

    def _keep_rows(self, one: Work, greedy: list[int]) -> None:
        known = len(one.known)
        one.following = tuple(one.session.tokens[one.first + 1 : one.first + known])
        if one.first + known < len(one.session.tokens):  # the prompt goes on
            one.following += (one.session.tokens[one.first + known],)
            one.kept = known
            return
        settled = self._settle(one.stream, one.drafts, greedy[known - 1 :], layers=self.model.main_layers)
        one.accepted = settled.accepted
        one.following += settled.tokens
        one.kept = known + settled.accepted

    def _run_head(self, work: Sequence[Work]) -> None:
        """The draft head's layer over the rows that are kept."""
        hidden = np.concatenate([one.hidden[: one.kept] for one in work])
        following = [token for one in work for token in one.following]
        rows, outputs = self._head_rows([(one.stream, one.kept) for one in work], hidden, following)
        end = 0
        for one, output in zip(work, outputs, strict=True):
            end += one.kept
            one.head_hidden = rows[end - 1 : end]
            one.outputs.append(output)
        drafts = self.model.draft_tokens(
            np.concatenate([one.head_hidden for one in work if one.head_hidden is not None]),
            [one.following[-1] for one in work],
            [one.first + one.kept for one in work],
        )
        for one, draft in zip(work, drafts.tolist(), strict=True):
            one.next_draft = draft

    def _head_rows(
        self, windows: Sequence[tuple[Stream, int]], hidden: Hidden, following: Sequence[int]
    ) -> tuple[Hidden, list[Bf16Array]]:
        rows, outputs = self._layers(windows, (self.model.head_layer,), self.model.head_input(hidden, following))
        return rows, outputs[0]

    def _layers(
        self, windows: Sequence[tuple[Stream, int]], layers: Sequence[int], hidden: Hidden
    ) -> tuple[Hidden, list[list[Bf16Array]]]:
        """Run layers over windows whose rows stand one after the other; also each layer's gated rows by window."""
        engine = self.pool.engine
        ends = np.cumsum([rows for _, rows in windows])[:-1]
        outputs = []
        with Round(windows, layers=layers) as step:
            for layer in step.layers:
                projected = np.split(self.model.projection(layer, hidden), ends)
                results = step.attend(layer, [engine.upload(part) for part in projected])
                gated = [engine.download(result.gated) for result in results]
                hidden = self.model.absorb(layer, hidden, np.concatenate(gated))
                outputs.append(gated)
        return hidden, outputs


def _return_to(stream: Stream, lengths: Sequence[int]) -> None:
    """Take a failed round back, layer by layer: what cannot be zeroed now is at the stream's next step."""
    for layer, length in enumerate(lengths):
        if stream.lengths[layer] > length:
            with contextlib.suppress(Exception):
                stream.roll_back(length, layers=(layer,))
