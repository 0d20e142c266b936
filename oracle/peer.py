"""`kvproof fixtures verify`: files of an independent implementation, held against `reference` and `fast`.

Each kernel is given the file's own results of the kernels before it, so that each is judged alone. Three errors are
told per tensor, as fractions of the bound: the file's distance from the float64 reference, our kernels' distance from
it, and the distance between the two, whose bound is the whole interval. fixtures/peer/README.md names the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from .. import reference
from ..reference.geometry import CHUNK, Geometry, Rope, Weights
from ..reference.layout import LayerCache, Layout, Part
from ..reference.numerics import widen
from ..reference.results import chunk_count, complete_blocks, score_blocks
from .arithmetic import arithmetic_of
from .compare import Site, compare_bound
from .interval import Interval, exact
from .operations import AXES, OPERATIONS, Array, Call, Kernels, Results, store

PAGE_BLOCKS = 4
"""Blocks to a page of the paged form."""
LAYERS, LAYER = 2, 1

NAMES = {
    "prep.q": "out.q",
    "prep.iq": "out.iq",
    "prep.keys": "out.kc",
    "prep.values": "out.vc",
    "prep.index_keys": "out.ikc",
    "pool.pooled": "out.pooled",
    "scores.scores": "out.scores",
    "select.ids": "out.ids",
    "select.nk": "out.nk",
    "select.sparse": "out.sparse",
    "chunks.o": "out.partial_o",
    "chunks.m": "out.partial_m",
    "chunks.l": "out.partial_l",
    "merge.out": "out.out",
}
"""Our outputs, and how the files call them."""
_NEEDED = ("in.p", "in.q_scale", "in.k_scale", "in.i_scale", "in.pool_scale", "in.inv_freq", "in.rope")
_STORED = ("out.kc", "out.vc", "out.ikc", "out.q", "out.iq")


class FixtureError(ValueError):
    """A fixture file cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One tensor of one file in one form.

    Attributes:
        file, tensor: which; the tensor by the file's name.
        form: "contiguous" or "paged".
        peer, fast: largest error of the file's and of our kernels' values, as fractions of the bound.
        apart: largest distance between the two, as a fraction of the interval.
        message: the first element out of bounds, or None.
    """

    file: str
    tensor: str
    form: str
    peer: float
    fast: float
    apart: float
    message: str | None


def verify(folder: Path, kernels: Kernels) -> Iterator[Verdict]:
    """Hold each `.safetensors` file of a folder against the reference and the given kernels.

    Raises:
        FixtureError: the folder holds none, or a file is damaged or lacks something.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise FixtureError(f"{folder} holds no .safetensors file; give the folder that does, such as fixtures/peer")
    for file in files:
        yield from _verify_file(read(file), kernels)


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerFile:
    """One file: the call it records and every tensor, by the file's names."""

    name: str
    geometry: Geometry
    call: Call
    tensors: dict[str, Array]
    capacity: int


def read(file: Path) -> PeerFile:
    """Read and check one file.

    Raises:
        FixtureError: it is damaged, or metadata or a tensor is missing.
    """
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FixtureError(f"{file.name}: not a whole safetensors file: {error}") from None
    missing = [name for name in (*_NEEDED, *_STORED) if name not in tensors]
    if missing:
        raise FixtureError(f"{file.name}: lacks {', '.join(missing)}")
    try:
        geometry, pos0 = _geometry(file.stem, metadata), int(metadata["pos0"])
        rope = _rope(metadata, tensors["in.rope"])
    except KeyError as error:
        raise FixtureError(f"{file.name}: its metadata lack {error}") from None
    except ValueError as error:
        raise FixtureError(f"{file.name}: {error}") from None
    weights = Weights(
        **{name: tensors[f"in.{name}"] for name in ("q_scale", "k_scale", "i_scale", "pool_scale", "inv_freq")}
    )
    call = Call(
        geometry=geometry, weights=weights, stream=0, pos0=pos0, projection=tensors["in.p"], rope=rope, dense_rows=1
    )
    return PeerFile(name=file.name, geometry=geometry, call=call, tensors=tensors, capacity=len(tensors["out.kc"]))


def _geometry(name: str, metadata: dict[str, str]) -> Geometry:
    fields = ("query_heads", "kv_heads", "head_dim", "index_heads", "index_dim", "block", "top_blocks", "rotary_half")
    numbers: dict[str, Any] = {field: int(metadata[field]) for field in fields}
    third, rest = divmod(numbers["rotary_half"], 3)  # the family's sections: as equal as they can be, t first
    return Geometry(
        name=name,
        **numbers,
        mrope_sections=(third + (rest > 0), third + (rest > 1), third),
        layers=LAYERS,
        rope_theta=float(metadata["theta"]),
        eps=float(metadata["eps"]),
    )


def _rope(metadata: dict[str, str], triples: npt.NDArray[np.int32]) -> Rope:
    mode, delta, length = (int(metadata[name]) for name in ("rope_mode", "rope_delta", "media_length"))
    if mode == 0:
        return Rope()
    if mode == 1:
        return Rope(mode="delta", delta=delta)
    return Rope(mode="media", delta=delta, triples=np.ascontiguousarray(triples[:length]))


