"""Hypothesis strategies of the contract: geometries, pages, lengths, tables, data, and whole cases.

    from kvproof.oracle import strategies as kv

    @given(case=kv.attention_cases())
    def test_my_kernel(case):
        kv.judge(my_kernel, case)

Every strategy takes keyword arguments only and checks them when it is called, not when it draws. Cases are plain
values: what Hypothesis prints is the call that builds them again. They shrink towards one stream of one position on the
smallest page, pages in order, zeros where nothing may be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import hypothesis
from hypothesis import strategies as st

from ..reference.geometry import TILE, TINY, Geometry
from ..reference.layout import KV_STYLES, KvStyle
from . import judge as judging
from .arithmetic import FP32, Arithmetic
from .attention import DTYPES, FILLS, PROFILES, AttentionCase, DType, Fill, Profile
from .attention_controls import AttentionControl, applicable_controls, is_effective
from .cases import PROFILES as CASE_PROFILES
from .cases import StreamCase, at_check
from .compare import Site, compare_bits
from .contract import Example, check_example
from .operations import OPERATIONS
from .report import Report
from .scene import POISONS
from .variants import variant_of

Strategy = st.SearchStrategy

DEFAULT_PAGE_SIZES: list[int] = []
"""Page sizes that strategies use when none are given; filled by pytest's --kv-page-size."""

BASE_SEED: list[int] = [0]
"""Added to the seeds of all data; set by pytest's --kv-seed."""


def judge(
    kernel: judging.Kernel, case: AttentionCase, *, arithmetic: Arithmetic = FP32, batch_bits: bool = True
) -> None:
    """`judge.judge`, and inside a Hypothesis test a target: the search goes where errors come near their bound.

    Raises:
        judge.ContractError: the kernel broke a gate.
        TypeError: the kernel's result is no array of the right dtype and shape.
    """
    __tracebackhide__ = True
    worst = judging.judge(kernel, case, arithmetic=arithmetic, batch_bits=batch_bits)
    if hypothesis.currently_in_test_context():
        hypothesis.target(worst, label="error / bound")


SHOWN = 5
"""Failures that an error tells."""


def check(kernels: Any, example: Example) -> Report:
    """Hold kernels in the block-sparse form to the contract on one example.

    Args:
        kernels: an object with some of the functions of `operations.Kernels`, or a sequence of `Variant`; what is not
            there is not judged.

    Returns:
        What was checked; `not_judged` names what was not there.

    Raises:
        judge.ContractError: a gate went red.
        ValueError: the kernels have no function that can be judged.
    """
    __tracebackhide__ = True
    variants = kernels if isinstance(kernels, (list, tuple)) else (variant_of(kernels),)
    if not any(op.implemented_by(variants[0].kernels) for op in OPERATIONS):
        known = ", ".join(op.name for op in OPERATIONS if not op.needs)
        raise ValueError(f"{type(kernels).__name__} has no function that can be judged; it needs some of {known}")
    report = Report(diagnoses=1)
    check_example(example, variants, report)
    if report.failures:
        raise _error(example, report)
    if hypothesis.currently_in_test_context() and report.worst:
        near = [worst for name, worst in report.worst.items() if name.startswith(("chunks.", "dense.o", "scores."))]
        hypothesis.target(max(near, default=0.0), label="error / bound")
    return report


def _error(example: Example, report: Report) -> judging.ContractError:
    first, *rest = report.failures
    told = [f"{f.gate} {f.kernel}: {f.message}\n  {f.where}" for f in report.failures[:SHOWN]]
    more = [f"and {len(rest) + 1 - SHOWN} more"] if len(rest) >= SHOWN else []
    lines = [*told, *more, f"example: {example!r}"]
    sentence = next((f.message.split("diagnosis: ")[1] for f in report.failures if "diagnosis: " in f.message), None)
    diagnosis = sentence or f"{first.kernel}: {first.message.splitlines()[0]}"
    saved = {
        "format": judging.WINDOW_FORMAT,
        "version": 1,
        "gate": first.gate,
        "diagnosis": diagnosis,
        "example": repr(example),
        "failures": [asdict(failure) for failure in report.failures],
    }
    return judging.ContractError(first.gate, lines, diagnosis=diagnosis, replay=judging.keep(saved))


