"""The steps of `kvproof gpu-check`, each in a process of its own: a kernel that fails ends its process and no other.

`python -m kvproof.oracle.gpu.steps STEP SECONDS FILE` runs one step for at most so many seconds, and writes what it
found to FILE as JSON, also while it runs, so that a step that is killed has still told what it knows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...fast import CudaBackend, Engine, NoDeviceError
from ...reference.geometry import FLASH_NEXT, Geometry
from ..report import write_json
from . import bench as gpu_bench
from .found import Clock, Found, TimeUpError
from .gates import bytes_of_cpu, check_on_device, digests_on_device
from .programs import device_facts, facts, free_bytes, gpu_tests, resource_records, sanitizers

NO_DEVICE = "no device"
"""What a step's file says in place of a verdict where no GPU answers."""


def benchmark(clock: Clock) -> Found:
    """Copy bandwidth, then every kernel and a layer end to end."""
    backend = CudaBackend()
    last_cache = device_facts(backend.device)["last_cache_bytes"]
    most = gpu_bench.most_bytes(free_bytes(backend.device))
    works, timer = gpu_bench.works(), gpu_bench.CupyTimer()
    return timed(Engine(backend), FLASH_NEXT, timer, works, last_cache=last_cache, clock=clock, most=most)


def timed(
    engine: Engine,
    geometry: Geometry,
    timer: gpu_bench.Timer,
    works: tuple[gpu_bench.Work, ...],
    *,
    last_cache: int,
    clock: Clock,
    most: int = gpu_bench.MOST_BYTES,
) -> Found:
    """Time works one after another, until the time is up; those whose caches take more than `most` bytes are told."""
    copied = gpu_bench.copy_bandwidth(timer)
    sample = gpu_bench.sample_of(engine.backend)
    result: dict[str, Any] = {"copy_bandwidth": copied, "geometry": geometry.name, "timings": [], "torch": []}
    fitting = [work for work in works if gpu_bench.cache_bytes(geometry, work) <= most]
    result["skipped"] = [work.name for work in works if work not in fitting]
    result["most_bytes"] = most
    try:
        for work in fitting:
            layers = gpu_bench.layers_for(geometry, work, last_cache, most)
            found = gpu_bench.measure(engine, geometry, work, timer, sample=sample, copied=copied, layers=layers)
            result["timings"] += [asdict(one) for one in found]
            _add_torch(result, geometry, work, layers)
            clock.save(result, now=True)
    except TimeUpError:
        count = len({one["work"] for one in result["timings"]})
        return Found(verdict="cut", reason=f"its time was up after {count} of {len(fitting)} works", result=result)
    return Found(verdict="green" if fitting else "skipped", reason=_told(result, fitting, copied), result=result)


def _told(result: dict[str, Any], fitting: Sequence[gpu_bench.Work], copied: float) -> str:
    done = f"{len(fitting)} works, copy {copied / 1e9:,.0f} GB/s"
    if not result["skipped"]:
        return done
    room = f"{result['most_bytes'] / 2**20:,.0f} MiB, which one layout's caches may take here"
    return f"{done}; skipped, as they need more than {room}: {'; '.join(result['skipped'])}"


def _add_torch(result: dict[str, Any], geometry: Geometry, work: gpu_bench.Work, layers: int) -> None:
    """The same attention by PyTorch, where it is there and works; its failure is told and spoils nothing."""
    if work.rows != 1 or "torch_absent" in result:
        return
    try:
        import torch

        if not torch.cuda.is_available():
            result["torch_absent"] = f"PyTorch {torch.__version__} finds no CUDA device; is it built for the CPU alone?"
            return
        from .bench_torch import sdpa

        result["torch"] += [asdict(one) for one in sdpa(geometry, work, layers=layers)]
    except TimeUpError:
        raise
    except Exception as error:  # a build without CUDA raises AssertionError, an older one TypeError
        result["torch_absent"] = f"{type(error).__name__}: {error}"


STEPS: Mapping[str, Callable[[Clock], Found]] = {
    "facts": facts,
    "check": check_on_device,
    "bytes": bytes_of_cpu,
    "digests": digests_on_device,
    "tests": gpu_tests,
    "sanitizer": sanitizers,
    "records": resource_records,
    "bench": benchmark,
}


def run_step(name: str, seconds: float, file: Path, steps: Mapping[str, Callable[[Clock], Found]] = STEPS) -> None:
    """Run a step, and write what it found to a file: a verdict, a reason and a result."""

    def save(found: Found) -> None:
        write_json(file, asdict(found))

    try:
        save(steps[name](Clock(seconds, save)))
    except NoDeviceError as error:
        write_json(file, {"verdict": NO_DEVICE, "reason": str(error), "result": {}})
    except TimeUpError:
        save(Found(verdict="cut", reason="its time was up before its end", result=_kept(file)))
    except Exception as error:
        save(Found(verdict="red", reason=f"{type(error).__name__}: {error}", result=_kept(file)))
        raise


def _kept(file: Path) -> dict[str, Any]:
    """The result that a step saved before."""
    if not file.exists():
        return {}
    result: dict[str, Any] = json.loads(file.read_text())["result"]
    return result


if __name__ == "__main__":
    run_step(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
