"""The prompt cache: what a stream holds, copied out of its pages and into those of another (SPEC section 4).

    saved = save(stream, 2000)
    stream = restore(pool, saved, weights)

A saved prompt is contiguous and lies on the host, so that it fits any layout, page size and backend. `prompt_file`
keeps it on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..reference.arrays import require_array
from ..reference.geometry import Geometry, IntArray, Rope, Weights
from ..reference.layout import BF16, PARTS, Layout
from .engine import Engine
from .page_pool import PagePool
from .prompt_rows import SavedLayer, read_rows, rows_shape, write_rows
from .stream import Stream
from .stream_rules import StreamError, require_no_capture, require_weights


class PromptError(RuntimeError):
    """A saved prompt cannot be used here; the message says why, and nothing was changed."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SavedPrompt:
    """The first positions of a stream, contiguous and on the host.

    Attributes:
        geometry: of the caches.
        positions: that each layer holds.
        rope: rotary positions of the stream's rows, its triples on the host; all of them, also those to come.
        weights_digest: of the weights that made the rows; see `digest_of`.
        layers: the rows.

    Raises:
        TypeError, ValueError: something does not fit the geometry or the positions.
    """

    geometry: Geometry
    positions: int
    rope: Rope
    weights_digest: str
    layers: tuple[SavedLayer, ...]

    def __post_init__(self) -> None:
        if self.positions < 1:
            raise ValueError(f"a saved prompt of {self.positions} positions; it must have at least 1")
        if len(self.weights_digest) != 64 or not set(self.weights_digest) <= set("0123456789abcdef"):
            raise ValueError(f"weights_digest is {self.weights_digest!r}; it must be a sha256 in 64 hex digits")
        if len(self.layers) != self.geometry.layers:
            raise ValueError(
                f"{len(self.layers)} layers are given; geometry {self.geometry.name!r} has {self.geometry.layers}"
            )
        self.rope.require()
        layout = Layout.contiguous(self.geometry, self.positions)
        for i, layer in enumerate(self.layers):
            for part in PARTS:
                shape = rows_shape(layout, part, self.positions)
                require_array(f"layer {i} of the saved prompt: {part}", layer.part(part), BF16, shape)

    def __repr__(self) -> str:
        return (
            f"SavedPrompt(geometry {self.geometry.name!r}, {self.positions} positions, rope {self.rope.mode!r}, "
            f"{self.nbytes:,} bytes, weights {self.weights_digest[:16]})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(layer.part(part).nbytes for layer in self.layers for part in PARTS)


def save(stream: Stream, positions: int) -> SavedPrompt:
    """Copy the first positions of a stream, on every layer, out of its pages; the stream stays as it is.

    Args:
        positions: 1 to what its shortest layer holds.

    Raises:
        StreamError: the stream is closed or in a round, or a layer holds fewer positions.
        CaptureError: a step is being captured.
        LaunchError: work that the rows wait for has failed.
    """
    require_no_capture("a prompt is saved")
    stream.require_idle()
    positions = _require_positions(stream, positions)
    engine = stream.pool.engine
    stream.order()
    layers = read_rows(stream, positions)
    return SavedPrompt(
        geometry=stream.pool.geometry,
        positions=positions,
        rope=_on_host(engine, stream.rope),
        weights_digest=digest_of(engine, stream.weights),
        layers=layers,
    )


def restore(pool: PagePool, saved: SavedPrompt, weights: Sequence[Weights], *, rope: Rope | None = None) -> Stream:
    """A new stream that holds a saved prompt, bit for bit as if it had computed it.

    Args:
        pool: of any layout and page size.
        weights: of each layer, in the engine's memory; those that made the prompt.
        rope: rotary positions of all rows, the saved and those to come, in the engine's memory; the saved when None.

    Raises:
        PromptError: the prompt is of another geometry or other weights, stands at other rotary positions than `rope`
            says, or is longer than a stream of this pool may be.
        PoolExhaustedError: the pool has not enough free pages.
        TypeError, ValueError: weights or rope do not fit the geometry or the engine.
        CaptureError: a step is being captured.
        LaunchError: earlier work of the backend has failed.

        Whatever it raises, no page stays taken and no other stream was touched.
    """
    require_no_capture("a prompt is restored")
    _require_ours(pool, saved, weights)
    if rope is None:
        rope = pool.engine.upload(saved.rope) if saved.rope.mode == "media" else saved.rope
    else:
        rope.require(pool.engine.place)
        _require_same_rotations(saved, _on_host(pool.engine, rope))
    stream = Stream(pool, weights, rope=rope)
    try:
        stream.grow(saved.positions)
        write_rows(stream, saved.layers, saved.positions)
        stream.mark()
    except BaseException:
        with contextlib.suppress(Exception):  # pages whose work the backend cannot fence stay out of use
            stream.close()
        raise
    stream.advance(range(pool.geometry.layers), saved.positions)
    return stream


def digest_of(engine: Engine, weights: Sequence[Weights]) -> str:
    """The sha256 over all norm weights and rotary frequencies, layer by layer, in hex.

    It tells models apart whose caches have the same shape. The projections are not in it.
    """
    digest = hashlib.sha256()
    for layer in weights:
        for field in dataclasses.fields(layer):
            array = engine.download(getattr(layer, field.name))
            digest.update(f"{field.name} {array.dtype} {array.shape};".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


# ---- checks ----


def _require_positions(stream: Stream, positions: int) -> int:
    if isinstance(positions, bool) or not isinstance(positions, (int, np.integer)):
        raise TypeError(f"positions is {positions!r}; it must be an integer")
    shortest = min(stream.lengths)
    if not 1 <= positions <= shortest:
        allowed = f"1 to {shortest} can be saved" if shortest else "there is nothing to save"
        raise StreamError(
            f"{positions} positions of {stream} cannot be saved: its layers hold {stream.lengths}, so {allowed}"
        )
    return int(positions)


def _require_ours(pool: PagePool, saved: SavedPrompt, weights: Sequence[Weights]) -> None:
    if saved.geometry != pool.geometry:
        raise PromptError(
            f"the saved prompt is of geometry {saved.geometry.name!r}, the pool of {pool.geometry.name!r}: "
            f"{differences(saved.geometry, pool.geometry)}; restore it into a pool of its own geometry"
        )
    require_weights(weights, pool.geometry, pool.engine.place)
    digest = digest_of(pool.engine, weights)
    if saved.weights_digest != digest:
        raise PromptError(
            f"the saved prompt was made with weights of digest {saved.weights_digest[:16]}, these have "
            f"{digest[:16]}: it is another model's; compute the prompt anew"
        )
    if saved.positions > pool.context:
        raise PromptError(
            f"the saved prompt has {saved.positions} positions; a stream of this pool holds at most {pool.context}: "
            "make the pool with a larger context="
        )


def _require_same_rotations(saved: SavedPrompt, rope: Rope) -> None:
    was, now = (_rotary_positions(one, saved.positions) for one in (saved.rope, rope))
    wrong = np.flatnonzero((was != now).any(axis=1))
    if len(wrong):
        p = int(wrong[0])
        raise PromptError(
            f"position {p} of the saved prompt stands at rotary position (t, h, w) = {tuple(was[p].tolist())}, but the "
            f"rope given says {tuple(now[p].tolist())}; give one that agrees on all {saved.positions} saved positions, "
            "or compute the prompt anew"
        )


def differences(found: Geometry, wanted: Geometry) -> str:
    """The fields in which two geometries differ, in words."""
    names = [field.name for field in dataclasses.fields(Geometry)]
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in names]
    return ", ".join(f"{name} is {a!r} instead of {b!r}" for name, a, b in pairs if a != b)


def _rotary_positions(rope: Rope, positions: int) -> IntArray:
    """Where the first rows stand on the (t, h, w) axes: int64 [positions, 3]."""
    at = np.repeat(np.arange(positions, dtype=np.int64)[:, None] + rope.delta, 3, axis=1)
    media = min(rope.media_length, positions)
    at[:media] = rope.triples[:media]
    return at


def _on_host(engine: Engine, rope: Rope) -> Rope:
    """A rope with triples of its own on the host."""
    return engine.download(rope) if rope.mode == "media" else rope