def page_sizes(*, block: int = 1, most: int = 64) -> Strategy[int]:
    """Page sizes in positions: any multiple of `block` up to `most`, not only powers of two.

    Raises:
        ValueError: there is no such multiple.
    """
    _positive(block=block, most=most)
    if most < block:
        raise ValueError(f"most is {most}; a page holds at least one block of {block}")
    if DEFAULT_PAGE_SIZES:
        whole = [size for size in DEFAULT_PAGE_SIZES if size % block == 0]
        if not whole:
            raise ValueError(f"--kv-page-size {DEFAULT_PAGE_SIZES} has no multiple of the block, {block}; add one")
        return st.sampled_from(whole)
    return st.integers(1, most // block).map(lambda blocks: blocks * block)


def lengths(*, page_size: int, most: int, edges: Sequence[int] = ()) -> Strategy[int]:
    """A stream's length from 1 to `most`, often on or beside an edge: a page's end, two pages' end, those given.

    Raises:
        ValueError: `page_size` or `most` is below 1.
    """
    _positive(page_size=page_size, most=most)
    return _lengths(page_size=page_size, most=most, edges=edges)


@st.composite
def _lengths(draw: st.DrawFn, *, page_size: int, most: int, edges: Sequence[int] = ()) -> int:
    near = [edge + step for edge in (page_size, 2 * page_size, *edges) for step in (-1, 0, 1)]
    near = sorted({n for n in near if 1 <= n <= most})
    return draw(st.integers(1, most) | st.sampled_from(near) if near else st.integers(1, most))


def page_orders(*, pages: int) -> Strategy[tuple[int, ...]]:
    """Physical pages in the order in which they are handed out: in order, reversed, or any permutation.

    Raises:
        ValueError: `pages` is below 1.
    """
    _positive(pages=pages)
    return _page_orders(pages=pages)


@st.composite
def _page_orders(draw: st.DrawFn, *, pages: int) -> tuple[int, ...]:
    kind = draw(st.sampled_from(("identity", "reversed", "shuffled")))
    if kind == "shuffled":
        return tuple(draw(st.permutations(range(pages))))
    return tuple(range(pages)) if kind == "identity" else tuple(reversed(range(pages)))


@st.composite
def _attention_case(draw: st.DrawFn, options: dict[str, Any]) -> AttentionCase:
    kv_heads = draw(st.sampled_from(options["kv_heads"]))
    page_size = draw(options["page_size"])
    streams = draw(st.integers(1, options["most_streams"]))
    held = [draw(lengths(page_size=page_size, most=options["most_length"])) for _ in range(streams)]
    rows = [draw(st.integers(1, min(n, options["most_rows"]))) for n in held]
    slack = draw(st.integers(0, 2))
    used = sum(-(-n // page_size) for n in held)
    seed = BASE_SEED[0] + draw(st.integers(0, 2**16))
    return AttentionCase(
        query_heads=kv_heads * draw(st.sampled_from(options["groups"])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(options["head_dims"])),
        style=draw(st.sampled_from(options["styles"])),
        padding=options["padding_unit"] * draw(st.integers(0, 2)),
        page_size=page_size,
        lengths=tuple(held),
        query_lengths=tuple(rows),
        order=draw(page_orders(pages=used + slack)),
        tail=draw(st.integers(0, 2)),
        fill=draw(st.sampled_from(options["fills"])),
        profile=draw(st.sampled_from(options["profiles"])),
        dtype=draw(st.sampled_from(options["dtypes"])),
        seeds=tuple(range(seed, seed + streams)),
    )


def attention_cases(
    *,
    prefill: bool = False,
    kv_heads: Sequence[int] = (1, 2),
    groups: Sequence[int] = (1, 2, 3),
    head_dims: Sequence[int] = (8, 16, 32),
    styles: Sequence[KvStyle] = ("nhd",),
    padding_unit: int = 0,
    page_size: Strategy[int] | None = None,
    most_length: int = 80,
    most_streams: int = 3,
    dtypes: Sequence[DType] = ("bf16", "f32"),
    fills: Sequence[Fill] = FILLS,
    profiles: Sequence[Profile] = PROFILES,
) -> Strategy[AttentionCase]:
    """Cases of plain paged grouped-query attention.

    Args:
        prefill: streams have up to 8 query rows, their last, causal; else each has one (decode).
        kv_heads, groups, head_dims: shapes to choose from; a group is the query heads of one key/value head.
        styles: layouts of the pages, see `reference.layout.KvLayout`.
        padding_unit: elements; up to two of it stand unused behind each page.
        page_size: positions of a page; multiples of 1 up to 64 when None.
        most_length, most_streams: largest length, and number of streams.
        dtypes, fills, profiles: see `AttentionCase`.

    Raises:
        ValueError: an argument is empty, or holds what is not allowed.
    """
    _positive(most_length=most_length, most_streams=most_streams)
    for name, given, allowed in (
        ("styles", styles, KV_STYLES),
        ("dtypes", dtypes, tuple(DTYPES)),
        ("fills", fills, FILLS),
        ("profiles", profiles, PROFILES),
    ):
        wrong = [value for value in given if value not in allowed]
        if wrong or not given:
            raise ValueError(f"{name} is {list(given)}; give some of {', '.join(allowed)}")
    for name, sizes in (("kv_heads", kv_heads), ("groups", groups), ("head_dims", head_dims)):
        if isinstance(sizes, (str, int)) or not sizes:
            raise ValueError(f"{name} is {sizes!r}; give a sequence of at least one size")
        _positive(**{f"a size of {name}": size for size in sizes if not isinstance(size, int) or size < 1})
    _strategy(page_size)
    if padding_unit < 0:
        raise ValueError(f"padding_unit is {padding_unit}; it must be 0 or more")
    return _attention_case(
        {
            "kv_heads": kv_heads,
            "groups": groups,
            "head_dims": head_dims,
            "styles": styles,
            "padding_unit": padding_unit,
            "page_size": page_sizes() if page_size is None else page_size,
            "most_length": most_length,
            "most_streams": most_streams,
            "most_rows": 8 if prefill else 1,
            "dtypes": dtypes,
            "fills": fills,
            "profiles": profiles,
        }
    )


def streams(*, geometry: Geometry, page_size: int, most_length: int, most_rows: int = 6) -> Strategy[StreamCase]:
    """One stream of the block-sparse form: cached positions on and beside the edges of block, page and budget.

    Raises:
        ValueError: a size is below 1.
    """
    _positive(page_size=page_size, most_length=most_length, most_rows=most_rows)
    return _streams(geometry=geometry, page_size=page_size, most_length=most_length, most_rows=most_rows)


@st.composite
def _streams(
    draw: st.DrawFn, *, geometry: Geometry, page_size: int, most_length: int, most_rows: int = 6
) -> StreamCase:
    edges = (geometry.block, geometry.budget + geometry.block - 1, TILE)
    end = draw(lengths(page_size=page_size, most=most_length, edges=edges))
    rows = draw(st.integers(1, min(end, most_rows)))
    return StreamCase(
        cached=end - rows,
        rows=rows,
        rope=draw(st.sampled_from(("text", "delta", "media"))),
        profile=draw(st.sampled_from(CASE_PROFILES)),
    )


@st.composite
def _example(draw: st.DrawFn, options: dict[str, Any]) -> Example:
    geometry = draw(st.sampled_from(options["geometries"]))
    page_size = draw(options["page_size"](geometry))
    held = [
        draw(streams(geometry=geometry, page_size=page_size, most_length=options["most_length"]))
        for _ in range(draw(st.integers(1, options["most_streams"])))
    ]
    pages = sum(-(-stream.end // page_size) for stream in held) + draw(st.integers(1, 3))
    return Example(
        geometry=geometry,
        streams=tuple(held),
        page_size=page_size,
        order=draw(page_orders(pages=pages)),
        filler=draw(st.sampled_from(("zero", *POISONS))),
        seed=BASE_SEED[0] + draw(st.integers(0, 2**16)),
    )


def cases(
    *,
    geometries: Sequence[Geometry] = (TINY,),
    page_size: Strategy[int] | None = None,
    most_length: int = 90,
    most_streams: int = 3,
) -> Strategy[Example]:
    """Examples of the block-sparse form, for `check`.

    Args:
        geometries: to choose from; each is compiled once.
        page_size: positions of a page; multiples of the geometry's block up to 64 when None.
        most_length, most_streams: largest length of a stream, its window included, and number of streams.

    Raises:
        ValueError: there are no geometries, or a size is below 1.
    """
    _positive(most_length=most_length, most_streams=most_streams)
    _strategy(page_size)
    if not geometries or not all(isinstance(geometry, Geometry) for geometry in geometries):
        raise ValueError(f"geometries is {geometries!r}; give at least one Geometry, such as reference.TINY")
    return _example(
        {
            "geometries": [at_check(geometry) for geometry in geometries],
            "page_size": (lambda g: page_sizes(block=g.block)) if page_size is None else (lambda g: page_size),
            "most_length": most_length,
            "most_streams": most_streams,
        }
    )


def controls(case: AttentionCase, *, arithmetic: Arithmetic = FP32) -> Strategy[AttentionControl]:
    """Effective controls of a case: planted rows, swapped, shifted, foreign and duplicate pages, wrong lengths.

    Raises:
        ValueError: none is effective, because `arithmetic` leaves room for nearly any answer.
    """
    made = _effective(case, arithmetic)
    if not made:
        raise ValueError(f"no control changes the answer of {case} within {arithmetic}; give a narrower arithmetic")
    return st.sampled_from(made)


def planted_rows(case: AttentionCase) -> Strategy[AttentionControl]:
    """The controls that plant a key or a value; every case has one."""
    return st.sampled_from([control for control in _effective(case) if control.changes in ("keys", "values")])


def swapped_tables(case: AttentionCase) -> Strategy[AttentionControl]:
    """The controls that name wrong pages.

    Nothing where none is effective, as in an arena of one page: Hypothesis then passes over the example.
    """
    made = [control for control in _effective(case) if control.changes == "page table"]
    return st.sampled_from(made) if made else st.nothing()


def _effective(case: AttentionCase, arithmetic: Arithmetic = FP32) -> list[AttentionControl]:
    bound = case.bound(arithmetic)
    return [control for control in applicable_controls(case) if is_effective(case, control, bound, arithmetic)]


def neighbourhoods(*, most_steps: int = 4) -> Strategy[tuple[AttentionCase, ...]]:
    """Steps of one batch: stream 0 stays as it is, its neighbours come, grow, shrink and go, on other pages each time.

    Raises:
        ValueError: `most_steps` is below 1.
    """
    _positive(most_steps=most_steps)
    return _neighbourhoods(most_steps=most_steps)


@st.composite
def _neighbourhoods(draw: st.DrawFn, *, most_steps: int = 4) -> tuple[AttentionCase, ...]:
    first = draw(attention_cases(most_streams=1))
    steps = []
    for _ in range(draw(st.integers(1, most_steps))):
        others = draw(st.lists(lengths(page_size=first.page_size, most=40), max_size=3))
        held = (*first.lengths, *others)
        pages = sum(-(-n // first.page_size) for n in held) + draw(st.integers(0, 2))
        steps.append(
            replace(
                first,
                lengths=held,
                query_lengths=(1,) * len(held),
                seeds=tuple(range(first.seeds[0], first.seeds[0] + len(held))),
                order=draw(page_orders(pages=pages)),
            )
        )
    return tuple(steps)


def judge_steps(kernel: judging.Kernel, steps: Sequence[AttentionCase]) -> None:
    """Stream 0 must have the same bits at every step.

    Raises:
        AssertionError: it has not; the message names the step and the first element that differs.
    """
    __tracebackhide__ = True
    rows = []
    for case in steps:
        given = case.arguments()
        rows.append(judging.as_result(kernel(*given.values()), given["q"])[: case.query_lengths[0]])
    for step, got in enumerate(rows):
        difference = compare_bits("result", got, rows[0], ("row", "head", "element"), Site(stream=0, pos0=0))
        assert difference is None, f"step {step}, {steps[step].lengths} beside {steps[0].lengths}: {difference}"


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small geometries of the block-sparse form, few sizes powers of two; each is compiled anew, in seconds."""
    kv_heads = draw(st.integers(1, 2))
    block = draw(st.integers(1, 8))
    half = draw(st.integers(1, 8))
    t = draw(st.integers(0, half))
    h = draw(st.integers(0, half - t))
    return Geometry(
        name="drawn",
        query_heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(-(-half // 4), 5)),
        index_heads=draw(st.integers(1, 3)),
        index_dim=8 * draw(st.integers(-(-half // 4), 4)),
        block=block,
        top_blocks=draw(st.integers(1, 5)),
        rotary_half=half,
        mrope_sections=(t, h, half - t - h),
        layers=2,
    )


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; it must be an integer")
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def _strategy(page_size: object) -> None:
    if page_size is not None and not isinstance(page_size, st.SearchStrategy):
        raise TypeError(f"page_size is {page_size!r}; give a strategy, such as st.just({page_size!r}), or None")
