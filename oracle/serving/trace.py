"""What one served prompt gave, as bytes, and the comparison of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...fast import Stream
from ...fast.page_runs import part_rows
from ...reference.layout import PARTS, LayerCache, Part
from ...reference.results import Bf16Array
from ..compare import Difference, Site, compare_bits

_OUTPUT_AXES = ("position", "head", "element")


@dataclass(kw_only=True, eq=False)
class Trace:
    """What a session gave.

    Attributes:
        stream: number of its prompt.
        first: position of the first output row; what was restored has none.
        tokens: the prompt's and the generated ones.
        outputs: per layer, runs of the kept positions' gated rows, bf16 [n, QH, D].
        caches: per layer, each part's rows at the end, bf16 [rows, heads, width].
        stale: what was found behind the last row, in words.
        places: per layer, the cache at the end, for its layout and a copy of its table.
        pages: of the stream at the end.
    """

    stream: int
    first: int = 0
    tokens: list[int] = field(default_factory=list)
    outputs: list[list[Bf16Array]] = field(default_factory=list)
    caches: list[dict[Part, Bf16Array]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    places: list[LayerCache] = field(default_factory=list)
    pages: int = 0

    @property
    def end_of_outputs(self) -> int:
        """One past the last position that has an output row; 0 where none has."""
        runs = self.outputs[0] if self.outputs else []
        return self.first + sum(map(len, runs)) if runs else 0

    @property
    def scattered(self) -> bool:
        """Whether its page table at the end is out of order, so that who does not read it goes wrong."""
        table = self.places[0].table if self.places else None
        return table is not None and not in_order(table[: self.pages])

    def add(self, layer: int, rows: Bf16Array) -> None:
        """Output rows of the next positions."""
        self.outputs[layer].append(rows)

    def output(self, layer: int) -> Bf16Array:
        """A layer's outputs, bf16 [positions, QH, D]."""
        runs = self.outputs[layer]
        if len(runs) > 1:
            self.outputs[layer] = runs = [np.concatenate(runs)]
        return runs[0]

    def look_behind(self, stream: Stream) -> None:
        """Note the bytes that are not zeros behind the stream's last row, in its own pages."""
        self._look_behind(stream, host_caches(stream))

    def end(self, stream: Stream) -> None:
        """Take the stream's cache down."""
        self.places = host_caches(stream)
        self.pages = len(stream.pages)
        self._look_behind(stream, self.places)
        for length, cache in zip(stream.lengths, self.places, strict=True):
            rows = {part: cache.read(part, np.arange(part_rows(cache.layout, part, length))) for part in PARTS}
            self.caches.append(rows)

    def _look_behind(self, stream: Stream, caches: Sequence[LayerCache]) -> None:
        held = len(stream.pages) * stream.pool.page_size
        for length, cache in zip(stream.lengths, caches, strict=True):
            for part in PARTS:
                owned, end = (part_rows(cache.layout, part, n) for n in (length, held))
                behind = cache.read(part, np.arange(owned, end))
                wrong = np.flatnonzero(behind.view(np.uint16).any(axis=(1, 2)))
                if len(wrong):
                    self.stale.append(
                        f"layer {cache.layer} {part}: row {owned + int(wrong[0])} is not zeros, though the layer holds "
                        f"{length} positions; so are {len(wrong)} rows"
                    )


def in_order(table: Sequence[int] | npt.NDArray[np.int32]) -> bool:
    """Whether a page table never descends; one of a single page, whether it is the first."""
    return not table[0] if len(table) == 1 else bool((np.diff(table) >= 0).all())


