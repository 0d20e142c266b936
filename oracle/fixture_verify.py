"""`kvproof fixtures verify` on a set that `fixtures write` wrote.

The bytes are checked first. Then our kernels must give each file's expected bits, each kernel given the file's results
of those before it; the expected results must lie within the float64 reference's intervals, which must be the file's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..fast import LaunchError
from ..reference.geometry import CHUNK, Geometry, Rope, Weights
from ..reference.layout import BF16, PARTS, LayerCache, Layout
from ..reference.results import complete_blocks, score_blocks
from . import bounds
from .compare import Site, compare_bits, compare_bound
from .fixture_set import DTYPES, MANIFEST, File, open_set
from .fixture_tensors import KNOWN, SAME, TENSORS, WANTED
from .fixtures import LAYER, metadata_of, outward
from .interval import Interval
from .operations import AXES, Array, Call, Kernels, Operation, Results, close_scores, store
from .peer import FixtureError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison of `verify_set`.

    Attributes:
        file: which file.
        kernel: whose output it is; "history" and "arena" for what no kernel gives alone.
        tensor: by the file's name.
        check: "bits" (our kernels' against the file's), "bound" (the file's against the reference), "ends" (the file's
            bounds against the reference's) or "run" (a kernel that cannot run on the file's results).
        worst: the largest error as a fraction of its bound, 0 for what must agree to the bit.
        message: the element that disagrees, or None.
    """

    file: str
    kernel: str
    tensor: str
    check: str
    worst: float = 0.0
    message: str | None = None


def verify_set(folder: Path, kernels: Kernels) -> Iterator[Finding]:
    """Hold a set against the reference and the given kernels, once its manifest and every byte have been checked.

    Raises:
        FixtureError: the manifest or a file is missing, damaged, too many, of another version, or makes no sense.
    """
    opened = open_set(folder)
    _require_described(opened.manifest.get("tensors"))
    for name in opened.names:
        yield from _verify_file(opened.load(name), kernels)


def _require_described(described: Any) -> None:
    """Raise unless the manifest describes the tensors as this version of the format has them; words may differ."""
    for name, tensor in TENSORS.items():
        want = {key: value for key, value in tensor.about().items() if key != "meaning"}
        try:
            found = {key: described[tensor.general(name)][key] for key in want}
        except (KeyError, TypeError):
            raise FixtureError(f"{MANIFEST}: tensors lack {tensor.general(name)}, or what it is") from None
        if found != want:
            raise FixtureError(f"{MANIFEST}: tensors say that {tensor.general(name)} is {found}; it must be {want}")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Read:
    """A file understood: each stream's call and cache, and the arena or None."""

    file: File
    calls: tuple[Call, ...]
    caches: tuple[LayerCache, ...]
    arena: npt.NDArray[Any] | None

    def of(self, call: Call, name: str) -> Array:
        return self.file.tensors[f"stream{call.stream}.{name}"]


def _verify_file(file: File, kernels: Kernels) -> Iterator[Finding]:
    read = _read(file)
    for call, cache in zip(read.calls, read.caches, strict=True):
        yield _verify_close_scores(read, call)
        yield from _verify_history(read, call, cache)
        yield from _verify_stream(read, call, cache, kernels)
    if read.arena is not None:
        got = read.arena.reshape(file.tensors["arena.after"].shape)
        site = Site(stream=0, pos0=0)
        found = compare_bits("arena.after", got, file.tensors["arena.after"], ("page", "element"), site)
        yield _finding(file, "arena", "arena.after", "bits", found)


def _finding(file: File, kernel: str, tensor: str, check: str, found: object, worst: float = 0.0) -> Finding:
    message = None if found is None else str(found)
    return Finding(file=file.name, kernel=kernel, tensor=tensor, check=check, worst=worst, message=message)


def _verify_close_scores(read: _Read, call: Call) -> Finding:
    """select_close makes its own scores; the file's must be those."""
    tensor, site = f"stream{call.stream}.in.close_scores", Site(stream=call.stream, pos0=call.pos0)
    found = compare_bits(tensor, close_scores(call), read.of(call, "in.close_scores"), AXES["scores.scores"], site)
    return _finding(read.file, "select_close", tensor, "bits", found)


