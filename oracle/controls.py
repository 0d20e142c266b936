"""Red controls: deliberate faults in the data that a check must see, each first proved to be worth seeing.

A control changes the cache, the page table or a kernel's input. It is *effective* where no answer is right both with
and without it: some element's bounds around the float64 reference do not meet. Only then does a
green check say that the kernel, and not the control, is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..reference.layout import BF16, PARTS, LayerCache, Part
from ..reference.prep import split
from ..reference.results import chunk_count
from .diagnosis_window import misread
from .operations import AHEAD, BY_NAME, Answers, Call, Operation, Reference, Results, store
from .scene import Scene, Workspace

Table = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """One control for one kernel.

    Attributes:
        name: what was done, in words.
        operation, call: what to run.
        given: results before it, perhaps planted.
        cache: what the kernel is given; its own copy of the arena.
        view: the same copy through the true page table, to read stores back.
        want: the results that the check expects, which the control must break.
        effective: the reference's answer changes.
    """

    name: str
    operation: Operation
    call: Call
    given: Results
    cache: LayerCache
    view: LayerCache
    want: Results
    effective: bool


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One cache row replaced: rows [heads, width], bf16."""

    part: Part
    row: int
    values: npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ground:
    """Where a control is planted: a scene in which everything before the operation has been stored."""

    scene: Scene
    workspace: Workspace
    layer: int
    operation: Operation
    answers: Answers

    def control(
        self,
        name: str,
        *,
        planted: Planted | None = None,
        table: Table | None = None,
        given: Results | None = None,
        call: Call | None = None,
    ) -> Control:
        """A control that plants a row, or replaces the page table, results before the operation, or the call.

        It stands in a copy of the scene, taken from the workspace: the next one ends it.
        """
        view = self._cache("control")
        if planted is not None:
            view.write(planted.part, [planted.row], planted.values[None])
        given = self.answers.results if given is None else given
        cache = view if table is None else replace(view, table=table)
        return Control(
            name=name,
            operation=self.operation,
            call=call or self.answers.call,
            given=given,
            cache=cache,
            view=view,
            want=self.answers.results,
            effective=self._effective(view, table, given, call or self.answers.call),
        )

    def _effective(self, view: LayerCache, table: Table | None, given: Results, call: Call) -> bool:
        operation = BY_NAME[AHEAD.get(self.operation.name, self.operation.name)]
        own = view
        if operation.stores:
            own = self._cache("control's reference")
            own.buffer[:] = view.buffer
        seen = own if table is None else misread(own, dict.fromkeys(PARTS, table))
        with np.errstate(all="ignore"):
            if operation.stores:  # what is read back is exact
                answer = operation.run(Reference(), call, given, seen, own)
                return any((self.answers.intervals[name].fraction(array) > 1).any() for name, array in answer.items())
            return any(
                (
                    (other.low > right.high) | (other.high < right.low) | np.isnan(other.value) & ~np.isnan(right.value)
                ).any()
                for name, other in operation.bound(call, given, seen).items()
                for right in (self.answers.intervals[name],)
            )

    def _cache(self, role: str) -> LayerCache:
        return self.scene.copy(self.workspace, role).cache(self.answers.call.stream, self.layer)


def controls(base: Scene, workspace: Workspace, answers: Answers, layer: int) -> Iterator[Control]:
    """The controls of every kernel for one stream of a scene whose caches hold the history only.

    Kernels that only read are given the window's last row. The scene itself ends with the window stored.
    """
    call, given, one = answers.call, answers.results, answers.last_row()

    def ground(name: str, answers: Answers) -> _Ground:
        return _Ground(scene=base, workspace=workspace, layer=layer, operation=BY_NAME[name], answers=answers)

    cache = base.cache(call.stream, layer)
    yield from _swapped(ground("prep", answers), call.end - 1)
    store(cache, call, BY_NAME["prep"], given)
    if len(call.completed):
        pool = ground("pool", answers)
        yield from _swapped(pool, int(call.completed[-1]) * call.geometry.block)
        yield pool.control("a planted raw indexer key", planted=_planted_index_key(call, cache))
    store(cache, call, BY_NAME["pool"], given)
    if one.results["select.sparse"][0]:
        scores = ground("scores", one)
        best = int(np.nanargmax(one.results["scores.scores"][-1]))
        yield from _swapped(scores, best * call.geometry.block)
        yield scores.control("a planted pooled row", planted=_planted_pooled(one))
        yield ground("select", one).control("a planted score", given=_with_planted_score(one))
    for name in ("chunks", "chunks_ahead", "dense", "dense_ahead"):
        reader = ground(name, one)
        position = _heaviest(name, one, cache)
        yield from _swapped(reader, position)
        yield from _wrong_tables(reader, position)
        yield from _wrong_lengths(reader)
        yield reader.control("a planted key", planted=_planted_key(position, one, cache))
        yield reader.control("a planted value", planted=_planted_value(position, one, cache))
    partials = {**one.results, "chunks.o": one.results["chunks.o"] + np.float32(64.0)}
    yield ground("merge", one).control("a planted partial", given=partials)
    yield _planted_output(ground("gate", one))


