"""Mutants that change no result, and why: each was looked at."""
# ruff: noqa: E501 - source lines, whole

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Key: TypeAlias = tuple[str, str, str, str, int]
"""(file, source line stripped, old, new, which such change of such lines): it outlives a shift of lines."""

EQUIVALENT: Mapping[str, tuple[Key, ...]] = {
    "Only how many heads, keys or pieces a thread takes at a time: no sum depends on it.": (
        (
            "chunks.cu",
            "constexpr int score_heads = heads_per_thread(KVP_GROUP, score_rows, 12 / score_keys);",
            "12",
            "13",
            0,
        ),
        (
            "chunks.cu",
            "constexpr int score_heads = heads_per_thread(KVP_GROUP, score_rows, 12 / score_keys);",
            "/",
            "*",
            0,
        ),
        (
            "chunks.cu",
            "constexpr int value_run = run_of(pieces, KVP_HOST_OR(2, 1)), value_columns = pieces / value_run;",
            "2",
            "3",
            0,
        ),
        (
            "chunks.cu",
            "constexpr int value_heads = heads_per_thread(KVP_GROUP, value_columns, 12 / value_run);",
            "12",
            "13",
            0,
        ),
        (
            "chunks.cu",
            "constexpr int value_heads = heads_per_thread(KVP_GROUP, value_columns, 12 / value_run);",
            "/",
            "*",
            0,
        ),
        ("common.cuh", "for (int h = 1; h <= heads && h <= most; ++h) {", "<=", "<", 0),
        ("common.cuh", "for (int h = 1; h <= heads && h <= most; ++h) {", "<=", "<", 1),
        ("common.cuh", "if (heads / h * items_per_head <= KVP_THREADS) break;", "/", "*", 0),
        ("common.cuh", "if (heads / h * items_per_head <= KVP_THREADS) break;", "*", "+", 0),
        ("common.cuh", "if (heads / h * items_per_head <= KVP_THREADS) break;", "<=", "<", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", ">=", ">", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "4", "5", 1),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", ">=", ">", 1),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "2", "3", 1),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "%", "/", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "4", "5", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "4", "5", 2),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "%", "/", 1),
        (
            "chunks.cu",
            "constexpr int value_run = run_of(pieces, KVP_HOST_OR(2, 1)), value_columns = pieces / value_run;",
            "1",
            "2",
            0,
        ),
        ("common.cuh", "for (int h = 1; h <= heads && h <= most; ++h) {", "1", "2", 0),
        ("common.cuh", "for (int h = 1; h <= heads && h <= most; ++h) {", "&&", "||", 0),
        ("common.cuh", "if (heads % h) continue;", "%", "/", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "==", "!=", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "0", "1", 0),
        ("common.cuh", "return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;", "&&", "||", 0),
    ),
    "One item or turn more than there is work for, which the next line skips.": (
        (
            "chunks.cu",
            "constexpr int value_items = ceil_div(value_columns * (KVP_GROUP / value_heads), KVP_THREADS);",
            "/",
            "*",
            0,
        ),
        (
            "scores.cu",
            "constexpr int width = KVP_INDEX_DIM, stride = staged_stride(width), rows_at_once = KVP_HOST_OR(2, 1);",
            "1",
            "2",
            0,
        ),
        ("chunks.cu", "KVP_UNROLL for (int n = 0; n < value_items; ++n) {", "<", "<=", 0),
        ("chunks.cu", "KVP_UNROLL for (int n = 0; n < value_items; ++n) {", "<", "<=", 1),
    ),
    "It computes blocks past the last one; they are not stored.": (
        ("scores.cu", "if (complete <= KVP_TOP_BLOCKS || first >= complete) return;", ">=", ">", 0),
        ("scores.cu", "if (i >= count) continue;", ">=", ">", 0),
    ),
    "Differs only where both sides are equal, and then gives the same value.": (
        ("chunks.cu", "const int left = a.nk[row] - first, count = left < KVP_CHUNK ? left : KVP_CHUNK;", "<", "<=", 0),
        (
            "chunks.cu",
            "auto keys_in = [&](int tile) { return count - tile * KVP_TILE < KVP_TILE ? count - tile * KVP_TILE : KVP_TILE; };",
            "<",
            "<=",
            0,
        ),
        ("merge.cu", "const float top = m[part] > high ? m[part] : high;", ">", ">=", 0),
        ("select.cu", "int slot = before + (tie < wanted ? tie : wanted);", "<", "<=", 0),
        ("scores.cu", "const int count = complete - first < KVP_TILE ? complete - first : KVP_TILE;", "<", "<=", 0),
        ("chunks.cu", "const int tiles_here = count > 0 ? ceil_div(count, KVP_TILE) : 0;", ">", ">=", 0),
    ),
    "Differs only at a zero, where either branch gives the same bits.": (
        (
            "scores.cu",
            "KVP_UNROLL for (int h = 0; h < KVP_INDEX_HEADS; ++h) score = score + (dot[h][r] > 0.0f ? dot[h][r] : 0.0f);",
            ">",
            ">=",
            0,
        ),
        ("arithmetic.cuh", "KVP_UNROLL for (int i = 0; i < 8; ++i) r[i] = x[i] < 0.0f ? x[i] : -x[i];", "<", "<=", 1),
        (
            "arithmetic.cuh",
            "KVP_UNROLL for (int i = 0; i < 8; ++i) r[i] = (x[i] < 0.0f ? e[i] : 1.0f) / (1.0f + e[i]);",
            "<",
            "<=",
            1,
        ),
    ),
    "Differs only where i is a multiple of 3, which no axis but t has.": (
        ("rotary.cuh", "if (i % 3 == 1 && i < 3 * KVP_SECTION_H) axis = 1;", "<", "<=", 0),
        ("rotary.cuh", "if (i % 3 == 2 && i < 3 * KVP_SECTION_W) axis = 2;", "<", "<=", 0),
    ),
    "Every other thread of the block stores the same value in place of the one that did.": (
        ("chunks.cu", "if (piece == 0) {", "==", "!=", 0),
        ("chunks.cu", "if (piece == 0) {", "0", "1", 0),
    ),
    "One head at a time always divides, so the first turn of the loop sets it.": (
        ("common.cuh", "int best = 1;", "1", "2", 0),
    ),
    "The first partial that is not empty replaces it before it is read.": (
        ("merge.cu", "float high = -KVP_INFINITY, normaliser = 0.0f;", "-", "", 0),
        ("merge.cu", "Lanes sum = splat(0.0f);", "0.0f", "1.0f", 0),
    ),
    "Every lane holds the same value.": (
        (
            "arithmetic.cuh",
            "__device__ __forceinline__ float exp_nonpositive(float x) { return exp8(splat(x))[0]; }",
            "[0]",
            "[(0) + 1]",
            0,
        ),
        (
            "arithmetic.cuh",
            "__device__ __forceinline__ float exp_nonpositive(float x) { return exp8(splat(x))[0]; }",
            "0",
            "1",
            0,
        ),
    ),
    "Where a digit holds just what is wanted, the next lower one becomes the least, none of it wanted: the same blocks. There is one, as more blocks share the prefix than are wanted.": (
        ("select.cu", "while (histogram[digit] < wanted) wanted -= histogram[digit--];", "<", "<=", 0),
    ),
    "A row past the list is computed and then dropped.": (("chunks.cu", "if (k0 < here)", "<", "<=", 0),),
}
"""Reasons, each with the mutants that it holds for."""

_BY_KEY = {key: reason for reason, keys in EQUIVALENT.items() for key in keys}


def reason_of(file: str, text: str, old: str, new: str, nth: int) -> str | None:
    """Why this change of a source line changes nothing; None where it should be seen."""
    return _BY_KEY.get((file, text, old, new, nth))
