"""The contract (SPEC section 6): what makes a kernel's paged form the same kernel.

Each case runs once over contiguous caches; what that gives is the truth that every paged run must reproduce to the bit,
kernel by kernel, each kernel given the truth's results so that it is judged alone. The truth itself is held against the
float64 reference by the bound gate. Paged runs go over several page sizes, tables and thread orders; the memory gate
repeats them with everything poisoned that no kernel may read, and compares the whole arena with what it should hold.
Then launches are captured and replayed (`captured`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..fast import CompileError, LaunchError, default_engine
from ..reference.geometry import Geometry
from ..reference.layout import LayerCache, Layout
from .arithmetic import arithmetic_of
from .captured import check_captured
from .cases import CHECK_LAYERS, Case, CaseData, StreamCase, fill
from .compare import Site, compare_bits, compare_bound
from .controls import Control, controls
from .diagnosis_window import READERS, diagnose_rows
from .interval import Interval
from .memory import FastKernels, changed
from .operations import AHEAD, AXES, OPERATIONS, Answers, Array, Call, Operation, Outputs, calls_of, store
from .report import Failure, Report
from .scene import (
    POISONS,
    TABLES,
    Filler,
    Scene,
    Tables,
    Workspace,
    contiguous,
    page_counts,
    page_order,
    paged,
    with_pooled,
)
from .variants import Variant

LAYER = CHECK_LAYERS - 1
"""The layer that is run; the others hold other data, and nothing may touch them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        geometry: of the kernels; its layers are those of the checked arena.
        cases, page_sizes: each with each.
        seed: of the data and the shuffled tables.
        replay: the command line that runs one case at one page size again; its fields are {case} and {page}.
        captured: check captured launches too, once for all cases.

    Raises:
        ValueError: a page size that is not a positive multiple of the block.
    """

    geometry: Geometry
    cases: tuple[Case, ...]
    page_sizes: tuple[int, ...]
    seed: int
    replay: str
    captured: bool = True

    def __post_init__(self) -> None:
        for page_size in self.page_sizes:
            Layout(geometry=self.geometry, page_size=page_size)

    def steps(self, variants: int) -> int:
        """Runs in all, for a progress bar."""
        paged_runs = len(TABLES) * variants + len(POISONS) + 1
        return len(self.cases) * (variants + 1 + len(self.page_sizes) * paged_runs)


Truth = tuple[dict[str, Array], ...]
"""Results of each stream's contiguous run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """One run of all kernels over one scene, and where its findings go."""

    report: Report
    data: CaseData
    calls: tuple[Call, ...]
    kept: tuple[Array, ...]
    tables: list[npt.NDArray[np.int32] | None]
    where: str
    replay: str

    def fail(self, gate: str, kernel: str, message: str) -> None:
        self.report.failed(Failure(gate=gate, kernel=kernel, where=self.where, message=message, replay=self.replay))

    def judge(self, gate: str, kernel: str, message: str | None) -> None:
        """Count one check: green without a message."""
        if message is None:
            self.report.passed(gate, kernel)
        else:
            self.fail(gate, kernel, message)


