"""Runs the fault catalogue: each fault over the same inputs until the gate that should see it goes red.

The unplanted kernels must be green on every input that a planted one is given.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ...fast import Engine, HostBackend, KernelSources, LaunchError, StreamError
from ...reference.geometry import TINY, Geometry
from ...reference.layout import BF16, PARTS, LayerCache, Layout
from ...reference.results import Bf16Array, KeyLists
from ..captured import check_captured
from ..cases import Case, CaseData, StreamCase, at_check, fill
from ..compare import Site, compare_bits
from ..contract import LAYER
from ..examples import Draw, draw, run_example
from ..operations import AXES, OPERATIONS, Array, Call, Kernels
from ..report import Failure, Report
from ..serving.delayed import DelayedBackend, DelayedEngine
from ..serving.load import run_load
from ..serving.world import StreamFaultError
from ..variants import Variant, host_variants
from .faults import FAULT_GATES, STREAMS, Fault, Inputs, chosen
from .isolate import isolated

EXAMPLES = 24
"""Drawn examples after which a fault that its gate has not seen is missed."""

TIMEOUT_S = 20.0
"""CPU seconds that a launch of a planted kernel may take."""

LOAD_OPERATIONS, LOAD_STREAMS = 300, 12
"""Of a load of streams."""

PROCESS_S = 120.0
"""Seconds of one fault, compilation included."""

Trial: TypeAlias = Callable[[Sequence[Variant], Report], None]
"""One input: runs the kernels on it and reports what every gate says."""


# ---- inputs ----


def _drawn(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    for example in draw(geometry, seed=seed, replay=replay):

        def trial(variants: Sequence[Variant], report: Report, example: Draw = example) -> None:
            run_example(geometry, example, variants, report, seed=seed)

        yield trial


_HIGH_ROWS = StreamCase(cached=40, rows=9)
_HIGH_PAGE_SIZE = 4096


def _high_page(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    """Every kernel over a page past 2**32 elements; an address cut to 32 bits falls on the arena's first pages."""

    def trial(variants: Sequence[Variant], report: Report) -> None:
        data = _one_stream(geometry, _HIGH_ROWS, seed)
        flat, far = _low_and_high(geometry, data)
        _over_a_high_page(_call(geometry, data), flat, far, variants[0], report, replay)

    yield trial


def _one_stream(geometry: Geometry, stream: StreamCase, seed: int) -> CaseData:
    return fill(geometry, Case(name="one", edge="one stream", streams=(stream,)), seed=seed)


def _call(geometry: Geometry, data: CaseData) -> Call:
    stream = data.streams[0]
    return Call(
        geometry=geometry,
        weights=data.weights,
        stream=0,
        pos0=stream.case.cached,
        projection=stream.projection,
        rope=stream.rope,
        dense_rows=2,
    )


def _low_and_high(geometry: Geometry, data: CaseData) -> tuple[LayerCache, LayerCache]:
    """The stream's history in a contiguous cache, and in the last page of an arena of more than 2**32 elements."""
    low = Layout.contiguous(geometry, _HIGH_PAGE_SIZE)
    page = 2**32 // low.page_elements + 1
    layout = Layout(geometry=geometry, page_size=_HIGH_PAGE_SIZE, pages=page + 1)
    table = np.array([page], np.int32)
    flat = LayerCache(buffer=low.zeros(), layout=low, layer=LAYER)
    far = LayerCache(buffer=_untouched(layout.elements), layout=layout, layer=LAYER, table=table)
    stream = data.streams[0]
    for cache in (flat, far):
        for part in PARTS[:3]:
            cache.write(part, np.arange(stream.case.cached), stream.history[LAYER][part])
    return flat, far


_LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Memory that is not even promised before it is touched."""


def _untouched(elements: int) -> Bf16Array:
    """A zeroed bf16 array whose memory is made where it is touched, however large."""
    return np.frombuffer(mmap.mmap(-1, 2 * elements, flags=_LAZY), BF16)


def _over_a_high_page(
    call: Call, flat: LayerCache, far: LayerCache, variant: Variant, report: Report, replay: str
) -> None:
    given: dict[str, Array] = {}
    where = f"the last page of an arena of {far.layout.elements} elements"
    for operation in OPERATIONS:
        judge = functools.partial(_judge, report, kernel=operation.name, where=where, replay=replay)
        try:
            given.update(operation.run(variant.kernels, call, given, flat, flat))
            got = operation.run(variant.kernels, call, given, far, far)
        except LaunchError as error:
            judge(gate="bits", message=str(error))
            continue
        for name, array in got.items():
            found = compare_bits(name, array, given[name], AXES[name], Site(stream=0, pos0=call.pos0, cache=far))
            judge(gate="bits", message=None if found is None else str(found))
        touched = far.buffer[: 2 * flat.layout.elements].view(np.uint16).any()
        judge(gate="memory", message="the first pages changed, which no table names" if touched else None)
    variant.broken_guards()


_BAD_TABLES: Mapping[str, tuple[int, ...]] = {
    "names the page behind the arena": (0, 3),
    "names page -1": (0, -1),
    "is one entry short": (0,),
    "names a page twice": (1, 1),
}


def _bad_tables(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    """Page tables that every kernel must refuse, over an arena of 3 pages and a page of NaN behind it."""
    for what, entries in _BAD_TABLES.items():

        def trial(variants: Sequence[Variant], report: Report, what: str = what, entries: Any = entries) -> None:
            layout = Layout(geometry=geometry, page_size=3 * geometry.budget, pages=3)
            memory = np.full(layout.elements + layout.page_elements, np.nan, BF16)
            memory[: layout.elements] = 1
            cache = LayerCache(
                buffer=memory[: layout.elements], layout=layout, layer=LAYER, table=np.array(entries, np.int32)
            )
            data = _one_stream(geometry, StreamCase(cached=2 * layout.page_size - 3, rows=2), seed)
            _refuse(_call(geometry, data), cache, memory, variants[0], report, f"a table that {what}", replay)

        yield trial


def _refuse(
    call: Call, cache: LayerCache, memory: Bf16Array, variant: Variant, report: Report, where: str, replay: str
) -> None:
    before = memory.copy().view(np.uint16)
    for kernel, launch in _launches(call, cache, variant.kernels).items():
        judge = functools.partial(_judge, report, kernel=kernel, where=where, replay=replay)
        try:
            launch()
        except ValueError:
            judge(gate="validation", message=None)
        except LaunchError as error:
            judge(gate="validation", message=f"launched with {where}: {error}")
        else:
            judge(gate="validation", message=f"accepted {where}")
        kept = np.array_equal(before, memory.view(np.uint16))
        judge(gate="memory", message=None if kept else f"stored rows through {where}")
    variant.broken_guards()


def _launches(call: Call, cache: LayerCache, k: Kernels) -> dict[str, Callable[[], object]]:
    """Every kernel that takes a cache, with queries of any values."""
    g, rows, pos0 = call.geometry, call.rows, call.pos0
    q = np.ones((rows, g.query_heads, g.head_dim), BF16)
    iq = np.ones((rows, g.index_heads, g.index_dim), BF16)
    lists = KeyLists.dense(np.arange(pos0, call.end) + 1)
    return {
        "prep": lambda: k.prep(g, call.weights, cache, call.projection, pos0, call.rope),
        "pool": lambda: k.pool(g, call.weights, cache, pos0, rows, call.rope),
        "scores": lambda: k.scores(g, cache, iq, pos0),
        "chunks": lambda: k.chunks(g, cache, q, lists),
        "chunks_ahead": lambda: k.chunks_ahead(g, cache, q, lists),
    }


def _judge(report: Report, *, gate: str, kernel: str, where: str, message: str | None, replay: str) -> None:
    if message is None:
        report.passed(gate, kernel)
    else:
        report.failed(Failure(gate=gate, kernel=kernel, where=where, message=message, replay=replay))


def _captured(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    """Captured launches, replayed while memory and pages change hands."""

    def trial(variants: Sequence[Variant], report: Report) -> None:
        check_captured(geometry, variants, report, seed=seed, replay=replay)

    yield trial


def _streams(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    """What a server does, on one queue."""
    yield functools.partial(_load, Engine, seed, replay)


def _queues(geometry: Geometry, seed: int, replay: str) -> Iterator[Trial]:
    """The same on two queues: work as late as it may be, and in turns."""
    yield functools.partial(_load, DelayedEngine, seed, replay)
    yield functools.partial(_load, lambda: DelayedEngine(DelayedBackend(policy="turns")), seed, replay)


def _load(engine: Callable[[], Engine], seed: int, replay: str, variants: Sequence[Variant], report: Report) -> None:
    """A load of streams on our kernels, whatever the variants: the fault is around them."""
    judge = functools.partial(
        _judge, report, kernel=STREAMS, where=f"{LOAD_OPERATIONS} random operations", replay=replay
    )
    try:
        run_load(engine(), operations=LOAD_OPERATIONS, streams=LOAD_STREAMS, seed=seed)
    except StreamFaultError as error:
        judge(gate=error.gate, message=str(error))
    except StreamError as error:
        judge(gate="validation", message=str(error))
    else:
        for gate in ("bits", "memory", "validation"):
            judge(gate=gate, message=None)


_INPUTS: Mapping[Inputs, Callable[[Geometry, int, str], Iterator[Trial]]] = {
    "drawn": _drawn,
    "high page": _high_page,
    "bad tables": _bad_tables,
    "captured": _captured,
    "streams": _streams,
    "queues": _queues,
}


# ---- running ----


@dataclass(frozen=True, kw_only=True)
class Caught:
    """What became of one planted fault.

    Attributes:
        fault: the entry.
        red: gates that went red, each with the kernels it went red on.
        examples: run until the expected gate went red, or in all.
        seconds: that took, compilation included.
        caught: the expected gate saw it.
        message: the first failure of the expected gate, in words; what went wrong where it is not caught.
    """

    fault: Fault
    red: Mapping[str, tuple[str, ...]]
    examples: int
    seconds: float
    caught: bool
    message: str

    def as_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        return {
            "id": self.fault.id,
            "title": self.fault.title,
            "expected": {"gate": self.fault.gate, "kernels": self.fault.kernels},
            "red": self.red,
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            "caught": self.caught,
            "message": self.message,
        }


@dataclass(kw_only=True)
class Hunt:
    """Runs entries over the same inputs, planted and unplanted.

    Attributes:
        seed: of the examples.
        limit: examples after which a fault is missed.
        backend: whose compiler and flags are used; optimises little when None, compilation being most of the work.
    """

    seed: int = 0
    limit: int = EXAMPLES
    backend: HostBackend | None = None
    geometry: Geometry = field(default_factory=lambda: at_check(TINY))
    _green: dict[tuple[Inputs, int], str | None] = field(default_factory=dict)
    _unplanted: tuple[Variant, ...] | None = None

    def run(self, fault: Fault) -> Caught:
        """Plant one fault and look for it.

        Raises:
            ValueError: one of its edits no longer applies.
        """
        started = time.monotonic()
        variants = self._variants(fault.sources(), fault.host)
        report, examples, message = Report(), 0, None
        for number, trial in enumerate(self._trials(fault), start=1):
            if number > self.limit:
                break
            examples = number
            message = self._unplanted_failure(fault.inputs, number, trial)
            if message is not None:
                break
            with (fault.method or nullcontext)():
                self._try(trial, variants, report)
            if _seen(fault, report):
                break
        return Caught(
            fault=fault,
            red=_red(report),
            examples=examples,
            seconds=time.monotonic() - started,
            caught=message is None and _seen(fault, report),
            message=message or _first(fault, report),
        )

    def _trials(self, fault: Fault) -> Iterator[Trial]:
        return _INPUTS[fault.inputs](self.geometry, self.seed, f"kvproof faults --only {fault.id} --seed {self.seed}")

    def _variants(self, sources: KernelSources, host: Callable[[Kernels], Kernels] | None) -> tuple[Variant, ...]:
        backend = self.backend or HostBackend(flags=("-O1",), timeout_s=TIMEOUT_S)
        made = host_variants(seed=self.seed, sources=sources, backend=backend)
        return made if host is None else tuple(replace(v, kernels=host(v.kernels)) for v in made)

    def _try(self, trial: Trial, variants: Sequence[Variant], report: Report) -> None:
        try:
            trial(variants, report)
        except ValueError as error:  # refused before a launch
            _judge(report, gate="validation", kernel="host", where="arguments", message=str(error), replay="")

    def _unplanted_failure(self, inputs: Inputs, number: int, trial: Trial) -> str | None:
        """Why the unplanted kernels are red on this input, None where they are green; each input is run once."""
        if (inputs, number) not in self._green:
            if self._unplanted is None:
                self._unplanted = self._variants(KernelSources(), None)
            report = Report()
            self._try(trial, self._unplanted, report)
            said = report.failures[0].message if report.failures else "nothing ran"
            self._green[inputs, number] = None if report.green else f"the unplanted kernels are red too: {said}"
        return self._green[inputs, number]


def _seen(fault: Fault, report: Report) -> bool:
    return any(gate == fault.gate and fault.expects(kernel) and c.failed for (gate, kernel), c in report.counts.items())


def _red(report: Report) -> dict[str, tuple[str, ...]]:
    red: dict[str, tuple[str, ...]] = {}
    for gate in FAULT_GATES:
        kernels = tuple(kernel for (g, kernel), count in report.counts.items() if g == gate and count.failed)
        if kernels:
            red[gate] = kernels
    return red


def _first(fault: Fault, report: Report) -> str:
    for failure in report.failures:
        if failure.gate == fault.gate and fault.expects(failure.kernel):
            return f"{failure.gate} {failure.kernel}: {failure.message}"
    where = ", ".join(f"{gate} ({', '.join(kernels)})" for gate, kernels in _red(report).items())
    wanted = f"{fault.gate} of {', '.join(fault.kernels)}"
    return f"{wanted} stayed green; red: {where or 'nothing'}"


def hunt(
    faults: Sequence[Fault], *, seed: int = 0, jobs: int = 2, progress: Callable[[Caught], None] = lambda caught: None
) -> list[Caught]:
    """Run planted faults, each in a process of its own, `jobs` at a time; in the order given.

    Raises:
        ValueError: one of their edits no longer applies.
    """
    done: list[Caught | None] = [None] * len(faults)
    for end in isolated(_hunt_one, [(fault.id, seed) for fault in faults], jobs=jobs, limit_s=PROCESS_S):
        fault = faults[end.number]
        caught = end.result or Caught(
            fault=fault, red={}, examples=0, seconds=end.seconds, caught=False, message=f"its process {end.died}"
        )
        done[end.number] = caught
        progress(caught)
    return [caught for caught in done if caught is not None]


def _hunt_one(name: str, seed: int) -> Caught:
    return Hunt(seed=seed).run(chosen([name])[0])
