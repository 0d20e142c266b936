"""The CUDA sources as text: read from the package, edited by who plants a fault, cut into families for a backend."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import numpy as np

from ..reference.geometry import TILE, Geometry
from .backend import Source

FAMILIES = ("prep", "pool", "scores", "select", "chunks", "merge", "gate")
"""Kernel families, one .cu file each."""


@functools.cache
def _packaged() -> Mapping[str, str]:
    root = resources.files(__package__)
    texts = {f.name: f.read_text() for f in (root / "cuda").iterdir() if f.name.endswith((".cu", ".cuh"))}
    texts["lanes.h"] = (root / "host" / "lanes.h").read_text()
    return texts


@dataclass(frozen=True)
class KernelSources:
    """Every file of the kernels, by name."""

    texts: Mapping[str, str] = field(default_factory=_packaged)

    def edit(self, file: str, old: str, new: str) -> KernelSources:
        """These sources with one place changed.

        Raises:
            KeyError: there is no such file.
            ValueError: `old` is not there, or more than once; nothing is guessed.
        """
        if file not in self.texts:
            raise KeyError(f"no kernel source {file!r}; there are {', '.join(sorted(self.texts))}")
        found = self.texts[file].count(old)
        if found != 1:
            raise ValueError(f"{file} holds this text {found} times, it must hold it once: {old!r}")
        return KernelSources({**self.texts, file: self.texts[file].replace(old, new)})

    def family(self, name: str, geometry: Geometry, *, threads: int, gpu_split: bool = False) -> Source:
        """One family at a geometry, for blocks of this many threads; see `Engine` for `gpu_split`."""
        headers = {file: text for file, text in self.texts.items() if not file.endswith(".cu")}
        split: dict[str, int | str | None] = {"KVP_GPU_SPLIT": 1} if gpu_split else {}
        given = {**defines(geometry, threads), **split}
        return Source(name=name, text=self.texts[f"{name}.cu"], headers=headers, defines=given)


def defines(geometry: Geometry, threads: int) -> dict[str, int | str | None]:
    """The preprocessor definitions of cuda/common.cuh; fp32 constants are rounded here, once."""
    g = geometry
    return {
        "KVP_QUERY_HEADS": g.query_heads,
        "KVP_KV_HEADS": g.kv_heads,
        "KVP_HEAD_DIM": g.head_dim,
        "KVP_INDEX_HEADS": g.index_heads,
        "KVP_INDEX_DIM": g.index_dim,
        "KVP_BLOCK": g.block,
        "KVP_TOP_BLOCKS": g.top_blocks,
        "KVP_ROTARY_HALF": g.rotary_half,
        "KVP_SECTION_H": g.mrope_sections[1],
        "KVP_SECTION_W": g.mrope_sections[2],
        "KVP_EPS": _fp32(g.eps),
        "KVP_SCALE": _fp32(g.head_dim**-0.5),
        "KVP_THREADS": threads,
    }


def staged_bytes(geometry: Geometry) -> int:
    """Bytes of a tile of keys in shared memory: rows padded by 16 bytes, as cuda/tile.cuh lays them out."""
    return TILE * (geometry.head_dim + 8) * 2


def _fp32(x: float) -> str:
    """An fp32 literal that every compiler reads as exactly this value."""
    return f"{np.float32(x):.9e}f"
