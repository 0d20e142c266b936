"""Resource records: what is red, what is told, how they are kept; and occupancy from published limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compiled import all_proofs, toolkit
from kvproof.fast import KernelSources
from kvproof.fast.compiler import CacheError, CompileError
from kvproof.fast.engine import GPU_THREADS
from kvproof.fast.nvrtc import COMPILE_OPTIONS, NvrtcError, toolkit_folders
from kvproof.fast.sources import FAMILIES, staged_bytes
from kvproof.oracle import cli
from kvproof.oracle.compiled import cli as records_cli
from kvproof.oracle.compiled import cubin, records, toolkits
from kvproof.oracle.compiled.cubin import CubinError, Resources
from kvproof.oracle.compiled.lookups import lookups
from kvproof.oracle.compiled.occupancy import LIMITS, occupancy
from kvproof.oracle.compiled.records import (
    SMS,
    Measured,
    RecordError,
    compare,
    dynamic_shared,
    folder,
    measure,
    occupancy_of,
    read,
    write,
)
from kvproof.oracle.compiled.toolkits import Job, build, nvcc_toolkit
from kvproof.reference import FLASH_NEXT, TINY

PLAIN = Resources(
    registers=40, shared_bytes=512, stack_bytes=0, local_bytes=0, spill_bytes=0, barriers=1, code_bytes=4096
)


def measured(**kernels):
    """What a toolkit found: kernels on sm_80 and sm_90, each `PLAIN` but for the fields given."""
    return Measured(
        toolkit="nvrtc-12.9",
        build="V12.9.86",
        options=("--fmad=false",),
        geometry="tiny",
        threads=192,
        kernels={
            name: {"sm_80": replace(PLAIN, **changed), "sm_90": replace(PLAIN, **changed)}
            for name, changed in kernels.items()
        },
    )


RECORD = measured(merge={}, gate={})
BOTH = ("sm_80", "sm_90")


def told(recorded, found, sms=BOTH):
    return [(change.kernel, change.sm, change.field, change.red) for change in compare(recorded, found, sms)]


def test_what_is_as_recorded_gives_no_change():
    assert compare(RECORD, RECORD, BOTH) == []


@pytest.mark.parametrize("field", ["registers", "shared_bytes", "barriers"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_changed_number_is_red(field, by):
    found = measured(merge={field: getattr(PLAIN, field) + by}, gate={})
    assert told(RECORD, found) == [("merge", "sm_80", field, True), ("merge", "sm_90", field, True)]


def test_a_change_is_said_in_a_sentence():
    change = compare(RECORD, measured(merge={"registers": 48}, gate={}), BOTH)[0]
    assert change.message == "nvrtc-12.9: merge on sm_80 has 48 registers, recorded 40"
    assert (change.recorded, change.found) == (40, 48)


def test_other_options_of_the_compiler_are_red():
    """The numbers may be the same, the arithmetic is not."""
    found = replace(RECORD, options=("--fmad=true", "--use_fast_math"))
    assert told(RECORD, found) == [("", "", "options", True)]
    message = compare(RECORD, found, BOTH)[0].message
    assert message == ("nvrtc-12.9: recorded with the options --fmad=false, found with --fmad=true --use_fast_math")


def test_another_build_of_the_toolkit_is_told_and_not_red():
    found = replace(RECORD, build="V12.9.99")
    assert told(RECORD, found) == [("", "", "build", False)]
    assert compare(RECORD, found, BOTH)[0].message == (
        "nvrtc-12.9: recorded with the build V12.9.86, found with V12.9.99"
    )


def test_another_build_of_the_toolkit_is_named_with_a_change():
    found = replace(measured(merge={"shared_bytes": 516}, gate={}), build="V12.9.99")
    message = compare(RECORD, found, BOTH)[0].message
    assert message.endswith(
        "has 516 bytes of shared memory, recorded 512 (recorded with V12.9.86, found with V12.9.99)"
    )


def test_another_code_size_is_told_and_not_red():
    assert told(RECORD, measured(merge={"code_bytes": 4224}, gate={}), ("sm_80",)) == [
        ("merge", "sm_80", "code_bytes", False)
    ]


@pytest.mark.parametrize("field", ["stack_bytes", "local_bytes", "spill_bytes"])
def test_local_memory_is_red_even_where_it_is_recorded(field):
    spilled = measured(merge={field: 8}, gate={})
    assert told(spilled, spilled) == [("merge", "sm_80", field, True), ("merge", "sm_90", field, True)]


def test_local_memory_that_went_away_is_told_against_the_record():
    assert told(measured(merge={"spill_bytes": 8}, gate={}), RECORD, ("sm_80",)) == [
        ("merge", "sm_80", "spill_bytes", True)
    ]


def test_a_kernel_without_a_record_is_red():
    assert told(measured(merge={}), RECORD) == [("gate", "sm_80", "", True), ("gate", "sm_90", "", True)]


def test_a_recorded_kernel_that_is_gone_is_red():
    assert told(RECORD, measured(merge={}), ("sm_90",)) == [("gate", "sm_90", "", True)]


def test_an_sm_without_a_record_is_red():
    recorded = replace(RECORD, kernels={name: {"sm_80": PLAIN} for name in RECORD.kernels})
    assert told(recorded, RECORD) == [("gate", "sm_90", "", True), ("merge", "sm_90", "", True)]


def test_sms_that_were_not_asked_for_are_left_out():
    assert told(RECORD, measured(merge={"registers": 48}, gate={}), ()) == []


def test_another_count_of_threads_is_red():
    assert told(RECORD, replace(RECORD, threads=128)) == [("", "", "threads", True)]


def test_a_toolkit_without_a_record_is_red_and_says_what_to_do():
    changes = compare(None, measured(merge={"local_bytes": 4}), BOTH)
    assert changes[0].message == "nvrtc-12.9: no record at tiny: run `kvproof records update`"
    assert [change.red for change in changes] == [True] * 3
    assert changes[1].field == "local_bytes"


# ---- files ----


def test_a_record_is_read_as_it_was_written(tmp_path):
    file = write(RECORD, tmp_path)
    assert file == tmp_path / "nvrtc-12.9.json"
    assert read("nvrtc-12.9", "tiny", tmp_path) == RECORD
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_a_record_has_a_line_for_each_kernel_and_sm(tmp_path):
    lines = [line for line in write(RECORD, tmp_path).read_text().splitlines() if '"registers"' in line]
    assert len(lines) == 4
    assert all(re.fullmatch(r'\s+"sm_\d+": \{"registers": 40, .*"code_bytes": 4096\},?', line) for line in lines)


def test_records_of_other_geometries_stay(tmp_path):
    other = replace(RECORD, geometry="flash_next")
    write(other, tmp_path)
    write(RECORD, tmp_path)
    assert read("nvrtc-12.9", "flash_next", tmp_path) == other
    assert read("nvrtc-12.9", "tiny", tmp_path) == RECORD


def test_records_of_another_build_do_not_stay(tmp_path):
    write(replace(RECORD, geometry="flash_next", build="V12.9.1"), tmp_path)
    write(RECORD, tmp_path)
    assert read("nvrtc-12.9", "flash_next", tmp_path) is None


def test_a_toolkit_or_geometry_without_a_record_reads_as_none(tmp_path):
    write(RECORD, tmp_path)
    assert read("nvrtc-13.0", "tiny", tmp_path) is None
    assert read("nvrtc-12.9", "flash_next", tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other", "version": 1}', '{"format": "kvproof records", "version": 2}']
)
def test_a_damaged_record_is_named_and_can_be_written_again(tmp_path, text):
    file = tmp_path / "nvrtc-12.9.json"
    file.write_text(text)
    with pytest.raises(RecordError, match=r"nvrtc-12\.9\.json is no record.*kvproof records update"):
        read("nvrtc-12.9", "tiny", tmp_path)
    write(RECORD, tmp_path)
    assert read("nvrtc-12.9", "tiny", tmp_path) == RECORD


# ---- the records of the package ----


def packaged():
    """Every toolkit's record of Flash Next."""
    names = [file.stem for file in folder().glob("nv*.json")]
    return {name: read(name, FLASH_NEXT.name) for name in names}


