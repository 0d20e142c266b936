"""Steps of `kvproof gpu-check` that compare bits: the contract on the device, the CPU's bytes, the recorded digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...fast import Backend, CudaBackend
from ...fast.engine import GPU_THREADS
from ...reference.geometry import FLASH_NEXT, TINY, Geometry
from ..cases import PAGE_SIZES, at_check, cases
from ..contract import Plan, check
from ..digests import Comparison, compare, digests, read
from ..report import Report
from ..variants import Variant, host_variants
from .found import ROOT, Clock, Found, TimeUpError
from .kernels import DeviceKernels, GuardedDevice, cuda_variants

BYTES_PAGE = 16
"""Page size, beside contiguous caches, at which the device is compared with the CPU."""


def check_on_device(clock: Clock) -> Found:
    """The whole of `kvproof check`, in three numbers of threads, over guarded outputs on the device."""
    return judged([_plan(FLASH_NEXT, PAGE_SIZES)], cuda_variants(CudaBackend()), clock)


def bytes_of_cpu(clock: Clock) -> Found:
    """Every case at both geometries: what the CPU gives is the truth that the device must reproduce to the bit."""
    plans = [_plan(geometry, (BYTES_PAGE,)) for geometry in (TINY, FLASH_NEXT)]
    return judged(plans, cpu_then(CudaBackend()), clock)


def cpu_then(backend: Backend) -> tuple[Variant, Variant]:
    """The CPU, whose results are the truth, and a device."""
    return host_variants(seed=0)[0], cuda_variants(backend)[0]


def _plan(geometry: Geometry, pages: tuple[int, ...]) -> Plan:
    shape = at_check(geometry)
    replay = f"kvproof gpu-check (geometry {geometry.name}, case {{case}}, page {{page}})"
    return Plan(geometry=shape, cases=cases(shape), page_sizes=pages, seed=0, replay=replay)


class _Progress:
    """Reports by geometry, and how many runs of all have begun."""

    def __init__(self, clock: Clock, total: int) -> None:
        self.reports: dict[str, Report] = {}
        self.runs = 0
        self.total = total
        self._clock = clock

    def begin(self, plan: Plan, variants: Sequence[Variant]) -> Report:
        """A fresh report of a plan."""
        name = plan.geometry.name
        self.reports[name] = Report(facts={"geometry": name, "variants": [one.name for one in variants]})
        return self.reports[name]

    def told(self, step: str) -> None:
        """A run begins: keep what there is, and raise TimeUpError where the time is up."""
        self.runs += 1
        self._clock.save(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        reports = {name: report.as_json() for name, report in self.reports.items()}
        return {"reports": reports, "runs": self.runs, "of": self.total}


def judged(plans: Sequence[Plan], variants: Sequence[Variant], clock: Clock) -> Found:
    """Run plans through the contract, until the time is up."""
    progress = _Progress(clock, sum(plan.steps(len(variants)) for plan in plans))
    cut = False
    try:
        for plan in plans:
            check(plan, variants, progress.begin(plan, variants), progress.told)
    except TimeUpError:
        cut = True
    return _verdict_of(progress, cut)


def _verdict_of(progress: _Progress, cut: bool) -> Found:
    counts = [count for report in progress.reports.values() for count in report.counts.values()]
    failures = [failure for report in progress.reports.values() for failure in report.failures]
    passed, failed = sum(count.passed for count in counts), sum(count.failed for count in counts)
    result = progress.as_json()
    if failed:
        reason = f"{failed} of {passed + failed} checks failed: {failures[0].message}"
        return Found(verdict="red", reason=reason, result=result)
    if cut:
        reason = (
            f"its time was up after {progress.runs} of {progress.total} runs; {passed} checks are green until there"
        )
        return Found(verdict="cut", reason=reason, result=result)
    return Found(verdict="green" if passed else "red", reason=f"{passed} checks", result=result)


def digests_on_device(clock: Clock) -> Found:
    """The digests of the device's bits against those of fixtures/digests.json."""
    file = ROOT / "fixtures" / "digests.json"
    if not file.is_file():
        return Found(verdict="skipped", reason=f"there is no {file}")
    return compared_digests(file, CudaBackend(), (TINY, FLASH_NEXT), clock)


def compared_digests(file: Path, backend: Backend, geometries: tuple[Geometry, ...], clock: Clock) -> Found:
    """Hash what every kernel gives on a device, and compare with a file of recorded digests."""
    recorded = read(file)
    kernels = DeviceKernels(GuardedDevice(backend, threads=GPU_THREADS, poison=0xFF))
    compared: list[Comparison] = []

    def told(case: str) -> None:
        clock.save({"compared": [asdict(one) for one in compared]})

    for geometry in geometries:
        found = digests(at_check(geometry), kernels, progress=told)
        compared += compare(geometry.name, recorded.get(geometry.name), found)
    red = [str(one) for one in compared if one.state != "same"]
    result = {"compared": [asdict(one) for one in compared]}
    if red:
        return Found(verdict="red", reason=f"{len(red)} of {len(compared)}: {red[0]}", result=result)
    return Found(verdict="green", reason=f"{len(compared)} digests as recorded", result=result)
