"""A kernel that takes one argument of every kind, and stores what it was given."""

from __future__ import annotations

import numpy as np
from kvproof.fast import Pointer, Source
from kvproof.fast.engine import Pages

BY_VALUE = Source(
    "by_value",
    r"""
struct Page { const int* table; long long elements; int positions; };
extern "C" __global__ void by_value(double* out, Page page, char a, short b, unsigned char c, bool d, double e,
                                    unsigned long long f, const int* null, float g, unsigned h) {
    out[0] = page.table[1]; out[1] = (double)page.elements; out[2] = page.positions; out[3] = a; out[4] = b;
    out[5] = c; out[6] = d; out[7] = e; out[8] = (double)f; out[9] = null == nullptr; out[10] = g; out[11] = h;
}
extern "C" __global__ void nothing() {}
""",
)

TABLE = np.array([3, 11], np.int32)
STORED = [11, 2**40, -5, -1, -300, 200, 1, 0.25, 2**50, 1, -0.5, 2**31]
"""float64 [12]: what it stores, given `arguments` with a table that holds TABLE."""


def arguments(out, table):
    """Its arguments, over two device arrays."""
    return [
        Pointer(out),
        Pages(table.__cuda_array_interface__["data"][0], 2**40, -5),
        np.int8(-1),
        np.int16(-300),
        np.uint8(200),
        np.bool_(True),
        np.float64(0.25),
        np.uint64(2**50),
        Pointer(None),
        np.float32(-0.5),
        np.uint32(2**31),
    ]
