"""A set of fixture files on disk: safetensors files and their manifest, written whole or not at all, read with care.

Nothing here knows what a tensor means. The bytes of a file follow from its contents alone: keys are sorted, tensors
stand by falling element size and then by name, and there is no date. docs/fixtures.md has the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..reference.layout import BF16
from .peer import FixtureError

FORMAT = "kvproof fixtures"
VERSION = 1
MANIFEST = "manifest.json"

DTYPES: dict[str, np.dtype[Any]] = {"BF16": BF16, "F32": np.dtype(np.float32), "I32": np.dtype(np.int32)}
"""Element types by their safetensors names."""

ALIGN = 8
"""A header ends on a multiple of this many bytes, so that each tensor is aligned to its elements."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class File:
    """One safetensors file.

    Attributes:
        name: in its folder, with the suffix.
        metadata: strings, by name.
        tensors: bf16, fp32 or int32, by name.
    """

    name: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, npt.NDArray[Any]]


def pack(file: File) -> bytes:
    """The bytes of a file: header length (8 bytes, little-endian), JSON header filled up with spaces, the tensors."""
    names = sorted(file.tensors, key=lambda name: (-file.tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(file.metadata.items()))}
    parts, end = [], 0
    for name in names:
        array = np.ascontiguousarray(file.tensors[name])
        parts.append(array.tobytes())
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def write_set(folder: Path, files: Iterable[File], about: Mapping[str, Any]) -> list[Path]:
    """Write a set of files and their manifest as a folder, whole or not at all; an older set there is replaced.

    Args:
        files: taken one at a time, while they are written.
        about: what the manifest says beside format, version and files.

    Returns:
        The files written, the manifest last.

    Raises:
        FixtureError: the folder holds something that is no set of ours, or its parent is missing; nothing was changed.
    """
    folder = folder.resolve()
    _require_ours(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as draft:
        fresh = Path(draft) / "new"
        fresh.mkdir()
        entries = [_write(fresh, file) for file in files]
        manifest = {"format": FORMAT, "version": VERSION, **about, "files": entries}
        (fresh / MANIFEST).write_text(_json(manifest), encoding="utf-8")
        _replace(folder, fresh, Path(draft) / "old")
    return [folder / name for name in (*(entry["name"] for entry in entries), MANIFEST)]


def _write(folder: Path, file: File) -> dict[str, Any]:
    """Write one file; returns its manifest entry."""
    data = pack(file)
    (folder / file.name).write_bytes(data)
    return {
        "name": file.name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "tensors": {
            name: {"dtype": _NAMES[array.dtype], "shape": list(array.shape)}
            for name, array in sorted(file.tensors.items())
        },
    }


def _replace(folder: Path, fresh: Path, old: Path) -> None:
    """Move the new folder to its place; what was there comes back if that fails."""
    if not folder.exists():
        os.rename(fresh, folder)
        return
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        os.rename(old, folder)
        raise


def _require_ours(folder: Path) -> None:
    """Raise unless the folder may be written: absent, empty, or a set of ours with nothing else in it."""
    if not folder.parent.is_dir():
        raise FixtureError(f"{folder}: there is no folder {folder.parent}; make it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FixtureError(f"{folder} is a file; give a new or empty folder")
    present = sorted(path.name for path in folder.iterdir())
    if not present:
        return
    try:
        entries = _manifest(folder)["files"]
        known = {MANIFEST, *(str(entry["name"]) for entry in entries)}
    except (FixtureError, KeyError, TypeError):
        raise FixtureError(
            f"{folder} holds {_few(present)} and was not written by `fixtures write`; give a new or empty folder"
        ) from None
    foreign = [name for name in present if name not in known]
    if foreign:
        raise FixtureError(
            f"{folder} holds {_few(foreign)} beside the set that `fixtures write` wrote; move it away first"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _json(value: Any) -> str:
    """JSON over lines, with lists of numbers or words, and leaves of a tree, on one line each."""
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    return re.sub(r"\{\s+([^{}]*?)\s+\}", lambda found: "{" + re.sub(r"\n\s*", " ", found[1]) + "}", text) + "\n"


@dataclass(frozen=True, kw_only=True, eq=False)
class FixtureSet:
    """A set whose manifest and bytes have been checked; see `open_set`.

    Attributes:
        folder: where it is.
        manifest: as read.
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The files, in the manifest's order."""
        return tuple(entry["name"] for entry in self.manifest["files"])

    def load(self, name: str) -> File:
        """Read one file.

        Raises:
            FixtureError: it is no safetensors file, of another version, or its tensors are not those of the manifest.
        """
        entry = next(entry for entry in self.manifest["files"] if entry["name"] == name)
        try:
            with safe_open(self.folder / name, "numpy") as opened:
                metadata = opened.metadata() or {}
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError) as error:  # TypeError: an element type that NumPy lacks
            raise FixtureError(f"{name}: not a whole safetensors file: {error}") from None
        _require_format(name, metadata.get("format"))
        _require_version(name, metadata.get("version"), str(VERSION))
        _require_tensors(name, tensors, entry["tensors"])
        return File(name=name, metadata=metadata, tensors=tensors)


def holds_set(folder: Path) -> bool:
    """Whether a folder is a set of ours, maybe a damaged one: it has a manifest, or a file that says so."""
    if (folder / MANIFEST).exists():
        return True
    return folder.is_dir() and any(_says_ours(file) for file in sorted(folder.glob("*.safetensors")))


def _says_ours(file: Path) -> bool:
    try:
        with safe_open(file, "numpy") as opened:
            return (opened.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


def open_set(folder: Path) -> FixtureSet:
    """Read a set's manifest, and hold the folder against it: every file there, none else, each with its bytes.

    Raises:
        FixtureError: the manifest is missing, damaged or of another version, or files are; each is named.
    """
    manifest = _manifest(folder)
    _require_version(MANIFEST, manifest.get("version"), VERSION)
    entries = manifest.get("files")
    if not isinstance(entries, list) or not entries:
        raise FixtureError(f"{MANIFEST}: lists no files")
    faults = [fault for entry in entries if (fault := _fault(folder, entry)) is not None]
    known = {MANIFEST, *(str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry)}
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    faults += [f"{name}: is not in {MANIFEST}; move it away" for name in extra]
    if faults:
        raise FixtureError("\n".join(faults))
    return FixtureSet(folder=folder, manifest=manifest)


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest, of this format but of any version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FixtureError(f"{MANIFEST}: is missing from {folder}") from None
    except (ValueError, OSError) as error:
        raise FixtureError(f"{MANIFEST}: not a readable JSON file: {error}") from None
    if not isinstance(manifest, dict):
        raise FixtureError(f"{MANIFEST}: holds a {type(manifest).__name__}; it must hold an object")
    _require_format(MANIFEST, manifest.get("format"))
    return manifest


def _require_format(name: str, found: Any) -> None:
    if found != FORMAT:
        raise FixtureError(f"{name}: its format is {found!r}; it must be {FORMAT!r}")


def _require_version(name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise FixtureError(
            f"{name}: is of version {found!r}, and this kvproof reads version {wanted!r}; "
            "use the kvproof that wrote it, or write the set again"
        )


def _fault(folder: Path, entry: Any) -> str | None:
    """What is wrong with a file, held against its manifest entry; None where nothing is."""
    if not isinstance(entry, dict) or not {"name", "bytes", "sha256", "tensors"} <= entry.keys():
        return f"{MANIFEST}: an entry of files lacks one of name, bytes, sha256, tensors: {entry!r:.80}"
    name = str(entry["name"])
    if Path(name).name != name:
        return f"{MANIFEST}: names the file {name!r}; files lie in the folder itself"
    file = folder / name
    if not file.is_file():
        return f"{name}: is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        what = "truncated" if size < entry["bytes"] else "too long"
        return f"{name}: is {what}: {size} bytes, {MANIFEST} says {entry['bytes']}"
    found = _sha256(file)
    if found != entry["sha256"]:
        return f"{name}: is damaged: its sha256 is {found}, {MANIFEST} says {entry['sha256']}"
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _require_tensors(file: str, tensors: Mapping[str, npt.NDArray[Any]], wanted: Mapping[str, Any]) -> None:
    """Raise unless a file's tensors are those of the manifest."""
    for name in wanted:
        if name not in tensors:
            raise FixtureError(f"{file}: lacks tensor {name}, which {MANIFEST} lists")
    for name, array in tensors.items():
        if name not in wanted:
            raise FixtureError(f"{file}: holds tensor {name}, which {MANIFEST} does not list")
        found = {"dtype": _NAMES.get(array.dtype, str(array.dtype)), "shape": list(array.shape)}
        if found != wanted[name]:
            raise FixtureError(f"{file}: tensor {name} is {_form(found)}, {MANIFEST} says {_form(wanted[name])}")


def _form(entry: Any) -> str:
    return f"{entry['dtype']} {entry['shape']}" if isinstance(entry, dict) and len(entry) == 2 else repr(entry)
