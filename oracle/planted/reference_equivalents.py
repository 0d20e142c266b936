"""Mutants of the reference that change no result, and why: each was looked at."""
# ruff: noqa: E501 - source lines, whole

from __future__ import annotations

from collections.abc import Mapping

from .equivalent_mutants import Key

EQUIVALENT: Mapping[str, tuple[Key, ...]] = {
    "NumPy takes any negative extent as the one that is unknown.": (
        ("attention.py", "grouped = q.reshape(keys.shape[1], -1, width)", "1", "2", 1),
        (
            "attention.py",
            "k, v = (x[table].reshape(-1, *x.shape[2:]).astype(np.float64) for x in (keys, values))",
            "1",
            "2",
            0,
        ),
        ("chunks.py", "return rows.reshape(-1, TILE, *rows.shape[1:])", "1", "2", 0),
        ("pool.py", "positions = (blocks[:, None] * block + np.arange(block)).reshape(-1)", "1", "2", 0),
        (
            "select.py",
            "listed = (blocks[:, None] * geometry.block + np.arange(geometry.block)).reshape(-1)",
            "1",
            "2",
            0,
        ),
    ),
    "Positions, their sums with a delta, and the axes of a media row all fit int32.": (
        (
            "chunks.py",
            "yield np.array([row]), lists.ids[row, chunk * CHUNK :][: count[row]].astype(np.int64)",
            "int64",
            "int32",
            0,
        ),
        ("pool.py", "blocks = np.arange(pos0 // block, (pos0 + rows) // block, dtype=np.int64)", "int64", "int32", 0),
        ("prep.py", "positions = pos0 + np.arange(rows, dtype=np.int64)", "int64", "int32", 0),
        ("prep.py", "triples = rope.triples[np.where(inside, positions, 0)].astype(np.int64)", "int64", "int32", 0),
    ),
    "NumPy counts in int64 anyway, on the platforms that kvproof runs on.": (
        (
            "layout.py",
            "return start[:, None] + np.arange(self.heads, dtype=np.int64) * self.head_stride",
            ", dtype=np.int64",
            "",
            0,
        ),
        (
            "pool.py",
            "blocks = np.arange(pos0 // block, (pos0 + rows) // block, dtype=np.int64)",
            ", dtype=np.int64",
            "",
            0,
        ),
        ("prep.py", "positions = pos0 + np.arange(rows, dtype=np.int64)", ", dtype=np.int64", "", 0),
        (
            "results.py",
            "return (pos0 + 1 + np.arange(rows, dtype=np.int64)) // geometry.block",
            ", dtype=np.int64",
            "",
            0,
        ),
    ),
    "A shortcut that calls without sparse rows may take: the way around it gives the same.": (
        ("results.py", "if not sparse.any() and nk.min(initial=0) >= 0:", "0", "1", 0),
        ("results.py", "if not sparse.any() and nk.min(initial=0) >= 0:", ">=", ">", 0),
        ("results.py", "if not sparse.any() and nk.min(initial=0) >= 0:", "0", "1", 1),
        ("results.py", "return most", "return most", "pass", 0),
    ),
    "The dtype that NumPy comes to without it: a quotient of integers is float64, and so is a comparison with float64.": (
        (
            "geometry.py",
            "exponent = -np.arange(self.rotary_half, dtype=np.float64) / self.rotary_half",
            ", dtype=np.float64",
            "",
            0,
        ),
        ("numerics.py", "exact = np.asarray(x, dtype=np.float64)", ", dtype=np.float64", "", 0),
        ("numerics.py", "back = near.astype(np.float64)", "float64", "float32", 0),
    ),
    "Differs only where the pair is a multiple of 3, which no axis but t has.": (
        (
            "prep.py",
            "return np.where((pairs % 3 == 1) & (pairs < 3 * h), 1, np.where((pairs % 3 == 2) & (pairs < 3 * w), 2, 0))",
            "<",
            "<=",
            0,
        ),
        (
            "prep.py",
            "return np.where((pairs % 3 == 1) & (pairs < 3 * h), 1, np.where((pairs % 3 == 2) & (pairs < 3 * w), 2, 0))",
            "<",
            "<=",
            1,
        ),
    ),
    "An array of no elements.": (
        (
            "geometry.py",
            "triples: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 3), np.int32))",
            "zeros",
            "ones",
            0,
        ),
        (
            "results.py",
            "np.zeros((rows, 0), np.int32), counts.astype(np.int32), np.zeros(rows, np.int32), longest=most, end=most",
            "zeros",
            "ones",
            0,
        ),
    ),
    "The bit is shifted out.": (
        ("numerics.py", "_SIGN = np.uint32(0x8000_0000)", "0x8000_0000", "0x80000001", 0),
        ("numerics.py", "_QUIET_NAN = np.uint32(0x7FC0_0000)", "0x7FC0_0000", "0x7fc00001", 0),
    ),
    "It is written over: each query row is one of a stream's.": (
        ("attention.py", "out = np.zeros(q.shape, np.float64)", "zeros", "ones", 0),
    ),
    "One entry more than is read.": (
        ("attention.py", "starts = np.arange(len(lengths) + 1) if query_start is None else query_start", "1", "2", 0),
    ),
    "Keys that fill up a tile have weight 0, whatever their values are.": (
        ("chunks.py", "rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]))])", "zeros", "ones", 0),
    ),
    "One page is named once, so counting the names finds nothing.": (
        ("layout.py", "if np.bincount(used).max() > 1:", ">", ">=", 0),
    ),
    "Equal steps, each taken equally often, are those of one row of one head: two would lie on each other.": (
        (
            "layout.py",
            "if (self.head_stride, self.heads) > (self.row_stride, self.rows_per_page):",
            ">",
            ">=",
            0,
        ),
    ),
    "0 divided by it is 0.": (
        (
            "merge.py",
            "return bf16(np.where(empty, 0.0, total.o) / np.where(empty, 1.0, total.l[..., None]))",
            "1.0",
            "2.0",
            0,
        ),
    ),
    "The last axis of two is axis 1, and the last of one element is element 0.": (
        ("prep.py", "half = angle.shape[-1]", "-", "", 0),
        ("scores.py", 'pooled = widen(cache.read("pooled", np.arange(complete[-1])))[:, 0]', "0", "(0) - 1", 0),
    ),
    "The other side of `max` is larger: at least 1 chunk, and 0 positions.": (
        ("results.py", "return _chunks_of(int(nk.max(initial=0)))", "0", "1", 0),
        ("results.py", "return max(dense_end, int(lists.ids[used].max(initial=-1)) + 1)", "1", "2", 0),
    ),
}
"""Reasons, each with the mutants that it holds for."""

_BY_KEY = {key: reason for reason, keys in EQUIVALENT.items() for key in keys}


def reason_of(file: str, text: str, old: str, new: str, nth: int) -> str | None:
    """Why this change of a source line changes nothing; None where a test should see it."""
    return _BY_KEY.get((file, text, old, new, nth))
