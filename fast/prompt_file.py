"""Saved prompts on disk: one safetensors file each, written whole or not at all, and read with distrust.

The bytes of a file follow from the prompt alone, and every one of them is checked when it is read: the header must be
the one that this prompt has, and the checksum covers header and rows. docs/prompt-cache.md has the format.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.geometry import TEXT, Geometry, Rope
from ..reference.layout import PARTS
from .prompt_cache import SavedPrompt, differences
from .prompt_header import (
    AGAIN,
    DTYPES,
    TRIPLES,
    UNSEALED,
    Facts,
    PromptFileError,
    facts_in,
    facts_of,
    nbytes_of,
    parse,
    refusal,
    require_tensors,
)
from .prompt_rows import SavedLayer


def write_prompt(saved: SavedPrompt, path: str | os.PathLike[str]) -> None:
    """Write a saved prompt to a file, whole or not at all; a file that stands there is replaced.

    The file is its owner's alone to read. A writer that is killed leaves a `.kvproof-*.part` beside it, which nobody
    reads and anyone may delete.

    Raises:
        PromptFileError: the folder or the disk refuses. The message tells which file stands there then: the older one,
            if there was one, or the new one, where only the folder's sync failed. Either is whole.
    """
    path = Path(path).resolve()
    facts = facts_of(saved)
    arrays = list(_arrays_of(saved))
    unsealed, _ = facts.header(UNSEALED)
    header, _ = facts.header(_digest(unsealed, arrays))
    try:
        _replace(path, [memoryview(header), *arrays])
    except OSError as error:
        raise PromptFileError(
            f"{path} could not be written: {error.strerror or error}; an older file there is whole: make room, or give "
            "another path"
        ) from error
    try:
        _sync_folder(path.parent)
    except OSError as error:
        raise PromptFileError(
            f"{path} is written and whole, and an older file there is replaced, but its folder could not be synced "
            f"({error.strerror or error}): a power cut may undo it; write it again"
        ) from error


def read_prompt(path: str | os.PathLike[str], *, geometry: Geometry | None = None) -> SavedPrompt:
    """Read a saved prompt.

    Args:
        geometry: that it must be of; any when None.

    Raises:
        PromptFileError: the file is missing, truncated, damaged, of another format, version or geometry, or its
            tensors are not those that a prompt of its geometry has.
    """
    path = Path(path)
    try:
        raw = np.fromfile(path, np.uint8)
    except OSError as error:
        raise PromptFileError(f"{path} could not be read: {error.strerror or error}; give a prompt file") from error
    raw.flags.writeable = False
    header, entries = parse(path, raw)
    facts, checksum = facts_in(path, entries.pop("__metadata__", None))
    require_tensors(path, facts, entries)
    data = _require_whole(path, facts, checksum, header, raw)
    if geometry is not None and facts.geometry != geometry:
        raise refusal(
            path,
            f"it is of geometry {facts.geometry.name!r}, and {geometry.name!r} is wanted: "
            f"{differences(facts.geometry, geometry)}",
            "give a prompt of this model",
        )
    return _prompt_of(path, facts, data)


# ---- between a prompt and a file's parts ----


def _arrays_of(saved: SavedPrompt) -> Iterator[memoryview]:
    """The bytes of every tensor, in the order of the file."""
    if saved.rope.mode == "media":
        yield _bytes_of(saved.rope.triples)
    for layer in saved.layers:
        for part in PARTS:
            yield _bytes_of(layer.part(part))


def _prompt_of(path: Path, facts: Facts, data: npt.NDArray[np.uint8]) -> SavedPrompt:
    """The prompt; its rows are views of the file's bytes."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    end = 0
    for name, (dtype, shape) in facts.tensors().items():
        begin, end = end, end + nbytes_of(dtype, shape)
        arrays[name] = data[begin:end].view(DTYPES[dtype]).reshape(shape)
    triples = arrays.get(TRIPLES, TEXT.triples)
    layers = range(facts.geometry.layers)
    try:
        return SavedPrompt(
            geometry=facts.geometry,
            positions=facts.positions,
            rope=Rope(mode=facts.mode, delta=facts.delta, triples=triples),
            weights_digest=facts.weights_digest,
            layers=tuple(SavedLayer(**{part: arrays[f"layer{i}.{part}"] for part in PARTS}) for i in layers),
        )
    except (TypeError, ValueError) as error:
        raise refusal(path, f"its metadata do not fit: {error}", AGAIN) from None


def _digest(header: bytes, arrays: list[memoryview]) -> str:
    digest = hashlib.sha256(header)
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# ---- what a file must be ----


def _require_whole(
    path: Path, facts: Facts, checksum: str, header: bytes, raw: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """The tensors' bytes, once every byte of the file is proved to be as written."""
    wanted, size = facts.header(checksum)
    if header != wanted:
        raise refusal(path, "its header is not written as a prompt's is: damaged, or written by others", AGAIN)
    data = raw[len(header) :]
    if len(data) != size:
        what = "truncated" if len(data) < size else "too long"
        raise refusal(path, f"it is {what}: {len(raw)} bytes, and its header says {len(header) + size}", AGAIN)
    found = _digest(facts.header(UNSEALED)[0], [data.data])
    if found != checksum:
        raise refusal(path, f"it is damaged: its checksum says {checksum!r}, its bytes have {found!r}", AGAIN)
    return data


# ---- whole or not at all ----


def _replace(path: Path, pieces: list[memoryview]) -> None:
    """Write a file beside its place, and move it there once the disk has it."""
    number, name = tempfile.mkstemp(prefix=".kvproof-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as draft:
            for piece in pieces:
                draft.write(piece)
            draft.flush()
            os.fsync(draft.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sync_folder(folder: Path) -> None:
    """Let a power cut not undo the move."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
