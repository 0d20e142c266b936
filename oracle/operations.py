"""What the contract runs: each kernel as an operation on a stream's cache, and the bound of what it gives.

An operation takes the results of the operations before it from a dictionary, so that a kernel under test can be given
the contiguous run's results and be judged alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .. import reference
from ..reference.geometry import CHUNK, Geometry, Rope, Weights
from ..reference.layout import LayerCache, Part
from ..reference.prep import split
from ..reference.results import Bf16Array, KeyLists, Partials, Prepared, score_blocks
from . import bounds
from .arithmetic import FP32, Arithmetic
from .cases import CaseData
from .interval import Interval, exact

Array = npt.NDArray[Any]
Results = Mapping[str, Array]
"""Outputs by name, "kernel.tensor"."""


class Kernels(Protocol):
    """An implementation under test; the arguments are those of `kvproof.reference`."""

    def prep(
        self, geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
    ) -> Prepared: ...

    def pool(
        self, geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope
    ) -> None: ...

    def scores(self, geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> Array: ...

    def select(self, geometry: Geometry, scores: Array, pos0: int) -> KeyLists: ...

    def chunks(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials: ...

    def chunks_ahead(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials: ...

    def merge(self, geometry: Geometry, partials: Partials) -> Bf16Array: ...

    def gate(self, geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> Bf16Array: ...


class Reference:
    """The float64 reference as `Kernels`; the next tile's loads are no part of the mathematics."""

    prep = staticmethod(reference.prep)
    pool = staticmethod(reference.pool)
    scores = staticmethod(reference.scores)
    select = staticmethod(reference.select)
    chunks = staticmethod(reference.chunks)
    chunks_ahead = staticmethod(reference.chunks)
    merge = staticmethod(reference.merge)
    gate = staticmethod(reference.gate)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One stream's window, as every operation is given it.

    Attributes:
        stream: number of the stream.
        pos0: position of row 0.
        projection: bf16 [rows, projection_width].
        dense_rows: last rows that the dense operation attends over the whole stream.
        dense_extra: keys that it reads past its own length; 0 but in a control.
        arithmetic: what the kernels under test promise, and the bounds are for.
    """

    geometry: Geometry
    weights: Weights
    stream: int
    pos0: int
    projection: Bf16Array
    rope: Rope
    dense_rows: int
    dense_extra: int = 0
    arithmetic: Arithmetic = FP32

    @property
    def rows(self) -> int:
        return len(self.projection)

    @property
    def end(self) -> int:
        """Positions that the stream holds after the window."""
        return self.pos0 + self.rows

    @property
    def completed(self) -> npt.NDArray[np.int64]:
        """Blocks that the window completes."""
        block = self.geometry.block
        return np.arange(self.pos0 // block, self.end // block, dtype=np.int64)


Outputs = dict[str, Array]
Run = Callable[[Kernels, Call, Results, LayerCache, LayerCache], Outputs]
Bound = Callable[[Call, Results, LayerCache], dict[str, Interval]]


def calls_of(data: CaseData, arithmetic: Arithmetic = FP32) -> tuple[Call, ...]:
    """The windows of a case, one for each stream, for kernels of this arithmetic."""
    return tuple(
        Call(
            geometry=data.geometry,
            weights=data.weights,
            stream=number,
            pos0=stream.case.cached,
            projection=stream.projection,
            rope=stream.rope,
            dense_rows=min(data.case.dense_rows, stream.case.rows),
            arithmetic=arithmetic,
        )
        for number, stream in enumerate(data.streams)
    )


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kernel under contract.

    Attributes:
        name: of the kernel; its outputs are "name.tensor".
        run: (kernels, call, results before it, cache it is given, cache its stores are read back through).
        bound: (call, results before it, cache) to the interval of each output; outputs without one are exact.
        stores: cache parts that it writes.
        needs: functions of `Kernels` that it calls; its own name when empty.
    """

    name: str
    run: Run
    bound: Bound
    stores: tuple[Part, ...] = ()
    needs: tuple[str, ...] = ()

    def implemented_by(self, kernels: object) -> bool:
        """Whether the kernels have every function that this calls."""
        return all(callable(getattr(kernels, name, None)) for name in self.needs or (self.name,))


_ROWS = ("row", "head", "element")
_STORED = ("position", "head", "element")
_CHUNKED = ("row", "chunk", "head")
_CHUNKERS = ("chunks", "chunks_ahead", "dense", "dense_ahead")
_PARTIALS = {"o": (*_CHUNKED, "element"), "m": _CHUNKED, "l": _CHUNKED}

AXES: dict[str, tuple[str, ...]] = {
    "prep.q": _ROWS,
    "prep.iq": _ROWS,
    "prep.keys": _STORED,
    "prep.values": _STORED,
    "prep.index_keys": _STORED,
    "pool.pooled": ("pooled row", "head", "element"),
    "scores.scores": ("row", "block"),
    **{f"{kernel}.{name}": axes for kernel in _CHUNKERS for name, axes in _PARTIALS.items()},
    **{f"{kernel}.ids": ("row", "entry") for kernel in ("select", "select_close")},
    **{f"{kernel}.{name}": ("row",) for kernel in ("select", "select_close") for name in ("nk", "sparse")},
    "merge.out": _ROWS,
    "gate.gated": _ROWS,
    "dense.out": _ROWS,
}
"""Axes of every output, named as `compare.Difference` tells them."""


