"""A session of the small server, its kept state, and its part of one round."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...fast import MOST_DRAFTS, Stream
from ...fast.prompt_cache import SavedPrompt
from ...reference.geometry import Rope
from ...reference.results import Bf16Array
from .model import Hidden
from .trace import Trace


@dataclass(kw_only=True, eq=False)
class Session:
    """One prompt that is served.

    Attributes:
        number: of the prompt.
        stream: its cache; None while it is kept away.
        tokens: the prompt's and the generated ones; the last one is pending once the prompt has been read.
        prompt: tokens of the prompt.
        limit: tokens to generate.
        rope: of its stream, on the host.
        trace: what it gave.
        accepted: how often 0, 1, 2 and 3 drafts of three stood.
        head_hidden, draft: the draft head's output behind its last row, and what it guesses follows the pending token;
            None where that row has not been run since the stream was made.
    """

    number: int
    stream: Stream | None
    tokens: list[int]
    prompt: int
    limit: int
    rope: Rope
    trace: Trace
    accepted: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFTS + 1))
    head_hidden: Hidden | None = None
    draft: int | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt

    @property
    def done(self) -> bool:
        """Whether all are."""
        return self.generated >= self.limit

    @property
    def live(self) -> Stream:
        """Its stream.

        Raises:
            ValueError: it is kept away.
        """
        if self.stream is None:
            raise ValueError(f"session {self.number} is kept away; resume it first")
        return self.stream


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A saved stream, and the tokens that it stands for.

    Attributes:
        tokens: positions + 1 of them: the draft head's last row depends on the one that follows.
        saved: the state.
    """

    tokens: tuple[int, ...]
    saved: SavedPrompt


@dataclass(kw_only=True, eq=False)
class Work:
    """One session's window in a round, and what is known of it so far."""

    session: Session
    stream: Stream
    first: int
    known: list[int]
    drafts: list[int]
    hidden: Hidden
    outputs: list[Bf16Array] = field(default_factory=list)
    kept: int = 0
    following: tuple[int, ...] = ()
    accepted: int = 0
    head_hidden: Hidden | None = None
    next_draft: int = 0

    @property
    def window(self) -> list[int]:
        """Tokens of its rows."""
        return self.known + self.drafts

    def commit(self) -> None:
        """The round has succeeded: what it gave is the session's."""
        session = self.session
        for layer, rows in enumerate(self.outputs):
            session.trace.add(layer, rows[: self.kept])
        session.tokens += self.following[len(session.tokens) - self.first - 1 :]
        session.head_hidden, session.draft = self.head_hidden, self.next_draft
        if len(self.drafts) == MOST_DRAFTS:
            session.accepted[self.accepted] += 1