def _verify_file(file: PeerFile, kernels: Kernels) -> Iterator[Verdict]:
    for form in ("contiguous", "paged"):
        cache = cache_of(file, form)
        store_history(file, cache)
        given = results_of(file)
        for operation in OPERATIONS:
            known = [name for name in AXES if name.startswith(f"{operation.name}.") and NAMES.get(name) in file.tensors]
            if not known:
                continue
            bound = operation.bound(file.call, given, cache)
            own = operation.bound(replace(file.call, arithmetic=arithmetic_of(kernels)), given, cache)
            got = operation.run(kernels, file.call, given, cache, cache)
            for name in known:
                yield _verdict(file, form, name, got[name], given[name], bound[name], own[name], cache)
            store(cache, file.call, operation, given)


def cache_of(file: PeerFile, form: str) -> LayerCache:
    """An empty cache for a file: "contiguous", or pages behind a shuffled table."""
    if form == "contiguous":
        layout = Layout.contiguous(file.geometry, file.capacity)
        return LayerCache(buffer=layout.zeros(), layout=layout, layer=LAYER)
    page = PAGE_BLOCKS * file.geometry.block
    pages = -(-file.capacity // page)
    layout = Layout(geometry=file.geometry, page_size=page, pages=pages + 3)
    table = np.random.Generator(np.random.PCG64(pages)).permutation(layout.pages)[:pages].astype(np.int32)
    return LayerCache(buffer=layout.zeros(), layout=layout, layer=LAYER, table=table)


def store_history(file: PeerFile, cache: LayerCache) -> None:
    """Write the positions before the window, and their pooled rows, as the file has them."""
    pos0, block = file.call.pos0, file.geometry.block
    named: dict[Part, str] = {"keys": "out.kc", "values": "out.vc", "index_keys": "out.ikc"}
    for part, name in named.items() if pos0 else ():
        rows = file.tensors[name][:pos0]
        cache.write(part, np.arange(pos0), rows.reshape(pos0, -1, rows.shape[-1]))
    blocks = np.arange(pos0 // block)
    if len(blocks) and "out.pooled" in file.tensors:
        cache.write("pooled", blocks, file.tensors["out.pooled"][blocks][:, None])
    elif len(blocks):
        reference.pool(file.geometry, file.call.weights, cache, 0, pos0, file.call.rope)


def results_of(file: PeerFile) -> dict[str, Array]:
    """The file's results under the names and shapes of ours."""
    call, tensors = file.call, file.tensors
    window = slice(call.pos0, call.end)
    given = {name: tensors[theirs] for name, theirs in NAMES.items() if theirs in tensors}
    for name in ("prep.keys", "prep.values", "prep.index_keys"):
        given[name] = given[name][window].reshape(call.rows, -1, given[name].shape[-1])
    if "pool.pooled" in given:
        given["pool.pooled"] = given["pool.pooled"][call.completed][:, None]
        given["scores.scores"] = given["scores.scores"][:, : score_blocks(call.geometry, call.pos0, call.rows)]
        for name in ("chunks.o", "chunks.m", "chunks.l"):
            given[name] = given[name][:, : chunk_count(given["select.nk"])]
        given |= _identities(given)
    return {name: np.ascontiguousarray(array) for name, array in given.items()}


def _identities(given: Results) -> dict[str, Array]:
    """The file's partials with the identity where a chunk holds no key; the file says nothing there."""
    empty = np.arange(given["chunks.m"].shape[1]) * CHUNK >= given["select.nk"][:, None]
    return {
        "chunks.o": np.where(empty[..., None, None], np.float32(0), given["chunks.o"]),
        "chunks.m": np.where(empty[..., None], np.float32(-np.inf), given["chunks.m"]),
        "chunks.l": np.where(empty[..., None], np.float32(0), given["chunks.l"]),
    }


def _verdict(
    file: PeerFile, form: str, name: str, got: Array, theirs: Array, bound: Interval, own: Interval, cache: LayerCache
) -> Verdict:
    judged = _judged(file, name, got.shape)
    theirs = np.where(judged, theirs, got)
    bound, own = (_where(judged, x, got) for x in (bound, own))
    site = Site(stream=0, pos0=file.call.pos0, cache=cache)
    peer, peer_broken = compare_bound(f"{NAMES[name]} of the file", theirs, bound, AXES[name], site)
    ours, ours_broken = compare_bound(NAMES[name], got, own, AXES[name], site)
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.abs(widen(got) - widen(theirs))
        apart = np.where(distance > 0, distance / (bound.high - bound.low), 0.0)
    broken = peer_broken or ours_broken
    return Verdict(
        file=file.name,
        tensor=NAMES[name],
        form=form,
        peer=peer,
        fast=ours,
        apart=float(apart.max(initial=0.0)),
        message=None if broken is None else str(broken),
    )


def _where(judged: npt.NDArray[np.bool_], bound: Interval, got: Array) -> Interval:
    """The bound where an element is judged, and what was got, exact, elsewhere."""
    kept = exact(got)
    return Interval(*(np.where(judged, getattr(bound, f.name), getattr(kept, f.name)) for f in fields(Interval)))


def _judged(file: PeerFile, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Elements that the file speaks of: scores of complete blocks of sparse rows, lists of sparse rows, all else."""
    complete = complete_blocks(file.geometry, file.call.pos0, file.call.rows)
    sparse = (complete > file.geometry.top_blocks)[:, None]
    if name == "scores.scores":
        return sparse & (np.arange(shape[1]) < complete[:, None])
    if name == "select.ids":
        return np.broadcast_to(sparse, shape)
    return np.ones(shape, bool)
