"""The header of a prompt file: what it says of a prompt, and the only form in which it may say so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..reference.geometry import Geometry
from ..reference.layout import BF16, PARTS, Layout
from .prompt_cache import PromptError, SavedPrompt
from .prompt_rows import rows_shape

FORMAT = "kvproof-prompt"
VERSION = "1"
ALIGN = 8
"""A header ends on a multiple of this many bytes, so that each tensor is aligned to its elements."""

Mode: TypeAlias = Literal["text", "delta", "media"]

DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "BF16": BF16}
"""Element types by their safetensors names."""
_LENGTH = 8  # bytes of the header's length, unsigned and little-endian
UNSEALED = "0" * 64  # stands where the checksum will, while it is taken
TRIPLES = "rope.triples"
AGAIN = "compute the prompt anew and save it again"


class PromptFileError(PromptError):
    """A prompt file was refused or could not be written; the message names the file, and nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a header says beside its tensors, which follow from it."""

    geometry: Geometry
    positions: int
    mode: Mode
    delta: int
    media_length: int
    weights_digest: str

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of every tensor, in the order of the file."""
        layout = Layout.contiguous(self.geometry, self.positions)
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self.mode == "media":
            found[TRIPLES] = ("I32", (self.media_length, 3))
        for layer in range(self.geometry.layers):
            for part in PARTS:
                found[f"layer{layer}.{part}"] = ("BF16", rows_shape(layout, part, self.positions))
        return found

    def header(self, checksum: str) -> tuple[bytes, int]:
        """The header's length and text, and the bytes of the tensors behind it."""
        rope = {"mode": self.mode, "delta": self.delta, "media_length": self.media_length}
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "geometry": _json(asdict(self.geometry)),
            "positions": str(self.positions),
            "rope": _json(rope),
            "weights": self.weights_digest,
            "checksum": checksum,
        }
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, (dtype, shape) in self.tensors().items():
            begin, end = end, end + nbytes_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = _json(header).encode()
        text += b" " * (-len(text) % ALIGN)
        return len(text).to_bytes(_LENGTH, "little") + text, end


def facts_of(saved: SavedPrompt) -> Facts:
    """What the header of a prompt's file says."""
    return Facts(
        geometry=saved.geometry,
        positions=int(saved.positions),
        mode=saved.rope.mode,
        delta=int(saved.rope.delta),
        media_length=saved.rope.media_length,
        weights_digest=saved.weights_digest,
    )


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    size = DTYPES[dtype].itemsize
    for extent in shape:
        size *= extent
    return size


def refusal(path: Path, found: str, remedy: str) -> PromptFileError:
    """The error that refuses a file."""
    return PromptFileError(f"{path} is refused: {found}; {remedy}")


def parse(path: Path, raw: npt.NDArray[np.uint8]) -> tuple[bytes, dict[str, Any]]:
    """The header's length and text, and what it says."""
    end = _LENGTH + int.from_bytes(raw[:_LENGTH].tobytes(), "little")
    if end > len(raw):
        raise refusal(path, f"it has {len(raw)} bytes and no whole header: truncated, or no safetensors file", AGAIN)
    header = raw[:end].tobytes()
    try:
        entries = json.loads(header[_LENGTH:])
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"its header is no JSON ({error}): damaged, or no safetensors file", AGAIN) from None
    if not isinstance(entries, dict):
        raise refusal(path, f"its header is a {type(entries).__name__}; it must be an object", AGAIN)
    return header, entries


def facts_in(path: Path, metadata: Any) -> tuple[Facts, str]:
    """What the metadata say, and the checksum."""
    given = metadata if isinstance(metadata, dict) else {}
    if given.get("format") != FORMAT:
        raise refusal(path, f"its format is {given.get('format')!r}; it must be {FORMAT!r}", "give a prompt file")
    if given.get("version") != VERSION:
        raise refusal(
            path,
            f"it is of version {given.get('version')!r}, and this kvproof reads version {VERSION!r}",
            "use the kvproof that wrote it, or save the prompt again",
        )
    try:
        return _facts_from(given), str(given["checksum"])
    except KeyError as error:
        raise refusal(path, f"its metadata lack {error}", AGAIN) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise refusal(path, f"its metadata are no prompt's: {error}", AGAIN) from None


def _facts_from(given: dict[str, Any]) -> Facts:
    fields = json.loads(given["geometry"])
    geometry = Geometry(**{**fields, "mrope_sections": tuple(fields["mrope_sections"])})
    rope = json.loads(given["rope"])
    mode, numbers = rope["mode"], (int(given["positions"]), rope["delta"], rope["media_length"])
    if mode not in get_args(Mode):
        raise ValueError(f"rope mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}")
    if not all(type(n) is int for n in numbers) or numbers[0] < 1 or numbers[2] < 0:
        raise ValueError(f"positions, rope delta and media_length are {numbers}; they must be integers in range")
    if numbers[2] and mode != "media":
        raise ValueError(f"rope mode {mode!r} takes no triples, but media_length is {numbers[2]}")
    return Facts(
        geometry=geometry,
        positions=numbers[0],
        mode=mode,
        delta=numbers[1],
        media_length=numbers[2],
        weights_digest=given["weights"],
    )


def require_tensors(path: Path, facts: Facts, entries: dict[str, Any]) -> None:
    """Raise unless the header names the tensors that a prompt of these facts has."""
    if facts.geometry.layers > len(entries):  # before anything is made for each layer that is claimed
        few = f"it holds {len(entries)} tensors, too few for {facts.geometry.layers} layers"
        raise refusal(path, few, AGAIN)
    wanted = facts.tensors()
    for name in wanted:
        if name not in entries:
            raise refusal(path, f"it lacks tensor {name}, which every prompt of its geometry has", AGAIN)
    for name, entry in entries.items():
        if name not in wanted:
            raise refusal(path, f"it holds tensor {name!r}, which no prompt of its geometry has", AGAIN)
        dtype, shape = wanted[name]
        found = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (entry, None)
        if found != (dtype, list(shape)):
            wrong = f"tensor {name} is {found[0]} {found[1]}; it must be {dtype} {list(shape)}"
            raise refusal(path, wrong, AGAIN)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
