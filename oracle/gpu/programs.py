"""Steps of `kvproof gpu-check` that ask other programs: what is here, pytest, compute-sanitizer, the compilers."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...fast import CudaBackend, HostBackend
from ...reference.geometry import FLASH_NEXT
from ..compiled import records, toolkits
from ..compiled.cubin import CubinError
from .found import ROOT, Clock, Found, Verdict
from .sanitizer import ToolRun, find_sanitizer, run_group, sanitize

_GPU_MARKER = "pytest.mark.gpu"
_JUNIT = ("tests", "failures", "errors", "skipped")
_SMI_FIELDS = (
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
)


def facts(clock: Clock) -> Found:
    """The device, its driver and toolkits, and what this checkout is."""
    backend = CudaBackend()
    result = {
        "backend": backend.describe(),
        "arch": backend.arch,
        **device_facts(backend.device),
        "nvidia_smi": _smi(),
        "toolkits": [{"name": one.name, "path": str(one.path)} for one in toolkits.toolkits()],
        "sanitizer": None if (sanitizer := find_sanitizer()) is None else str(sanitizer),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
        "host_compiler": HostBackend().compiler.name,
    }
    reason = f"{result['device']}, {backend.arch}, CUDA {result['cuda_of_driver']}"
    return Found(verdict="green", reason=reason, result=result)


def device_facts(number: int) -> dict[str, Any]:
    """What CUDA tells of a device; its last cache and its memory in bytes."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "device": runtime.getDeviceProperties(number)["name"].decode(),
        "cuda_of_driver": runtime.driverGetVersion(),
        "cuda_of_cupy": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "memory_bytes": cupy.cuda.Device(number).mem_info[1],
        "multiprocessors": runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, number),
        "last_cache_bytes": runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, number),
    }


def free_bytes(number: int) -> int:
    """Memory of a device that nobody holds, in bytes."""
    import cupy

    return int(cupy.cuda.Device(number).mem_info[0])


def _smi() -> dict[str, str]:
    """What nvidia-smi tells; nothing where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    words = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    first = done.stdout.partition("\n")[0]
    return dict(zip(_SMI_FIELDS, map(str.strip, first.split(",")), strict=False)) if done.returncode == 0 else {}


def gpu_tests(clock: Clock) -> Found:
    """`pytest -m gpu`."""
    tests = ROOT / "tests"
    if not tests.is_dir():
        return Found(verdict="skipped", reason=f"there is no folder {tests}; run it from a checkout")
    files = gpu_test_files(tests)
    with tempfile.TemporaryDirectory(prefix="kvproof-gpu-") as folder:
        report = Path(folder) / "tests.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        words += ["--continue-on-collection-errors", *map(str, files)]
        limit_s = max(1.0, clock.left())
        try:
            done = run_group(words, limit_s=limit_s, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return Found(verdict="cut", reason="its time was up before its end")
        if not report.exists():
            return Found(verdict="red", reason="pytest wrote no report", result={"output": done.stdout + done.stderr})
        return tests_verdict(report.read_text(), done.stdout)


def gpu_test_files(tests: Path) -> list[Path]:
    """The test files that speak of the marker `gpu`: no other is imported, which may need what is not installed."""
    return sorted(file for file in tests.rglob("test_*.py") if _GPU_MARKER in file.read_text())


def tests_verdict(junit: str, output: str) -> Found:
    """What pytest's report of the GPU-marked tests says: one that is skipped here, on a GPU, proved nothing."""
    root = ElementTree.fromstring(junit)
    counts = {name: sum(int(suite.get(name, "0")) for suite in root.iter("testsuite")) for name in _JUNIT}
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    told = f"{passed} passed, {bad} failed, {counts['skipped']} skipped"
    result = {**counts, "passed": passed, "output": output[-8000:] if bad or not passed else ""}
    return Found(verdict="red" if bad or not passed else "green", reason=told, result=result)


def sanitizers(clock: Clock) -> Found:
    """compute-sanitizer's tools over a small case."""
    program = find_sanitizer()
    if program is None:
        return Found(verdict="skipped", reason="compute-sanitizer is not installed: it comes with the CUDA toolkit")

    def save(runs: list[ToolRun]) -> None:
        clock.save({"runs": [asdict(run) for run in runs]}, now=True)

    verdicts = sanitize(program, clock.left, save)
    result = {"program": str(program), "tools": [asdict(one) for one in verdicts]}
    reason = "; ".join(f"{one.tool} {one.verdict}: {one.reason}" for one in verdicts)
    names = {one.verdict for one in verdicts}
    verdict: Verdict = "red" if "red" in names else "green" if names == {"green"} else "skipped"
    return Found(verdict=verdict, reason=reason, result=result)


def resource_records(clock: Clock) -> Found:
    """`kvproof records check` for this device's SM, with every toolkit that is here."""
    sms = (CudaBackend().arch,)
    if sms[0] not in records.SMS:
        return Found(verdict="skipped", reason=f"{sms[0]} has no records; there are those of {', '.join(records.SMS)}")
    try:
        measured = [records.measure(toolkit, FLASH_NEXT, sms) for toolkit in toolkits.toolkits()]
    except CubinError as error:
        return Found(verdict="skipped", reason=str(error))
    return compared_records(measured, sms)


def compared_records(measured: list[records.Measured], sms: tuple[str, ...]) -> Found:
    """Measurements against their records; a toolkit that has none is told, and judged by what no record allows."""
    recorded = {one.toolkit: records.read(one.toolkit, one.geometry) for one in measured}
    changes = [change for one in measured for change in records.compare(recorded[one.toolkit], one, sms)]
    unrecorded = [name for name, record in recorded.items() if record is None]
    red = [change for change in changes if change.red and not (change.kernel == "" and change.toolkit in unrecorded)]
    result = {"measured": [asdict(one) for one in measured], "changes": [asdict(change) for change in changes]}
    if red:
        return Found(verdict="red", reason=f"{len(red)} changes: {red[0].message}", result=result)
    if unrecorded:
        reason = f"no record of {', '.join(unrecorded)}; none of its kernels has local memory"
        return Found(verdict="skipped" if len(unrecorded) == len(measured) else "green", reason=reason, result=result)
    return Found(verdict="green", reason=f"as recorded for {', '.join(recorded)}", result=result)