def test_nvrtc_and_nvcc_have_records():
    assert {name.partition("-")[0] for name in packaged()} == {"nvrtc", "nvcc"}


@pytest.mark.parametrize("name", packaged())
def test_a_record_holds_every_kernel_on_every_sm(name):
    entries = re.findall(r"\b(fn_\w+)\(", "".join(KernelSources().texts[f"{family}.cu"] for family in FAMILIES))
    record = packaged()[name]
    assert set(record.kernels) == set(entries)
    assert all(set(by_sm) == set(SMS) for by_sm in record.kernels.values())
    assert record.options == COMPILE_OPTIONS
    assert record.threads == GPU_THREADS


@pytest.mark.parametrize("name", packaged())
def test_no_recorded_kernel_uses_local_memory(name):
    assert compare(packaged()[name], packaged()[name]) == []


@pytest.mark.parametrize("sm", ["sm_90", "sm_121"])
@pytest.mark.parametrize("kernel", ["fn_attn_chunks", "fn_attn_chunks_ahead"])
@pytest.mark.parametrize("name", packaged())
def test_chunks_fill_a_quarter_of_an_sm(name, kernel, sm):
    one = packaged()[name].kernels[kernel][sm]
    assert occupancy_of(kernel, sm, one, FLASH_NEXT, GPU_THREADS).fraction >= 0.25


