"""The page argument has one layout: Python's, the CPU compiler's and NVRTC's."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from kvproof.fast import CompileError, HostBackend, KernelSources, NvrtcError, Pointer, Source
from kvproof.fast.cuda_backend import find_parameters
from kvproof.fast.engine import Pages
from kvproof.fast.nvrtc import Nvrtc
from kvproof.reference import TINY

ARCH = "sm_90"

PROBE = r"""
#include "pages.cuh"
extern "C" __device__ unsigned char pages_layout[5] = {
    sizeof(Pages), alignof(Pages), KVP_OFFSET(Pages, table), KVP_OFFSET(Pages, page_elements),
    KVP_OFFSET(Pages, positions)};
extern "C" __global__ void layout(long long* out) {
    for (int i = 0; i < 5; ++i) out[i] = pages_layout[i];
}
extern "C" __global__ void fields(long long* out, char before, Pages pages, char behind) {
    out[0] = reinterpret_cast<long long>(pages.table);
    out[1] = pages.page_elements;
    out[2] = pages.positions;
    out[3] = before;
    out[4] = behind;
}
"""

LAYOUT = [
    ctypes.sizeof(Pages),
    ctypes.alignment(Pages),
    Pages.table.offset,
    Pages.page_elements.offset,
    Pages.positions.offset,
]


def probe(sources=None):
    family = (sources or KernelSources()).family("pool", TINY, threads=1)
    return Source("probe", PROBE, family.headers, family.defines)


@pytest.fixture(scope="module")
def nvrtc():
    return Nvrtc()


def test_python_and_the_cpu_lay_it_out_alike():
    out = np.zeros(5, np.int64)
    HostBackend().load(probe()).launch("layout", grid=1, block=1, args=[Pointer(out)])
    assert out.tolist() == LAYOUT


def test_the_cpu_takes_it_by_value():
    out = np.zeros(5, np.int64)
    args = [Pointer(out), np.int8(-3), Pages(0x123456789A, 2**40 + 1, -5), np.int8(7)]
    HostBackend().load(probe()).launch("fields", grid=1, block=1, args=args)
    assert out.tolist() == [0x123456789A, 2**40 + 1, -5, -3, 7]


def test_python_and_nvrtc_lay_it_out_alike(nvrtc):
    ptx = nvrtc.compile(probe(), ARCH).ptx
    (listed,) = re.findall(r"pages_layout\[5\] = \{([^}]*)\}", ptx)
    assert [int(number) for number in listed.split(",")] == LAYOUT


def test_nvrtc_takes_it_by_value(nvrtc):
    ptx = nvrtc.compile(probe(), ARCH).ptx
    _, _, pages, _ = find_parameters(ptx)["fields"]
    assert (pages.kinds, pages.size, pages.align) == ("s", *LAYOUT[:2])
    loads = re.findall(r"ld\.param\.(\w+)\s+%\w+, \[fields_param_2(?:\+(\d+))?\]", ptx)
    assert sorted((int(offset or 0), kind) for kind, offset in loads) == [(0, "u64"), (8, "u64"), (16, "s32")]


FAULTS = {
    "order": ("long long page_elements;  // elements of a whole page, over all layers\n  int positions;",
              "int positions;  // elements of a whole page, over all layers\n  long long page_elements;"),
    "narrow": ("long long page_elements;", "int page_elements;"),
    "grown": ("int positions;            //", "int positions, unused[2];            //"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), FAULTS.values(), ids=FAULTS)
def test_another_layout_does_not_compile(nvrtc, old, new):
    wrong = probe(KernelSources().edit("pages.cuh", old, new))
    with pytest.raises(CompileError, match="layout of the page argument"):
        HostBackend().load(wrong)
    with pytest.raises(NvrtcError, match="layout of the page argument"):
        nvrtc.compile(wrong, ARCH)
