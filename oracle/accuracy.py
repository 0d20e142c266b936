"""How near the kernels come to their bounds: error / bound of every element that has one, at growing lengths.

An output in bf16 may use half an ulp of bf16 for its own rounding, which is most of its bound; `before_rounding` tells
what is left of both without it. docs/accuracy.md has the tables and says how to read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..reference.geometry import FLASH_NEXT, FloatArray
from ..reference.layout import BF16, LayerCache
from ..reference.numerics import widen
from .arithmetic import arithmetic_of
from .cases import Case, Profile, StreamCase, fill
from .interval import Interval, half_ulp
from .operations import AXES, OPERATIONS, Answers, Array, Kernels, calls_of, store
from .peer import NAMES, FixtureError, PeerFile, cache_of, read, results_of, store_history
from .scene import Workspace, contiguous, with_pooled

GEOMETRY = dataclasses.replace(FLASH_NEXT, layers=1)
"""Flash Next in a cache of one layer, so that 32,768 positions stay small."""

LENGTHS = (64, 512, 4096, 32768)
"""Positions that a stream holds after its window."""

ROWS = 4
"""Rows of the window: they complete one block."""

DENSE_ROWS = 2

HIGH = 0.99
"""The quantile beside the median."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """error / bound of one output, over its elements that have a bound: neither exact nor left uncomputed.

    Attributes:
        tensor: "kernel.tensor".
        elements: how many.
        median, high, worst: their 50 %, their 99 % quantile, their largest.
        decided: share of them for which the bound leaves one value of bf16; None where the output is fp32.
    """

    tensor: str
    elements: int
    median: float
    high: float
    worst: float
    decided: float | None


Judged = tuple[Interval, Array]
"""The bound of an output, and the output."""


def spread(tensor: str, judged: list[Judged]) -> Spread | None:
    """The spread of all these outputs together; None where no element of theirs has a bound."""
    bounded = [(bound.reach > 0) & ~np.isnan(bound.value) for bound, _ in judged]
    pairs = list(zip(judged, bounded, strict=True))
    fractions = np.concatenate([bound.fraction(got)[where] for (bound, got), where in pairs])
    if not len(fractions):
        return None
    one = np.concatenate([(bound.low == bound.high)[where] for (bound, _), where in pairs])
    return Spread(
        tensor=tensor,
        elements=len(fractions),
        median=float(np.quantile(fractions, 0.5)),
        high=float(np.quantile(fractions, HIGH)),
        worst=float(fractions.max()),
        decided=float(one.mean()) if judged[0][1].dtype == BF16 else None,
    )


def before_rounding(bound: Interval, got: npt.NDArray[np.generic]) -> FloatArray:
    """The least error / bound that a bf16 output must have had before it was rounded, elementwise.

    A value rounds to `got` from at most half an ulp away; what its error has beyond that it had before. The bound
    before the rounding is the reach without its half ulp, taken at the lower end where low or high is a power of two.
    """
    wide = widen(got)
    error = np.maximum(np.abs(wide - bound.value) - half_ulp(wide), 0.0)
    farthest = np.maximum(np.abs(bound.low), np.abs(bound.high))
    reach = bound.reach - half_ulp(np.nextafter(farthest, 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0, 0.0, error / reach)


def answers_at(kernels: Kernels, length: int, *, seed: int, profile: Profile = "normal") -> tuple[Answers, LayerCache]:
    """Every kernel's outputs and bounds over a window at the end of a stream of this profile, and the stream's cache.

    Raises:
        ValueError: the length holds less than the window.
    """
    if length < ROWS:
        raise ValueError(f"length is {length}; it must hold the window's {ROWS} rows")
    stream = StreamCase(cached=length - ROWS, rows=ROWS, profile=profile)
    case = Case(name=f"length {length}", edge="none", streams=(stream,), dense_rows=DENSE_ROWS)
    data = with_pooled(fill(GEOMETRY, case, seed=seed))
    cache = contiguous(data, Workspace()).cache(0, 0)
    (call,) = calls_of(data, arithmetic_of(kernels))
    results: dict[str, Array] = {}
    intervals: dict[str, Interval] = {}
    for operation in OPERATIONS:
        results |= operation.run(kernels, call, results, cache, cache)
        intervals |= operation.bound(call, results, cache)
    return Answers(call=call, results=results, intervals=intervals), cache


def spreads(answers: Answers) -> list[Spread]:
    """The spread of each output that has bounds at all."""
    found = (spread(name, [(bound, answers.results[name])]) for name, bound in answers.intervals.items())
    return [one for one in found if one is not None]


def peer_spreads(folder: Path, progress: Callable[[str], None]) -> list[Spread]:
    """The spread of each tensor over all peer files of a folder, in the bound of any fp32 arithmetic.

    Raises:
        FixtureError: the folder holds none, or a file is damaged or lacks something.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FixtureError(f"{folder} holds no .safetensors file; give the folder that does, such as fixtures/peer")
    judged: dict[str, list[Judged]] = {}
    for file in files:
        progress(f"peer file {file.name}")
        for name, one in _peer_outputs(read(file)):
            judged.setdefault(name, []).append(one)
    found = (spread(name, outputs) for name, outputs in judged.items())
    return [one for one in found if one is not None]


def _peer_outputs(file: PeerFile) -> Iterator[tuple[str, Judged]]:
    """Each of a file's outputs and its bound, given the file's own results before it."""
    cache = cache_of(file, "contiguous")
    store_history(file, cache)
    given = results_of(file)
    for operation in OPERATIONS:
        known = [name for name in AXES if name.startswith(f"{operation.name}.") and NAMES.get(name) in file.tensors]
        bound = operation.bound(file.call, given, cache) if known else {}
        for name in known:
            yield name, (bound[name], given[name])
        if known:
            store(cache, file.call, operation, given)
