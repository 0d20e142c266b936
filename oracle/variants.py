"""The ways in which kernels are run that must not show in any bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..fast import ORDERS, HostBackend, KernelSources
from ..reference.geometry import Geometry
from .memory import FastKernels, GuardedEngine
from .operations import Kernels

SHUFFLED_THREADS = 24

TIMEOUT_S = 60.0
"""CPU seconds after which a launch of a check is taken to hang."""

_POISON = {"forward": 0xFF, "reverse": 0x7F, "shuffle": 0x55}
"""What an output holds before its kernel runs, by order: NaN, a huge value, a plausible one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """One way of running the kernels: on a CPU, an order of threads and blocks.

    Attributes:
        name: how messages call it.
        kernels: what runs.
        broken_guards: what was written outside the outputs made since it was last called.
        prepare: compiles the kernels of a geometry, if that is still to be done; is given each family's name.
    """

    name: str
    kernels: Kernels
    broken_guards: Callable[[], list[str]]
    prepare: Callable[[Geometry, Callable[[str], None]], None]


def variant_of(kernels: Any, *, name: str = "kernels") -> Variant:
    """Anyone's kernels as the one variant of a check: an object with some of the functions of `Kernels`."""
    return Variant(name=name, kernels=kernels, broken_guards=list, prepare=lambda geometry, progress: None)


def host_variants(
    *, seed: int, sources: KernelSources | None = None, backend: HostBackend | None = None, threads: int | None = None
) -> tuple[Variant, ...]:
    """The CPU in three thread orders: forward, reverse, and shuffled by `seed`.

    In the shuffled one a block's threads share the work as on a GPU, and their number divides nothing: threads then
    read what others wrote wherever a barrier stands between them, so that a barrier which is missing shows.

    Args:
        sources: the packaged kernels when None.
        backend: whose compiler, flags and workers are used.
        threads: of a block, in all three; what is best for each when None.
    """
    base = backend or HostBackend(timeout_s=TIMEOUT_S)
    variants = []
    for order in ORDERS:
        shuffled = order == "shuffle"
        engine = GuardedEngine(
            base.with_order(order, seed),
            sources=sources,
            threads=threads or (SHUFFLED_THREADS if shuffled else None),
            gpu_split=shuffled,
            poison=_POISON[order],
        )
        variants.append(
            Variant(
                name=order,
                kernels=FastKernels(engine),
                broken_guards=engine.broken_guards,
                prepare=engine.prepare,
            )
        )
    return tuple(variants)
