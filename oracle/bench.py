"""`kvproof bench`: attention rows side by side, in one run, at Flash Next geometry.

Contenders take turns of a few runs, so that a slow spell of the machine meets all of them, and medians are told beside
the fastest run. PyTorch and Triton are measured where they are installed: what a user would otherwise test against.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import fast, reference
from ..fast import Engine, HostBackend
from ..reference.geometry import FLASH_NEXT, TEXT, Geometry
from ..reference.layout import BF16, PARTS, LayerCache, Layout
from ..reference.results import KeyLists
from .cases import weights_of

ROUNDS = 15
RUNS = 5
"""Runs of one turn; only one of what takes longer than SLOW_MS, which no cache holds."""
SLOW_MS = 50.0

KEYS = 2048
CACHED, WINDOW = 8000, 64
PAGE = 16
REFERENCE = "NumPy float64"

Contender = Callable[[], npt.NDArray[Any]]
"""Does the work once; returns the attention rows [rows, QH, D]."""

AGREEMENT = 0.03
"""Largest difference from float64 that a contender's rows may have: enough for bf16 weights and results near one."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One contender at one piece of work: milliseconds, and the median as a multiple of the contiguous kernel's."""

    work: str
    contender: str
    median_ms: float
    fastest_ms: float
    ratio: float


def bench(*, rounds: int, progress: Callable[[str], None]) -> tuple[list[Timing], dict[str, str]]:
    """Time every contender; also returns which are absent, and why."""
    geometry = dataclasses.replace(FLASH_NEXT, layers=1)
    row, absent = _one_row(geometry)
    window = _window(geometry)
    works = {f"one row, {KEYS:,} keys, chunks + merge": row, f"{WINDOW}-row window at {CACHED:,}, all kernels": window}
    timings = [timing for work, contenders in works.items() for timing in _time(work, contenders, rounds, progress)]
    absent["Triton interpreter, window"] = f"one run takes about {WINDOW} times the row's"
    return timings, absent


def _time(work: str, contenders: dict[str, Contender], rounds: int, progress: Callable[[str], None]) -> list[Timing]:
    rows = {name: np.asarray(contender(), np.float64) for name, contender in contenders.items()}
    for name, got in rows.items():
        away = np.abs(got - rows[REFERENCE]).max()
        if not away <= AGREEMENT:
            raise ValueError(
                f"{work}: {name} is {away:.3g} away from {REFERENCE}; nothing is timed that computes wrongly"
            )
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        progress(f"{work}, round {turn + 1} of {rounds}")
        for name, contender in contenders.items():
            taken[name] += _turn(contender)
    base = statistics.median(next(iter(taken.values())))
    return [
        Timing(
            work=work,
            contender=name,
            median_ms=statistics.median(times),
            fastest_ms=min(times),
            ratio=statistics.median(times) / base,
        )
        for name, times in taken.items()
    ]


def _turn(contender: Contender) -> list[float]:
    """Milliseconds of a few runs in a row, after one that brings the data back into the caches."""
    first = _run(contender)
    if first > SLOW_MS:
        return [first]
    return [_run(contender) for _ in range(RUNS)]


def _run(contender: Contender) -> float:
    start = time.perf_counter()
    contender()
    return (time.perf_counter() - start) * 1e3


def _one_row(geometry: Geometry) -> tuple[dict[str, Contender], dict[str, str]]:
    rng = np.random.Generator(np.random.PCG64(0))
    plain, pages = _same_caches(geometry, KEYS, rng)
    q = rng.standard_normal((1, geometry.query_heads, geometry.head_dim), dtype=np.float32).astype(BF16)
    lists = KeyLists.dense([KEYS])
    one_core = Engine(HostBackend(workers=1))

    def kernel(cache: LayerCache, engine: Engine) -> Contender:
        return lambda: fast.merge(geometry, fast.chunks(geometry, cache, q, lists, engine=engine), engine=engine)

    contenders: dict[str, Contender] = {
        "contiguous, 1 core": kernel(plain, one_core),
        f"paged {PAGE}, 1 core": kernel(pages, one_core),
        REFERENCE: lambda: reference.merge(geometry, reference.chunks(geometry, plain, q, lists)),
    }
    absent = {}
    if find_spec("torch") is None:
        absent["PyTorch"] = absent["Triton interpreter"] = "torch is not installed"
        return contenders, absent
    from .bench_torch import sdpa_after_gather

    contenders |= sdpa_after_gather(pages, q, KEYS)
    if find_spec("triton") is None:
        return contenders, {"Triton interpreter": "triton is not installed"}
    from .bench_triton import paged_row

    contenders["Triton interpreter"] = paged_row(pages, q, KEYS)
    return contenders, absent


def _window(geometry: Geometry) -> dict[str, Contender]:
    rng = np.random.Generator(np.random.PCG64(1))
    end = CACHED + WINDOW
    weights = weights_of(geometry, rng)
    projection = rng.standard_normal((WINDOW, geometry.projection_width), dtype=np.float32).astype(BF16)
    plain, pages = _same_caches(geometry, end, rng)
    engine = Engine()

    def kernels(cache: LayerCache) -> Contender:
        return lambda: fast.window(geometry, weights, cache, projection, CACHED, TEXT, engine=engine).out

    contenders = {
        "contiguous, all cores": kernels(plain),
        f"paged {PAGE}, all cores": kernels(pages),
        REFERENCE: lambda: reference.window(geometry, weights, plain, projection, CACHED, TEXT).out,
    }
    if find_spec("torch") is not None:
        from .bench_torch import sdpa_of_lists

        made = fast.window(geometry, weights, pages, projection, CACHED, TEXT, engine=engine)
        contenders |= sdpa_of_lists(pages, made.q, made.lists)
    return contenders


def _same_caches(geometry: Geometry, positions: int, rng: np.random.Generator) -> tuple[LayerCache, LayerCache]:
    """The same N(0, 1) rows in a contiguous cache, and in pages through a shuffled table."""
    plain = Layout.contiguous(geometry, positions)
    paged = Layout(geometry=geometry, page_size=PAGE, pages=-(-positions // PAGE))
    table = rng.permutation(paged.pages).astype(np.int32)
    buffer = rng.standard_normal(plain.elements, dtype=np.float32).astype(BF16)
    caches = LayerCache(buffer=buffer, layout=plain), LayerCache(buffer=paged.zeros(), layout=paged, table=table)
    for part in PARTS:
        rows = np.arange(positions // geometry.block if part == "pooled" else positions)
        caches[1].write(part, rows, caches[0].read(part, rows))
    return caches
