"""What the bound alone detects: how small a planted change may be, and which share of wrong reads turns it red.

Each fault is planted in what one row's kernel is given, while the bound stays that of the unchanged inputs. Bits see
every one of them; these numbers say what is left to a user who has nothing to compare bits with.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..reference.geometry import CHUNK, IntArray
from ..reference.layout import LayerCache, Part
from ..reference.numerics import bf16, widen
from ..reference.results import KeyLists, Partials
from .interval import Interval
from .operations import BY_NAME, Answers, Array, Call, Kernels, Results, partials_of, store

PAGE = 16
"""Keys of a wrong page, as in SPEC section 7."""

TOLERANCES = (1e-2, 1.5e-2)
"""The absolute tolerances of SPEC section 7, on the bf16 row."""

TRIALS = 200
"""Reads of each kind."""

PLACES = 9
"""Places at which a smallest change is looked for, at each length."""

BF16_LEAST, FP32_LEAST = 2.0**-10, 2.0**-25
"""Where the search for a smallest change starts: too little to change an element of the format."""

MOST = 2.0**20
"""Where it ends."""

NARROWINGS = 4
"""Halvings, in its exponent, of the octave that holds a smallest change."""


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest relative change of one thing that turns the bound red, over several places where it is planted.

    Attributes:
        change: what is scaled by 1 + x.
        judged: the outputs that are looked at.
        least, median, most: smallest x; inf where no x up to `MOST` is seen.
    """

    change: str
    judged: str
    least: float
    median: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of planted wrong reads that each way to judge a row sees.

    Attributes:
        fault: what is read wrongly; "none": a right row, which no way to judge should see.
        seen: by way: "partials" (the bound of chunks' o, m and l), "row" (the bound of the bf16 row), or a tolerance.
    """

    fault: str
    seen: dict[str, float]


def smallest(red: Callable[[float], bool], *, least: float = BF16_LEAST) -> float:
    """The smallest x from `least` to `MOST` with red(x), to a sixteenth of an octave; inf where there is none.

    Doubles x until it is red, so that the first red octave is found though red is not monotone.
    """
    x = least
    while not red(x):
        x *= 2.0
        if x > MOST:
            return float("inf")
    low = x / 2.0
    for _ in range(NARROWINGS):
        middle = (low * x) ** 0.5
        low, x = (low, middle) if red(middle) else (middle, x)
    return x


def _red(got: Array, bound: Interval) -> bool:
    return bool((bound.fraction(got) > 1).any())


class AttentionRow:
    """The last row of a window as plain attention over its whole stream; one chunk of it can be read anew.

    Args:
        answers: of the unchanged window.
        cache: that holds the stream.
    """

    def __init__(self, kernels: Kernels, answers: Answers, cache: LayerCache) -> None:
        row = answers.last_row()
        self.kernels, self.cache, self.geometry = kernels, cache, row.call.geometry
        self.length = row.call.end
        self.q = answers.results["prep.q"][-1:]
        self._partials = partials_of(row.results, "dense")
        self._bounds = {name: row.intervals[f"dense.{name}"] for name in ("o", "m", "l", "out")}

    def positions(self, chunk: int) -> IntArray:
        """The keys of a chunk, in order."""
        return np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, self.length), dtype=np.int64)

    def seen(self, chunk: int, positions: IntArray) -> dict[str, bool]:
        """Which ways to judge the row see a chunk that reads these positions: see `Share.seen`."""
        ids = positions.astype(np.int32)[None]
        lists = KeyLists(ids, np.array([len(positions)], np.int32), np.ones(1, np.int32))
        part = self.kernels.chunks(self.geometry, self.cache, self.q, lists)
        whole = Partials(*(getattr(self._partials, name).copy() for name in "oml"))
        for name in "oml":
            getattr(whole, name)[:, chunk] = getattr(part, name)[:, 0]
        out = self.kernels.merge(self.geometry, whole)
        red = any(_red(getattr(whole, name)[:, chunk], self._bounds[name][:, chunk]) for name in "oml")
        away = np.abs(widen(out) - self._bounds["out"].value).max()
        return {
            "partials": red,
            "row": _red(out, self._bounds["out"]),
            **{f"{tolerance:g}": bool(away > tolerance) for tolerance in TOLERANCES},
        }

    def scaled(self, part: Part, position: int, x: float) -> dict[str, bool]:
        """What sees the first element of a key or value row scaled by 1 + x."""
        kept = self.cache.read(part, [position])
        self.cache.write(part, [position], _scaled(kept, (0, 0, 0), x))
        chunk = position // CHUNK
        seen = self.seen(chunk, self.positions(chunk))
        self.cache.write(part, [position], kept)
        return seen

    def sees(self, part: Part, judged: str, position: int, x: float) -> bool:
        """Whether one way to judge the row sees that."""
        return self.scaled(part, position, x)[judged]


def smallest_in_row(row: AttentionRow, *, seed: int) -> list[Smallest]:
    """The smallest scaling of an element of one value, and of one key, that the partials' and the row's bound see."""
    places = np.random.Generator(np.random.PCG64(seed)).integers(0, row.length, PLACES).tolist()
    rows: dict[str, Part] = {"a value element": "values", "a key element": "keys"}
    return [
        _over(places, change, judged, functools.partial(row.sees, part, judged))
        for change, part in rows.items()
        for judged in ("partials", "row")
    ]


def shares(row: AttentionRow, *, seed: int) -> list[Share]:
    """The share of reads seen: right ones, a page of another place, one row of another place, a key left out."""
    rng = np.random.Generator(np.random.PCG64(seed))
    faults: dict[str, Callable[[AttentionRow, np.random.Generator], tuple[int, IntArray]]] = {
        "none": _nothing,
        f"a wrong page of {PAGE} keys": _wrong_page,
        "one wrong key and value": _wrong_row,
        "one key left out": _left_out,
    }
    return [_share(fault, [row.seen(*plant(row, rng)) for _ in range(TRIALS)]) for fault, plant in faults.items()]


def _share(fault: str, trials: list[dict[str, bool]]) -> Share:
    return Share(fault=fault, seen={way: statistics.mean(trial[way] for trial in trials) for way in trials[0]})


def _nothing(row: AttentionRow, rng: np.random.Generator) -> tuple[int, IntArray]:
    chunk = int(rng.integers(row.length)) // CHUNK
    return chunk, row.positions(chunk)


def _wrong_page(row: AttentionRow, rng: np.random.Generator) -> tuple[int, IntArray]:
    page, other = rng.choice(row.length // PAGE, 2, replace=False)
    chunk, first = divmod(int(page) * PAGE, CHUNK)
    positions = row.positions(chunk)
    positions[first : first + PAGE] = int(other) * PAGE + np.arange(PAGE)
    return chunk, positions


def _wrong_row(row: AttentionRow, rng: np.random.Generator) -> tuple[int, IntArray]:
    position, other = rng.choice(row.length, 2, replace=False)
    chunk, place = divmod(int(position), CHUNK)
    positions = row.positions(chunk)
    positions[place] = other
    return chunk, positions


def _left_out(row: AttentionRow, rng: np.random.Generator) -> tuple[int, IntArray]:
    chunk, place = divmod(int(rng.integers(row.length)), CHUNK)
    return chunk, np.delete(row.positions(chunk), place)


class WindowChanges:
    """One element of what a kernel is given in a window, scaled by 1 + x; each tells whether the bound is red."""

    def __init__(self, kernels: Kernels, answers: Answers, cache: LayerCache) -> None:
        self._kernels, self._answers, self._cache = kernels, answers, cache

    def query(self, element: int, x: float) -> bool:
        """prep: an element of the last row's first query; what is stored does not follow from it."""
        projection = _scaled(self._answers.call.projection, (-1, element), x)
        return self._red("prep", call=replace(self._answers.call, projection=projection))

    def index_key(self, element: int, x: float) -> bool:
        """pool: an element of the first indexer key of the last block that the window completes."""
        position = int(self._answers.call.completed[-1]) * self._answers.call.geometry.block
        red = self._red_with("pool", "index_keys", position, element, x)
        store(self._cache, self._answers.call, BY_NAME["pool"], self._answers.results)
        return red

    def pooled(self, element: int, x: float) -> bool:
        """scores: an element of the first pooled row."""
        return self._red_with("scores", "pooled", 0, element, x)

    def partial(self, chunk: int, x: float) -> bool:
        """merge: o of a chunk of the last row."""
        o = self._answers.results["chunks.o"].copy()
        o[-1, chunk] *= np.float32(1.0 + x)
        return self._red("merge", given={"chunks.o": o})

    def attended(self, element: int, x: float) -> bool:
        """gate: an element of the last row's first head."""
        return self._red("gate", given={"merge.out": _scaled(self._answers.results["merge.out"], (-1, 0, element), x)})

    def _red_with(self, kernel: str, part: Part, row: int, element: int, x: float) -> bool:
        kept = self._cache.read(part, [row])
        self._cache.write(part, [row], _scaled(kept, (0, 0, element), x))
        red = self._red(kernel)
        self._cache.write(part, [row], kept)
        return red

    def _red(self, kernel: str, *, call: Call | None = None, given: Results | None = None) -> bool:
        results = {**self._answers.results, **(given or {})}
        got = BY_NAME[kernel].run(self._kernels, call or self._answers.call, results, self._cache, self._cache)
        return any(_red(array, self._answers.intervals[name]) for name, array in got.items())


def _scaled(x: npt.NDArray[np.generic], index: tuple[int, ...], factor: float) -> npt.NDArray[np.generic]:
    """A copy of x, bf16, with one element scaled by 1 + factor."""
    changed = x.copy()
    changed[index] = bf16(widen(x[index][None]) * (1.0 + factor))[0]
    return changed


def smallest_in_kernels(kernels: Kernels, answers: Answers, cache: LayerCache, *, seed: int) -> list[Smallest]:
    """The smallest scaling of one element that each other kernel's bound sees; select is exact and has none."""
    changes, g = WindowChanges(kernels, answers, cache), answers.call.geometry
    chunks = -(-int(answers.results["select.nk"][-1]) // CHUNK)
    kinds: tuple[tuple[str, str, int, Callable[[int, float], bool], float], ...] = (
        ("an element of a query", "prep", g.head_dim, changes.query, BF16_LEAST),
        ("an element of an indexer key", "pool", g.index_dim, changes.index_key, BF16_LEAST),
        ("an element of a pooled row", "scores", g.index_dim, changes.pooled, BF16_LEAST),
        ("o of one chunk", "merge", chunks, changes.partial, FP32_LEAST),
        ("an element of an attention row", "gate", g.head_dim, changes.attended, BF16_LEAST),
    )
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        _over(rng.integers(0, places, PLACES).tolist(), change, kernel, seen, least)
        for change, kernel, places, seen, least in kinds
    ]


def _over(
    places: list[int], change: str, judged: str, seen: Callable[[int, float], bool], least: float = BF16_LEAST
) -> Smallest:
    found = [smallest(functools.partial(seen, place), least=least) for place in places]
    return Smallest(
        change=change, judged=judged, least=min(found), median=statistics.median_low(found), most=max(found)
    )
