"""`kvproof fixtures write`: inputs, expected bits and bounds for kernels in any language.

A file holds one case in one layout: what the kernels are given, what each must give, and between which values. It
stands alone, so that a reader needs no Python. `TENSORS` says what is in it; docs/fixtures.md says it to people.
Expected bits are those of our kernels, which must be the same contiguous and paged or nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from ..reference.geometry import CHUNK, TILE, Geometry, Weights
from ..reference.layout import BF16, PARTS, LayerCache, Layout
from ..reference.numerics import bf16, widen
from .cases import CHECK_LAYERS, Case, CaseData, fill
from .compare import Site, compare_bits, compare_bound
from .fixture_set import DTYPES, FORMAT, VERSION, File, write_set
from .fixture_tensors import KNOWN, TENSORS, WANTED
from .interval import Interval
from .memory import changed
from .operations import AXES, Answers, Array, Call, Kernels, calls_of, close_scores, store
from .peer import FixtureError
from .scene import Filler, Scene, Tables, Workspace, contiguous, page_order, paged, with_pooled

Form = Literal["contiguous", "reversed", "shuffled"]
FORMS: tuple[Form, ...] = ("contiguous", "reversed", "shuffled")
"""Contiguous caches, or an arena whose pages are handed out from the last to the first, or at random."""
DEFAULT_FORMS: tuple[Form, ...] = ("contiguous", "shuffled")
DEFAULT_PAGES = (4, 12)
"""So small that short cases cross pages: one block, and no power of two."""

FILLERS: dict[Tables, Filler] = {"reversed": "other", "shuffled": "nan"}
"""What stands where no kernel may read: NaN spreads through sums but vanishes in fmax; another stream's rows do not."""

LAYER = CHECK_LAYERS - 1
"""The layer that the kernels are run on; the others hold other data."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a set holds: each case contiguous, and at each page size through each kind of table.

    Attributes:
        geometry: with the layers of a checked arena (`cases.at_check`).
        cases: of `cases.cases`.
        page_sizes: in positions.
        forms: among `FORMS`.
        seed: of the data and the tables.

    Raises:
        ValueError: no case or form, an unknown form, a page size that does not hold whole blocks, pages asked for
            without a size, or a negative seed.
    """

    geometry: Geometry
    cases: tuple[Case, ...]
    page_sizes: tuple[int, ...] = DEFAULT_PAGES
    forms: tuple[Form, ...] = DEFAULT_FORMS
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("cases", "forms"):
            if not getattr(self, name):
                raise ValueError(f"a recipe without {name}; it must have at least one")
        for form in self.forms:
            if form not in FORMS:
                raise ValueError(f"layout {form!r} does not exist; it must be one of {', '.join(FORMS)}")
        for page_size in self.page_sizes:
            Layout(geometry=self.geometry, page_size=page_size)
        if self.tables and not self.page_sizes:
            raise ValueError(f"layout {self.tables[0]!r} needs a page size, but none is given")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")

    @property
    def tables(self) -> tuple[Tables, ...]:
        """The forms that have pages."""
        return tuple(form for form in self.forms if form != "contiguous")

    def about(self) -> dict[str, Any]:
        """What the manifest says beside its files."""
        return {
            "kvproof": version("kvproof"),
            "geometry": asdict(self.geometry) | {"mrope_sections": list(self.geometry.mrope_sections)},
            "cases": [case.name for case in self.cases],
            "page_sizes": list(self.page_sizes),
            "layouts": list(self.forms),
            "seed": self.seed,
            "tensors": {tensor.general(name): tensor.about() for name, tensor in TENSORS.items()},
        }


def write(
    folder: Path, recipe: Recipe, kernels: Kernels, *, progress: Callable[[str], None] = lambda step: None
) -> list[Path]:
    """Write a set; the same recipe gives the same bytes.

    Args:
        folder: new, empty, or a set written before, which is replaced.
        kernels: whose results are expected.
        progress: called with each file, once it is computed.

    Returns:
        The files written, the manifest last.

    Raises:
        FixtureError: the folder holds something else, or the kernels leave a bound or differ between layouts; nothing
            was written.
    """
    with threadpool_limits(1):
        return write_set(folder, _told(_files(recipe, kernels), progress), recipe.about())


def _told(files: Iterator[File], progress: Callable[[str], None]) -> Iterator[File]:
    for file in files:
        progress(file.name)
        yield file


def _files(recipe: Recipe, kernels: Kernels) -> Iterator[File]:
    for case in recipe.cases:
        data = with_pooled(fill(recipe.geometry, case, seed=recipe.seed))
        scene = contiguous(data, Workspace())
        answers = tuple(_answers(kernels, call, scene.cache(call.stream, LAYER)) for call in calls_of(data))
        shared = _shared(data, answers)
        if "contiguous" in recipe.forms:
            yield _file(recipe, data, answers, "contiguous", shared | _histories(data))
        for page_size in recipe.page_sizes:
            for tables in recipe.tables:
                order = page_order(case, page_size=page_size, tables=tables, seed=recipe.seed)
                scene = paged(data, Workspace(), page_size=page_size, order=order, filler=FILLERS[tables])
                arena = _arenas(scene, answers, kernels)
                yield _file(recipe, data, answers, tables, shared | arena, scene.layouts[0])