def check(
    plan: Plan, variants: Sequence[Variant], report: Report, progress: Callable[[str], None] = lambda step: None
) -> None:
    """Run the plan's cases through every gate.

    Args:
        variants: at least one; the first gives the truth.
        report: takes the findings.
        progress: called before each run with what it is.
    """
    for variant in variants:
        variant.prepare(plan.geometry, lambda family: None)
    for case in plan.cases:
        _check_case(plan, case, variants, report, progress)
    if plan.captured and plan.cases and plan.page_sizes:
        replay = plan.replay.format(case=plan.cases[0].name, page=plan.page_sizes[0])
        check_captured(plan.geometry, variants, report, seed=plan.seed, replay=replay)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One small check, drawn by Hypothesis; its repr builds it again.

    Attributes:
        geometry: of the kernels.
        streams: which share one arena.
        page_size: positions of a page.
        order: physical pages in the order in which they are handed out, a permutation; what is left over is slack.
        filler: what everything holds that no kernel may read.
        seed: of the data.

    Raises:
        ValueError: a page size that is not a positive multiple of the block, or pages that do not suffice.
    """

    geometry: Geometry
    streams: tuple[StreamCase, ...]
    page_size: int
    order: tuple[int, ...]
    filler: Filler = "zero"
    seed: int = 0

    def __post_init__(self) -> None:
        Layout(geometry=self.geometry, page_size=self.page_size)
        needed = sum(page_counts(self.case, self.page_size))
        if sorted(self.order) != list(range(len(self.order))) or len(self.order) < needed:
            raise ValueError(f"order {self.order} must be a permutation of the arena's pages, at least {needed}")

    @property
    def case(self) -> Case:
        """The streams as a case."""
        return Case(name="example", edge="drawn", streams=self.streams, dense_rows=1)


def check_example(example: Example, variants: Sequence[Variant], report: Report) -> None:
    """Run one example through every gate: contiguous by each variant, then its own pages by each, then the controls.

    The variants take turns: the first gives the truth; the last reads the pages over zeros, the one before it over the
    example's filler.
    """
    data = with_pooled(fill(example.geometry, example.case, seed=example.seed))
    calls, kept = calls_of(data, arithmetic_of(variants[0].kernels)), _kept(data)
    space = Workspace()

    def run(where: str) -> _Run:
        replay = f"check_example({example!r})"
        return _Run(report=report, data=data, calls=calls, kept=kept, tables=[], where=where, replay=replay)

    truth = _truth(run("contiguous"), contiguous(data, space), variants[0])
    if truth is None:
        return
    answers = _bound_gate(run("against float64"), contiguous(data, space), variants[0], truth)

    def arena(filler: Filler) -> Scene:
        return paged(data, space, page_size=example.page_size, order=example.order, filler=filler)

    _window_run(run("paged"), arena("zero"), space, variants[-1], truth, "bits")
    if example.filler != "zero":
        what = run(f"paged, poisoned with {example.filler}")
        _window_run(what, arena(example.filler), space, variants[len(variants) // 2], truth, "memory")
    _control_gate(run("controls"), arena("other"), space, variants[0], answers)


def _kept(data: CaseData) -> tuple[Array, ...]:
    """Copies of what the kernels are given and must leave as it is."""
    return tuple(stream.projection.copy() for stream in data.streams)


def _check_case(
    plan: Plan, case: Case, variants: Sequence[Variant], report: Report, progress: Callable[[str], None]
) -> None:
    data = with_pooled(fill(plan.geometry, case, seed=plan.seed))
    calls, kept = calls_of(data, arithmetic_of(variants[0].kernels)), _kept(data)

    def run(where: str, page: int | None) -> _Run:
        pages = "" if page is None else f"page {page}, "
        replay = plan.replay.format(case=case.name, page=page or plan.page_sizes[0])
        progress(f"{case.name}: {pages}{where}")
        where = f"case {case.name}, {pages}{where}"
        return _Run(report=report, data=data, calls=calls, kept=kept, tables=[], where=where, replay=replay)

    space = Workspace()
    truth = _truth(run(f"contiguous, {variants[0].name}", None), contiguous(data, space), variants[0])
    if truth is None:
        return
    for variant in variants[1:]:
        what = run(f"contiguous, {variant.name}", None)
        _window_run(what, contiguous(data, space), space, variant, truth, "bits")
    answers = _bound_gate(run("against float64", None), contiguous(data, space), variants[0], truth)

    for page in plan.page_sizes:

        def arena(tables: Tables, filler: Filler, page: int = page) -> Scene:
            order = page_order(case, page_size=page, tables=tables, seed=plan.seed)
            return paged(data, space, page_size=page, order=order, filler=filler)

        for tables in TABLES:
            base = arena(tables, "zero")
            for variant in variants:
                what = run(f"{tables} table, {variant.name}", page)
                _window_run(what, base.copy(space, "run"), space, variant, truth, "bits")
        for number, filler in enumerate(POISONS):
            variant = variants[number % len(variants)]
            what = run(f"shuffled table, poisoned with {filler}, {variant.name}", page)
            _window_run(what, arena("shuffled", filler), space, variant, truth, "memory")
        _control_gate(run("controls", page), arena("shuffled", "other"), space, variants[0], answers)


def _truth(run: _Run, scene: Scene, variant: Variant) -> Truth | None:
    """The first contiguous run; None, and a failure in the report, where a kernel did not run.

    What the kernels under test do not implement is computed by our own, and not judged.
    """
    results: tuple[dict[str, Array], ...] = tuple({} for _ in run.calls)
    for operation in OPERATIONS:
        judged = operation.implemented_by(variant.kernels)
        if not judged:
            run.report.not_judged.add(operation.name)
        for call, given in zip(run.calls, results, strict=True):
            cache = scene.cache(call.stream, LAYER)
            outputs = (
                _launch(run, "bits", operation, variant, call, given, cache)
                if judged
                else operation.run(FastKernels(default_engine()), call, given, cache, cache)
            )
            if outputs is None:
                return None
            given.update((name, array.copy()) for name, array in outputs.items())
            if operation.name in AHEAD and judged:
                plain = {name: given[name.replace(operation.name, AHEAD[operation.name])] for name in outputs}
                _compare(run, "bits", operation, call, outputs, plain, cache)
        if judged:
            _guards(run, operation, variant)
    return results


def _launch(
    run: _Run,
    gate: str,
    operation: Operation,
    variant: Variant,
    call: Call,
    given: dict[str, Array],
    cache: LayerCache,
    view: LayerCache | None = None,
) -> Outputs | None:
    """Run one operation; None, and a failure in the report, where the kernel failed."""
    try:
        return operation.run(variant.kernels, call, given, cache, view or cache)
    except LaunchError as error:
        overrun = "address" in error.reason or "shared memory" in error.reason
        run.fail("memory" if overrun else gate, operation.name, str(error))
        return None
    except (CompileError, TypeError, ValueError) as error:  # what the kernels before it gave does not fit
        run.fail(gate, operation.name, str(error))
        return None


def _guards(run: _Run, operation: Operation, variant: Variant) -> None:
    broken = variant.broken_guards()
    run.judge("memory", operation.name, "; ".join(broken) if broken else None)


def _window_run(run: _Run, scene: Scene, space: Workspace, variant: Variant, truth: Truth, gate: str) -> None:
    """Every kernel over a scene whose caches hold the streams' history, compared with the truth."""
    want = scene.copy(space, "want")
    run.tables[:] = scene.tables
    for operation in OPERATIONS:
        judged = operation.implemented_by(variant.kernels)
        for call, given in zip(run.calls, truth, strict=True):
            cache = scene.cache(call.stream, LAYER)
            store(want.cache(call.stream, LAYER), call, operation, given)
            if not judged:
                store(cache, call, operation, given)
                continue
            outputs = _launch(run, gate, operation, variant, call, given, cache)
            _compare(run, gate, operation, call, outputs or {}, given, cache)
        if not judged:
            continue
        _guards(run, operation, variant)
        if operation.stores:
            _written(run, operation.name, scene, want)
    _readers_wrote_nothing(run, scene, want, variant, truth)
    _inputs_are_whole(run)