def test_the_kernels_take_what_is_recorded():
    """As `kvproof records check` for NVRTC, with what the proofs compiled already."""
    found = {}
    for (kernel, sm), proof in all_proofs().items():
        found.setdefault(kernel, {})[sm] = proof.resources
    record = read(toolkit().name, FLASH_NEXT.name)
    assert [change.message for change in compare(record, replace(record, kernels=found)) if change.red] == []


def test_dynamic_shared_memory_is_counted_where_a_kernel_has_some():
    declares = {family: "KVP_DYNAMIC_SHARED" in KernelSources().texts[f"{family}.cu"] for family in FAMILIES}
    entries = {family: re.findall(r"\b(fn_\w+)\(", KernelSources().texts[f"{family}.cu"]) for family in FAMILIES}
    for family, names in entries.items():
        for name in names:
            assert dynamic_shared(name, FLASH_NEXT) == (staged_bytes(FLASH_NEXT) if declares[family] else 0)


# ---- measuring ----


def test_a_spill_is_measured():
    """Sixty registers squeezed into 32: ten blocks are asked for."""
    squeezed = KernelSources().edit("scores.cu", "(KVP_THREADS)\n", "(KVP_THREADS, 10)\n")
    source = squeezed.family("scores", FLASH_NEXT, threads=GPU_THREADS)
    one = build(Job(toolkit=toolkit(), source=source, arch="sm_90")).kernels["fn_qsa_scores"].resources
    assert one.registers == 32
    assert one.stack_bytes > 0
    assert one.spill_bytes > 0


def test_an_unknown_sm_is_refused():
    with pytest.raises(ValueError, match="SM 'sm_70' has no record; it must be one of sm_75, sm_80"):
        measure(toolkit(), TINY, ("sm_70",))


def test_a_cubin_that_is_cut_off_is_refused():
    source = KernelSources().family("gate", TINY, threads=32)
    made = toolkits.compiled(Job(toolkit=toolkit(), source=source, arch="sm_90"))
    with pytest.raises(CubinError, match="cuobjdump does not take this cubin of 100 bytes"):
        cubin.dump(made.cubin[:100])


def test_text_in_another_form_is_refused():
    with pytest.raises(CubinError, match="in a form that is not known here"):
        cubin.kernels("Resource usage:\n Function k:\n  registers: 12\n", "sm_90")


def test_a_machine_without_cuobjdump_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(cubin, "_folders", lambda: iter([Path("/no/such/folder")]))
    with pytest.raises(CubinError, match="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"):
        cubin.find_tools()


def test_a_result_of_the_cache_that_is_damaged_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    job = Job(toolkit=toolkit(), source=KernelSources().family("merge", TINY, threads=32), arch="compute_90")
    made = toolkits.compiled(job)
    (kept,) = (tmp_path / "cuda").iterdir()
    kept.write_bytes(kept.read_bytes()[:-7])
    assert toolkits.compiled(job) == made


def test_a_result_of_the_cache_is_not_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    job = Job(toolkit=toolkit(), source=KernelSources().family("merge", TINY, threads=32), arch="compute_90")
    made = toolkits.compiled(job)
    monkeypatch.setattr(toolkits, "_nvrtc", None)
    assert toolkits.compiled(job) == made


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path / "file"))
    job = Job(toolkit=toolkit(), source=KernelSources().family("merge", TINY, threads=32), arch="compute_90")
    with pytest.raises(CacheError, match="set KVPROOF_CACHE_DIR to a folder that can be written"):
        toolkits.compiled(job)


needs_nvcc = pytest.mark.skipif(nvcc_toolkit() is None, reason="no nvcc is installed")


