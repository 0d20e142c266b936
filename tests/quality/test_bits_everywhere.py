"""Every compiler, optimisation and thread order gives the recorded digests, and a change of arithmetic does not."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvproof.fast import Engine, HostBackend, KernelSources
from kvproof.fast.compiler import OLDEST, Compiler, _major_version, compiler_from, find_zig
from kvproof.oracle.cases import at_check
from kvproof.oracle.digests import Digests, compare, digests, read
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.planted.isolate import isolated
from kvproof.oracle.variants import host_variants
from kvproof.reference import FLASH_NEXT, TINY
from kvproof.reference.geometry import PRESETS

RECORDED = read(Path(__file__).parents[2] / "fixtures" / "digests.json")

PLAIN_CPU = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}
"""The least CPU of each kind: on x86-64 it has no FMA and 16-byte vectors, so other instructions give the bits."""

NEWER = 12
"""Major versions beyond the oldest that are looked for under a name of their own, such as g++-13."""


def compilers_present() -> dict[str, Compiler]:
    """Every compiler that can build the kernels, by name, each program once; zig's where it is installed."""
    found = {}
    for name, oldest in OLDEST.items():
        for word in (name, *(f"{name}-{major}" for major in range(oldest, oldest + NEWER))):
            program = os.path.realpath(shutil.which(word) or "")
            if os.path.isfile(program) and _major_version(word) >= oldest:
                found.setdefault(program, (word, compiler_from([word])))
    zig = find_zig()
    return dict(found.values()) | ({} if zig is None else {"zig": zig})


def test_the_compiler_of_the_ziglang_wheel_is_among_them() -> None:
    """A test, and no assertion while tests are collected: where it is absent, only this fails."""
    assert "zig" in compilers_present(), "ziglang is a dependency"


@dataclass(frozen=True)
class Way:
    """A way of compiling the kernels, beside the backend's own flags."""

    name: str
    compiler: Compiler
    flags: tuple[str, ...]


def ways() -> list[Way]:
    """Every compiler at -O1, -O2 and -O3, for the least CPU and for this very one."""
    made = []
    for name, compiler in compilers_present().items():
        plain = "-mcpu=baseline" if compiler.is_zig else PLAIN_CPU[platform.machine()]
        for level in ("-O1", "-O2", "-O3"):
            made += [Way(f"{name}{level}-plain", compiler, (level, plain))]
            made += [Way(f"{name}{level}-native", compiler, (level, "-march=native"))]
    return made


def is_slow(way: Way, geometry: str) -> bool:
    """Of each compiler, the way farthest from the backend's own flags is run each time, at the small geometry."""
    return geometry != "tiny" or not way.name.endswith("-O1-plain")


MATRIX = [
    pytest.param(way, geometry, id=f"{way.name}-{geometry}", marks=[pytest.mark.slow] * is_slow(way, geometry))
    for way in ways()
    for geometry in PRESETS
]


def made_by(backend: HostBackend, geometry: str, sources: KernelSources | None = None) -> FastKernels:
    """Kernels of a backend, compiled on all CPUs."""
    engine = Engine(backend, sources=sources)
    engine.prepare(at_check(PRESETS[geometry]))
    return FastKernels(engine)


def differing(geometry: str, found: Digests) -> list[str]:
    """How digests differ from the recorded ones, in words."""
    return [str(one) for one in compare(geometry, RECORDED[geometry], found) if one.state != "same"]


@pytest.mark.parametrize(("way", "geometry"), MATRIX)
def test_every_compiler_and_flag_gives_the_recorded_bits(way: Way, geometry: str) -> None:
    kernels = made_by(HostBackend(compiler=way.compiler, flags=way.flags), geometry)
    assert differing(geometry, digests(at_check(PRESETS[geometry]), kernels)) == []


@pytest.mark.parametrize("geometry", ["tiny", pytest.param("flash_next", marks=pytest.mark.slow)])
def test_every_thread_order_gives_the_recorded_bits(geometry: str) -> None:
    shape = at_check(PRESETS[geometry])
    for variant in host_variants(seed=1):
        variant.prepare(shape, lambda family: None)
        assert differing(geometry, digests(shape, variant.kernels)) == [], variant.name


@dataclass(frozen=True)
class Change:
    """A change of arithmetic in one source, and the kernels whose bits it changes."""

    name: str
    file: str
    old: str
    new: str
    seen_in: frozenset[str]
    geometry: str = "tiny"


