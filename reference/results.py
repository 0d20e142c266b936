"""What the kernels hand to each other, and what each checks of its arguments before it reads or writes anything.

R is the rows of a window, QH and D the query heads and their width, IH and DI the indexer's. `reference` and `fast`
return these same dataclasses and call these same checks; a check raises TypeError for a wrong kind of object and
ValueError for a wrong value, and says what was given and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import HOST, Place, describe, require_aligned, require_array, shape_of
from .geometry import CHUNK, MAX_POSITION, Geometry, IntArray, Rope, Weights
from .layout import BF16, LayerCache

Bf16Array = npt.NDArray[np.generic]
"""An array of ml_dtypes.bfloat16, which NumPy's types know only as a generic."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """What prep gives beside its stores: q bf16 [R, QH, D], iq bf16 [R, IH, DI], normed and rotated."""

    q: Bf16Array
    iq: Bf16Array


@dataclass(frozen=True, eq=False)
class KeyLists:
    """The keys that each row attends.

    Attributes:
        ids: int32 [R, capacity], a sparse row's positions in list order; -1 where unwritten, and all over a dense row.
        nk: int32 [R], keys of the row.
        sparse: int32 [R], 1 where the row reads `ids`, 0 where it reads positions 0 to nk - 1.
        longest: at least the largest `nk`; None where the host may look it up.
        end: one past the last position that any row reads, or more; None where the host may look it up.
    """

    ids: npt.NDArray[np.int32]
    nk: npt.NDArray[np.int32]
    sparse: npt.NDArray[np.int32]
    longest: int | None = None
    end: int | None = None

    @property
    def capacity(self) -> int:
        """Entries kept for one row's list."""
        return shape_of(self.ids)[1]

    @classmethod
    def dense(cls, nk: npt.ArrayLike) -> KeyLists:
        """Lists of plain grouped-query attention: row r reads positions 0 to nk[r] - 1, any number, also none."""
        counts = np.atleast_1d(np.asarray(nk))
        if counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise ValueError(f"key counts are {counts.dtype} {list(counts.shape)}; they must be integers [rows]")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= MAX_POSITION:
            raise ValueError(f"key counts reach from {counts.min()} to {counts.max()}; allowed is 0 to {MAX_POSITION}")
        rows = len(counts)
        most = int(counts.max(initial=0))
        return cls(
            np.zeros((rows, 0), np.int32), counts.astype(np.int32), np.zeros(rows, np.int32), longest=most, end=most
        )


@dataclass(frozen=True, eq=False)
class Partials:
    """Softmax of each chunk of a row's key list, not yet merged; float64 from `reference`, fp32 from `fast`.

    Attributes:
        o: [R, chunks, QH, D], sum of exp(s - m) * value.
        m: [R, chunks, QH], the largest score s.
        l: [R, chunks, QH], sum of exp(s - m).
            A chunk without keys holds the identity: o = 0, m = -inf, l = 0.
    """

    o: npt.NDArray[Any]
    m: npt.NDArray[Any]
    l: npt.NDArray[Any]

    @property
    def chunks(self) -> int:
        """Partials kept per row."""
        return shape_of(self.m)[1]


@dataclass(frozen=True, eq=False)
class Window:
    """Everything a window computes: the results of prep, scores, select, chunks, merge and gate, in that order."""

    q: Bf16Array
    iq: Bf16Array
    scores: npt.NDArray[Any]
    lists: KeyLists
    partials: Partials
    out: Bf16Array
    gated: Bf16Array


def complete_blocks(geometry: Geometry, pos0: int, rows: int) -> IntArray:
    """Blocks that each row sees whole: (p + 1) // block, int64 [rows]."""
    return (pos0 + 1 + np.arange(rows, dtype=np.int64)) // geometry.block