def _swapped(ground: _Ground, position: int = 0) -> Iterator[Control]:
    """A swapped page table that changes the reference's answer; the last one tried, if none does; none in one page.

    Two full pages of a dense row can be swapped without changing its key set. So the page of `position`, which the
    kernel reads, is swapped with the last, partly filled page first, and with a page of another stream last.
    """
    call = ground.answers.call
    table = ground.scene.tables[call.stream]
    assert table is not None
    page_size = ground.scene.layouts[call.stream].page_size
    live, read = -(-call.end // page_size), position // page_size
    pairs = ((read, live - 1), (live - 2, live - 1), (read, (read + 1) % live))
    tried = None
    for i, j in pairs:
        if i == j or i < 0:
            continue
        swapped = table.copy()
        swapped[[i, j]] = table[[j, i]]
        tried = ground.control(f"a page table with entries {i} and {j} swapped", table=swapped)
        if tried.effective:
            yield tried
            return
    for entry in () if table[live] in table[:live] else (live - 1, read):
        foreign = table.copy()
        foreign[entry] = table[live]
        tried = ground.control(f"a page table whose entry {entry} names a page of another stream", table=foreign)
        if tried.effective:
            break
    if tried is not None:
        yield tried


def _wrong_tables(ground: _Ground, position: int) -> Iterator[Control]:
    """A table off by one entry, and one that names a page twice; the kernels may refuse the second."""
    call = ground.answers.call
    table = ground.scene.tables[call.stream]
    assert table is not None
    page_size = ground.scene.layouts[call.stream].page_size
    live, read = -(-call.end // page_size), position // page_size
    if table[live] not in table[:live]:
        shifted = table.copy()
        shifted[:live] = table[1 : live + 1]
        yield ground.control("a page table that is off by one entry", table=shifted)
    if live > 1:
        twice = table.copy()
        twice[read] = table[(read + 1) % live]
        yield ground.control("a page table that names a page twice", table=twice)


def _wrong_lengths(ground: _Ground) -> Iterator[Control]:
    """The last length one too small; for the dense form also the stale tail of the last page taken in.

    Only where as many partials come of it, so that the sums must tell.
    """
    call, results = ground.answers.call, ground.answers.results

    def same_chunks(keys: int, extra: int) -> bool:
        return chunk_count(np.array([keys])) == chunk_count(np.array([keys + extra]))

    if not ground.operation.name.startswith("dense"):
        if not same_chunks(int(results["select.nk"][0]), -1):
            return
        fewer = {**results, "select.nk": results["select.nk"] - np.int32(1)}
        yield ground.control("a last length that is one too small", given=fewer)
        return
    tail = -call.end % ground.scene.layouts[call.stream].page_size
    if tail and same_chunks(call.end, tail):
        yield ground.control("the stale tail of the last page", call=replace(call, dense_extra=tail))
    if same_chunks(call.end, -1):
        yield ground.control("a last length that is one too small", call=replace(call, dense_extra=-1))


def _heaviest(name: str, answers: Answers, cache: LayerCache) -> int:
    """The position that the last row's first head weighs most: what is planted there is not drowned."""
    results = answers.results
    positions = np.arange(answers.call.end)
    if not name.startswith("dense") and results["select.sparse"][0]:
        positions = results["select.ids"][0, : results["select.nk"][0]]
    keys = cache.read("keys", positions)[:, 0].astype(np.float64)
    return int(positions[np.argmax(keys @ results["prep.q"][-1, 0].astype(np.float64))])


def _planted_key(position: int, answers: Answers, cache: LayerCache) -> Planted:
    """A key that the first query head of each group scores far above all others."""
    queries = answers.results["prep.q"][-1][:: answers.call.geometry.group].astype(np.float32)
    size = 8.0 * _largest(cache, "keys", answers.call.end)
    return Planted(part="keys", row=position, values=(size * np.sign(queries)).astype(BF16))


def _planted_value(position: int, answers: Answers, cache: LayerCache) -> Planted:
    """A value far larger than all others."""
    g = answers.call.geometry
    size = 4096.0 * _largest(cache, "values", answers.call.end)
    return Planted(part="values", row=position, values=np.full((g.kv_heads, g.head_dim), size, BF16))


def _planted_output(ground: _Ground) -> Control:
    """An output row far from what merge gave; where every gate that it meets is shut, the gates turned round."""
    results, call = ground.answers.results, ground.answers.call
    out = results["merge.out"].astype(np.float32)
    far = (out + 8.0 * max(1.0, float(np.abs(out).max()))).astype(BF16)
    planted = ground.control("a planted output row", given={**results, "merge.out": far})
    if planted.effective:
        return planted
    projection = call.projection.copy()
    gates = split(call.geometry, projection).gate
    gates[...] = -gates.astype(np.float32)
    return ground.control("output gates of the other sign", call=replace(call, projection=projection))


def _largest(cache: LayerCache, part: Part, end: int) -> float:
    """The largest magnitude of a stream's rows, at least 1."""
    return max(1.0, float(np.abs(cache.read(part, np.arange(end)).astype(np.float32)).max()))


def _planted_index_key(call: Call, cache: LayerCache) -> Planted:
    """Another raw indexer key at the first position of the first block that the window completes."""
    position = int(call.completed[0]) * call.geometry.block
    key = cache.read("index_keys", [position])[0].astype(np.float32)
    return Planted(part="index_keys", row=position, values=(8.0 - key).astype(BF16))


def _left_out(answers: Answers) -> int:
    """The last block that the last row sees whole and does not select."""
    block = answers.call.geometry.block
    selected = np.unique(answers.results["select.ids"][-1] // block)
    return int(np.setdiff1d(np.arange(answers.call.end // block), selected)[-1])


def _planted_pooled(answers: Answers) -> Planted:
    """A pooled row that the first index head scores far above all others, at a block that was not selected."""
    query = answers.results["prep.iq"][-1][:1].astype(np.float32)
    return Planted(part="pooled", row=_left_out(answers), values=(8.0 * np.sign(query)).astype(BF16))


def _with_planted_score(answers: Answers) -> Results:
    """The score of a block that was not selected, raised above all others."""
    scores = answers.results["scores.scores"].copy()
    scores[0, _left_out(answers)] = np.nanmax(scores[0]) + 1.0
    return {**answers.results, "scores.scores": scores}
