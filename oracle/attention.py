"""Plain paged grouped-query attention as other engines call it: one case, its arrays, and what they should give.

    decode:   kernel(q, keys, values, page_table, lengths)               one query row per stream
    prefill:  kernel(q, keys, values, page_table, lengths, query_start)  a stream's last rows, causal

    q            [rows, query_heads, head_dim], streams one behind the other
    keys, values [pages, page, heads, dim] or [pages, heads, page, dim]: views, perhaps of one array, perhaps padded
    page_table   int32 [streams, entries], physical page of each logical page; what lies past a stream's pages is noise
    lengths      int32 [streams], positions that each stream holds, its query rows included
    query_start  int32 [streams + 1], first row of each stream

The result is [rows, query_heads, head_dim] in q's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..reference import paged_attention
from ..reference.layout import KvLayout, KvStyle
from .arithmetic import Arithmetic
from .bounds import plain_attention
from .interval import Interval, stacked, widened

Array = npt.NDArray[Any]

Fill = Literal["zero", "nan", "inf", "huge", "other"]
FILLS: tuple[Fill, ...] = ("zero", "other", "huge", "inf", "nan")

Profile = Literal["normal", "heavy", "tied", "zeros", "tiny", "huge"]
PROFILES: tuple[Profile, ...] = ("normal", "heavy", "tied", "zeros", "tiny", "huge")

DType = Literal["bf16", "f16", "f32"]
DTYPES: dict[DType, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
_ROUNDOFF: dict[DType, tuple[float, float]] = {
    "bf16": (2.0**-8, 2.0**-134),
    "f16": (2.0**-11, 2.0**-25),
    "f32": (2.0**-24, 2.0**-150),
}

Part = Literal["keys", "values"]


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One call of a plain paged attention kernel; its repr builds it again.

    Attributes:
        query_heads, kv_heads, head_dim: shape of the attention.
        style, padding: layout of the pages, see `KvLayout`.
        page_size: positions of a page.
        lengths: positions that each stream holds.
        query_lengths: rows of each stream, its last; all 1 is decode.
        order: physical pages in the order in which they are handed to the streams, a permutation of all pages of the
            arena; what is left over is slack.
        tail: page table entries past each stream's pages; they name pages of other streams, or slack.
        fill: what every row holds that no kernel may read.
        profile: what the data look like.
        dtype: of q, keys, values and the result.
        seeds: of each stream's data, all different.

    Raises:
        ValueError: the fields do not fit each other; the message says which and what is allowed.
    """

    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    style: KvStyle = "nhd"
    padding: int = 0
    page_size: int = 4
    lengths: tuple[int, ...] = (1,)
    query_lengths: tuple[int, ...] = (1,)
    order: tuple[int, ...] = (0,)
    tail: int = 0
    fill: Fill = "zero"
    profile: Profile = "normal"
    dtype: DType = "bf16"
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.tail < 0 or min(self.seeds, default=0) < 0:
            raise ValueError(f"tail is {self.tail} and seeds are {self.seeds}; none may be negative")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads do not divide among {self.kv_heads} key/value heads")
        streams = len(self.lengths)
        if not streams or len(self.query_lengths) != streams or not len(set(self.seeds)) == len(self.seeds) == streams:
            raise ValueError(
                f"{streams} lengths, {len(self.query_lengths)} query lengths and seeds {self.seeds}; give one of each "
                "per stream, the seeds all different"
            )
        for length, rows in zip(self.lengths, self.query_lengths, strict=True):
            if not 1 <= rows <= length:
                raise ValueError(f"{rows} query rows of a stream of {length} positions; allowed are 1 to {length}")
        if sorted(self.order) != list(range(len(self.order))) or len(self.order) < sum(self.pages):
            raise ValueError(
                f"order {self.order} must be a permutation of the arena's pages, at least {sum(self.pages)}"
            )
        for name, value, allowed in (
            ("fill", self.fill, FILLS),
            ("profile", self.profile, PROFILES),
            ("dtype", self.dtype, tuple(DTYPES)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        self.layout  # noqa: B018  # its own checks

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each stream."""
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def layout(self) -> KvLayout:
        """Layout of the arena."""
        return KvLayout(
            style=self.style,
            pages=len(self.order),
            page_size=self.page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            padding=self.padding,
        )

    @property
    def decode(self) -> bool:
        """Whether every stream has one query row."""
        return all(rows == 1 for rows in self.query_lengths)

    @property
    def query_start(self) -> Array:
        """First row of each stream, and the end: int32 [streams + 1]."""
        return np.cumsum([0, *self.query_lengths], dtype=np.int32)

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """Physical pages of each stream, in its own order."""
        ends = np.cumsum([0, *self.pages])
        return tuple(self.order[a:b] for a, b in pairwise(ends))

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Each query row: its stream, its row in the stream's window, and the keys it reads."""
        return [
            (stream, row, length - rows + row + 1)
            for stream, (length, rows) in enumerate(zip(self.lengths, self.query_lengths, strict=True))
            for row in range(rows)
        ]

    def contiguous(self) -> AttentionCase:
        """The same streams in pages that lie in order, one stream behind the other, with nothing else in the arena."""
        return replace(self, order=tuple(range(sum(self.pages))), tail=0, fill="zero")

    def alone(self, stream: int) -> AttentionCase:
        """One stream by itself; its data stay the same."""
        pages = self.pages[stream]
        return replace(
            self,
            lengths=(self.lengths[stream],),
            query_lengths=(self.query_lengths[stream],),
            seeds=(self.seeds[stream],),
            order=tuple(range(pages)),
            tail=0,
            fill="zero",
        )

    @cached_property
    def streams(self) -> tuple[dict[str, Array], ...]:
        """Each stream's q [rows, QH, D] and keys, values [length, KH, D]; a stream's data follow from its seed."""
        return tuple(
            _stream_data(self, seed, length, rows)
            for seed, length, rows in zip(self.seeds, self.lengths, self.query_lengths, strict=True)
        )

    def page_table(self) -> Array:
        """int32 [streams, entries]; past a stream's pages stand pages that are not its own."""
        entries = max(self.pages) + self.tail
        table = np.empty((len(self.lengths), entries), np.int32)
        for stream, own in enumerate(self.tables):
            foreign = [page for page in self.order if page not in own] or [0]
            table[stream] = np.concatenate([own, np.resize(np.array(foreign), entries - len(own))])
        return table

    def csr(self) -> tuple[Array, Array, Array]:
        """The table as indptr [streams + 1], indices, last_page_len [streams], all int32."""
        indptr = np.cumsum([0, *self.pages], dtype=np.int32)
        indices = np.array([page for own in self.tables for page in own], np.int32)
        last = np.array([(length - 1) % self.page_size + 1 for length in self.lengths], np.int32)
        return indptr, indices, last

    def buffers(self) -> dict[str, Array]:
        """Fresh arena arrays: "keys" and "values", the same object where they are interleaved."""
        dtype = DTYPES[self.dtype]
        keys = _filled(self.layout.elements, self.fill, dtype)
        made = {"keys": keys, "values": keys if self.layout.interleaved else keys.copy()}
        for stream, own in enumerate(self.tables):
            for part in ("keys", "values"):
                rows = np.arange(self.lengths[stream])
                offsets = self.layout.part(part).offsets(rows, np.array(own, np.int32))
                made[part][offsets[..., None] + np.arange(self.head_dim)] = self.streams[stream][part]
        return made

    def arguments(self) -> dict[str, Array]:
        """Fresh arguments of a kernel, in order; `query_start` only where a stream has more than one row."""
        return self.build()[0]

    def build(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Fresh arguments, and the arenas behind their views, padding and all."""
        made = self.buffers()
        given = {
            "q": np.concatenate([stream["q"] for stream in self.streams]),
            "keys": self.layout.view(made["keys"], "keys"),
            "values": self.layout.view(made["values"], "values"),
            "page_table": self.page_table(),
            "lengths": np.array(self.lengths, np.int32),
        }
        arenas = {"arena of keys": made["keys"], "arena of values": made["values"]}
        return (given if self.decode else {**given, "query_start": self.query_start}), arenas

    def bound(self, arithmetic: Arithmetic) -> Interval:
        """Where every element of the result must lie: [rows, QH, D]."""
        made = [self.row_bound(row, arithmetic) for row in range(len(self.rows))]
        return stacked(made)

    def bound_of(self, given: dict[str, Array], arithmetic: Arithmetic) -> Interval:
        """Where the result must lie for other arguments: a control's."""
        keys, values = given["keys"], given["values"]
        if self.style.endswith("hnd"):
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        made = []
        for row, (stream, _, count) in enumerate(self.rows):
            count += int(given["lengths"][stream]) - self.lengths[stream]
            table = given["page_table"][stream, : -(-count // self.page_size)]
            k, v = (x[table].reshape(-1, *x.shape[2:])[:count] for x in (keys, values))
            made.append(self.row_bound(row, arithmetic, k, v))
        return stacked(made)

    def row_bound(
        self,
        row: int,
        arithmetic: Arithmetic,
        keys: Array | None = None,
        values: Array | None = None,
        scale: float | None = None,
        heads: Array | None = None,
    ) -> Interval:
        """Where one row must lie, [QH, D]; over other keys and values [n, KH, D], another scale or other heads."""
        stream, inner, count = self.rows[row]
        own = self.streams[stream]
        keys = own["keys"][:count] if keys is None else keys
        values = own["values"][:count] if values is None else values
        q, k, v = (x.astype(np.float64) for x in (own["q"][inner], keys, values))
        q = q if heads is None else q[heads]
        unrounded = plain_attention(q, k, v, self.head_dim**-0.5 if scale is None else scale, arithmetic)
        return widened(unrounded, *_ROUNDOFF[self.dtype])

    def reference(self, given: dict[str, Array]) -> Array:
        """What the float64 reference gives for a kernel's arguments: [rows, QH, D]."""
        return paged_attention(*given.values(), hnd=self.style.endswith("hnd"))

    def as_json(self) -> dict[str, Any]:
        """The case as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> AttentionCase:
        """The case that `as_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or does not fit.
        """
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            raise ValueError(f"not an attention case: fields {sorted(set(values) ^ known)} are missing or unknown")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**plain)


def _stream_data(case: AttentionCase, seed: int, length: int, rows: int) -> dict[str, Array]:
    rng = np.random.Generator(np.random.PCG64(seed))
    shape = (length, case.kv_heads, case.head_dim)
    q = rng.standard_normal((rows, case.query_heads, case.head_dim))
    keys, values = rng.standard_normal(shape), rng.standard_normal(shape)
    if case.profile == "heavy":  # a few keys take nearly all the weight
        keys[rng.integers(0, length, max(1, length // 16))] *= 16.0
    elif case.profile == "tied":  # every key scores the same
        keys[:] = keys[:1]
    elif case.profile == "zeros":
        keys[rng.random(shape) < 0.5] = -0.0
        values[rng.random(shape) < 0.5] = -0.0
    elif case.profile == "tiny":
        keys, values = keys * 2.0**-12, values * 2.0**-12
    elif case.profile == "huge":
        keys, values = keys * 2.0**6, values * 2.0**8
    dtype = DTYPES[case.dtype]
    return {"q": q.astype(dtype), "keys": keys.astype(dtype), "values": values.astype(dtype)}


def _filled(elements: int, fill: Fill, dtype: np.dtype[Any]) -> Array:
    if fill == "other":
        return np.random.Generator(np.random.PCG64(99)).standard_normal(elements).astype(dtype)
    top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    value = {"zero": 0.0, "nan": np.nan, "inf": np.inf, "huge": top}[fill]
    return np.full(elements, value, dtype)