def score_blocks(geometry: Geometry, pos0: int, rows: int) -> int:
    """Width of a window's score array: the last row's complete blocks, at least 1."""
    return max(1, (pos0 + rows) // geometry.block)


def longest_list(geometry: Geometry, pos0: int, rows: int) -> int:
    """Keys of the longest list that select gives a window, told by the positions alone."""
    end = pos0 + 1 + np.arange(rows, dtype=np.int64)
    dense = complete_blocks(geometry, pos0, rows) <= geometry.top_blocks
    return int(np.where(dense, end, geometry.budget + end % geometry.block).max())


def chunk_count(nk: npt.NDArray[np.integer[Any]]) -> int:
    """Partials kept per row: chunks of the longest key list, at least 1."""
    return _chunks_of(int(nk.max(initial=0)))


def list_chunks(lists: KeyLists) -> int:
    """Partials kept per row, where `lists.longest` is known without a look at `lists.nk`."""
    return chunk_count(lists.nk) if lists.longest is None else _chunks_of(lists.longest)


def _chunks_of(keys: int) -> int:
    return max(1, -(-keys // CHUNK))


def require_window(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    projection: Bf16Array,
    pos0: int,
    rope: Rope,
    place: Place = HOST,
) -> int:
    """Check the arguments of prep and window; returns the window's rows."""
    rows, _ = require_array("projection", projection, BF16, (None, geometry.projection_width), place)
    require_store(geometry, weights, cache, pos0, rows, rope, place)
    return rows


def require_store(
    geometry: Geometry,
    weights: Weights,
    cache: LayerCache,
    pos0: int,
    rows: int,
    rope: Rope,
    place: Place = HOST,
) -> None:
    """Check the arguments of pool, and of anything that stores rows pos0 to pos0 + rows - 1."""
    weights.require(geometry, place)
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is a {type(rope).__name__}; it must be a Rope, for example geometry.TEXT")
    rope.require(place)
    require_rows(pos0, rows)
    if abs(pos0 + rows - 1 + int(rope.delta)) > MAX_POSITION:
        raise ValueError(
            f"position {pos0 + rows - 1} with rope delta {rope.delta} does not fit int32; give a smaller delta"
        )
    require_cache(geometry, cache, pos0 + rows, place)
    facts = describe(cache.buffer)
    if facts is not None and not facts.writeable:
        raise ValueError("the cache buffer is read-only; this kernel stores rows, so pass a writable copy")


def require_scores(geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int, place: Place = HOST) -> int:
    """Check the arguments of scores; returns the window's rows."""
    rows, _, _ = require_array("iq", iq, BF16, (None, geometry.index_heads, geometry.index_dim), place)
    require_rows(pos0, rows)
    require_cache(geometry, cache, pos0 + rows, place)
    return rows


def require_select(geometry: Geometry, scores: npt.NDArray[Any], pos0: int, place: Place = HOST) -> int:
    """Check the arguments of select; returns the window's rows."""
    rows = _score_rows(scores)
    require_rows(pos0, rows)
    _require_float("scores", scores, (rows, score_blocks(geometry, pos0, rows)), place)
    return rows


def require_chunks(geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists, place: Place = HOST) -> int:
    """Check the arguments of chunks, each listed key too where it may be read; returns the rows."""
    rows, _, _ = require_array("q", q, BF16, (None, geometry.query_heads, geometry.head_dim), place)
    if not isinstance(lists, KeyLists):
        raise TypeError(f"lists is a {type(lists).__name__}; it must be a KeyLists, from select or KeyLists.dense")
    require_array("lists.ids", lists.ids, np.int32, (rows, None), place)
    require_array("lists.nk", lists.nk, np.int32, (rows,), place)
    require_array("lists.sparse", lists.sparse, np.int32, (rows,), place)
    require_cache(geometry, cache, _list_end(lists, place), place)
    return rows


def require_merge(geometry: Geometry, partials: Partials, place: Place = HOST) -> int:
    """Check the argument of merge; returns the rows."""
    if not isinstance(partials, Partials):
        raise TypeError(f"partials is a {type(partials).__name__}; it must be a Partials, from chunks")
    heads = geometry.query_heads
    rows, chunks, *_ = _require_float("partials.o", partials.o, (None, None, heads, geometry.head_dim), place)
    require_aligned("partials.o", partials.o)
    if not chunks:
        raise ValueError(
            "partials hold no chunk; they must hold at least one, the identity (0, -inf, 0) if it is empty"
        )
    for name in ("m", "l"):
        _require_float(f"partials.{name}", getattr(partials, name), (rows, chunks, heads), place)
    return rows


def require_gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array, place: Place = HOST) -> int:
    """Check the arguments of gate; returns the rows."""
    rows, _ = require_array("projection", projection, BF16, (None, geometry.projection_width), place)
    require_array("out", out, BF16, (rows, geometry.query_heads, geometry.head_dim), place)
    return rows


def require_rows(pos0: int, rows: int) -> None:
    """Raise unless rows pos0 to pos0 + rows - 1 are positions: at least one, none negative, all in int32."""
    for name, value in (("pos0", pos0), ("rows", rows)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be an integer")
    if pos0 < 0:
        raise ValueError(f"pos0 is {pos0}; a window's first position must be 0 or more")
    if rows < 1:
        raise ValueError(f"a window of {rows} rows; it must have at least one")
    if pos0 + rows - 1 > MAX_POSITION:
        raise ValueError(f"position {pos0 + rows - 1} does not fit int32; the last position allowed is {MAX_POSITION}")


def require_cache(geometry: Geometry, cache: LayerCache, end: int, place: Place = HOST) -> None:
    """Raise unless the cache has this geometry, lies in `place` and has room for positions 0 to end - 1."""
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a LayerCache")
    if cache.layout.geometry != geometry:
        raise ValueError(
            f"the cache is laid out for geometry {cache.layout.geometry}, but the call is for {geometry}; "
            "both must be the same"
        )
    cache.require_place(place)
    if place.may_read:
        cache.require(end)
    else:
        cache.require_room(end)


def _list_end(lists: KeyLists, place: Place) -> int:
    """One past the last position that any row reads, told by the lists where they may not be read."""
    if place.may_read:
        return _read_list_end(lists)
    if lists.longest is None or lists.end is None:
        raise ValueError(
            "lists.longest and lists.end are not told, and these lists cannot be looked at now; give both, or take the "
            "lists of select or KeyLists.dense"
        )
    return lists.end


def _read_list_end(lists: KeyLists) -> int:
    nk, sparse, capacity = lists.nk, lists.sparse, lists.ids.shape[1]
    most = int(nk.max(initial=0))
    if lists.longest is not None and most > lists.longest:
        raise ValueError(f"lists.longest is {lists.longest}; it must be at least {most}, the largest of lists.nk")
    if not sparse.any() and nk.min(initial=0) >= 0:
        return most
    for row in np.flatnonzero((sparse != 0) & (sparse != 1)):
        raise ValueError(f"lists.sparse[{row}] is {sparse[row]}; it must be 0 or 1")
    for row in np.flatnonzero((nk < 0) | ((sparse == 1) & (nk > capacity))):
        limit = f"at most {capacity}, the entries of a list" if sparse[row] else "0 or more"
        raise ValueError(f"lists.nk[{row}] is {nk[row]}; it must be {limit}")
    dense_end = int(nk[sparse == 0].max(initial=0))
    used = (np.arange(capacity) < nk[:, None]) & (sparse[:, None] == 1)
    for row, entry in np.argwhere(used & (lists.ids < 0)):
        raise ValueError(f"lists.ids[{row}, {entry}] is {lists.ids[row, entry]}; a listed key must be a position")
    return max(dense_end, int(lists.ids[used].max(initial=-1)) + 1)


def _score_rows(scores: Any) -> int:
    """Extent of the first axis of two, which tells how wide the second must be."""
    facts = describe(scores)
    if facts is None:
        raise TypeError(f"scores is a {type(scores).__name__}; it must be a float array [rows, blocks]")
    if len(facts.shape) != 2:
        raise ValueError(f"scores has shape {list(facts.shape)}; it must be [rows, blocks]")
    return facts.shape[0]


def _require_float(name: str, array: Any, shape: tuple[int | None, ...], place: Place) -> tuple[int, ...]:
    """float64 on the host, or float32, which is what kernels take."""
    wide = isinstance(array, np.ndarray) and array.dtype == np.float64
    return require_array(name, array, np.float64 if wide else np.float32, shape, place)


def require_fp32(name: str, array: Any) -> None:
    """Raise ValueError for float64, which the reference takes and a kernel does not."""
    if isinstance(array, np.ndarray) and array.dtype != np.float32:
        raise ValueError(f"{name} is {array.dtype}; the kernel takes float32")
