"""What the tensors of a fixture file are: name, type, shape, how a result is held against them, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .operations import AHEAD, OPERATIONS

Gate = Literal["exact", "bits", "bound"]
"""How a tensor is judged: "exact" follows from the inputs in any arithmetic, "bits" from the arithmetic of
docs/kernels.md, and "bound" allows each element its own interval."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What the tensors of one name are.

    Attributes:
        dtype: by its safetensors name.
        shape: extents, by name; docs/fixtures.md has them.
        gates: how a result is held against it; none for an input.
        meaning: in a line.
        per_stream: every stream has one, named "stream0." and on.
        only: in files of this kind only.
    """

    dtype: str
    shape: tuple[str, ...]
    meaning: str
    gates: tuple[Gate, ...] = ()
    per_stream: bool = True
    only: Literal["contiguous", "paged"] | None = None

    def stands_in(self, *, paged: bool) -> bool:
        """Whether files with or without pages hold it."""
        return self.only is None or (self.only == "paged") == paged

    def general(self, name: str) -> str:
        """How the manifest calls it: "stream*." stands for any stream."""
        return f"stream*.{name}" if self.per_stream else name

    def about(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "gates": list(self.gates),
            "meaning": self.meaning,
        }


_BOTH: tuple[Gate, ...] = ("bits", "bound")
_EXACT: tuple[Gate, ...] = ("exact",)
_HEADS = ("rows", "query_heads", "head_dim")
_INDEX = ("rows", "index_heads", "index_dim")


def _weight(extent: str, meaning: str) -> Tensor:
    return Tensor(dtype="F32", shape=(extent,), meaning=meaning, per_stream=False)


def _arena(when: str, gates: tuple[Gate, ...] = ()) -> Tensor:
    return Tensor(
        dtype="BF16",
        shape=("pages", "page_elements"),
        meaning=f"the whole arena, every layer and page, {when}",
        gates=gates,
        per_stream=False,
        only="paged",
    )


def _history(rows: str, heads: str, width: str, meaning: str) -> Tensor:
    """Paged files have it in the arena."""
    return Tensor(dtype="BF16", shape=(rows, heads, width), meaning=meaning, only="contiguous")


def _partials(kernel: str, rows: str, chunks: str, of: str) -> dict[str, Tensor]:
    shape = (rows, chunks, "query_heads")
    return {
        f"{kernel}.o": Tensor(
            dtype="F32",
            shape=(*shape, "head_dim"),
            meaning=f"{of}: sum of bf16(exp(s - m)) * value over a chunk's keys; 0 without keys",
            gates=_BOTH,
        ),
        f"{kernel}.m": Tensor(
            dtype="F32", shape=shape, meaning=f"{of}: largest score s of a chunk; -inf without keys", gates=_BOTH
        ),
        f"{kernel}.l": Tensor(
            dtype="F32",
            shape=shape,
            meaning=f"{of}: sum of exp(s - m) over them; 0 without keys",
            gates=_BOTH,
        ),
    }


def _lists(kernel: str, scores: str) -> dict[str, Tensor]:
    return {
        f"{kernel}.ids": Tensor(
            dtype="I32",
            shape=("rows", "list_capacity"),
            meaning=f"a sparse row's positions in list order, from {scores}; -1 behind them and over a dense row",
            gates=_EXACT,
        ),
        f"{kernel}.nk": Tensor(dtype="I32", shape=("rows",), meaning="keys of each row's list", gates=_EXACT),
        f"{kernel}.sparse": Tensor(
            dtype="I32", shape=("rows",), meaning="1 where the row reads ids, else 0", gates=_EXACT
        ),
    }


_INPUTS = {
    "weights.q_scale": _weight("head_dim", "norm weight of the queries"),
    "weights.k_scale": _weight("head_dim", "norm weight of the keys"),
    "weights.i_scale": _weight("index_dim", "norm weight of the indexer queries"),
    "weights.pool_scale": _weight("index_dim", "norm weight of the pooled rows"),
    "weights.inv_freq": _weight("rotary_half", "rotary frequencies, radians per position"),
    "in.projection": Tensor(
        dtype="BF16",
        shape=("rows", "projection_width"),
        meaning="the window's rows: each query head, then its gate; keys; values; indexer queries; indexer key",
    ),
    "in.triples": Tensor(
        dtype="I32", shape=("media_length", "axes"), meaning="(t, h, w) positions of a media prompt; empty otherwise"
    ),
    "in.close_scores": Tensor(
        dtype="F32", shape=("rows", "score_blocks"), meaning="scores that differ in their last bits only, many equal"
    ),
    "in.keys": _history("cached", "kv_heads", "head_dim", "keys of positions 0 to pos0 - 1, rotated"),
    "in.values": _history("cached", "kv_heads", "head_dim", "values of positions 0 to pos0 - 1"),
    "in.index_keys": _history("cached", "one", "index_dim", "raw indexer keys of positions 0 to pos0 - 1"),
    "in.pooled": _history("cached_blocks", "one", "index_dim", "pooled rows of the blocks complete before row 0"),
    "in.table": Tensor(
        dtype="I32",
        shape=("table",),
        meaning="page table: physical page of each logical page; entries past the stream's end must not be used",
        only="paged",
    ),
    "arena.before": _arena("before the window"),
    "arena.after": _arena("after prep and pool of every stream; all else is unchanged", ("bits",)),
}

WANTED = {
    "prep.q": Tensor(dtype="BF16", shape=_HEADS, meaning="queries, normed and rotated", gates=_BOTH),
    "prep.iq": Tensor(dtype="BF16", shape=_INDEX, meaning="indexer queries, normed and rotated", gates=_BOTH),
    "prep.keys": Tensor(
        dtype="BF16", shape=("rows", "kv_heads", "head_dim"), meaning="stored keys, normed and rotated", gates=_BOTH
    ),
    "prep.values": Tensor(
        dtype="BF16", shape=("rows", "kv_heads", "head_dim"), meaning="stored values, copied", gates=_EXACT
    ),
    "prep.index_keys": Tensor(
        dtype="BF16", shape=("rows", "one", "index_dim"), meaning="stored raw indexer keys, copied", gates=_EXACT
    ),
    "pool.pooled": Tensor(
        dtype="BF16",
        shape=("completed", "one", "index_dim"),
        meaning="pooled rows of the blocks that the window completes, from pos0 / block on",
        gates=_BOTH,
    ),
    "scores.scores": Tensor(
        dtype="F32",
        shape=("rows", "score_blocks"),
        meaning="block scores; NaN where nothing is computed: dense rows, blocks that the row does not see whole",
        gates=_BOTH,
    ),
    **_lists("select", "the scores here"),
    **_lists("select_close", "in.close_scores"),
    **_partials("chunks", "rows", "chunks", "chunks and chunks_ahead"),
    "merge.out": Tensor(dtype="BF16", shape=_HEADS, meaning="attention rows, from the chunks here", gates=_BOTH),
    "gate.gated": Tensor(dtype="BF16", shape=_HEADS, meaning="out * sigmoid(gate), from the rows here", gates=_BOTH),
    **_partials("dense", "dense_rows", "dense_chunks", "the last rows over all keys up to themselves, both ways"),
    "dense.out": Tensor(
        dtype="BF16",
        shape=("dense_rows", "query_heads", "head_dim"),
        meaning="plain causal grouped-query attention of the last rows of prep.q, by chunks and merge",
        gates=_BOTH,
    ),
}


def _ends(name: str, tensor: Tensor) -> dict[str, Tensor]:
    def end(which: str) -> Tensor:
        meaning = f"{which} that an element of want.{name} may have; NaN where it must be NaN"
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, meaning=meaning)

    return {f"low.{name}": end("least value"), f"high.{name}": end("largest value")}


TENSORS: dict[str, Tensor] = {
    **_INPUTS,
    **{f"want.{name}": tensor for name, tensor in WANTED.items()},
    **{end: t for name, x in WANTED.items() if "bound" in x.gates for end, t in _ends(name, x).items()},
}
"""Every tensor of a file, without its stream."""

SAME = {f"{ahead}.{name}": f"{plain}.{name}" for ahead, plain in AHEAD.items() for name in ("o", "m", "l")}
"""Outputs that must have the bits of another, and have no tensor of their own."""

KNOWN = tuple(op for op in OPERATIONS if any(name.startswith(f"{op.name}.") for name in (*WANTED, *SAME)))
"""Operations whose results a file holds; one that is new to kvproof is not among them until the format has it."""