def _inputs_are_whole(run: _Run) -> None:
    """No kernel may have written to what it was given."""
    for call, data, kept in zip(run.calls, run.data.streams, run.kept, strict=True):
        if not np.array_equal(call.projection.view(np.uint16), kept.view(np.uint16)):
            run.fail(
                "memory", "window", f"a kernel changed the projection of stream {call.stream}, which it only reads"
            )
            data.projection[...] = kept


def _compare(
    run: _Run, gate: str, operation: Operation, call: Call, got: Outputs, want: Outputs, cache: LayerCache
) -> None:
    site = Site(stream=call.stream, pos0=call.pos0, cache=cache)
    for name, array in got.items():
        found = compare_bits(name, array, want[name], AXES[name], site)
        if found is None:
            run.report.passed(gate, operation.name)
            continue
        sentence = None
        if run.report.diagnoses and operation.name in READERS and not run.report.counts[gate, operation.name].failed:
            run.report.diagnoses -= 1
            sentence = diagnose_rows(operation, call, want, cache, run.tables, got)
        run.fail(gate, operation.name, str(found) if sentence is None else f"{found}\n  diagnosis: {sentence}")


def _written(run: _Run, kernel: str, scene: Scene, want: Scene) -> None:
    """Compare the whole arena with what it should hold, and put it right for the kernels that follow."""
    found = changed(scene, want)
    run.judge("memory", kernel, found)
    if found is not None:
        scene.restore(want)


