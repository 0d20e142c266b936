"""Mutants of the kernels: one operator, index, comparison, constant or barrier changed at a time, each run on its own.

The fault catalogue holds the mistakes that people made; mutants hold those that nobody thought of. Each runs in a
process of its own, under a time limit, until something sees it (`mutant_judge`). What nothing sees is a survivor: it
needs a case, or a line in `equivalent_mutants` that says why it changes nothing.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...fast import KernelSources
from ...fast.compiler import CACHE_VARIABLE
from .equivalent_mutants import reason_of
from .isolate import isolated
from .mutant_judge import Status, judge, portable

PROCESS_S = 300.0
"""Seconds of one mutant, compilation included; killed behind them."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change.

    Attributes:
        file, line, column: where, counted from 1.
        start: offset in the file.
        old, new: text before and after.
        text: the source line, stripped: what stays the same when lines shift.
        nth: which change of this kind in lines of this text, from 0.
    """

    file: str
    line: int
    column: int
    start: int
    old: str
    new: str
    text: str
    nth: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.old} -> {self.new or 'nothing'}"

    def sources(self, base: KernelSources) -> KernelSources:
        """The kernels with this one place changed."""
        text = base.texts[self.file]
        if text[self.start : self.start + len(self.old)] != self.old:
            raise ValueError(f"{self}: the text there is {text[self.start : self.start + len(self.old)]!r}")
        return KernelSources(
            {**base.texts, self.file: text[: self.start] + self.new + text[self.start + len(self.old) :]}
        )


# ---- making them ----

_SWAPS: Mapping[str, str] = {
    "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
    "+=": "-=", "-=": "+=", "++": "--", "--": "++",
}  # fmt: skip

_UNSEEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\bfetch_wait\([^;{]*\);|\b__launch_bounds__\([^)]*\)', re.DOTALL
)
"""Comments, strings, and what only a GPU does: waits for copies, limits of registers."""
_NOT_BUILT = (
    "#ifndef KVP_HOST",
    "#ifdef KVP_ASYNC_COPY",
    "#if defined(__CUDA_ARCH__)",
    "#if defined(__clang__)",
    "#if 0",
)
_SIZES = r"(?:\[[^\]]*\])+"
_DECLARES_ARRAY = re.compile(
    r"\s*(?:__shared__\b.*"
    rf"|using \w+ = \w+{_SIZES};"
    rf"|(?:__align__\(16\) )?(?:Lanes|float|bf16|int|long long|Query) \w+{_SIZES}(?:, \w+{_SIZES})*;)$"
)

_BINARY = re.compile(r"(?<=[\w)\]] )(<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^])(?= [\w(!~*&-])")
_ASSIGNING = re.compile(r"(?<= )(\+=|-=)(?= )|\+\+|--")
_UNARY = re.compile(r"(?<=[(\s,?:=])(-|!|~)(?=[\w(])")
_NUMBER = re.compile(r"(?<![\w.#])(0x[0-9a-fA-F]+|\d+\.\d+(?:e-?\d+)?|\d+)([fuUlL]*)\b")
_INDEX = re.compile(r"(?<=[\w\])])\[([^\[\]]+)\]")
_BARRIER = re.compile(r"__syncthreads\(\);")


def mutants(sources: KernelSources, files: Sequence[str] = ()) -> Iterator[Mutant]:
    """Every mutant of the .cu and .cuh files, or of `files`, in order of file and place.

    Left alone: comments and strings; what is not built on a CPU; sizes of declared arrays, as a longer array is the
    same program.

    Raises:
        ValueError: there is no such kernel source.
    """
    known = sorted(name for name in sources.texts if name.endswith((".cu", ".cuh")))
    for name in files:
        if name not in known:
            raise ValueError(f"--file is {name!r}; it must be one of {', '.join(known)}")
    for name in files or known:
        yield from _of_file(name, sources.texts[name])


def _of_file(file: str, text: str) -> Iterator[Mutant]:
    code = _seen(text)
    seen: dict[tuple[str, str, str], int] = {}
    for start, old, new in sorted(set(_changes(code))):
        line = text.count("\n", 0, start) + 1
        begin = text.rfind("\n", 0, start) + 1
        whole = text[begin:].partition("\n")[0].strip()
        nth = seen[whole, old, new] = seen.get((whole, old, new), -1) + 1
        yield Mutant(file=file, line=line, column=start - begin + 1, start=start, old=old, new=new, text=whole, nth=nth)


def _changes(code: str) -> Iterator[tuple[int, str, str]]:
    """(offset, old, new) of each change, in code whose unseen parts are blank."""
    for pattern in (_BINARY, _ASSIGNING):
        for found in pattern.finditer(code):
            yield found.start(), found.group(), _SWAPS[found.group()]
    for found in _UNARY.finditer(code):
        yield found.start(), found.group(), ""
    for found in _NUMBER.finditer(code):
        yield found.start(), found.group(), _other_number(*found.groups())
    for found in _INDEX.finditer(code):
        for step in ("+ 1", "- 1"):
            yield found.start(), found.group(), f"[({found.group(1)}) {step}]"
    for found in _BARRIER.finditer(code):
        yield found.start(), found.group(), ";"


def _other_number(digits: str, suffix: str) -> str:
    """One more for an integer, twice as much for a fraction; 1 for 0."""
    if "." not in digits:
        following = int(digits, 0) + 1
        return (hex(following) if digits.startswith("0x") else str(following)) + suffix
    twice = 2 * float(digits)
    return (repr(twice) if twice else "1.0") + suffix


def _seen(text: str) -> str:
    """The text with all blank that is no code of a CPU build, every offset kept."""
    code = _UNSEEN.sub(_blank, text)
    lines, built = [], [True]
    for line in code.split("\n"):
        if line.startswith("#if"):
            built.append(built[-1] and not line.startswith(_NOT_BUILT))
        elif line.startswith("#else"):
            built[-1] = built[-2] and not built[-1]
        elif line.startswith("#endif"):
            built.pop()
        directive = line.startswith("#") and not line.startswith("#define")
        skip = directive or not built[-1] or _DECLARES_ARRAY.match(line)
        lines.append(" " * len(line) if skip else line)
    return "\n".join(lines)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found.group())


# ---- running many ----


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A mutant and what became of it.

    Attributes:
        status: "killed" by something, "survived", "equivalent" for a reason given, "invalid" where it does not compile.
        by: what killed it, why it is equivalent, or why it is invalid.
        seconds: it took.
    """

    mutant: Mutant
    status: Status
    by: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        m = self.mutant
        return {
            "mutant": str(m),
            "file": m.file,
            "line": m.line,
            "column": m.column,
            "old": m.old,
            "new": m.new,
            "nth": m.nth,
            "text": m.text,
            "status": self.status,
            "by": self.by,
            "seconds": round(self.seconds, 2),
        }


