"""Device memory filled and compared where it lies: copies to the host and back would take most of a check's time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...fast import Backend, Pointer, Source
from ...reference.arrays import shape_of
from ...reference.layout import BF16

_THREADS, _BLOCKS = 256, 4096
_ELEMENTS = 64
"""Elements of a thread, at least."""

_SOURCE = Source(
    "memory",
    r"""
#define EACH(i, count)                                                                                       \
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; \
  i += static_cast<unsigned long long>(gridDim.x) * blockDim.x

extern "C" __global__ void spread(unsigned short* to, unsigned long long count, const unsigned short* from,
                                  unsigned long long period) {
  for (EACH(i, count)) to[i] = from[i % period];
}

extern "C" __global__ void differ(const unsigned short* one, const unsigned short* other, unsigned long long count,
                                  unsigned* found) {
  for (EACH(i, count))
    if (one[i] != other[i]) *found = 1;
}
""",
)


def spread(backend: Backend, sample: Any, elements: int) -> Any:
    """A fresh bf16 array of so many elements that holds a bf16 array of the device again and again."""
    made = backend.empty((elements,), BF16)
    period = np.uint64(math.prod(shape_of(sample)))
    _launch(backend, "spread", elements, Pointer(made), np.uint64(elements), Pointer(sample), period)
    return made


def differ(backend: Backend, one: Any, other: Any) -> bool:
    """Whether two bf16 arrays of the device, of one shape, differ in any bit; waits for the answer."""
    elements = math.prod(shape_of(one))
    found = backend.upload(np.zeros(1, np.uint32))
    _launch(backend, "differ", elements, Pointer(one), Pointer(other), np.uint64(elements), Pointer(found))
    return bool(backend.download(found)[0])


def _launch(backend: Backend, entry: str, elements: int, *args: Pointer | np.generic) -> None:
    blocks = max(1, min(_BLOCKS, elements // (_THREADS * _ELEMENTS)))
    backend.load(_SOURCE).launch(entry, grid=blocks, block=_THREADS, args=args)