def host_caches(stream: Stream) -> list[LayerCache]:
    """A stream's cache, layer by layer, with a copy of its table, on the host; the host's own arena is not copied."""
    engine, first = stream.pool.engine, stream.cache(0)
    buffer = first.buffer if engine.backend.device is None else engine.download(first.buffer)
    table = None if first.table is None else engine.download(first.table)
    layers = range(len(stream.lengths))
    return [dataclasses.replace(stream.cache(layer), buffer=buffer, table=table) for layer in layers]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison of two traces found.

    Attributes:
        bytes: compared.
        differences: in words, the first of each tensor; [] where all is equal.
        tensors: that differ.
        tokens_differ: whether the text does.
    """

    bytes: int
    differences: tuple[str, ...]
    tensors: tuple[str, ...]

    @property
    def tokens_differ(self) -> bool:
        """Whether the text differs."""
        return "tokens" in self.tensors


def compare_traces(got: Trace, want: Trace, *, tokens: int) -> Compared:
    """Tokens, every layer's outputs from `got.first` on, and every layer's cache, bit for bit.

    Args:
        tokens: of the prompt and to be generated. Where they are fewer than `want` has, its beginning is compared.
    """
    told: list[tuple[str, str]] = []
    size = 0
    for name, ours, theirs, axes, site in _tensors(got, want):
        size += ours.nbytes
        found = _difference(name, ours, theirs, axes, site)
        if found is not None:
            told.append((name, str(found)))
    told += shortcomings(got, tokens, len(want.outputs))
    return Compared(
        bytes=size,
        differences=tuple(words for _, words in told),
        tensors=tuple(name for name, _ in told),
    )


def shortcomings(trace: Trace, tokens: int, layers: int) -> list[tuple[str, str]]:
    """What a trace lacks, whatever it is compared with: the tensor, and words.

    Args:
        tokens: of the prompt and to be generated.
        layers: that it must tell of.
    """
    told: list[tuple[str, str]] = []
    if len(trace.tokens) != tokens:
        told.append(("tokens", f"tokens: {len(trace.tokens)}, but the prompt and what it was to generate are {tokens}"))
    rows = len(trace.tokens) - 1
    if trace.end_of_outputs != rows:
        told.append(("outputs", f"outputs end at position {trace.end_of_outputs}; {rows} positions have been run"))
    if (len(trace.outputs), len(trace.caches)) != (layers, layers):
        told.append(("layers", f"outputs of {len(trace.outputs)} and caches of {len(trace.caches)} layers of {layers}"))
    return told + [("rows behind the last", words) for words in trace.stale[:1]]


def _difference(
    name: str, ours: npt.NDArray[Any], theirs: npt.NDArray[Any], axes: tuple[str, ...], site: Site
) -> Difference | str | None:
    if ours.shape != theirs.shape:
        return f"{name}: {len(ours)} rows, but the plain contiguous run has {len(theirs)}"
    return compare_bits(name, ours, theirs, axes, site)


_Tensor: TypeAlias = tuple[str, npt.NDArray[Any], npt.NDArray[Any], tuple[str, ...], Site]


def _tensors(got: Trace, want: Trace) -> list[_Tensor]:
    text = Site(stream=got.stream, pos0=0)
    texts = [np.array(trace.tokens[: len(got.tokens)], np.int32) for trace in (got, want)]
    tensors: list[_Tensor] = [("tokens", texts[0], texts[1], ("position",), text)]
    for layer in range(len(got.outputs)):
        place = got.places[layer] if got.places else None
        site = Site(stream=got.stream, pos0=got.first, cache=place)
        theirs = want.output(layer)[got.first - want.first : len(got.tokens) - 1 - want.first]
        tensors.append((f"layer {layer} output", got.output(layer), theirs, _OUTPUT_AXES, site))
    for layer, rows in enumerate(got.caches):
        site = Site(stream=got.stream, pos0=0, cache=got.places[layer])
        for part, mine in rows.items():
            theirs = want.caches[layer][part][: part_rows(got.places[layer].layout, part, len(got.tokens) - 1)]
            row = "pooled row" if part == "pooled" else "position"
            tensors.append((f"layer {layer} {part}", mine, theirs, (row, "head", "element"), site))
    return tensors