def _verify_history(read: _Read, call: Call, cache: LayerCache) -> Iterator[Finding]:
    """The history's pooled rows follow from its raw indexer keys."""
    if call.pos0 < call.geometry.block:
        return
    site = Site(stream=call.stream, pos0=0, cache=cache)
    tensor = f"stream{call.stream}.in.pooled" if read.arena is None else "arena.before"
    interval = bounds.pool(call.geometry, call.weights, cache, 0, call.pos0, call.rope)
    rows = cache.read("pooled", np.arange(call.pos0 // call.geometry.block))
    worst, found = compare_bound(f"pooled rows of {tensor}", rows, interval, AXES["pool.pooled"], site)
    yield _finding(read.file, "history", tensor, "bound", found, worst)


def _verify_stream(read: _Read, call: Call, cache: LayerCache, kernels: Kernels) -> Iterator[Finding]:
    """Each kernel, given the file's results of those before it."""
    given: Results = {name: read.of(call, f"want.{name}") for name in WANTED}
    for operation in KNOWN:
        yield from _verify_operation(read, operation, call, given, cache, kernels)
        store(cache, call, operation, given)


def _verify_operation(
    read: _Read, operation: Operation, call: Call, given: Results, cache: LayerCache, kernels: Kernels
) -> Iterator[Finding]:
    try:
        intervals = operation.bound(call, given, cache)
        outputs = operation.run(kernels, call, given, cache, cache)
    except (ValueError, LaunchError) as error:  # wrong results in the file, such as a key list past the cache's end
        told = f"{operation.name} of stream {call.stream} cannot run on the file's results: {error}"
        yield _finding(read.file, operation.name, "", "run", told)
        return
    site = Site(stream=call.stream, pos0=call.pos0, cache=cache)
    for name, got in outputs.items():
        known = SAME.get(name, name)
        tensor = f"stream{call.stream}.want.{known}"
        found = compare_bits(f"{tensor} by {operation.name}", got, given[known], AXES[name], site)
        yield _finding(read.file, operation.name, tensor, "bits", found)
        if name in WANTED:
            worst, outside = compare_bound(tensor, given[name], intervals[name], AXES[name], site)
            yield _finding(read.file, operation.name, tensor, "bound", outside, worst)
            yield from _verify_ends(read, call, name, intervals[name], site)


def _verify_ends(read: _Read, call: Call, name: str, interval: Interval, site: Site) -> Iterator[Finding]:
    """The file's bounds are the reference's; one fp32 step is allowed, where another machine's float64 rounds it."""
    if "bound" not in WANTED[name].gates:
        return
    dtype = DTYPES[WANTED[name].dtype]
    for end, own in zip(("low", "high"), outward(interval, dtype), strict=True):
        tensor = f"stream{call.stream}.{end}.{name}"
        stored = read.file.tensors[tensor]
        near = (stored == own) | (np.isnan(stored) & np.isnan(own))
        if dtype != BF16:
            with np.errstate(invalid="ignore"):
                near |= np.abs(stored - own) <= np.spacing(np.abs(own))
        found = compare_bits(tensor, stored, np.where(near, stored, own), AXES[name], site)
        yield _finding(read.file, name.split(".")[0], tensor, "ends", found)


def _read(file: File) -> _Read:
    """Understand a file.

    Raises:
        FixtureError: its metadata or shapes contradict each other, or a table names no page; the file is named.
    """
    try:
        geometry = _geometry(file.metadata)
        form = file.metadata["layout"]
        layout = None if form == "contiguous" else _layout(geometry, file.metadata)
        numbers = range(int(file.metadata["streams"]))
        for number in numbers:
            _require_shapes(file, geometry, number, layout)
        calls = tuple(_call(file, geometry, number) for number in numbers)
        _require_metadata(file, calls, layout)
        arena = None if layout is None else file.tensors["arena.before"].reshape(-1).copy()
        caches = tuple(_cache(file, call, layout, arena) for call in calls)
        for call, cache in zip(calls, caches, strict=True):
            cache.require(call.end)
    except KeyError as error:
        raise FixtureError(f"{file.name}: its metadata lack {error}") from None
    except ValueError as error:
        raise FixtureError(f"{file.name}: {error}") from None
    return _Read(file=file, calls=calls, caches=caches, arena=arena)


def _geometry(metadata: Mapping[str, str]) -> Geometry:
    values: dict[str, Any] = {}
    for field in fields(Geometry):
        word = metadata[f"geometry.{field.name}"]
        if field.name == "name":
            values[field.name] = word
        elif field.name == "mrope_sections":
            values[field.name] = tuple(int(part) for part in word.split(","))
        else:
            values[field.name] = float(word) if field.name in ("rope_theta", "eps") else int(word)
    return Geometry(**values)


def _layout(geometry: Geometry, metadata: Mapping[str, str]) -> Layout:
    return Layout(geometry=geometry, page_size=int(metadata["page_size"]), pages=int(metadata["pages"]))


def _require_shapes(file: File, geometry: Geometry, number: int, layout: Layout | None) -> None:
    """Raise unless a file has every tensor of a stream, each with the shape and type that its call gives it."""
    extents: dict[str, int] | None = None
    for name, tensor in TENSORS.items():
        if not tensor.stands_in(paged=layout is not None):
            continue
        full = f"stream{number}.{name}" if tensor.per_stream else name
        if full not in file.tensors:
            raise ValueError(f"lacks tensor {full}")
        extents = extents or _extents(file, geometry, number, layout)
        found = file.tensors[full]
        shape = tuple(extents[extent] for extent in tensor.shape)
        if found.dtype != DTYPES[tensor.dtype] or found.shape != shape:
            raise ValueError(
                f"tensor {full} is {found.dtype} {list(found.shape)}; by the metadata it must be {tensor.dtype} "
                f"{list(shape)}, [{', '.join(tensor.shape)}]"
            )


def _extents(file: File, geometry: Geometry, number: int, layout: Layout | None) -> dict[str, int]:
    """The extents that `Tensor.shape` names, of one stream."""
    facts = {name: int(file.metadata[f"stream{number}.{name}"]) for name in ("pos0", "rows", "media_length")}
    dense_rows = int(file.metadata[f"stream{number}.dense_rows"])
    pos0, rows = facts["pos0"], facts["rows"]
    end, block = pos0 + rows, geometry.block
    # chunks of the longest list: a sparse row's has the budget and a tail shorter than a block
    complete = complete_blocks(geometry, pos0, rows)
    sparse = complete > geometry.top_blocks
    ends = pos0 + 1 + np.arange(rows)
    nk = np.where(sparse, geometry.budget + ends - block * complete, ends)
    return {
        **{f.name: v for f in fields(Geometry) if isinstance(v := getattr(geometry, f.name), int)},
        "one": 1,
        "axes": 3,
        "rows": rows,
        "cached": pos0,
        "cached_blocks": pos0 // block,
        "completed": end // block - pos0 // block,
        "media_length": facts["media_length"],
        "projection_width": geometry.projection_width,
        "list_capacity": geometry.list_capacity,
        "score_blocks": score_blocks(geometry, pos0, rows),
        "chunks": max(1, -(-int(nk.max(initial=0)) // CHUNK)),
        "dense_rows": dense_rows,
        "dense_chunks": max(1, -(-end // CHUNK)),
        "table": 0 if layout is None else len(file.tensors[f"stream{number}.in.table"]),
        "pages": 0 if layout is None else layout.pages,
        "page_elements": 0 if layout is None else layout.page_elements,
    }


def _call(file: File, geometry: Geometry, number: int) -> Call:
    def said(name: str) -> str:
        return file.metadata[f"stream{number}.{name}"]

    mode: Any = said("rope_mode")
    triples = file.tensors[f"stream{number}.in.triples"]
    return Call(
        geometry=geometry,
        weights=Weights(**{f.name: file.tensors[f"weights.{f.name}"] for f in fields(Weights)}),
        stream=number,
        pos0=int(said("pos0")),
        projection=file.tensors[f"stream{number}.in.projection"],
        rope=Rope(mode=mode, delta=int(said("rope_delta")), triples=triples),
        dense_rows=int(said("dense_rows")),
    )


def _require_metadata(file: File, calls: tuple[Call, ...], layout: Layout | None) -> None:
    """Raise unless the metadata are what follows from the geometry, the calls and the layout."""
    facts = {name: file.metadata[name] for name in ("case", "layout", "seed")}
    for name, want in metadata_of(calls, layout, facts).items():
        if file.metadata[name] != want:
            raise ValueError(f"its metadata say {name} {file.metadata[name]}; it must be {want}")


def _cache(file: File, call: Call, layout: Layout | None, arena: npt.NDArray[Any] | None) -> LayerCache:
    """A stream's cache before the window: its part of the arena, or a contiguous one with a block behind the end."""
    if layout is not None and arena is not None:
        table = file.tensors[f"stream{call.stream}.in.table"]
        return LayerCache(buffer=arena, layout=layout, layer=LAYER, table=table)
    alone = Layout.contiguous(call.geometry, call.end + call.geometry.block)
    cache = LayerCache(buffer=alone.zeros(), layout=alone, layer=LAYER)
    for part in PARTS:
        rows = file.tensors[f"stream{call.stream}.in.{part}"]
        cache.write(part, np.arange(len(rows)), rows)
    return cache
