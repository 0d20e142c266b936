"""Every kernel family compiles with NVRTC, from the project's own headers alone, and is rounded explicitly."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from kvproof.fast.engine import GPU_THREADS
from kvproof.fast.sources import FAMILIES, KernelSources
from kvproof.reference import FLASH_NEXT, TINY


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = find_spec("nvidia.cuda_nvrtc")
    assert spec is not None, "nvidia-cuda-nvrtc-cu12 belongs to the test extra"
    return ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("lib/libnvrtc.so.*"))))


def compile_ptx(nvrtc, source, arch):
    def words(items):
        return (ctypes.c_char_p * len(items))(*[item.encode() for item in items])

    def text(kind):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        return buffer.value.decode()

    program = ctypes.c_void_p()
    names, texts = zip(*source.headers.items(), strict=True)
    name = f"{source.name}.cu".encode()
    main = source.text.encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), main, name, len(names), words(texts), words(names))
    options = [f"-D{key}={value}" for key, value in source.defines.items()]
    options += [f"-arch={arch}", "--fmad=false", "-std=c++17"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), words(options))
    assert not code, text("ProgramLog")
    return text("PTX")


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90", "compute_120"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiles_for_every_generation(nvrtc, family, arch):
    ptx = compile_ptx(nvrtc, KernelSources().family(family, FLASH_NEXT, threads=GPU_THREADS), arch)
    assert f".target sm_{arch[8:]}" in ptx
    assert ".entry fn_" in ptx
    assert not re.findall(r"\.approx|\.ftz", ptx)
    floats = re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|rcp)[.\w]*\.f(?:32|64)\b", ptx)
    assert all(".rn" in word or ".rz" in word for word in floats), set(floats)


def test_a_small_geometry_compiles_too(nvrtc):
    for family in FAMILIES:
        compile_ptx(nvrtc, KernelSources().family(family, TINY, threads=32), "compute_90")
