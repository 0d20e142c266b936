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

from .geometry import CHUNK, MAX_POSITION, Geometry, IntArray, Rope, Weights, require_array
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
    """

    ids: npt.NDArray[np.int32]
    nk: npt.NDArray[np.int32]
    sparse: npt.NDArray[np.int32]

    @classmethod
    def dense(cls, nk: npt.ArrayLike) -> KeyLists:
        """Lists of plain grouped-query attention: row r reads positions 0 to nk[r] - 1, any number, also none."""
        counts = np.atleast_1d(np.asarray(nk))
        if counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise ValueError(f"key counts are {counts.dtype} {list(counts.shape)}; they must be integers [rows]")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= MAX_POSITION:
            raise ValueError(f"key counts reach from {counts.min()} to {counts.max()}; allowed is 0 to {MAX_POSITION}")
        rows = len(counts)
        return cls(np.zeros((rows, 0), np.int32), counts.astype(np.int32), np.zeros(rows, np.int32))


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


def chunk_count(nk: npt.NDArray[np.integer[Any]]) -> int:
    """Partials kept per row: chunks of the longest key list, at least 1."""
    return max(1, -(-int(nk.max(initial=0)) // CHUNK))


def require_window(
    geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
) -> int:
    """Check the arguments of prep and window; returns the window's rows."""
    require_array("projection", projection, BF16, (None, geometry.projection_width))
    require_store(geometry, weights, cache, pos0, len(projection), rope)
    return len(projection)


def require_store(geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope) -> None:
    """Check the arguments of pool, and of anything that stores rows pos0 to pos0 + rows - 1."""
    weights.require(geometry)
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is a {type(rope).__name__}; it must be a Rope, for example geometry.TEXT")
    require_rows(pos0, rows)
    if abs(pos0 + rows - 1 + int(rope.delta)) > MAX_POSITION:
        raise ValueError(
            f"position {pos0 + rows - 1} with rope delta {rope.delta} does not fit int32; give a smaller delta"
        )
    require_cache(geometry, cache, pos0 + rows)
    if not cache.buffer.flags.writeable:
        raise ValueError("the cache buffer is read-only; this kernel stores rows, so pass a writable copy")


def require_scores(geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> int:
    """Check the arguments of scores; returns the window's rows."""
    require_array("iq", iq, BF16, (None, geometry.index_heads, geometry.index_dim))
    require_rows(pos0, len(iq))
    require_cache(geometry, cache, pos0 + len(iq))
    return len(iq)


def require_select(geometry: Geometry, scores: npt.NDArray[Any], pos0: int) -> int:
    """Check the arguments of select; returns the window's rows."""
    rows = _leading(scores)
    require_rows(pos0, rows)
    _require_float("scores", scores, (rows, score_blocks(geometry, pos0, rows)))
    return rows


def require_chunks(geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> int:
    """Check the arguments of chunks, each listed key too; returns the rows."""
    require_array("q", q, BF16, (None, geometry.query_heads, geometry.head_dim))
    if not isinstance(lists, KeyLists):
        raise TypeError(f"lists is a {type(lists).__name__}; it must be a KeyLists, from select or KeyLists.dense")
    rows = len(q)
    require_array("lists.ids", lists.ids, np.int32, (rows, None))
    require_array("lists.nk", lists.nk, np.int32, (rows,))
    require_array("lists.sparse", lists.sparse, np.int32, (rows,))
    require_cache(geometry, cache, _list_end(lists))
    return rows


def require_merge(geometry: Geometry, partials: Partials) -> int:
    """Check the argument of merge; returns the rows."""
    if not isinstance(partials, Partials):
        raise TypeError(f"partials is a {type(partials).__name__}; it must be a Partials, from chunks")
    heads = geometry.query_heads
    _require_float("partials.o", partials.o, (None, None, heads, geometry.head_dim))
    rows, chunks = partials.o.shape[:2]
    if not chunks:
        raise ValueError(
            "partials hold no chunk; they must hold at least one, the identity (0, -inf, 0) if it is empty"
        )
    for name in ("m", "l"):
        _require_float(f"partials.{name}", getattr(partials, name), (rows, chunks, heads))
    return int(rows)


def require_gate(geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> int:
    """Check the arguments of gate; returns the rows."""
    require_array("projection", projection, BF16, (None, geometry.projection_width))
    require_array("out", out, BF16, (len(projection), geometry.query_heads, geometry.head_dim))
    return len(projection)


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


def require_cache(geometry: Geometry, cache: LayerCache, end: int) -> None:
    """Raise unless the cache has this geometry and room for positions 0 to end - 1."""
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a LayerCache")
    if cache.layout.geometry != geometry:
        raise ValueError(
            f"the cache is laid out for geometry {cache.layout.geometry}, but the call is for {geometry}; "
            "both must be the same"
        )
    cache.require(end)


def _list_end(lists: KeyLists) -> int:
    """One past the last position that any row reads."""
    nk, sparse, capacity = lists.nk, lists.sparse, lists.ids.shape[1]
    if not sparse.any() and nk.min(initial=0) >= 0:
        return int(nk.max(initial=0))
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


def _leading(array: Any) -> int:
    """Extent of the first axis, 0 for what has none; the array check that follows names the fault."""
    return len(array) if isinstance(array, np.ndarray) and array.ndim else 0


def _require_float(name: str, array: Any, shape: tuple[int | None, ...]) -> None:
    wide = isinstance(array, np.ndarray) and array.dtype == np.float64
    require_array(name, array, np.float64 if wide else np.float32, shape)