SUMS = frozenset({"chunks", "chunks_ahead", "dense", "dense_ahead"})
NORM = Change("norm-not-rounded", "rotary.cuh", "return rounded_bf16(", "return (", frozenset({"prep", "pool"}))
CHANGES = (
    Change(
        "dot-products-summed-from-behind",
        "tile.cuh",
        "for (int d = 0; d < WIDTH; d += 8) {\n    Lanes k",
        "for (int d = WIDTH - 8; d >= 0; d -= 8) {\n    Lanes k",
        SUMS | {"scores"},
    ),
    Change(  # the small geometry's lists are one tile; only its dense rows have several
        "rescaling-without-an-fma",
        "chunks.cu",
        "o[n][h][r] = fma8(splat(s.rescale[at.h0 + h]), o[n][h][r], sum[h][r])",
        "o[n][h][r] = splat(s.rescale[at.h0 + h]) * o[n][h][r] + sum[h][r]",
        frozenset({"dense", "dense_ahead"}),
    ),
    Change(
        "exp-of-degree-6",
        "arithmetic.cuh",
        "Lanes p = fma8(splat(1.0f / 5040.0f), r, splat(1.0f / 720.0f))",
        "Lanes p = splat(1.0f / 720.0f)",
        SUMS,
    ),
    NORM,
    Change("score-by-the-reciprocal", "scores.cu", "score / root", "score * (1.0f / root)", frozenset({"scores"})),
    Change("gate-rounded-twice", "gate.cu", "x[i] * weight[i]", "x[i] * rounded_bf16(weight[i])", frozenset({"gate"})),
    Change(
        "root-of-the-reciprocal",
        "rotary.cuh",
        "1.0f / sqrtf(mean + KVP_EPS)",
        "sqrtf(1.0f / (mean + KVP_EPS))",
        frozenset({"prep", "pool"}),
        "flash_next",
    ),
    Change(
        "merge-rounds-the-other-product",
        "merge.cu",
        "sum = fma8(splat(a), sum, splat(b) * o_c)",
        "sum = fma8(splat(b), o_c, splat(a) * sum)",
        frozenset({"merge", "dense"}),
        "flash_next",
    ),
)


def changed_by(kernels: FastKernels, before: FastKernels, geometry: str) -> set[str]:
    """Kernels whose bits are not the recorded ones, each given the results of unchanged kernels."""
    found = digests(at_check(PRESETS[geometry]), kernels, before=before)
    assert found.inputs == RECORDED[geometry].inputs
    return {name for name, by_case in found.kernels.items() if by_case != RECORDED[geometry].kernels[name]}


@pytest.mark.parametrize(
    "change",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.geometry != "tiny")) for c in CHANGES],
)
def test_a_change_of_arithmetic_changes_the_kernels_that_use_it(engine: Engine, change: Change) -> None:
    sources = KernelSources().edit(change.file, change.old, change.new)
    kernels = made_by(HostBackend(), change.geometry, sources)
    assert changed_by(kernels, FastKernels(engine), change.geometry) == change.seen_in


def test_a_change_is_not_laid_to_the_kernels_that_follow() -> None:
    sources = KernelSources().edit(NORM.file, NORM.old, NORM.new)
    found = digests(at_check(TINY), made_by(HostBackend(), "tiny", sources))
    states = {(one.kernel, one.state) for one in compare("tiny", RECORDED["tiny"], found) if one.state != "same"}
    assert {kernel for kernel, state in states if state == "CHANGED"} == NORM.seen_in
    assert {kernel for kernel, state in states if state == "other inputs"} >= SUMS | {"scores", "merge", "gate"}


def bits_with(flags: tuple[str, ...], geometry: str) -> set[str]:
    """Kernels whose bits flags change; for a process of its own, whose arithmetic -ffast-math may alter."""
    before = made_by(HostBackend(), geometry)
    return changed_by(made_by(HostBackend(flags=flags), geometry), before, geometry)


def test_fast_math_is_seen() -> None:
    ended = next(isolated(bits_with, [(("-ffast-math",), "tiny")], jobs=1, limit_s=300))
    assert "scores" in ended.result, ended.died


@pytest.mark.slow
def test_contracted_products_are_seen() -> None:
    assert "prep" in bits_with(("-ffp-contract=fast",), FLASH_NEXT.name)
