"""Compiling and caching: one library per content, whoever asks, and errors that say what to do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kvproof.fast import compiler as compiling
from kvproof.fast.backend import Pointer, Source
from kvproof.fast.compiler import Build, CacheError, CompileError, build, compiler_from, find_compiler, find_zig
from kvproof.fast.host_backend import HostBackend

SCALE = r"""
#include "factor.cuh"
extern "C" __global__ void scale(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = fmaf((float)threadIdx.x, FACTOR, BIAS);
    __syncthreads();
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, tile[63 - threadIdx.x], 1);
}
"""
SOURCE = Source("scale", SCALE, headers={"factor.cuh": "#pragma once\n#define FACTOR 2.0f\n"}, defines={"BIAS": "0.5f"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_scale(backend: HostBackend) -> np.ndarray:
    out = np.zeros(64, np.float32)
    backend.load(SOURCE).launch("scale", grid=1, block=64, args=[Pointer(out)])
    return out


EXPECTED = ((63 - (np.arange(64) ^ 1)) * 2 + 0.5).astype(np.float32)


def small(value: int) -> Build:
    text = f'extern "C" __attribute__((visibility("default"))) int value() {{ return {value}; }}\n'
    return Build("small", {"small.cpp": text}, "small.cpp")


def value_of(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).value())


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ran: list[str] = []
    original = compiling._run

    def counted(job: Build, *rest: object) -> subprocess.CompletedProcess[str]:
        ran.append(job.name)
        return original(job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compiling, "_run", counted)
    return ran


def test_import_compiles_nothing(cache: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "import kvproof.fast.host_backend as h; h.HostBackend()"], check=True, cwd=cache.parent
    )
    assert not cache.exists()


def test_headers_and_defines_reach_the_kernel() -> None:
    np.testing.assert_array_equal(run_scale(HostBackend()), EXPECTED)


def test_zig_gives_the_same_bits() -> None:
    zig = find_zig()
    assert zig is not None, "ziglang is a dependency"
    assert run_scale(HostBackend(compiler=zig)).tobytes() == EXPECTED.tobytes()


def test_content_decides_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_compiles(monkeypatch)
    compiler = find_compiler()
    assert value_of(build(small(1), compiler)) == 1
    assert value_of(build(small(1), compiler)) == 1
    assert len(ran) == 1
    assert value_of(build(small(2), compiler)) == 2
    build(Build("small", small(2).files, "small.cpp", ("-O1",)), compiler)
    build(small(2), compiling.Compiler(compiler.command, compiler.identity + "another version"))
    assert len(ran) == 4


def test_modules_are_kept_in_memory() -> None:
    backend = HostBackend()
    assert backend.load(SOURCE) is backend.load(Source(SOURCE.name, SOURCE.text, SOURCE.headers, SOURCE.defines))
    assert backend.load(SOURCE) is not backend.load(Source("scale", SCALE, SOURCE.headers, {"BIAS": "1.5f"}))


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_entry_is_rebuilt(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    path = build(small(3), compiler)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes({"truncated": bytes(raw[: len(raw) // 2]), "empty": b"", "flipped": bytes(raw)}[damage])
    ran = count_compiles(monkeypatch)
    assert value_of(build(small(3), compiler)) == 3
    assert len(ran) == 1


def test_processes_compile_at_once(cache: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_host_compiler as t;"
        "print(t.value_of(t.build(t.small(4), t.find_compiler())))"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in running] == ["4\n"] * 4
    assert [path.name for path in (cache / "host").iterdir() if not path.name.startswith("lock-")] == [
        build(small(4), find_compiler()).name
    ]


def test_threads_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_compiles(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: build(small(5), find_compiler()), range(8)))
    assert len(paths) == len(ran) == 1


def test_load_all_reports_progress() -> None:
    sources = [Source("scale", SCALE, SOURCE.headers, {"BIAS": f"{i}.0f"}) for i in range(3)]
    seen: list[Source] = []
    modules = HostBackend().load_all(sources, seen.append)
    assert [module.source for module in modules] == sources
    assert len(seen) == 3
    assert all(source in seen for source in sources)


def test_an_unwritable_cache_names_folder_and_variable(cache: Path) -> None:
    cache.write_text("a file where the folder should be")  # not even root can write into it
    with pytest.raises(CacheError, match=rf"cannot write compiled kernels to {cache}/host: .*set KVPROOF_CACHE_DIR"):
        HostBackend().load(SOURCE)


def test_a_compile_error_is_short_and_names_the_line(cache: Path) -> None:
    broken = "\n" + "\n".join(f'extern "C" __global__ void k{i}(int* p) {{ p[0] = missing_{i}; }}' for i in range(9))
    with pytest.raises(CompileError) as caught:
        HostBackend().load(Source("broken", broken))
    text = str(caught.value)
    assert "could not compile broken.cu:" in text
    assert "broken.cu:2:" in text
    assert "missing_0" in text
    assert "missing_3" not in text
    assert "and 6 more" in text
    assert len(text.splitlines()) < 30
    assert str(cache) not in text
    assert not [path for path in (cache / "host").iterdir() if path.name.startswith(("broken", "build-"))]


def test_an_error_in_a_header_names_the_header() -> None:
    with pytest.raises(CompileError, match=r"factor\.cuh:1:\d+: error"):
        HostBackend().load(Source("scale", SCALE, headers={"factor.cuh": "int wrong = ;"}))


def test_approximate_functions_do_not_compile() -> None:
    with pytest.raises(CompileError, match="__expf"):
        HostBackend().load(Source("fast", 'extern "C" __global__ void f(float* p) { p[0] = __expf(p[0]); }'))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("empty", "int x;"), r"empty\.cu has no kernel"),
        (Source("path", SCALE, headers={"../x.h": ""}), r"'\.\./x\.h' cannot name a file of path"),
        (Source("clash", SCALE, headers={"cuda.h": ""}), r"'cuda\.h' cannot name a file of clash"),
    ],
)
def test_wrong_sources_are_refused(source: Source, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostBackend().load(source)


def test_a_flag_that_the_compiler_lacks_is_dropped(tmp_path: Path) -> None:
    wrapper = tmp_path / "old-c++"
    wrapper.write_text(
        "#!/bin/sh\nfor word; do\n"
        '[ "$word" = -march=native ] && { echo "error: bad value for -march" >&2; exit 1; }\ndone\n'
        f'exec {find_compiler().command[0]} {" ".join(find_compiler().command[1:])} "$@"\n'
    )
    wrapper.chmod(0o755)
    np.testing.assert_array_equal(run_scale(HostBackend(compiler=compiler_from([str(wrapper)]))), EXPECTED)


def test_cxx_chooses_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(CompileError, match=r"no program 'no-such-compiler'; set \$CXX"):
        find_compiler()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho broken licence >&2; exit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(CompileError, match="--version` failed: broken licence"):
        find_compiler()


def test_zig_is_found_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if find_zig() is not None:
        assert find_compiler().is_zig
    monkeypatch.setattr(compiling, "find_zig", lambda: None)
    compiling._find_compiler.cache_clear()
    with pytest.raises(CompileError, match=r"set \$CXX, install g"):
        find_compiler()
    compiling._find_compiler.cache_clear()


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPROOF_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compiling.cache_folder() == Path("/somewhere/kvproof")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiling.cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "kvproof"


CASTS = Source(
    "casts",
    """
extern "C" __global__ void casts(const float* x, float* back, const double* y, double* wide, int* nearest) {
  const int i = threadIdx.x;
  back[i] = static_cast<float>(static_cast<int>(x[i]));
  wide[i] = static_cast<double>(__double2int_rn(y[i]));
  nearest[i] = __double2int_rn(y[i]);
}
""",
)


def test_a_number_that_was_an_integer_has_no_negative_zero() -> None:
    x = np.array([-0.3, -0.0, 0.7, -1.5], np.float32)
    y = np.array([-0.3, np.nan, 2.5, -1e300])
    back, wide, nearest = np.empty(4, np.float32), np.empty(4), np.empty(4, np.int32)
    arrays = [Pointer(array) for array in (x, back, y, wide, nearest)]
    HostBackend().load(CASTS).launch("casts", grid=1, block=4, args=arrays)
    assert back.view(np.uint32).tolist() == np.array([0, 0, 0, -1], np.float32).view(np.uint32).tolist()
    assert not np.signbit(wide[0])
    assert nearest.tolist() == [0, -(2**31), 2, -(2**31)]
