"""The search for the attacks of `adversary.RECORDED`: Hypothesis draws recipes and climbs on error / bound.

    python -m kvproof.oracle.adversary_search     # about ten minutes on one core; prints the nearest attacks

The same examples are drawn every time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st

from ..fast import Engine
from ..reference.geometry import CHUNK, TILE
from .accuracy import GEOMETRY
from .adversary import (
    LANES,
    Attack,
    BlockScoreErrors,
    Hit,
    MergeErrors,
    RowErrors,
    ScoreErrors,
    TieErrors,
    ValueErrors,
    strike,
)
from .memory import FastKernels
from .operations import Kernels

EXAMPLES = 1500
"""Of each kind of attack, in the search for what is recorded."""


def _counts(most: int, number: int = LANES) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, most) for _ in range(number)))


_KEYS = st.sampled_from((2, 3, 16, TILE, TILE + 1, CHUNK, CHUNK + 1))

STRATEGIES: tuple[st.SearchStrategy[Attack], ...] = (
    st.builds(
        ScoreErrors,
        keys=_KEYS,
        top=st.integers(0, CHUNK),
        ups=_counts(30),
        swap=st.booleans(),
        gap=st.integers(1, 20),
        steps=st.integers(1, 4),
        value=st.integers(-4, 8),
        exponent=st.integers(-8, 8),
    ),
    st.builds(ValueErrors, keys=st.integers(2, CHUNK), ups=st.integers(0, TILE - 1), later=st.integers(-24, 0)),
    st.builds(
        BlockScoreErrors,
        ups=_counts(15),
        heads=_counts(127, GEOMETRY.index_heads),
        exponents=st.tuples(*(st.integers(-20, 20) for _ in range(GEOMETRY.index_heads))),
    ),
    st.builds(
        MergeErrors,
        chunks=st.integers(2, 6),
        drop=st.integers(0, 80),
        rest=st.integers(-12, 0),
        seed=st.integers(0, 2**16),
    ),
    st.builds(
        RowErrors, exponent=st.integers(-60, 50), spread=st.sampled_from((0, 1, 8, 128)), seed=st.integers(0, 2**16)
    ),
    st.builds(TieErrors, exponent=st.integers(-20, 20), lift=st.integers(-160, 160), seed=st.integers(0, 2**16)),
)
"""One for each kind of attack."""


def search(kernels: Kernels, attacks: st.SearchStrategy[Attack], *, examples: int) -> dict[str, Hit]:
    """The largest error / bound in each output that Hypothesis finds, climbing on all of them; above 1 comes first."""
    best: dict[str, Hit] = {}

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )
    @given(attack=attacks)
    def climb(attack: Attack) -> None:
        for found in strike(kernels, attack):
            target(found.before, label=found.output)
            known = best.get(found.output)
            if known is None or (found.ratio > 1, found.before) > (known.ratio > 1, known.before):
                best[found.output] = found

    climb()
    return best


if __name__ == "__main__":
    for attacks in STRATEGIES:
        for one in search(FastKernels(Engine()), attacks, examples=EXAMPLES).values():
            print(f"{one.output}: {one.ratio:.4f}, before rounding {one.before:.4f}: {one.attack}", flush=True)
