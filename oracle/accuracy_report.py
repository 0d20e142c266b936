"""`kvproof bench --accuracy`: every measurement of how tight the bounds are, and how they are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .accuracy import GEOMETRY, LENGTHS, Spread, answers_at, peer_spreads, spreads
from .adversary import AIM, Looseness, replay
from .cases import Profile
from .detection import PLACES, AttentionRow, Share, Smallest, shares, smallest_in_kernels, smallest_in_row
from .operations import Kernels

PEER = Path("fixtures/peer")
"""Where a checkout keeps the peer files, seen from its root."""

SEED = 0

MAIN = 4096
"""The length at which other data than N(0, 1), and the kernels around attention, are looked at."""

OTHERS: tuple[Profile, ...] = ("heavy", "zeros", "tiny", "huge")
"""Data that change what attention reads; "tied" is about block scores."""

MEDIAN_AIM = 0.01
"""Aimed at for attention rows of `MAIN` keys: the median error / bound."""

TOLERANCES_MISS = (
    "SPEC section 7 found on data of its own: one wrong page among 4,096 keys is missed by a tolerance of 1.5e-2 in "
    "97 % of trials, by 1e-2 in 60 %; at 16,384 keys both always miss."
)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """All that is measured.

    Attributes:
        spreads: error / bound of our kernels, by length.
        others: the same at `MAIN` keys, by profile of other data.
        peer: that of the peer files, in the bound of any fp32 arithmetic; None where there are none.
        smallest: smallest changes that the bound of an attention row sees, by length.
        shares: shares of wrong reads that it sees, by length.
        other_shares: the same at `MAIN` keys, by profile of other data.
        kernels: smallest changes that the other kernels' bounds see.
        looseness: the largest errors of the recorded attacks.
        seconds: what it took.
    """

    spreads: dict[int, list[Spread]]
    others: dict[Profile, list[Spread]]
    peer: list[Spread] | None
    smallest: dict[int, list[Smallest]]
    shares: dict[int, list[Share]]
    other_shares: dict[Profile, list[Share]]
    kernels: list[Smallest]
    looseness: list[Looseness]
    seconds: float

    @property
    def worst(self) -> float:
        """The largest error / bound of all: above 1 a bound is wrong, or a kernel."""
        told = [*self.spreads.values(), *self.others.values(), self.peer or []]
        return max([one.worst for found in told for one in found] + [one.ratio for one in self.looseness])


def measure(kernels: Kernels, *, peer: Path, progress: Callable[[str], None]) -> Accuracy:
    """Measure everything; `progress` is called before each step.

    Args:
        peer: folder of peer files, which need not exist.

    Raises:
        FixtureError: it exists, but holds no file, or a damaged one.
    """
    started = time.monotonic()
    found: dict[int, list[Spread]] = {}
    smallest: dict[int, list[Smallest]] = {}
    seen: dict[int, list[Share]] = {}
    around: list[Smallest] = []
    for length in LENGTHS:
        progress(f"{length:,} keys: error / bound")
        answers, cache = answers_at(kernels, length, seed=SEED)
        found[length] = spreads(answers)
        row = AttentionRow(kernels, answers, cache)
        progress(f"{length:,} keys: smallest changes")
        smallest[length] = smallest_in_row(row, seed=SEED)
        progress(f"{length:,} keys: wrong reads")
        seen[length] = shares(row, seed=SEED)
        if length == MAIN:
            progress("smallest changes of the other kernels")
            around = smallest_in_kernels(kernels, answers, cache, seed=SEED)
    others, other_shares = _other_data(kernels, progress)
    peers = peer_spreads(peer, progress) if peer.is_dir() else None
    progress("recorded attacks")
    looseness = replay(kernels)
    return Accuracy(
        spreads=found,
        others=others,
        peer=peers,
        smallest=smallest,
        shares=seen,
        other_shares=other_shares,
        kernels=around,
        looseness=looseness,
        seconds=time.monotonic() - started,
    )


def _other_data(
    kernels: Kernels, progress: Callable[[str], None]
) -> tuple[dict[Profile, list[Spread]], dict[Profile, list[Share]]]:
    found: dict[Profile, list[Spread]] = {}
    seen: dict[Profile, list[Share]] = {}
    for profile in OTHERS:
        progress(f"{profile} data")
        answers, cache = answers_at(kernels, MAIN, seed=SEED, profile=profile)
        found[profile] = spreads(answers)
        seen[profile] = shares(AttentionRow(kernels, answers, cache), seed=SEED)
    return found, seen


def print_accuracy(console: Console, found: Accuracy) -> bool:
    """The tables and the verdict; True where no error is above its bound."""
    console.print(f"[bold]{GEOMETRY.name}[/bold], seed {SEED}")
    _print_spreads(console, _by_length(found.spreads))
    _print_aim(console, found.spreads[MAIN])
    _print_spreads(console, _by_profile(found.others))
    _print_peer(console, found.peer)
    _print_smallest(console, found)
    _print_shares(console, _by_length(found.shares))
    _print_shares(console, _by_profile(found.other_shares))
    console.print(TOLERANCES_MISS)
    _print_looseness(console, found.looseness)
    green = found.worst <= 1
    verdict = "GREEN: no error is above its bound" if green else f"RED: an error is {found.worst:.4g} times its bound"
    console.print(Text(f"{verdict} ({found.seconds:.1f} s)", style="bold green" if green else "bold red"))
    return green


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _cell(one: Spread | None) -> str:
    return "-" if one is None else f"{one.median:.2g} / {one.high:.2g} / {one.worst:.2g}"


def _decided(one: Spread | None) -> str:
    return "" if one is None or one.decided is None else f"{one.decided:.2%}"


_Found = TypeVar("_Found")


def _by_length(found: dict[int, _Found]) -> dict[str, _Found]:
    return {f"{length:,} keys": one for length, one in found.items()}


def _by_profile(found: dict[Profile, _Found]) -> dict[str, _Found]:
    return {f"{MAIN:,} keys, {profile}": one for profile, one in found.items()}


def _print_spreads(console: Console, found: dict[str, list[Spread]]) -> None:
    """One column for each length or profile; tensors as the last one has them, which is the longest."""
    columns = [{one.tensor: one for one in spreads} for spreads in found.values()]
    errors = _table("error / bound: median / 99 % / max", ["tensor"], list(found))
    decided = _table("elements for which the bound leaves one value of bf16", ["tensor"], list(found))
    for tensor in columns[-1]:
        told = [column.get(tensor) for column in columns]
        errors.add_row(tensor, *map(_cell, told))
        if any(map(_decided, told)):
            decided.add_row(tensor, *map(_decided, told))
    console.print(errors)
    console.print(decided)


def _print_aim(console: Console, found: list[Spread]) -> None:
    for one in found:
        if one.tensor.split(".")[0] in ("dense", "merge"):
            met = "above" if one.median > MEDIAN_AIM else "NOT above"
            own = "" if one.decided is None else " (mostly the rounding to bf16)"
            console.print(f"{one.tensor} at {MAIN:,} keys: median {one.median:.2g}{own}, {met} the aim, {MEDIAN_AIM}")


def _print_peer(console: Console, peer: list[Spread] | None) -> None:
    if peer is None:
        console.print(f"peer files: not measured, there is no folder {PEER} here; run this in a checkout")
        return
    title = "peer files: error / bound of any fp32 arithmetic"
    table = _table(title, ["tensor"], ["elements", "median / 99 % / max", "one value of bf16"])
    for one in peer:
        table.add_row(one.tensor, f"{one.elements:,}", _cell(one), _decided(one))
    console.print(table)


def _print_smallest(console: Console, found: Accuracy) -> None:
    columns = list(_by_length(found.smallest))
    title = (
        f"smallest x that the bound alone sees, an element scaled by 1 + x: least / median / most of {PLACES} places"
    )
    table = _table(title, ["change", "seen by"], columns)
    for both in zip(*found.smallest.values(), strict=True):
        table.add_row(both[0].change, both[0].judged, *map(_three, both))
    console.print(table)
    table = _table(f"the same of the other kernels, {MAIN:,} keys", ["change", "seen by"], ["x"])
    for one in found.kernels:
        table.add_row(one.change, one.judged, _three(one))
    table.add_row("any other list", "select", "exact")
    console.print(table)


def _three(one: Smallest) -> str:
    return f"{one.least:.2g} / {one.median:.2g} / {one.most:.2g}"


def _print_shares(console: Console, found: dict[str, list[Share]]) -> None:
    table = _table("wrong reads seen", ["fault", "seen by"], list(found))
    names = {"partials": "bound, fp32 partials", "row": "bound, bf16 row"}
    for both in zip(*found.values(), strict=True):
        for number, way in enumerate(both[0].seen):
            shares = (f"{one.seen[way]:.1%}" for one in both)
            table.add_row("" if number else both[0].fault, names.get(way, f"tolerance {way}"), *shares)
    console.print(table)


def _print_looseness(console: Console, found: list[Looseness]) -> None:
    columns = ["error / bound", "before rounding", "constants may be divided by"]
    table = _table("recorded attacks: the largest errors found", ["output"], columns)
    for one in found:
        table.add_row(one.output, f"{one.ratio:.3f}", f"{one.before:.3f}", f"{one.spare:.2f}")
    console.print(table)
    loose = [one.output for one in found if one.spare > AIM or one.before < 1 / AIM]
    told = f"missed by {', '.join(loose)}" if loose else "met by every output"
    console.print(f"aim: no bound more than {AIM:g} times as wide as the largest error found: {told}")


def accuracy_json(found: Accuracy) -> dict[str, Any]:
    """All of it for machines; an x that is not found, and any other infinity, is null."""
    told = asdict(found) | {"looseness": [{**asdict(one), "attack": str(one.attack)} for one in found.looseness]}
    return {
        "format": "kvproof accuracy",
        "green": found.worst <= 1,
        "geometry": asdict(GEOMETRY),
        "seed": SEED,
        **_finite(told),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if value == float("inf") else value
