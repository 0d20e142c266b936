"""Caches laid out for a check: contiguous ones, and one arena in which several streams interleave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..reference import pool
from ..reference.geometry import Geometry
from ..reference.layout import BF16, PARTS, LayerCache, Layout
from .cases import Case, CaseData, StreamData
from .fenced import fenced

Tables = Literal["reversed", "shuffled"]
TABLES: tuple[Tables, ...] = ("reversed", "shuffled")

Filler = Literal["zero", "nan", "inf", "huge", "other"]
POISONS: tuple[Filler, ...] = ("nan", "inf", "huge", "other")
"""What the memory gate fills everything with that no kernel may read."""

SLACK_PAGES = 3
"""Pages of an arena that no stream owns."""

TABLE_TAIL = 2
"""Entries of a page table behind a stream's pages; they name pages that are not its own."""


class Workspace:
    """Large buffers that are taken again and again: fresh memory costs more than the bytes written to it."""

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[np.generic]] = {}

    def take(self, role: str, elements: int) -> npt.NDArray[np.generic]:
        """The role's buffer, bf16 [elements], holding anything; taking it again ends its earlier use."""
        held = self._held.get(role)
        if held is None or len(held) < elements:
            held = self._held[role] = fenced(elements * BF16.itemsize).view(BF16)
        return held[len(held) - elements :]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """One buffer per stream (contiguous), or one arena for all of them (paged).

    Attributes:
        geometry: of every stream.
        layouts: of each stream's buffer.
        buffers: bf16 [layout.elements] per stream; the same object for every stream of an arena.
        tables: int32 page table per stream; None for contiguous buffers.
        owned: the part of each table that names the stream's own pages.
    """

    geometry: Geometry
    layouts: tuple[Layout, ...]
    buffers: tuple[npt.NDArray[np.generic], ...]
    tables: tuple[npt.NDArray[np.int32] | None, ...]
    owned: tuple[npt.NDArray[np.int32] | None, ...]

    def cache(self, stream: int, layer: int) -> LayerCache:
        """One layer of one stream."""
        return LayerCache(
            buffer=self.buffers[stream], layout=self.layouts[stream], layer=layer, table=self.tables[stream]
        )

    def copy(self, workspace: Workspace, role: str) -> Scene:
        """The same caches over the role's buffers, with this scene's bytes."""
        fresh: dict[int, npt.NDArray[np.generic]] = {}
        for stream, buffer in enumerate(self.buffers):
            if id(buffer) not in fresh:
                fresh[id(buffer)] = workspace.take(f"{role} {stream}", len(buffer))
        other = replace(self, buffers=tuple(fresh[id(buffer)] for buffer in self.buffers))
        other.restore(self)
        return other

    def restore(self, other: Scene) -> None:
        """Take over the other scene's bytes."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            np.copyto(mine.view(np.uint16), theirs.view(np.uint16))


def contiguous(data: CaseData, workspace: Workspace, *, filler: Filler = "zero") -> Scene:
    """Each stream's history in a buffer of its own, with a block of unused positions behind it."""
    block = data.geometry.block
    layouts = tuple(Layout.contiguous(data.geometry, s.case.end + block) for s in data.streams)
    scene = Scene(
        geometry=data.geometry,
        layouts=layouts,
        buffers=tuple(
            _filled(workspace.take(f"contiguous {number}", layout.elements), filler)
            for number, layout in enumerate(layouts)
        ),
        tables=(None,) * len(layouts),
        owned=(None,) * len(layouts),
    )
    _store_history(data, scene)
    return scene


def page_counts(case: Case, page_size: int) -> list[int]:
    """Pages of each stream."""
    return [-(-stream.end // page_size) for stream in case.streams]


def page_order(case: Case, *, page_size: int, tables: Tables, seed: int) -> tuple[int, ...]:
    """Physical pages in the order in which they are handed out: from the last to the first, or at random."""
    pages = sum(page_counts(case, page_size)) + SLACK_PAGES
    if tables == "reversed":
        return tuple(reversed(range(pages)))
    return tuple(np.random.Generator(np.random.PCG64([seed, page_size])).permutation(pages).tolist())


def paged(
    data: CaseData, workspace: Workspace, *, page_size: int, order: tuple[int, ...], filler: Filler = "zero"
) -> Scene:
    """All streams in one arena of pages, their pages interleaved; what `order` has left over is slack."""
    pages = page_counts(data.case, page_size)
    layout = Layout(geometry=data.geometry, page_size=page_size, pages=len(order))
    physical = np.array(order, np.int32)
    owners = np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in pages]), kind="stable")
    stream_of = np.repeat(np.arange(len(pages)), pages)[owners]
    owned = tuple(physical[: sum(pages)][stream_of == stream] for stream in range(len(pages)))
    arena = _filled(workspace.take("arena", layout.elements), filler)
    scene = Scene(
        geometry=data.geometry,
        layouts=(layout,) * len(pages),
        buffers=(arena,) * len(pages),
        tables=tuple(np.concatenate([mine, _foreign(physical, mine)]) for mine in owned),
        owned=owned,
    )
    _store_history(data, scene)
    return scene


def _foreign(physical: npt.NDArray[np.int32], own: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A table's tail: pages that are not the stream's, or zeros where it owns them all."""
    others = physical[~np.isin(physical, own)]
    return np.resize(others if len(others) else np.zeros(1, np.int32), TABLE_TAIL)


def _filled(buffer: npt.NDArray[np.generic], filler: Filler) -> npt.NDArray[np.generic]:
    if filler == "other":
        rng = np.random.Generator(np.random.PCG64(0))
        sample = rng.standard_normal(1 << 16, dtype=np.float32).astype(BF16)
        for start in range(0, len(buffer), len(sample)):
            buffer[start : start + len(sample)] = sample[: len(buffer) - start]
        return buffer
    words = {"zero": 0x0000, "nan": 0x7FC0, "inf": 0x7F80, "huge": 0x7F7F}
    buffer.view(np.uint16)[:] = words[filler]
    return buffer


def _store_history(data: CaseData, scene: Scene) -> None:
    """Write each stream's history to every layer, its complete blocks' pooled rows by the reference."""
    for number, stream in enumerate(data.streams):
        for layer, rows in enumerate(stream.history):
            cache = scene.cache(number, layer)
            for part in PARTS:
                if len(rows[part]):
                    cache.write(part, np.arange(len(rows[part])), rows[part])


def with_pooled(data: CaseData) -> CaseData:
    """The case with the pooled rows of its histories, computed once by the reference."""
    streams = tuple(_with_pooled(data, stream) for stream in data.streams)
    return CaseData(geometry=data.geometry, case=data.case, weights=data.weights, streams=streams)


def _with_pooled(data: CaseData, stream: StreamData) -> StreamData:
    g, cached = data.geometry, stream.case.cached
    history = []
    for rows in stream.history:
        cache = LayerCache(buffer=(layout := Layout.contiguous(g, max(cached, 1))).zeros(), layout=layout)
        if cached:
            cache.write("index_keys", np.arange(cached), rows["index_keys"])
            pool(g, data.weights, cache, 0, cached, stream.rope)
        history.append({**rows, "pooled": cache.read("pooled", np.arange(cached // g.block))})
    return StreamData(case=stream.case, history=tuple(history), projection=stream.projection, rope=stream.rope)