def _answers(kernels: Kernels, call: Call, cache: LayerCache) -> Answers:
    """A contiguous run's results and their intervals; refuses results that no fixture should expect."""
    results: dict[str, Array] = {}
    intervals: dict[str, Interval] = {}
    site = Site(stream=call.stream, pos0=call.pos0, cache=cache)
    for operation in KNOWN:
        results.update(operation.run(kernels, call, results, cache, cache))
        for name, interval in operation.bound(call, results, cache).items():
            _, found = compare_bound(name, results[name], interval, AXES[name], site)
            _refuse(None if found is None else str(found))
            intervals[name] = interval
    return Answers(call=call, results=results, intervals=intervals)


def _arenas(scene: Scene, answers: tuple[Answers, ...], kernels: Kernels) -> dict[str, Array]:
    """The arena before and after the window, and the tables; refuses kernels whose paged bits are others."""
    before = _whole(scene)
    want = scene.copy(Workspace(), "want")
    for answer in answers:
        call, cache = answer.call, scene.cache(answer.call.stream, LAYER)
        for operation in KNOWN:
            for name, got in operation.run(kernels, call, answer.results, cache, cache).items():
                found = compare_bits(
                    name, got, answer.results[name], AXES[name], Site(stream=call.stream, pos0=call.pos0, cache=cache)
                )
                _refuse(None if found is None else str(found))
            store(want.cache(call.stream, LAYER), call, operation, answer.results)
    _refuse(changed(scene, want))
    tables = {f"stream{number}.in.table": table for number, table in enumerate(scene.tables) if table is not None}
    return {"arena.before": before, "arena.after": _whole(scene), **tables}


def _whole(scene: Scene) -> Array:
    layout = scene.layouts[0]
    return scene.buffers[0].reshape(layout.pages, layout.page_elements).copy()


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise FixtureError(f"the kernels break the contract, so nothing was written; see `kvproof check`: {fault}")


def _shared(data: CaseData, answers: tuple[Answers, ...]) -> dict[str, Array]:
    """The tensors of a case that are the same in every layout."""
    tensors: dict[str, Array] = {f"weights.{f.name}": getattr(data.weights, f.name) for f in fields(Weights)}
    for number, (stream, answer) in enumerate(zip(data.streams, answers, strict=True)):
        mine = {"in.projection": stream.projection, "in.triples": stream.rope.triples}
        mine["in.close_scores"] = close_scores(answer.call)
        for name, tensor in WANTED.items():
            mine[f"want.{name}"] = answer.results[name]
            if "bound" in tensor.gates:
                mine[f"low.{name}"], mine[f"high.{name}"] = outward(answer.intervals[name], DTYPES[tensor.dtype])
        tensors |= {f"stream{number}.{name}": array for name, array in mine.items()}
    return tensors


def _histories(data: CaseData) -> dict[str, Array]:
    return {
        f"stream{number}.in.{part}": stream.history[LAYER][part]
        for number, stream in enumerate(data.streams)
        for part in PARTS
    }


def outward(interval: Interval, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Both ends of an interval in fp32 or bf16, rounded away from it; NaN is the positive quiet one and zero is +0."""
    return _toward(interval.low, -np.inf, dtype), _toward(interval.high, np.inf, dtype)


def _toward(end: npt.NDArray[np.float64], limit: float, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = bf16(end) if dtype == BF16 else end.astype(dtype)
        inside = widen(near) > end if limit < 0 else widen(near) < end
        moved = np.where(inside, np.nextafter(near, np.array(limit, dtype)), near)
    return np.where(np.isnan(end), np.array(np.nan, dtype), moved + np.zeros((), dtype))


def _file(
    recipe: Recipe,
    data: CaseData,
    answers: tuple[Answers, ...],
    form: Form,
    tensors: dict[str, Array],
    layout: Layout | None = None,
) -> File:
    case = data.case.name
    name = f"{case}.contiguous" if layout is None else f"{case}.page{layout.page_size}.{form}"
    facts = {"case": case, "layout": form, "seed": str(recipe.seed)}
    calls = tuple(answer.call for answer in answers)
    return File(name=f"{name}.safetensors", metadata=metadata_of(calls, layout, facts), tensors=tensors)


def metadata_of(calls: tuple[Call, ...], layout: Layout | None, facts: Mapping[str, str]) -> dict[str, str]:
    """A file's strings: its format, the geometry, each stream's call, and the addresses of the paged layer."""
    geometry = calls[0].geometry
    found = {"format": FORMAT, "version": str(VERSION), "chunk": str(CHUNK), "tile": str(TILE)}
    found |= facts
    found |= {f"geometry.{name}": _word(value) for name, value in asdict(geometry).items()}
    found |= {"layer": str(LAYER), "streams": str(len(calls))}
    for call in calls:
        mine = {
            "pos0": call.pos0,
            "rows": call.rows,
            "rope_mode": call.rope.mode,
            "rope_delta": call.rope.delta,
            "media_length": len(call.rope.triples),
            "dense_rows": call.dense_rows,
        }
        found |= {f"stream{call.stream}.{name}": str(value) for name, value in mine.items()}
    return found if layout is None else found | _addresses(layout)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _addresses(layout: Layout) -> dict[str, str]:
    numbers = {"page_size": layout.page_size, "pages": layout.pages, "page_elements": layout.page_elements}
    for part in PARTS:
        where = layout.part(LAYER, part)
        numbers |= {
            f"{part}.base": where.base,
            f"{part}.rows_per_page": where.rows_per_page,
            f"{part}.row_stride": where.row_stride,
            f"{part}.head_stride": where.head_stride,
        }
    return {name: str(value) for name, value in numbers.items()}
