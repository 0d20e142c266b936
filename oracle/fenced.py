"""Memory that ends where it says: pages that cannot be touched stand on both sides.

A kernel that runs past it stops there, as a `LaunchError` that tells the address, before it harms anything else.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

FENCE = 1 << 20
"""Bytes of address space on either side."""

ALIGNMENT = 16
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes, zeroed, the last of them right before the upper fence (but for the alignment to 16).

    Raises:
        MemoryError: the address space or the system's limit on mappings is used up.
    """
    page = mmap.PAGESIZE
    inner = max(1, -(-size // page)) * page
    try:
        region = mmap.mmap(-1, inner + 2 * FENCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes between fences: {error}") from None
    whole = np.frombuffer(region, np.uint8)
    base = int(whole.__array_interface__["data"][0])
    for start in (base, base + FENCE + inner):
        if _libc.mprotect(start, FENCE, _PROT_NONE):
            raise MemoryError(f"no fence for {size} bytes: mprotect failed with error {ctypes.get_errno()}")
    end = FENCE + inner
    first = (end - size) // ALIGNMENT * ALIGNMENT
    return whole[first : first + size]
