"""Drafts: a window verifies the pending token and what a draft head guessed behind it; what it refuted is taken back.

The window's row 0 holds the pending token and row i the i-th draft. After row i the model says which token follows:
`greedy[i]`. Draft i + 1 stands as long as all before it do and it is what row i says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .page_sizes import as_integer
from .stream import Stream
from .stream_rules import StreamError

MOST_DRAFTS = 3
"""Drafts of one window, in the family's server."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What a window of drafts came to.

    Attributes:
        accepted: drafts that stand.
        tokens: what the model says after each row that is kept: accepted + 1 of them, the last of which is pending.
        removed: positions taken back, the same on each layer.
    """

    accepted: int
    tokens: tuple[int, ...]
    removed: int


def accepted(drafts: Sequence[int], greedy: Sequence[int]) -> int:
    """Drafts up to the first that the model refutes.

    Args:
        drafts: tokens of rows 1 and on.
        greedy: the model's token after each row, one more.

    Raises:
        ValueError: the lengths do not fit.
    """
    if len(greedy) != len(drafts) + 1:
        raise ValueError(
            f"{len(greedy)} tokens are given for {len(drafts)} drafts; there is one after each row of the window, "
            f"{len(drafts) + 1}"
        )
    for i, draft in enumerate(drafts):
        if draft != greedy[i]:
            return i
    return len(drafts)


def settle(
    stream: Stream, drafts: Sequence[int], greedy: Sequence[int], *, layers: Sequence[int] | None = None
) -> Settled:
    """Keep a window of drafts, appended already, up to the first refuted draft, and roll the rest back.

    Args:
        layers: that ran the window; all when None.

    Raises:
        TypeError: a token is no integer; nothing was changed.
        ValueError: the lengths do not fit; nothing was changed.
        StreamError: the stream is closed or in a round, a layer does not exist or is named twice, or it holds another
            number of positions than the others or less than the window, so that the rollback could not be the same on
            each; nothing was changed.
        LaunchError: the backend failed, when the rest was rolled back already: do not settle the window again.
    """
    stream.require_idle()
    drafts = [as_integer(f"draft {i}", token) for i, token in enumerate(drafts)]
    greedy = [as_integer(f"the token after row {i}", token) for i, token in enumerate(greedy)]
    stands = accepted(drafts, greedy)
    chosen = stream.require_layers(layers)
    lengths = {layer: stream.lengths[layer] for layer in chosen}
    end = max(lengths.values())
    refuted = len(drafts) - stands
    if min(lengths.values()) != end or end < len(greedy):
        raise StreamError(
            f"a window of {len(greedy)} rows cannot be settled on {stream}: its layers hold {lengths} positions, which "
            "must be equal and hold the window; nothing was rolled back"
        )
    removed = stream.roll_back(end - refuted, layers=chosen) if refuted else (0,) * len(chosen)
    if set(removed) != {refuted}:
        raise StreamError(f"{stream} should have lost {refuted} positions on each of {chosen}, but lost {removed}")
    return Settled(accepted=stands, tokens=tuple(greedy[: stands + 1]), removed=refuted)
