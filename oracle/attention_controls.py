"""Red controls for plain paged attention: wrong arguments that must change the result.

A control counts only where it is effective: where the float64 reference's bounds for the wrong arguments and for the
right ones do not meet, so that no right kernel can give the same answer to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..reference.geometry import FloatArray
from .arithmetic import Arithmetic
from .attention import DTYPES, Array, AttentionCase, Part
from .interval import Interval


@dataclass(frozen=True, eq=False)
class AttentionControl:
    """Wrong arguments for a kernel: what is wrong with them, and which of them is, in words."""

    name: str
    changes: str
    arguments: dict[str, Array]


def effective_control(case: AttentionCase, bound: Interval, arithmetic: Arithmetic) -> AttentionControl | None:
    """One effective control of a case; which one follows from the case, so that many cases try them all.

    None where none is effective, because `arithmetic` leaves room for nearly any answer: a planted value changes every
    answer that is told at all.
    """
    made = list(CONTROLS)
    first = case.seeds[0]  # nothing else: a smaller case of the same seed meets the same control while it is shrunk
    for place in range(len(made)):
        control = made[(first + place) % len(made)](case)
        if control is not None and is_effective(case, control, bound, arithmetic):
            return control
    return None


def is_effective(case: AttentionCase, control: AttentionControl, bound: Interval, arithmetic: Arithmetic) -> bool:
    """Whether no answer is right for both: some element's bounds, with and without the control, do not meet."""
    with np.errstate(all="ignore"):
        other = case.bound_of(control.arguments, arithmetic)
        apart = (other.low > bound.high) | (other.high < bound.low) | np.isnan(other.value)
        return bool(apart.any())


def swapped_table(case: AttentionCase) -> AttentionControl | None:
    """Two entries of the longest stream's table swapped: its last one, and the heaviest page's or else the first."""
    stream = int(np.argmax(case.lengths))
    if case.pages[stream] < 2:
        return None
    given = case.arguments()
    table = given["page_table"][stream]
    last = case.pages[stream] - 1
    other = _heaviest(case, stream) // case.page_size % last
    table[[other, last]] = table[[last, other]]
    return AttentionControl(
        f"a page table with entries {other} and {last} of stream {stream} swapped", "page table", given
    )


def shifted_table(case: AttentionCase) -> AttentionControl | None:
    """Every entry taken from the one behind it."""
    if max(case.pages) < 2:
        return None
    given = case.arguments()
    given["page_table"] = np.ascontiguousarray(np.roll(given["page_table"], -1, axis=1))
    return AttentionControl("a page table that is off by one entry", "page table", given)


def foreign_page(case: AttentionCase) -> AttentionControl | None:
    """The heaviest page of stream 0 replaced by one that is not its own."""
    others = [page for page in case.order if page not in case.tables[0]]
    if not others:
        return None
    given = case.arguments()
    given["page_table"][0, _heaviest(case, 0) // case.page_size] = others[0]
    return AttentionControl("a page table that names a page which is not the stream's", "page table", given)


def duplicate_page(case: AttentionCase) -> AttentionControl | None:
    """A page of the longest stream named twice, the second time in the place of its heaviest page."""
    stream = int(np.argmax(case.lengths))
    if case.pages[stream] < 2:
        return None
    given = case.arguments()
    table, heavy = given["page_table"][stream], _heaviest(case, stream) // case.page_size
    table[heavy] = table[(heavy + 1) % case.pages[stream]]
    return AttentionControl(f"a page table of stream {stream} that names one page twice", "page table", given)


def longer(case: AttentionCase) -> AttentionControl | None:
    """The stale tail of each last page taken for part of the stream."""
    given = case.arguments()
    whole = np.array([n * case.page_size for n in case.pages], np.int32)
    if (given["lengths"] == whole).all():
        return None
    given["lengths"] = whole
    return AttentionControl("lengths that take in the stale tail of each last page", "lengths", given)


def shorter(case: AttentionCase) -> AttentionControl | None:
    """Each length one too small."""
    given = case.arguments()
    if (np.array(case.lengths) <= np.array(case.query_lengths)).any():
        return None
    given["lengths"] = given["lengths"] - np.int32(1)
    return AttentionControl("lengths that are one too small", "lengths", given)


def planted_key(case: AttentionCase) -> AttentionControl:
    """A key that the last row scores far above all others, where it reads least: what it reads most may be all."""
    query = case.streams[0]["q"][-1].reshape(case.kv_heads, -1, case.head_dim)[:, 0]
    size = max(16.0, 8.0 * _largest(case, "keys"))
    row = (size * np.sign(query.astype(np.float32))).astype(DTYPES[case.dtype])
    return _planted(case, "keys", int(np.argmin(_scores(case, 0))), row)


def planted_value(case: AttentionCase) -> AttentionControl:
    """A value far from all others, where the last row reads most: there no other key can drown it."""
    dtype = DTYPES[case.dtype]
    top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    size = min(4096.0 * max(1.0, _largest(case, "values")), top / 2)
    return _planted(case, "values", _heaviest(case, 0), np.full((case.kv_heads, case.head_dim), size, dtype))


def _planted(case: AttentionCase, part: Part, position: int, row: Array) -> AttentionControl:
    """A row [KH, D] at a position of stream 0."""
    given = case.arguments()
    page, inside = divmod(position, case.page_size)
    place = given[part][case.tables[0][page]]
    if case.style.endswith("hnd"):
        place[:, inside] = row
    else:
        place[inside] = row
    return AttentionControl(f"a planted row of {part}", part, given)


def _heaviest(case: AttentionCase, stream: int) -> int:
    """The position that the first head of a stream's last row weighs most, which is never less than one in n."""
    return int(np.argmax(_scores(case, stream)))


def _scores(case: AttentionCase, stream: int) -> FloatArray:
    """What the first head of a stream's last row scores each position, unscaled: [n]."""
    own = case.streams[stream]
    scores: FloatArray = own["keys"][:, 0].astype(np.float64) @ own["q"][-1, 0].astype(np.float64)
    return scores


def _largest(case: AttentionCase, part: Part) -> float:
    """The largest magnitude of stream 0's rows."""
    return float(np.abs(case.streams[0][part].astype(np.float32)).max())


CONTROLS: tuple[Callable[[AttentionCase], AttentionControl | None], ...] = (
    duplicate_page,  # first, as it is effective on the smallest case: two pages of one position
    swapped_table,
    planted_key,
    planted_value,
    shifted_table,
    foreign_page,
    longer,
    shorter,
)


def applicable_controls(case: AttentionCase) -> Iterator[AttentionControl]:
    """Every control that the case has room for."""
    for make in CONTROLS:
        control = make(case)
        if control is not None:
            yield control