def _readers_wrote_nothing(run: _Run, scene: Scene, want: Scene, variant: Variant, truth: Truth) -> None:
    """No kernel that only reads may have changed the arena; where one did, run each again to name it."""
    readers = [op for op in OPERATIONS if not op.stores and op.implemented_by(variant.kernels)]
    found = changed(scene, want)
    if found is None:
        for operation in readers:
            run.report.passed("memory", operation.name)
        return
    run.fail("memory", "window", found)
    for operation in readers:
        scene.restore(want)
        for call, given in zip(run.calls, truth, strict=True):
            _launch(run, "memory", operation, variant, call, given, scene.cache(call.stream, LAYER))
        run.judge("memory", operation.name, changed(scene, want))


def _bound_gate(run: _Run, scene: Scene, variant: Variant, truth: Truth) -> tuple[Answers, ...]:
    """Hold the contiguous results against the float64 reference; returns them with their intervals."""
    answers = []
    for call, given in zip(run.calls, truth, strict=True):
        cache = scene.cache(call.stream, LAYER)
        site = Site(stream=call.stream, pos0=call.pos0, cache=cache)
        intervals: dict[str, Interval] = {}
        for operation in OPERATIONS:
            found = operation.bound(call, given, cache)
            judged = operation.implemented_by(variant.kernels)
            for name, interval in found.items() if judged else ():
                worst, difference = compare_bound(name, given[name], interval, AXES[name], site)
                run.report.near(name, worst)
                run.judge("bound", operation.name, None if difference is None else str(difference))
            intervals.update(found)
            store(cache, call, operation, given)
        answers.append(Answers(call=call, results=given, intervals=intervals))
    return tuple(answers)


def _control_gate(run: _Run, base: Scene, space: Workspace, variant: Variant, answers: tuple[Answers, ...]) -> None:
    """Plant each control that changes the reference's answer: the check must go red. Each kernel must have one."""
    longest = max(answers, key=lambda a: a.call.end)
    tried: dict[str, list[str]] = {}
    effective = set()
    for control in controls(base, space, longest, LAYER):
        name = control.operation.name
        if not control.operation.implemented_by(variant.kernels):
            continue
        tried.setdefault(name, []).append(control.name)
        if control.effective:
            effective.add(name)
            _judge_control(run, control, variant)
    for name in tried.keys() - effective:
        told = ", ".join(tried[name])
        run.fail("controls", name, f"no control changes the float64 answer, so none proves anything: {told}")
    variant.broken_guards()


def _judge_control(run: _Run, control: Control, variant: Variant) -> None:
    name = control.operation.name
    try:
        got = control.operation.run(variant.kernels, control.call, control.given, control.cache, control.view)
        red = any(compare_bits(n, array, control.want[n], AXES[n], _NOWHERE) is not None for n, array in got.items())
    except (LaunchError, ValueError):
        red = True  # a kernel that stops over a planted row has seen it
    run.judge(
        "controls", name, None if red else f"{control.name} changes the float64 answer, but the check stayed green"
    )


_NOWHERE = Site(stream=0, pos0=0)
