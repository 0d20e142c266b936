"""compute-sanitizer over a small case: each tool must find the fault that is planted for it, and none in the kernels.

`python -m kvproof.oracle.gpu.sanitizer PROGRAM` is what runs under it: "small", the kernels at the tiny geometry, or
the name of a tool, one kernel with the fault that the tool is for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ... import fast
from ...fast import Backend, CudaBackend, Engine, Pointer, Source
from ...fast.nvrtc import toolkit_folders
from ...reference.geometry import TINY
from ...reference.layout import LayerCache
from ..cases import cases, fill
from ..operations import Call, calls_of
from ..scene import Workspace, contiguous, page_order, paged, with_pooled

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

SMALL = "small"
"""The program that must be clean."""
_CASES = ("block-tile", "sparse")
_PAGE = 16

ERROR_STATUS = 99
"""With which compute-sanitizer ends where it found something."""

_PADDING_BYTES = 256
"""Behind every allocation, so that memcheck sees a write that lands past it."""

_SUMMARY = re.compile(r"=+ (?:ERROR SUMMARY: (\d+) errors?\s*$|RACECHECK SUMMARY: (\d+) hazards?)", re.MULTILINE)
_TOLD_LINES = 12

_REPORTS = {
    "memcheck": r"Invalid __global__ write",
    "racecheck": r"Race reported between|hazard detected",
    "initcheck": r"Uninitialized __global__ memory read",
    "synccheck": r"Barrier error detected",
}
"""How each tool begins a report of the fault that is planted for it; the lines that belong to it are indented."""
_PLANTED_KERNEL = re.compile(r"\bplanted\b")
_REFUSED = re.compile(r"^=+ .*\bDevice not supported\b.*$", re.MULTILINE)
_WINDOWS = re.compile(r"^[1-9]\d* windows$", re.MULTILINE)

PLANTED = {
    "memcheck": "out[size + threadIdx.x] = 1;",
    "racecheck": "__shared__ unsigned s[64]; s[threadIdx.x] = threadIdx.x + size; *out = s[63 - threadIdx.x];",
    "initcheck": "out[threadIdx.x] = out[threadIdx.x + size / 2] + 1;",
    "synccheck": "if (threadIdx.x < 16) __syncthreads(); out[threadIdx.x] = size;",
}
"""A fault for each tool: a write past an array, a barrier that is missing, memory that nobody wrote, half a barrier."""

_THREADS, _WORDS = 64, 128


@dataclass(frozen=True, kw_only=True)
class ToolRun:
    """What one tool said of one program.

    Attributes:
        tool, program: which.
        found: errors or hazards that its summary counts; None where it gave no summary.
        status: with which it ended; None where its time was up.
        seen: of a planted fault, whether a report is of just that fault, in just that kernel; of the small program,
            whether it said how many windows it ran.
        refused: the line by which the tool says that it does not work on this device; "" where it says no such thing.
        told: the lines that say why, where there is something to say.
    """

    tool: str
    program: str
    found: int | None
    status: int | None
    seen: bool = False
    refused: str = ""
    told: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ToolVerdict:
    """Of one tool.

    Attributes:
        verdict: "skipped" where the tool does not work here, for this reason.
    """

    tool: str
    verdict: Literal["green", "red", "skipped"]
    reason: str


def find_sanitizer() -> Path | None:
    """compute-sanitizer of `$PATH` or of a CUDA toolkit; None where there is none."""
    return next(_programs(), None)


def _programs() -> Iterator[Path]:
    if found := shutil.which("compute-sanitizer"):
        yield Path(found)
    for folder in toolkit_folders():
        for place in (folder / "bin", folder / "compute-sanitizer"):
            if (program := place / "compute-sanitizer").is_file():
                yield program


def command(sanitizer: Path, tool: str, program: str) -> list[str]:
    """The command line that runs a program under a tool; its options: docs.nvidia.com/compute-sanitizer."""
    options = ["--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--print-limit", "10"]
    if tool == "memcheck":
        options += ["--padding", str(_PADDING_BYTES)]
    return [str(sanitizer), *options, sys.executable, "-m", "kvproof.oracle.gpu.sanitizer", program]


def summary(text: str) -> int | None:
    """Errors or hazards that a tool's last summary counts; None where there is none."""
    found = _SUMMARY.findall(text)
    return int(found[-1][0] or found[-1][1]) if found else None