def _prep(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    prepared = kernels.prep(call.geometry, call.weights, cache, call.projection, call.pos0, call.rope)
    positions = np.arange(call.pos0, call.end)
    stored = {f"prep.{p}": view.read(p, positions) for p in ("keys", "values", "index_keys")}
    return {"prep.q": prepared.q, "prep.iq": prepared.iq, **stored}


def _prep_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    bound = bounds.prep(call.geometry, call.weights, call.projection, call.pos0, call.rope, call.arithmetic)
    fields = split(call.geometry, call.projection)
    return {
        "prep.q": bound.q,
        "prep.iq": bound.iq,
        "prep.keys": bound.keys,
        "prep.values": exact(fields.v),
        "prep.index_keys": exact(fields.ik),
    }


def _pool(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    kernels.pool(call.geometry, call.weights, cache, call.pos0, call.rows, call.rope)
    return {"pool.pooled": view.read("pooled", call.completed)}


def _pool_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    return {
        "pool.pooled": bounds.pool(call.geometry, call.weights, cache, call.pos0, call.rows, call.rope, call.arithmetic)
    }


def _scores(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    scores = kernels.scores(call.geometry, cache, given["prep.iq"], call.pos0)
    return {"scores.scores": scores}


def _scores_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    return {"scores.scores": bounds.scores(call.geometry, cache, given["prep.iq"], call.pos0, call.arithmetic)}


def _select(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    lists = kernels.select(call.geometry, given["scores.scores"], call.pos0)
    return {
        "select.ids": lists.ids,
        "select.nk": lists.nk,
        "select.sparse": lists.sparse,
    }


def _select_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    lists = reference.select(call.geometry, given["scores.scores"], call.pos0)
    return {f"select.{name}": exact(getattr(lists, name)) for name in ("ids", "nk", "sparse")}


def lists_of(given: Results) -> KeyLists:
    """The key lists among results."""
    return KeyLists(given["select.ids"], given["select.nk"], given["select.sparse"])


def partials_of(given: Results, kernel: str = "chunks") -> Partials:
    """The partials of a kernel among results."""
    return Partials(given[f"{kernel}.o"], given[f"{kernel}.m"], given[f"{kernel}.l"])


def _chunk_outputs(kernel: str, partials: Partials) -> Outputs:
    return {f"{kernel}.o": partials.o, f"{kernel}.m": partials.m, f"{kernel}.l": partials.l}


def _chunk_bounds(kernel: str, bound: bounds.PartialsBound) -> dict[str, Interval]:
    return {f"{kernel}.o": bound.o, f"{kernel}.m": bound.m, f"{kernel}.l": bound.l}


def _chunks(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    return _chunk_outputs("chunks", kernels.chunks(call.geometry, cache, given["prep.q"], lists_of(given)))


def _chunks_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    bound = bounds.chunks(call.geometry, cache, given["prep.q"], lists_of(given), call.arithmetic)
    return _chunk_bounds("chunks", bound)


def _chunks_ahead(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    partials = kernels.chunks_ahead(call.geometry, cache, given["prep.q"], lists_of(given))
    return _chunk_outputs("chunks_ahead", partials)


def _chunks_ahead_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    """The same sums as chunks, to the bit."""
    return {f"chunks_ahead.{name}": exact(given[f"chunks.{name}"]) for name in ("o", "m", "l")}


def _merge(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    return {"merge.out": kernels.merge(call.geometry, partials_of(given))}


def _merge_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    return {"merge.out": bounds.merge(call.geometry, partials_of(given), call.arithmetic)}


def _gate(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    return {"gate.gated": kernels.gate(call.geometry, given["merge.out"], call.projection)}


def _gate_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    return {"gate.gated": bounds.gate(call.geometry, given["merge.out"], call.projection, call.arithmetic)}


def _dense_call(call: Call, given: Results) -> tuple[Bf16Array, KeyLists]:
    """The last rows as plain causal attention over everything up to themselves."""
    rows = min(call.dense_rows, call.rows)
    return given["prep.q"][-rows:], KeyLists.dense(np.arange(call.end - rows, call.end) + 1 + call.dense_extra)


def _dense(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    partials = kernels.chunks(call.geometry, cache, *_dense_call(call, given))
    out = kernels.merge(call.geometry, partials)
    return {**_chunk_outputs("dense", partials), "dense.out": out}


def _dense_ahead(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    partials = kernels.chunks_ahead(call.geometry, cache, *_dense_call(call, given))
    return _chunk_outputs("dense_ahead", partials)


def _dense_ahead_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    """The same sums as dense, to the bit."""
    return {f"dense_ahead.{name}": exact(given[f"dense.{name}"]) for name in ("o", "m", "l")}


def close_scores(call: Call) -> Array:
    """Scores that differ in their last bits only, many of them equal: fp32 [rows, blocks], from 1 upwards.

    The cut falls among equal scores, so that one bit too few, or a tie taken the other way, changes the list.
    """
    blocks = score_blocks(call.geometry, call.pos0, call.rows)
    rank = np.random.Generator(np.random.PCG64(blocks)).permuted(
        np.tile(np.arange(blocks, dtype=np.uint32) // 2, (call.rows, 1)), axis=1
    )
    return (np.float32(1.0).view(np.uint32) + rank).view(np.float32)


def _close(kernels: Kernels, call: Call, given: Results, cache: LayerCache, view: LayerCache) -> Outputs:
    lists = kernels.select(call.geometry, close_scores(call), call.pos0)
    return {"select_close.ids": lists.ids, "select_close.nk": lists.nk, "select_close.sparse": lists.sparse}


def _close_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    lists = reference.select(call.geometry, close_scores(call), call.pos0)
    return {f"select_close.{name}": exact(getattr(lists, name)) for name in ("ids", "nk", "sparse")}


def _dense_bound(call: Call, given: Results, cache: LayerCache) -> dict[str, Interval]:
    q, lists = _dense_call(call, given)
    bound = bounds.chunks(call.geometry, cache, q, lists, call.arithmetic)
    return {**_chunk_bounds("dense", bound), "dense.out": bounds.attention(call.geometry, bound, call.arithmetic)}


AHEAD = {"chunks_ahead": "chunks", "dense_ahead": "dense"}
"""Operations that load the next tile while one is summed, no part of the mathematics, and what they must equal."""

OPERATIONS = (
    Operation(name="prep", run=_prep, bound=_prep_bound, stores=("keys", "values", "index_keys")),
    Operation(name="pool", run=_pool, bound=_pool_bound, stores=("pooled",)),
    Operation(name="scores", run=_scores, bound=_scores_bound),
    Operation(name="select", run=_select, bound=_select_bound),
    Operation(name="chunks", run=_chunks, bound=_chunks_bound),
    Operation(name="chunks_ahead", run=_chunks_ahead, bound=_chunks_ahead_bound),
    Operation(name="merge", run=_merge, bound=_merge_bound),
    Operation(name="gate", run=_gate, bound=_gate_bound),
    Operation(name="dense", run=_dense, bound=_dense_bound, needs=("chunks", "merge")),
    Operation(name="dense_ahead", run=_dense_ahead, bound=_dense_ahead_bound, needs=("chunks_ahead",)),
    Operation(name="select_close", run=_close, bound=_close_bound, needs=("select",)),
)
"""In the order in which each finds its inputs among the results before it. "dense" is plain grouped-query attention
over a stream's whole length, by chunks and merge, "dense_ahead" its chunks by chunks_ahead; "select_close" gives select
scores that differ in their last bits."""

BY_NAME = {operation.name: operation for operation in OPERATIONS}


def store(cache: LayerCache, call: Call, operation: Operation, results: Results) -> None:
    """Write what an operation should have stored, nothing if it only reads."""
    for part in operation.stores:
        rows = call.completed if part == "pooled" else np.arange(call.pos0, call.end)
        cache.write(part, rows, results[f"{operation.name}.{part}"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What a call should give: the results, and each within its interval."""

    call: Call
    results: Results
    intervals: Mapping[str, Interval]

    def last_row(self) -> Answers:
        """The window's last row alone."""
        row = self.call.rows - 1
        one, results = one_row(self.call, self.results, row)
        nk = int(self.results["select.nk"][row])
        intervals = {
            name: x.map(lambda array, name=name: row_of(self.call, name, array, row, one, nk=nk))  # type: ignore[misc]
            for name, x in self.intervals.items()
            if name in results
        }
        return Answers(call=one, results=results, intervals=intervals)


def one_row(call: Call, results: Results, row: int) -> tuple[Call, dict[str, Array]]:
    """One row of a window alone: a call that stores nothing gives that row's bits from it.

    Results that are no rows (what was stored), or hold other rows only, are left out.
    """
    one = replace(call, pos0=call.pos0 + row, projection=call.projection[row : row + 1], dense_rows=1)
    kept = {name: array for name, array in results.items() if AXES[name][0] == "row" and row >= call.rows - len(array)}
    nk = int(results["select.nk"][row])
    return one, {name: row_of(call, name, array, row, one, nk=nk) for name, array in kept.items()}


def row_of(call: Call, name: str, array: Array, row: int, one: Call, *, nk: int | None = None) -> Array:
    """One row of an output, as wide as `one`, the call of that row alone, gives it.

    Args:
        nk: keys of the row's list, for partials over it; as many chunks as there are when None.
    """
    place = row - (call.rows - len(array))
    last = array[place : place + 1]
    if AXES[name][1:2] == ("block",):
        last = last[:, : score_blocks(one.geometry, one.pos0, 1)]
    if AXES[name][1:2] == ("chunk",):
        keys = one.end if name.startswith("dense") else nk
        last = last if keys is None else last[:, : max(1, -(-keys // CHUNK))]
    return np.ascontiguousarray(last)
