"""NVRTC: where it is found, what it makes, and what it says where it cannot."""

from __future__ import annotations

import functools
import struct
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from kvproof.fast import CompileError, KernelSources, Source, nvrtc
from kvproof.fast.nvrtc import COMPILE_OPTIONS, Nvrtc, NvrtcError, find_nvrtc
from kvproof.fast.sources import FAMILIES
from kvproof.reference import TINY

SOURCE = Source(
    name="scale",
    text='#include "factor.h"\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] = x[threadIdx.x] * F + B; }',
    headers={"factor.h": "#define F 3.0f"},
    defines={"B": "1.0f", "BARE": None},
)


@pytest.fixture(scope="module")
def compiler():
    return Nvrtc()


def test_a_source_with_headers_and_definitions_compiles(compiler):
    made = compiler.compile(SOURCE, "sm_90")
    assert ".target sm_90" in made.ptx
    assert ".entry scale" in made.ptx
    assert made.ptx.endswith("\n")
    assert "mul.rn.f32" in made.ptx
    assert "fma" not in made.ptx


def test_options_are_the_callers(compiler):
    contracting = Nvrtc(compiler.path, options=("--fmad=true",))
    assert "fma.rn.f32" in contracting.compile(SOURCE, "sm_90").ptx
    assert compiler.options == COMPILE_OPTIONS


def test_a_cubin_comes_whole(compiler):
    cubin = compiler.compile(SOURCE, "sm_90").cubin
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
    assert cubin[:4] == b"\x7fELF"
    assert max(program_headers + program_size * programs, section_headers + section_size * sections) == len(cubin)


def test_a_virtual_architecture_gives_ptx_alone(compiler):
    made = compiler.compile(SOURCE, "compute_90")
    assert made.cubin == b""
    assert made.ptx == compiler.compile(SOURCE, "sm_90").ptx


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_geometry_compiles_too(compiler, family):
    assert "fn_" in compiler.compile(KernelSources().family(family, TINY, threads=32), "compute_90").ptx


def test_threads_may_share_one(compiler):
    archs = ["sm_75", "sm_80", "sm_90", "sm_120"]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda arch: compiler.compile(SOURCE, arch).cubin, archs))
    assert together == [compiler.compile(SOURCE, arch).cubin for arch in archs]


def test_a_refused_source_is_told_with_family_architecture_and_log(compiler):
    with pytest.raises(NvrtcError) as caught:
        compiler.compile(Source(name="bad", text="__global__ void bad() { undeclared(); }"), "sm_90")
    assert (caught.value.family, caught.value.arch) == ("bad", "sm_90")
    assert "undeclared" in caught.value.log
    assert f"NVRTC {compiler.version} could not compile bad.cu for sm_90" in str(caught.value)
    assert isinstance(caught.value, CompileError)


@pytest.mark.parametrize("arch", ["sm_20", "90", "sm_90x", ""])
def test_an_unknown_architecture_is_told_with_those_that_are_known(compiler, arch):
    with pytest.raises(ValueError, match=f"arch is {arch!r}; NVRTC .* compiles for .*sm_75, .*sm_121"):
        compiler.compile(SOURCE, arch)


def test_the_wheel_is_found_first(monkeypatch):
    monkeypatch.delenv(nvrtc.NVRTC_VARIABLE, raising=False)
    assert find_nvrtc().is_relative_to(find_spec("nvidia.cuda_nvrtc").submodule_search_locations[0])


def test_the_variable_chooses(monkeypatch, compiler):
    monkeypatch.setenv(nvrtc.NVRTC_VARIABLE, str(compiler.path))
    assert find_nvrtc() == compiler.path


def test_a_variable_that_names_no_file_is_told(monkeypatch):
    monkeypatch.setenv(nvrtc.NVRTC_VARIABLE, "/no/such/libnvrtc.so")
    with pytest.raises(NvrtcError, match=r"\$KVPROOF_NVRTC is '/no/such/libnvrtc.so', which is no file"):
        find_nvrtc()


def test_a_library_that_is_none_is_told(tmp_path):
    file = tmp_path / "libnvrtc.so.12"
    file.write_text("no library")
    with pytest.raises(NvrtcError, match="does not load"):
        Nvrtc(file)


@pytest.fixture
def no_wheel(monkeypatch, tmp_path):
    """A machine whose only toolkits are those under $CUDA_HOME and /usr/local."""
    monkeypatch.delenv(nvrtc.NVRTC_VARIABLE, raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    return tmp_path


def test_a_toolkit_is_found_without_a_wheel(no_wheel):
    library = no_wheel / "lib64" / "libnvrtc.so.13"
    library.parent.mkdir()
    library.touch()
    library.with_name("libnvrtc.so.13.0.88").touch()
    assert find_nvrtc() == library


def test_a_machine_without_nvrtc_is_told_what_to_install(no_wheel, monkeypatch):
    monkeypatch.setattr(nvrtc, "toolkit_folders", lambda: iter([no_wheel]))
    with pytest.raises(NvrtcError, match="pip install nvidia-cuda-nvrtc-cu12"):
        find_nvrtc()


@pytest.fixture
def wheels(no_wheel, monkeypatch):
    """Installs stand-ins of NVRTC wheels and of CuPy; gives the library of each wheel, by CUDA release."""

    def install(*releases, cupy=None):
        root = no_wheel / "nvidia"
        folders = {12: root / "cuda_nvrtc" / "lib"}
        made = {}
        for release in releases:
            made[release] = folders.get(release, root / f"cu{release}" / "lib") / f"libnvrtc.so.{release}"
            made[release].parent.mkdir(parents=True)
            made[release].touch()
        spec = SimpleNamespace(submodule_search_locations=[str(root)])
        monkeypatch.setattr(nvrtc, "find_spec", lambda name: spec)
        monkeypatch.setattr(metadata, "version", functools.partial(version_where, f"cupy-cuda{cupy}x"))
        return made

    return install


def version_where(installed, name):
    if name == installed:
        return "14.0.1"
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("releases", "cupy", "taken"),
    [
        ((13,), None, 13),
        ((12,), None, 12),
        ((12, 13), None, 13),
        ((12, 13, 14), None, 14),
        ((12, 13), 12, 12),
        ((12, 13), 13, 13),
        ((12, 13, 14), 13, 13),
        ((13,), 12, 13),
        ((12,), 13, 12),
        ((12, 13), 11, 13),
    ],
    ids=str,
)
def test_the_wheel_that_fits_the_installed_cupy_is_found_else_the_newest(wheels, releases, cupy, taken):
    made = wheels(*releases, cupy=cupy)
    assert find_nvrtc() == made[taken]
