"""Our fp32 exp, cos and sin by themselves, and how far they are from the true functions: swept over every float.

    python -m kvproof.oracle.elementary     # about 75 s on one core; needs mpmath

An error in ulps is |computed - true| over the spacing of fp32 at the true value: 2**(e - 23) for a value in
[2**e, 2**(e + 1)), 2**-149 below 2**-126. docs/elementary.md tells what is swept, against what, and what was found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..fast import Argument, Backend, HostBackend, KernelSources, Module, Pointer, Source
from ..fast.sources import defines
from ..reference.geometry import TINY

EXP_ERROR = 7.9e-8
"""Relative error of exp on [-126 ln 2, 0]: 7.894049e-8 (1.3244 * 2**-24), the largest over all 1,118,743,632 floats."""

EXP_ULPS = 0.9371
"""The same in ulps: 0.937081."""

EXP_FLOOR = 2.0**-126
"""Absolute error of exp below -126 ln 2, where the kernels give 0 and the true value is less than this."""

TURN_ERROR = 2.0**-24
"""Relative error of cos and of sin: 5.959825e-8 (0.99989 * 2**-24), the largest over all floats of magnitude up to
2**31: over every int32 position at every frequency of at most one radian. sin 0 = 0 and cos 0 = 1 are exact."""

TURN_ULPS = 0.50001
"""The same in ulps: 0.500006. Correct rounding would give 0.5."""

Floats: TypeAlias = npt.NDArray[np.float32]
Progress: TypeAlias = Callable[[str], None]

_ENTRIES = """
#include "arithmetic.cuh"
extern "C" __global__ void exps(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += 8) store8(y + i, exp8(load8(x + i)));
}
extern "C" __global__ void turns(const float* x, float* s, float* c, int n) {
    for (int i = 0; i < n; ++i) { SinCos t = sincos_of(x[i]); s[i] = t.sin; c[i] = t.cos; }
}
extern "C" __global__ void sigmoids(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += 8) store8(y + i, sigmoid8(load8(x + i)));
}
extern "C" __global__ void roundings(const float* x, float* y, float* lanes, int n) {
    for (int i = 0; i < n; ++i) y[i] = rounded_bf16(x[i]);
    for (int i = 0; i < n; i += 8) store8(lanes + i, round8(load8(x + i)));
}
extern "C" __global__ void folds(const float* x, float* sum, float* high, int n) {
    for (int i = 0; i < n; i += 8) { sum[i] = sum8(load8(x + i)); high[i] = highest8(load8(x + i)); }
}
extern "C" __global__ void trees(const float* x, float* three, float* five, int n) {
    for (int i = 0; i < n; i += 8) { three[i] = tree<3>(x + i); five[i] = tree<5>(x + i); }
}
"""

_OUTPUTS = {"exps": 1, "turns": 2, "sigmoids": 1, "roundings": 2, "folds": 2, "trees": 2}


@dataclass(frozen=True)
class Functions:
    """The kernels' functions as entries of one module."""

    module: Module

    def __call__(self, entry: str, x: npt.ArrayLike) -> tuple[Floats, ...]:
        """Run an entry over floats.

        Args:
            entry: "exps" (exp8), "turns" (sin and cos of `sincos_of`), "sigmoids" (sigmoid8), "roundings"
                (rounded_bf16, round8), "folds" (sum8 and highest8 of each eight, at its first place), "trees"
                (tree<3> and tree<5> of what follows the first place of each eight).
            x: [n], taken as fp32; zeros fill up the last eight.

        Returns:
            The entry's outputs, fp32 [n] each.

        Raises:
            ValueError: there is no such entry.
        """
        if entry not in _OUTPUTS:
            raise ValueError(f"there is no function {entry!r}; name one of {', '.join(_OUTPUTS)}")
        given = np.asarray(x, np.float32)
        padded = np.zeros(-(-len(given) // 8) * 8, np.float32)
        padded[: len(given)] = given
        found = [np.zeros_like(padded) for _ in range(_OUTPUTS[entry])]
        args: list[Argument] = [Pointer(padded), *map(Pointer, found), np.int32(len(padded))]
        self.module.launch(entry, grid=1, block=1, args=args)
        return tuple(array[: len(given)] for array in found)


def load(backend: Backend | None = None, sources: KernelSources | None = None) -> Functions:
    """The kernels' functions, compiled by themselves; of the package's sources, on the CPU, unless told otherwise."""
    return Functions(_load("functions", _ENTRIES, backend or HostBackend(), sources or KernelSources(), {}))


def _load(name: str, text: str, backend: Backend, sources: KernelSources, given: dict[str, int]) -> Module:
    headers = {file: header for file, header in sources.texts.items() if not file.endswith(".cu")}
    return backend.load(Source(name, text, headers, {**defines(TINY, 1), **given}))


RUN = 2**18
"""Floats of one block of a sweep, which keeps the worst of them."""

CHECKED = 251
"""Every so many-th float of a sweep, the double library is checked against the long double one."""

LISTED = 200
"""Blocks whose worst float is evaluated by mpmath, for each function and kind of error."""

PRECISION = 160
"""Bits that mpmath works in."""

LAUNCHED = 512
"""Blocks of one launch, between two words of progress."""

_SWEEPS = """
extern "C" double exp(double);
extern "C" double sin(double);
extern "C" double cos(double);
extern "C" long double expl(long double);
extern "C" long double sinl(long double);
extern "C" long double cosl(long double);

struct Worst {
    double error = -1.0;
    float at = 0.0f;
    __device__ void see(double other, float x) {
        if (other != other) other = KVP_INFINITY;  // a NaN must not pass for small
        if (other > error) { error = other; at = x; }
    }
};

// Spacing of fp32 at a positive or negative value; the smaller one at a power of two.
__device__ double spacing(double value) {
    const long long below = __double_as_longlong(fabs(value)) - 1;
    return fmax(__longlong_as_double(below & 0x7ff0000000000000ll), 0x1p-126) * 0x1p-23;
}

struct Errors {
    Worst kinds[4];  // absolute, relative, in ulps; and of the double library, in ulps
    __device__ void see(float x, float got, double want) {
        const double error = fabs(got - want);
        kinds[0].see(error, x);
        kinds[1].see(error / fabs(want), x);
        kinds[2].see(error / spacing(want), x);
    }
    __device__ void check(float x, double want, long double wide) {
        kinds[3].see(fabs(static_cast<double>(wide - want)) / spacing(want), x);
    }
    __device__ void store(double* errors, float* at) const {
        for (int i = 0; i < 4; ++i) { errors[i] = kinds[i].error; at[i] = kinds[i].at; }
    }
};

// Float i of a block's run: bits first to last, the last again where a run is longer.
struct Run {
    unsigned start, last;
    __device__ Run(unsigned first, unsigned last, unsigned block) : start(first + block * KVP_RUN), last(last) {}
    __device__ float operator[](unsigned i) const { return __uint_as_float(start + i < last ? start + i : last); }
};

extern "C" __global__ void exp_errors(unsigned first, unsigned last, unsigned from, double* errors, float* at,
                                      double* facts) {
    const unsigned block = from + blockIdx.x;
    const Run run(first, last, block);
    Errors found;
    double rises = 0.0, rise = 0.0, highest = 0.0;
    float before = exp_nonpositive(__uint_as_float(block ? run.start - 1 : first));
    for (unsigned i = 0; i < KVP_RUN; i += 8) {
        float x[8], y[8];
        for (unsigned j = 0; j < 8; ++j) x[j] = run[i + j];
        store8(y, exp8(load8(x)));
        for (unsigned j = 0; j < 8; ++j) {
            const double want = exp(static_cast<double>(x[j]));
            found.see(x[j], y[j], want);
            if ((i + j) % KVP_CHECKED == 0) found.check(x[j], want, expl(x[j]));
            highest = fmax(highest, y[j]);
            if (y[j] > before) {
                rises += 1.0;
                rise = fmax(rise, (static_cast<double>(y[j]) - before) / spacing(y[j]));
            }
            before = y[j];
        }
    }
    found.store(errors + 4 * block, at + 4 * block);
    facts[3 * block] = highest;
    facts[3 * block + 1] = rises;
    facts[3 * block + 2] = rise;
}

extern "C" __global__ void turn_errors(unsigned first, unsigned last, unsigned from, double* errors, float* at,
                                       double* facts) {
    const unsigned block = from + blockIdx.x;
    const Run run(first, last, block);
    Errors sines, cosines;
    double uneven = 0.0;
    for (unsigned i = 0; i < KVP_RUN; ++i) {
        const float x = run[i];
        const SinCos turn = sincos_of(x), back = sincos_of(-x);
        const double sine = sin(static_cast<double>(x)), cosine = cos(static_cast<double>(x));
        sines.see(x, turn.sin, sine);
        cosines.see(x, turn.cos, cosine);
        if (i % KVP_CHECKED == 0) {
            sines.check(x, sine, sinl(x));
            cosines.check(x, cosine, cosl(x));
        }
        if (back.sin != -turn.sin || back.cos != turn.cos) uneven += 1.0;
    }
    sines.store(errors + 8 * block, at + 8 * block);
    cosines.store(errors + 8 * block + 4, at + 8 * block + 4);
    facts[block] = uneven;
}
"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Every fp32 from `first` to `last`, of one sign and away from zero.

    Raises:
        ValueError: the signs differ, `last` is nearer to zero than `first`, or an end is not finite.
    """

    first: float
    last: float

    def __post_init__(self) -> None:
        ends = np.array([self.first, self.last], np.float32)
        same = np.signbit(ends[0]) == np.signbit(ends[1])
        if not (np.isfinite(ends).all() and same and abs(ends[0]) <= abs(ends[1])):
            raise ValueError(
                f"a span from {self.first} to {self.last} is no run of floats; give finite ends of one sign (-0.0 is "
                "negative), the one nearer to zero first"
            )

    @property
    def bits(self) -> tuple[int, int]:
        """The ends as fp32 words."""
        low, high = (int(np.float32(x).view(np.uint32)) for x in (self.first, self.last))
        return low, high

    @property
    def count(self) -> int:
        """Floats from end to end."""
        low, high = self.bits
        return high - low + 1


EXP_SPAN = Span(first=-0.0, last=-87.33654)
"""All of [-126 ln 2, -0]: -87.33654 is the least fp32 above -126 ln 2."""

TURN_SPAN = Span(first=2.0**-149, last=2.0**31)
"""Every positive angle up to fp32(2**31 - 1), which is 2**31; the sweep runs each angle's negative too."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest error of one kind, and the float where it is."""

    error: float
    at: float


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far one function strays from the true one.

    Attributes:
        absolute, relative, ulps: the largest |computed - true|; that over |true|; that in ulps. All by mpmath.
        library: the most that the double library, which ranked the floats, was seen to err, in ulps of fp32:
            against long double at every `CHECKED`-th float, and against mpmath at the worst ones.
    """

    absolute: Largest
    relative: Largest
    ulps: Largest
    library: float


@dataclass(frozen=True, kw_only=True)
class ExpSweep:
    """exp over a span.

    Attributes:
        count: floats swept.
        errors: of exp8.
        highest: the largest result.
        rises: neighbours x' < x, both in the span, with exp8(x') > exp8(x), where exp falls.
        rise: the largest such step up, in ulps.
    """

    count: int
    errors: Errors
    highest: float
    rises: int
    rise: float


@dataclass(frozen=True, kw_only=True)
class TurnSweep:
    """sin and cos over a span.

    Attributes:
        count: angles swept.
        sin, cos: their errors.
        uneven: angles a with sin(-a) != -sin(a) or cos(-a) != cos(a).
    """

    count: int
    sin: Errors
    cos: Errors
    uneven: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published constant beside what the sweep measured."""

    constant: str
    published: float
    measured: float

    @property
    def holds(self) -> bool:
        """The constant covers what was measured, and is at most one percent above it."""
        return 0.99 * self.published <= self.measured <= self.published


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep found."""

    exp: ExpSweep
    turns: TurnSweep

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The constants that a sweep of the whole spans must bear out."""
        exp, sin, cos = self.exp.errors, self.turns.sin, self.turns.cos
        relative = float(np.maximum(sin.relative.error, cos.relative.error))  # a NaN stays one
        ulps = float(np.maximum(sin.ulps.error, cos.ulps.error))
        return (
            Claim(constant="EXP_ERROR", published=EXP_ERROR, measured=exp.relative.error),
            Claim(constant="EXP_ULPS", published=EXP_ULPS, measured=exp.ulps.error),
            Claim(constant="TURN_ERROR", published=TURN_ERROR, measured=relative),
            Claim(constant="TURN_ULPS", published=TURN_ULPS, measured=ulps),
        )


def sweep(*, backend: HostBackend | None = None, progress: Progress | None = None) -> Sweep:
    """Sweep exp, sin and cos over the whole of their spans.

    Args:
        backend: where the kernels run; its workers share the floats.
        progress: told what has been swept, about twenty times.

    Raises:
        ValueError: mpmath is not installed.
    """
    return Sweep(
        exp=sweep_exp(backend=backend, progress=progress), turns=sweep_turns(backend=backend, progress=progress)
    )


def sweep_exp(
    span: Span = EXP_SPAN,
    *,
    backend: HostBackend | None = None,
    sources: KernelSources | None = None,
    progress: Progress | None = None,
) -> ExpSweep:
    """Hold exp8 against exp at every float of a span.

    Args:
        span: within `EXP_SPAN`.
        backend, progress: as of `sweep`.
        sources: the kernels' text, the package's own when None.

    Raises:
        ValueError: the span leaves `EXP_SPAN`, or mpmath is not installed.
    """
    _require_within(span, EXP_SPAN)
    found = _run("exp", span, _load_sweeps(backend, sources), progress)
    highest, rises, rise = found.facts.T
    return ExpSweep(
        count=span.count,
        errors=_errors(found, 0, "exp"),
        highest=float(highest.max()),
        rises=int(rises.sum()),
        rise=float(rise.max()),
    )


def sweep_turns(
    span: Span = TURN_SPAN,
    *,
    backend: HostBackend | None = None,
    sources: KernelSources | None = None,
    progress: Progress | None = None,
) -> TurnSweep:
    """Hold sincos_of against sin and cos at every angle of a span, and at its negative.

    Args:
        span: within `TURN_SPAN`.
        backend, sources, progress: as of `sweep_exp`.

    Raises:
        ValueError: the span leaves `TURN_SPAN`, or mpmath is not installed.
    """
    _require_within(span, TURN_SPAN)
    found = _run("turn", span, _load_sweeps(backend, sources), progress)
    sin, cos = (_errors(found, place, name) for place, name in enumerate(("sin", "cos")))
    return TurnSweep(count=span.count, sin=sin, cos=cos, uneven=int(found.facts.sum()))


def _require_within(span: Span, whole: Span) -> None:
    low, high = whole.bits
    if not low <= span.bits[0] <= span.bits[1] <= high:
        raise ValueError(
            f"the span from {span.first} to {span.last} leaves what is swept; give floats from {whole.first} to "
            f"{whole.last}"
        )


def _load_sweeps(backend: HostBackend | None, sources: KernelSources | None) -> Module:
    if find_spec("mpmath") is None:
        raise ValueError("mpmath evaluates the worst floats of a sweep, but is not installed; run `pip install mpmath`")
    given = {"KVP_RUN": RUN, "KVP_CHECKED": CHECKED}
    return _load("sweeps", _ENTRIES + _SWEEPS, backend or HostBackend(), sources or KernelSources(), given)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """What each block of a sweep saw.

    Attributes:
        functions: to compute single floats again.
        errors: float64 [blocks, functions, 4]: the largest absolute error, relative error and error in ulps, and the
            double library's error in ulps.
        at: fp32 of the same shape: where.
        facts: float64 [blocks, n], what else the entry tells.
    """

    functions: Functions
    errors: npt.NDArray[np.float64]
    at: Floats
    facts: npt.NDArray[np.float64]


_FACTS = {"exp": (1, 3), "turn": (2, 1)}
"""Functions that a sweep's entry judges, and facts that it tells of each block."""


def _run(name: str, span: Span, module: Module, progress: Progress | None) -> _Found:
    """Launch a sweep's blocks, a few hundred at a time."""
    blocks = -(-span.count // RUN)
    functions, facts = _FACTS[name]
    found = _Found(
        functions=Functions(module),
        errors=np.empty((blocks, functions, 4)),
        at=np.empty((blocks, functions, 4), np.float32),
        facts=np.empty((blocks, facts)),
    )
    ends = [np.uint32(word) for word in span.bits]
    arrays = [Pointer(array) for array in (found.errors, found.at, found.facts)]
    for start in range(0, blocks, LAUNCHED):
        grid = min(LAUNCHED, blocks - start)
        module.launch(f"{name}_errors", grid=grid, block=1, args=[*ends, np.uint32(start), *arrays])
        if progress is not None:
            progress(f"{name}: {min((start + grid) * RUN, span.count):,} of {span.count:,} floats")
    return found


def _errors(found: _Found, place: int, name: str) -> Errors:
    """The largest errors of the function at this place: those that the double library ranks highest, by mpmath."""
    swept = found.errors[:, place]
    ranked = np.argsort(swept[:, :3], axis=0)[::-1][:LISTED]
    at = np.take_along_axis(found.at[:, place, :3], ranked, axis=0)
    exact = [_exact_errors(found.functions, name, at[:, kind])[:, kind] for kind in range(3)]
    largest = [
        Largest(error=float(errors.max()), at=float(floats[errors.argmax()]))
        for errors, floats in zip(exact, at.T, strict=True)
    ]
    by_mpmath = np.abs(exact[2] - swept[ranked[:, 2], 2]).max()
    return Errors(
        absolute=largest[0],
        relative=largest[1],
        ulps=largest[2],
        library=float(np.maximum(by_mpmath, swept[:, 3].max())),
    )


_ENTRY_OF = {"exp": ("exps", 0), "sin": ("turns", 0), "cos": ("turns", 1)}


def _exact_errors(functions: Functions, name: str, at: Floats) -> npt.NDArray[np.float64]:
    """Absolute error, relative error and error in ulps at each of n floats, by mpmath: [n, 3]."""
    import mpmath  # type: ignore[import-untyped, unused-ignore]

    entry, place = _ENTRY_OF[name]
    computed = functions(entry, at)[place]
    found = np.empty((len(at), 3))
    with mpmath.workprec(PRECISION):
        for row, (x, got) in enumerate(zip(at.tolist(), computed.tolist(), strict=True)):
            true = getattr(mpmath, name)(mpmath.mpf(x))
            error = abs(mpmath.mpf(got) - true)
            _, exponent = mpmath.frexp(true)
            spacing = mpmath.ldexp(1, max(exponent, -125) - 24)
            found[row] = [float(e) for e in (error, error / abs(true), error / spacing)]
    return found


def _print(found: Sweep) -> None:
    rows = {"exp": found.exp.errors, "sin": found.turns.sin, "cos": found.turns.cos}
    print(f"{'':6}{'absolute':>14}{'relative':>14}{'ulps':>12}   double library, ulps")
    for name, e in rows.items():
        print(f"{name:6}{e.absolute.error:14.6e}{e.relative.error:14.6e}{e.ulps.error:12.6f}{e.library:14.1e}")
        print(f"{'at':6}{e.absolute.at:14.7g}{e.relative.at:14.7g}{e.ulps.at:12.6g}")
    exp, turns = found.exp, found.turns
    print(f"exp: {exp.count:,} floats; highest {exp.highest:g}; {exp.rises:,} steps up, the largest {exp.rise:g} ulps")
    print(f"sin, cos: {turns.count:,} angles and their negatives; {turns.uneven:,} uneven")
    for claim in found.claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        print(f"{claim.constant:11}{claim.published:14.6e}, measured {claim.measured:14.6e}: {verdict}")


def main() -> int:
    """Sweep and print what was found; 1 where a constant is not borne out, else 0."""
    found = sweep(progress=lambda line: print(line, file=sys.stderr))
    _print(found)
    return 0 if all(claim.holds for claim in found.claims) else 1


if __name__ == "__main__":
    sys.exit(main())