def run_tool(words: Sequence[str], *, tool: str, program: str, limit_s: float) -> ToolRun:
    """Run a command of `command`, for so many seconds at most."""
    try:
        done = run_group(words, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        return ToolRun(tool=tool, program=program, found=None, status=None, told=(f"ran past {limit_s:.0f} s",))
    text = done.stdout + done.stderr
    clean = summary(text) == 0 and done.returncode == 0
    told = () if clean else tuple(line for line in text.splitlines() if line.strip())[-_TOLD_LINES:]
    refused = _REFUSED.search(text)
    return ToolRun(
        tool=tool,
        program=program,
        found=summary(text),
        status=done.returncode,
        seen=_WINDOWS.search(done.stdout) is not None if program == SMALL else reports_planted(tool, text),
        refused=refused[0].strip("= ") if refused else "",
        told=told,
    )


def run_group(words: Sequence[str], *, limit_s: float, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; when its time is up, end it with all that it started, which may hold its output open.

    Raises:
        subprocess.TimeoutExpired: it ran past `limit_s`.
    """
    child = subprocess.Popen(
        words,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except BaseException:  # Ctrl-C, too, which does not reach a session of its own
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def reports_planted(tool: str, text: str) -> bool:
    """Whether a tool's output has a report of the fault that is planted for it, in the kernel that has it."""
    report = re.compile(rf"^=+ .*(?:{_REPORTS[tool]}).*(?:\n=+ {{2,}}.*)*", re.MULTILINE)
    return any(_PLANTED_KERNEL.search(found[0]) for found in report.finditer(text))


def judge(planted: ToolRun, small: ToolRun | None) -> ToolVerdict:
    """A tool that does not find its planted fault proves nothing; `small` is then not run, and None."""
    told = "; ".join(planted.told[-3:])
    if planted.refused:
        return ToolVerdict(tool=planted.tool, verdict="skipped", reason=f"it does not work here: {planted.refused}")
    if planted.found is None:
        return ToolVerdict(tool=planted.tool, verdict="skipped", reason=f"it gives no summary here: {told}")
    if not planted.found:
        return ToolVerdict(tool=planted.tool, verdict="red", reason="it does not find the fault that is planted for it")
    if not planted.seen:
        reason = f"it finds {planted.found} errors, but does not report the fault that is planted for it: {told}"
        return ToolVerdict(tool=planted.tool, verdict="red", reason=reason)
    if small is None or small.found is None or small.status not in (0, ERROR_STATUS):
        why = "it was not run" if small is None else "; ".join(small.told[-3:])
        return ToolVerdict(tool=planted.tool, verdict="red", reason=f"the kernels did not run to their end: {why}")
    if small.found or small.status:
        reason = f"it finds {small.found} errors in the kernels: {'; '.join(small.told)}"
        return ToolVerdict(tool=planted.tool, verdict="red", reason=reason)
    if not small.seen:
        reason = "the kernels did not run: the program did not say how many windows it ran"
        return ToolVerdict(tool=planted.tool, verdict="red", reason=reason)
    return ToolVerdict(
        tool=planted.tool, verdict="green", reason=f"finds the planted fault ({planted.found}), no other"
    )


def sanitize(sanitizer: Path, left: Callable[[], float], save: Callable[[list[ToolRun]], None]) -> list[ToolVerdict]:
    """Run every tool over its planted fault, then over the kernels.

    Args:
        left: seconds that are left.
        save: is given all runs so far, after each.
    """
    runs: list[ToolRun] = []
    verdicts = []
    for tool in TOOLS:
        both: list[ToolRun] = []
        for program in (tool, SMALL):
            if both and not (both[0].found and both[0].seen and not both[0].refused):
                break
            words = command(sanitizer, tool, program)
            both.append(run_tool(words, tool=tool, program=program, limit_s=max(1.0, left())))
            runs.append(both[-1])
            save(runs)
        verdicts.append(judge(both[0], both[1] if len(both) > 1 else None))
    return verdicts


# ---- what runs under it ----


def planted_source(tool: str) -> Source:
    """The kernel whose fault a tool is for."""
    text = f'extern "C" __global__ void planted(unsigned* out, unsigned size) {{ {PLANTED[tool]} }}'
    return Source(f"planted_{tool}", text)


def run_planted(backend: Backend, tool: str) -> None:
    """Run that kernel, over memory that nothing was written to."""
    out, module = backend.empty((_WORDS,), np.uint32), backend.load(planted_source(tool))
    module.launch("planted", grid=1, block=_THREADS, args=[Pointer(out), np.uint32(_WORDS)])


def run_small(engine: Engine) -> int:
    """Every kernel over small cases, contiguous and paged; returns how many windows that was."""
    windows = 0
    for case in cases(TINY):
        if case.name not in _CASES:
            continue
        data, space = with_pooled(fill(TINY, case, seed=0)), Workspace()
        order = page_order(case, page_size=_PAGE, tables="shuffled", seed=0)
        for scene in (contiguous(data, space), paged(data, space, page_size=_PAGE, order=order)):
            for call in calls_of(data):
                _window(engine, call, scene.cache(call.stream, 0))
                windows += 1
    return windows


def _window(engine: Engine, call: Call, cache: LayerCache) -> None:
    weights, mine = engine.upload(call.weights), engine.upload(cache)
    projection, rope = engine.upload(call.projection), engine.upload(call.rope)
    made = fast.window(TINY, weights, mine, projection, call.pos0, rope, engine=engine)
    ahead = fast.chunks_ahead(TINY, mine, made.q, made.lists, engine=engine)
    engine.download(made)
    engine.download(ahead)


def main(program: str) -> None:
    """Run a program on the GPU; memory is the driver's own, so that a tool knows where every array ends."""
    import cupy

    cupy.cuda.set_allocator(None)
    backend = CudaBackend()
    if program == SMALL:
        print(f"{run_small(Engine(backend))} windows")
    else:
        run_planted(backend, program)
        backend.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
