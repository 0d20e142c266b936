"""Faults of the code around the kernels, planted while a `with` block lasts.

Each plants the mechanism of one entry of the fault catalogue in streams, the prompt cache or the queues.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from ... import fast
from ...fast import Engine, PagePool, Stream
from ...fast import prompt_cache as cache_module
from ...fast import round as round_module
from ...reference.geometry import Geometry, Rope, Weights
from ...reference.layout import LayerCache, Layout
from ...reference.results import Bf16Array, Window
from .delayed import DelayedEngine


@contextlib.contextmanager
def pooled_rows_stay_valid() -> Iterator[None]:
    """F04: a rollback restores the lengths; blocks that were pooled once are taken for pooled."""
    pooled: dict[int, tuple[LayerCache, int]] = {}

    def window(
        geometry: Geometry,
        weights: Weights,
        cache: LayerCache,
        projection: Bf16Array,
        pos0: int,
        rope: Rope,
        *,
        engine: Engine | None = None,
    ) -> Window:
        end = pos0 + projection.shape[0]
        _, done = pooled.get(id(cache), (cache, 0))
        pooled[id(cache)] = (cache, max(done, end // geometry.block))
        prepared = fast.prep(geometry, weights, cache, projection, pos0, rope, engine=engine)
        first = max(pos0, done * geometry.block)
        if first < end:
            fast.pool(geometry, weights, cache, first, end - first, rope, engine=engine)
        scores = fast.scores(geometry, cache, prepared.iq, pos0, engine=engine)
        lists = fast.select(geometry, scores, pos0, engine=engine)
        partials = fast.chunks(geometry, cache, prepared.q, lists, engine=engine)
        out = fast.merge(geometry, partials, engine=engine)
        gated = fast.gate(geometry, out, projection, engine=engine)
        return Window(prepared.q, prepared.iq, scores, lists, partials, out, gated)

    with mock.patch.object(round_module, "window", window):
        yield


@contextlib.contextmanager
def restore_clears_every_stream() -> Iterator[None]:
    """F06: a restore zeroes the pooled rows of the whole arena, and fills in those of the restored stream only."""
    restore = cache_module.restore

    def planted(pool: PagePool, *args: Any, **options: Any) -> Stream:
        for page in range(pool.layout.pages):
            if pool.holder(page) is not None:
                _zero_pooled(pool, page)
        return restore(pool, *args, **options)

    with mock.patch.object(fast, "restore", planted):
        yield


@contextlib.contextmanager
def pooled_rows_not_saved() -> Iterator[None]:
    """F07: the pooled rows are left out of a saved state."""
    save = cache_module.save

    def planted(stream: Stream, positions: int) -> Any:
        saved = save(stream, positions)
        layers = tuple(dataclasses.replace(layer, pooled=np.zeros_like(layer.pooled)) for layer in saved.layers)
        return dataclasses.replace(saved, layers=layers)

    with mock.patch.object(fast, "save", planted):
        yield


@contextlib.contextmanager
def pages_for_committed_rows_only() -> Iterator[None]:
    """F22: pages are reserved for the rows that a stream holds, not for those of the window."""
    grow = Stream.grow

    def planted(stream: Stream, positions: int) -> None:
        grow(stream, max(1, stream.length))

    with mock.patch.object(Stream, "grow", planted):
        yield


@contextlib.contextmanager
def table_rewritten_before_its_copy() -> Iterator[None]:
    """F23: tables go to the device through one staging buffer, which the next stream's table overwrites."""
    staging: dict[str, npt.NDArray[Any]] = {}

    def enter(stream: Stream, first: int, pages: Any) -> None:
        if stream.pool.contiguous:
            layout = Layout(geometry=stream.pool.geometry, page_size=stream.pool.page_size)
            stream._caches = stream._make_caches(stream.pool.page(pages[0]), layout)
            return
        buffer = staging.setdefault("table", np.zeros(1024, np.int32))
        buffer[: len(pages)] = pages
        backend: Any = stream.pool.engine.backend
        where = stream._table[first : first + len(pages)]
        backend.submit(lambda: np.copyto(where, buffer[: len(pages)]))

    with mock.patch.object(Stream, "_enter", enter):
        yield


@contextlib.contextmanager
def scratch_kept_by_shape() -> Iterator[None]:
    """F25: scratch for partials is kept by shape, whatever queue the work goes to."""
    empty = DelayedEngine.empty
    kept: dict[tuple[Any, ...], Any] = {}

    def planted(engine: DelayedEngine, shape: Any, dtype: npt.DTypeLike) -> Any:
        if np.dtype(dtype) != np.float32:
            return empty(engine, shape, dtype)
        key = (tuple(shape), np.dtype(dtype))
        if key not in kept:
            kept[key] = empty(engine, shape, dtype)
        return kept[key]

    with mock.patch.object(DelayedEngine, "empty", planted):
        yield


@contextlib.contextmanager
def copy_that_nothing_orders() -> Iterator[None]:
    """F26: rows are copied out on whatever queue is current, with no wait for the work that writes them."""

    save = cache_module.save

    def planted(stream: Stream, positions: int) -> Any:
        with mock.patch.object(Stream, "order", return_value=None):
            return save(stream, positions)

    with mock.patch.object(fast, "save", planted):
        yield


@contextlib.contextmanager
def rollback_returns_early() -> Iterator[None]:
    """F28: a rollback over a block's or page's edge removes nothing, and says nothing."""
    roll_back = Stream.roll_back

    def planted(stream: Stream, length: int, *, layers: Any = None) -> tuple[int, ...]:
        chosen = range(len(stream.lengths)) if layers is None else layers
        edge = stream.pool.geometry.block
        if any(length // edge != (stream.lengths[layer] - 1) // edge for layer in chosen):
            return (0,) * len(chosen)
        return roll_back(stream, length, layers=layers)

    with mock.patch.object(Stream, "roll_back", planted):
        yield


def _zero_pooled(pool: PagePool, page: int) -> None:
    for layer in range(pool.geometry.layers):
        rows = pool.layout.part(layer, "pooled")
        start = rows.base + page * rows.page_stride
        pool.engine.backend.zero(pool.arena[start : start + rows.rows_per_page * rows.row_stride])