@needs_nvcc
def test_nvcc_gives_what_it_is_recorded_to():
    nvcc = nvcc_toolkit()
    found = build(Job(toolkit=nvcc, source=KernelSources().family("merge", FLASH_NEXT, threads=192), arch="sm_90"))
    record = read(nvcc.name, FLASH_NEXT.name)
    assert record is not None, f"no record for {nvcc.name}: run `kvproof records update`"
    assert found.kernels["fn_attn_merge"].resources == record.kernels["fn_attn_merge"]["sm_90"]


@needs_nvcc
def test_a_source_that_nvcc_refuses_is_told():
    broken = KernelSources().edit("merge.cu", "Lanes sum = ", "Lanes sum = undeclared, ")
    with pytest.raises(CompileError, match=r"nvcc could not compile merge\.cu for sm_90:\n(.|\n)*undeclared"):
        build(Job(toolkit=nvcc_toolkit(), source=broken.family("merge", TINY, threads=32), arch="sm_90"))


# ---- occupancy ----


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "blocks", "limit"),
    [
        ("sm_90", 32, 0, 10, "threads"),  # 6 warps to a block, 64 to the SM
        ("sm_90", 96, 48064, 3, "registers"),  # 3072 to a warp: 5 warps in a quarter, 20 in all
        ("sm_90", 40, 96000, 2, "shared memory"),  # 233472 of (96000 + 1024)
        ("sm_75", 95, 48064, 1, "shared memory"),  # 65536 of 48128; nothing is reserved
        ("sm_121", 80, 48064, 2, "shared memory"),  # 102400 of 49152
        ("sm_86", 255, 0, 1, "registers"),  # 8192 to a warp: 2 warps in a quarter, 8 in all
        ("sm_120", 255, 200000, 0, "shared memory"),
    ],
)
def test_occupancy_by_hand(arch, registers, shared, blocks, limit):
    found = occupancy(arch, threads=192, registers=registers, shared_bytes=shared)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.fraction == blocks * 192 / LIMITS[arch].threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "sm_70"}, "arch is 'sm_70'; limits are known for sm_75"),
        ({"threads": 0}, "0 threads of 32 registers; both must be at least 1"),
        ({"registers": 0}, "192 threads of 0 registers; both must be at least 1"),
    ],
    ids=["arch", "threads", "registers"],
)
def test_occupancy_of_nonsense_is_refused(arguments, message):
    given = {"arch": "sm_90", "threads": 192, "registers": 32, "shared_bytes": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        occupancy(given.pop("arch"), **given)


NVIDIA_OCCUPANCY = r"""
#include <climits>
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int major, minor, threads_sm, regs, shared;
  size_t shared_sm, reserved;
  const char* line = "%d %d %d %zu %zu %d %d";
  while (std::scanf(line, &major, &minor, &threads_sm, &shared_sm, &reserved, &regs, &shared) == 7) {
    cudaOccDeviceProp p;
    p.computeMajor = major, p.computeMinor = minor, p.maxThreadsPerBlock = 1024, p.warpSize = 32;
    p.maxThreadsPerMultiprocessor = threads_sm, p.regsPerBlock = 65536, p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 49152, p.sharedMemPerMultiprocessor = shared_sm, p.numSms = 1;
    p.sharedMemPerBlockOptin = shared_sm - reserved, p.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes a;
    a.maxThreadsPerBlock = 1024, a.numRegs = regs, a.sharedSizeBytes = 0;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, a.maxDynamicSharedSizeBytes = shared_sm - reserved;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &state, 192, shared);
    std::printf("%d\n", error ? -error : r.activeBlocksPerMultiprocessor);
  }
}
"""


def headers():
    """The folder of NVIDIA's own occupancy calculator, None where no CUDA toolkit is."""
    return next((one / "include" for one in toolkit_folders() if (one / "include" / "cuda_occupancy.h").exists()), None)


@pytest.mark.skipif(headers() is None, reason="no CUDA toolkit is installed, which has cuda_occupancy.h")
def test_occupancy_is_what_nvidias_calculator_says(tmp_path):
    (tmp_path / "a.cpp").write_text(NVIDIA_OCCUPANCY)
    subprocess.run(["g++", "-I", str(headers()), "a.cpp", "-o", "a"], cwd=tmp_path, check=True)
    asked = [
        (arch, registers, shared)
        for arch in LIMITS
        for registers in (24, 32, 33, 40, 57, 64, 77, 80, 96, 128, 168, 255)
        for shared in (0, 700, 2568, 18944, 48064, 49025)
    ]
    lines = []
    for arch, registers, shared in asked:
        sm, number = LIMITS[arch], int(arch[3:])
        device = (number // 10, number % 10, sm.threads, sm.shared_bytes, sm.reserved_bytes)
        lines.append(" ".join(map(str, (*device, registers, shared))))
    done = subprocess.run([tmp_path / "a"], input="\n".join(lines), capture_output=True, text=True, check=True)
    ours = [occupancy(arch, threads=192, registers=r, shared_bytes=s).blocks for arch, r, s in asked]
    assert list(map(int, done.stdout.split())) == ours


# ---- the command ----


def command(monkeypatch, capsys, *words):
    """Exit code and what `kvproof records ...` prints, on one line."""
    monkeypatch.setattr(sys, "argv", ["kvproof", "records", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    shown = capsys.readouterr()
    return stopped.value.code, " ".join((shown.out + shown.err).split())


ONE = ("--toolkit", "nvrtc", "--sm", "90")


@pytest.fixture
def own_records(monkeypatch, tmp_path):
    """A folder of records of its own, with NVRTC's record of the package."""
    write(packaged()[toolkit().name], tmp_path)
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    return tmp_path


def test_check_is_green_and_writes_json(monkeypatch, capsys, own_records, tmp_path):
    code, shown = command(monkeypatch, capsys, "check", *ONE, "--json", str(tmp_path / "out.json"))
    assert (code, "GREEN: 10 kernels on 1 SMs take what is recorded" in shown) == (0, True), shown
    assert json.loads((tmp_path / "out.json").read_text())["green"] is True


@pytest.fixture
def measured_already(monkeypatch):
    """What the proofs compiled, in place of compiling it again."""
    kernels = {kernel: {sm: proof.resources} for (kernel, sm), proof in all_proofs().items() if sm == "sm_90"}
    found = replace(packaged()[toolkit().name], kernels=kernels)
    monkeypatch.setattr(records_cli, "measure", lambda *given: found)


@pytest.mark.usefixtures("measured_already")
def test_check_is_red_on_a_changed_record(monkeypatch, capsys, own_records, tmp_path):
    file = own_records / f"{toolkit().name}.json"
    file.write_text(
        file.read_text().replace('"registers": 40', '"registers": 41').replace('"barriers": 1', '"barriers": 2')
    )
    code, shown = command(monkeypatch, capsys, "check", *ONE, "--json", str(tmp_path / "out.json"))
    assert code == 1
    assert "fn_attn_merge on sm_90 has 40 registers, recorded 41" in shown
    assert "fn_attn_chunks on sm_90 has 1 barriers, recorded 2" in shown
    assert "RED: " in shown
    assert json.loads((tmp_path / "out.json").read_text())["changes"]


@pytest.mark.usefixtures("measured_already")
def test_check_is_red_without_a_record(monkeypatch, capsys, own_records):
    (own_records / f"{toolkit().name}.json").unlink()
    code, shown = command(monkeypatch, capsys, "check", *ONE)
    assert code == 1
    assert "no record at flash_next: run `kvproof records update`" in shown


@pytest.mark.usefixtures("measured_already")
def test_check_tells_the_records_that_it_did_not_check(monkeypatch, capsys, own_records, tmp_path):
    write(replace(packaged()[toolkit().name], toolkit="nvcc-13.9"), own_records)
    write(replace(packaged()[toolkit().name], toolkit="nvcc-13.8", geometry="tiny"), own_records)
    code, shown = command(monkeypatch, capsys, "check", *ONE, "--json", str(tmp_path / "out.json"))
    assert (code, "not checked here: nvcc-13.9 (no such toolkit) GREEN" in shown) == (0, True), shown
    assert json.loads((tmp_path / "out.json").read_text())["not_checked"] == {"nvcc-13.9": "no such toolkit"}


def test_a_toolkit_that_is_here_and_was_left_out_is_told(monkeypatch, own_records):
    write(replace(packaged()[toolkit().name], toolkit="nvcc-13.9"), own_records)
    monkeypatch.setattr(records_cli, "toolkits", lambda: [replace(toolkit(), kind="nvcc", version="13.9")])
    assert records_cli.not_checked([toolkit().name], "flash_next") == {"nvcc-13.9": "left out by --toolkit"}
    assert records_cli.not_checked([toolkit().name, "nvcc-13.9"], "flash_next") == {}


def absent(error):
    def find():
        raise error

    return find


@pytest.mark.parametrize("words", [("check",), ("update",), ("show",)], ids=" ".join)
@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (("find_nvrtc", "find_tools"), "need NVRTC and cuobjdump with nvdisasm beside it, which"),
        (("find_nvrtc",), "need NVRTC, which"),
        (("find_tools",), "need cuobjdump with nvdisasm beside it, which"),
    ],
    ids=["both", "nvrtc", "tools"],
)
def test_everything_that_is_missing_is_told_at_once(monkeypatch, capsys, words, gone, named):
    monkeypatch.delenv("KVPROOF_NVRTC", raising=False)
    for name in gone:
        error = NvrtcError("no") if name == "find_nvrtc" else CubinError("no")
        monkeypatch.setattr(records_cli, name, absent(error))
    code, shown = command(monkeypatch, capsys, *words)
    assert (code, named in shown, "run `pip install -e '.[test]'`" in shown) == (2, True, True), shown


def test_an_nvrtc_that_was_chosen_and_is_no_file_is_told(monkeypatch, capsys):
    monkeypatch.setenv("KVPROOF_NVRTC", "/no/such/file")
    code, shown = command(monkeypatch, capsys, "check")
    assert (code, "$KVPROOF_NVRTC is '/no/such/file', which is no file" in shown) == (2, True), shown


@pytest.mark.usefixtures("measured_already")
def test_check_is_red_where_the_compiler_had_other_options(monkeypatch, capsys, own_records):
    write(replace(packaged()[toolkit().name], options=("--use_fast_math",)), own_records)
    code, shown = command(monkeypatch, capsys, "check", *ONE)
    assert (code, "recorded with the options --use_fast_math, found with --fmad=false" in shown) == (1, True), shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "--sm", "70"), "SM 'sm_70' has no record; it must be one of sm_75"),
        (("check", "--geometry", "huge"), "--geometry is 'huge'; it must be one of flash_next, tiny"),
        (("update", "--toolkit", "clang"), "--toolkit is 'clang'; it must be one of nvrtc, nvcc"),
        (("check", "--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_misuse_exits_2_and_says_what_is_allowed(monkeypatch, capsys, words, message):
    code, shown = command(monkeypatch, capsys, *words)
    assert (code, message in shown) == (2, True), shown


@pytest.mark.usefixtures("measured_already")
def test_show_prints_occupancy_and_what_is_proved(monkeypatch, capsys):
    mine = [proof for (_, sm), proof in all_proofs().items() if sm == "sm_90"]
    monkeypatch.setattr(records_cli, "prove", lambda *given: mine)
    code, shown = command(monkeypatch, capsys, "show", *ONE)
    assert (code, "GREEN: every claim of this table holds, 10 times; not in it, and left to tests/" in shown) == (
        0,
        True,
    ), shown
    assert "GREEN: prep, pool, scores, chunks, chunks_ahead look up each row once" in shown
    assert re.search(r"fn_attn_chunks_ahead │ 48064 │ 96 28%", shown), shown
    assert re.search(r"fn_attn_merge │ 52 │ 29 │ 0 │ 0 │ 0 │ 0 │ 0 │ 0 │ 0 │ 0", shown), shown


@pytest.mark.usefixtures("measured_already")
def test_show_is_red_where_a_tile_is_looked_up_twice(monkeypatch, capsys):
    mine = [proof for (_, sm), proof in all_proofs().items() if sm == "sm_90"]
    monkeypatch.setattr(records_cli, "prove", lambda *given: mine)
    planted = KernelSources().edit("chunks.cu", "weigh_tile(s, tile);", "weigh_tile(s, tile);\n    look_up(tile);")
    monkeypatch.setattr(records_cli, "lookups", lambda *given, **named: lookups(*given, **named, sources=planted))
    code, shown = command(monkeypatch, capsys, "show", *ONE)
    assert code == 1
    assert re.search(
        r"chunks_ahead looks up the page table ([\d,]+) times, [\d,]+ are due; they differ at page 0", shown
    )


@pytest.mark.slow
def test_update_writes_what_check_then_finds(monkeypatch, capsys, own_records):
    file = own_records / f"{toolkit().name}.json"
    before = file.read_text()
    file.write_text(before.replace('"registers": 40', '"registers": 41'))
    monkeypatch.setattr(sys, "argv", ["kvproof", "records", "update", "--toolkit", "nvrtc"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "has 40 registers, recorded 41" in capsys.readouterr().out
    assert file.read_text() == before