def sample(every: Sequence[Mutant], limit: int | None, *, seed: int) -> list[Mutant]:
    """`limit` of them drawn by seed, in their order; all of them when None."""
    if limit is None or limit >= len(every):
        return list(every)
    kept = np.random.Generator(np.random.PCG64([seed, 0x6D75])).permutation(len(every))[:limit]
    return [every[i] for i in sorted(kept)]


def run_mutants(
    chosen: Sequence[Mutant], *, jobs: int, progress: Callable[[Judged], None] = lambda judged: None
) -> list[Judged]:
    """Judge mutants, each in a process of its own, `jobs` at a time; in the order given.

    What is known to be equivalent is not run.
    """
    done: list[Judged | None] = [_known(mutant) for mutant in chosen]
    for judged in filter(None, done):
        progress(judged)
    open_ones = [number for number, judged in enumerate(done) if judged is None]
    with tempfile.TemporaryDirectory(prefix="kvproof-mutants-") as cache:
        words = [(chosen[number],) for number in open_ones]
        for end in isolated(_work, words, jobs=jobs, limit_s=PROCESS_S, environment={CACHE_VARIABLE: cache}):
            mutant = chosen[open_ones[end.number]]
            status, by = end.result or ("killed", end.died or "")
            judged = Judged(mutant=mutant, status=status, by=by, seconds=end.seconds)
            done[open_ones[end.number]] = judged
            progress(judged)
    return [judged for judged in done if judged is not None]


def _known(mutant: Mutant) -> Judged | None:
    reason = reason_of(mutant.file, mutant.text, mutant.old, mutant.new, mutant.nth)
    return None if reason is None else Judged(mutant=mutant, status="equivalent", by=reason, seconds=0.0)


def _work(mutant: Mutant) -> tuple[Status, str]:
    base = portable() if mutant.file == "lanes.cuh" else KernelSources()
    return judge(base, mutant.sources(base))
