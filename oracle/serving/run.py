"""Runs the units of a serve-check, one after the other or in several processes."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from threadpoolctl import threadpool_limits

from ...fast import Engine, HostBackend, backend_for
from ...fast.engine import BackendChoice
from .check import BASELINE, needs_media, run_unit, serve_plain, units
from .ground import Ground
from .plan import ServePlan
from .served import Served
from .trace import Trace


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a plan is run.

    Attributes:
        plan: what is served.
        checks: which.
        backend: where the kernels run.
        replay: command line that runs one check again; `{check}` stands for its name.
        jobs: processes.
    """

    plan: ServePlan
    checks: tuple[str, ...]
    backend: BackendChoice
    replay: str
    jobs: int


Told = Callable[[str], None]


def steps(setting: Setting) -> int:
    """Steps that `serve_all` tells of."""
    return len(_wanted(setting)) + len(units(setting.plan, setting.checks))


def serve_all(setting: Setting, told: Told) -> list[Served]:
    """Run the checks; the first entry is the plain runs themselves, and the others are in the order of `units`."""
    ordered = units(setting.plan, setting.checks)
    found: dict[tuple[str, str], Served] = {}
    baseline = _baseline()
    wants: dict[str, Trace] = {}
    with tempfile.TemporaryDirectory() as folder, _pool(setting) as pool:
        first = setting.replay.format(check=setting.checks[0])
        for traces, plain in pool(_plain, [(name, first) for name in _wanted(setting)]):
            wants |= traces
            baseline.prompts += len(traces)
            baseline.tokens += plain.tokens
            baseline.seconds += plain.seconds
            baseline.failures += plain.failures
            told(f"plain {', '.join(traces)}")
        file = Path(folder) / "wants"
        file.write_bytes(pickle.dumps(wants) if setting.jobs > 1 else b"")
        calls = [(check, run, setting.replay.format(check=check), str(file)) for check, run in ordered]
        for served in pool(_unit, calls):
            found[served.check, served.run] = served
            told(f"{served.check}: {served.run}")
    return [baseline, *(found[unit] for unit in ordered)]


def _wanted(setting: Setting) -> list[str]:
    """Names of the prompts whose plain runs are needed."""
    numbers = range(setting.plan.prompts)
    text = [f"text {i}" for i in numbers]
    media = [f"media {i}" for i in numbers if needs_media(setting.checks)]
    return text + media


# ---- processes ----

_T = TypeVar("_T")
Calls: TypeAlias = Callable[[Callable[..., _T], Sequence[tuple[Any, ...]]], Iterator[_T]]

_ground: Ground | None = None  # of this process


@contextmanager
def _pool(setting: Setting) -> Iterator[Any]:
    """Calls a function with each of several arguments, and gives the results as they come."""
    global _ground
    if setting.jobs == 1:
        _begin(setting)
        try:
            yield lambda call, arguments: (call(*one) for one in arguments)
        finally:
            _ground = None
        return
    context = multiprocessing.get_context("spawn")  # a fork would share the threads of BLAS
    with ProcessPoolExecutor(setting.jobs, context, initializer=_begin, initargs=(setting,)) as executor:

        def calls(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
            for future in as_completed([executor.submit(call, *one) for one in arguments]):
                yield future.result()

        yield calls


def _begin(setting: Setting) -> None:
    """Make this process ready."""
    global _ground
    if setting.jobs > 1:
        threadpool_limits(1)
    backend = HostBackend(workers=1) if setting.jobs > 1 else backend_for(setting.backend)
    engine = Engine(backend)
    engine.prepare(setting.plan.geometry)
    _ground = Ground(setting.plan, engine)


def _here() -> Ground:
    assert _ground is not None
    return _ground


def _baseline() -> Served:
    return Served(check=BASELINE, run="plain, contiguous, alone")


def _plain(name: str, replay: str) -> tuple[dict[str, Trace], Served]:
    """The plain run of one prompt, and what is told of it."""
    ground, served = _here(), _baseline()
    ground.replay = replay
    started = time.monotonic()
    requests = [request for request in ground.text + ground.media if request.name == name]
    traces = serve_plain(ground, requests, served)
    ground.wants |= traces
    served.tokens = sum(len(traces[request.name].tokens) - len(request.tokens) for request in requests)
    served.seconds = time.monotonic() - started
    return traces, served


def _unit(check: str, run: str, replay: str, wants: str) -> Served:
    ground = _here()
    if len(ground.wants) < len(ground.text) + len(ground.media):
        data = Path(wants).read_bytes()
        ground.wants |= pickle.loads(data) if data else {}  # which this run wrote itself
    return run_unit(ground, check, run, replay)
