"""The CUDA compilers of this machine, and what they make of the kernels, kept by content: nothing is made twice."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ...fast.backend import Source
from ...fast.compiler import CACHE_VARIABLE, CacheError, CompileError, cache_folder
from ...fast.nvrtc import COMPILE_OPTIONS, Compiled, Nvrtc, definitions, toolkit_folders
from . import cubin
from .cubin import Kernel

WORKERS = 2
"""Processes that compile at a time; each takes some hundred MB."""

_TIMEOUT_S = 300
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """One CUDA compiler.

    Attributes:
        kind: NVRTC the library, or nvcc the program.
        version: its release, such as "12.9".
        path: the library or program.
        options: of every compilation.
    """

    kind: Literal["nvrtc", "nvcc"]
    version: str
    path: Path
    options: tuple[str, ...] = COMPILE_OPTIONS

    @property
    def name(self) -> str:
        """How records and tables call it."""
        return f"{self.kind}-{self.version}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A family to be compiled.

    Attributes:
        toolkit: by what.
        source: the family.
        arch: for what, such as "sm_90".
        code: whether its machine code is asked for.
    """

    toolkit: Toolkit
    source: Source
    arch: str
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a compiler made of a family.

    Attributes:
        ptx: its PTX.
        kernels: what its cubin holds, by name.
    """

    ptx: str
    kernels: Mapping[str, Kernel]


def nvrtc_toolkit() -> Toolkit:
    """The NVRTC of `fast.nvrtc.find_nvrtc`.

    Raises:
        NvrtcError: there is none.
    """
    found = Nvrtc()
    return Toolkit(kind="nvrtc", version=found.version, path=found.path)


def nvcc_toolkit() -> Toolkit | None:
    """The nvcc of `$PATH` or of a CUDA toolkit's folder; None where none is installed."""
    for program in _nvcc_programs():
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if release := re.search(r"release (\d+\.\d+)", done.stdout):
            return Toolkit(kind="nvcc", version=release[1], path=program)
    return None


def toolkits() -> list[Toolkit]:
    """NVRTC, and nvcc where one is installed.

    Raises:
        NvrtcError: there is no NVRTC.
    """
    other = nvcc_toolkit()
    return [nvrtc_toolkit()] if other is None else [nvrtc_toolkit(), other]


def each(work: Callable[[Job], _T], jobs: Sequence[Job], progress: Callable[[str], None] | None = None) -> list[_T]:
    """What a function makes of each job, in their order, two at a time in processes of their own.

    Args:
        work: a function of a module, such as `build`.
        progress: told each job's name when it is done.

    Raises:
        CompileError: a compiler refused a source.
        CubinError: machine code could not be read.
    """
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = []
        for job, one in zip(jobs, pool.map(work, jobs), strict=True):
            made.append(one)
            if progress is not None:
                progress(f"{job.toolkit.name} {job.source.name} {job.arch}")
    return made


def build(job: Job) -> Built:
    """Build one job, or find it in the cache.

    Raises:
        CompileError: the compiler refused the source.
        CubinError: the machine code could not be read.
    """
    made = compiled(job)
    found = cubin.kernels(_dump(made.cubin, code=job.code), job.arch, code=job.code)
    if any(one.resources.stack_bytes or one.resources.local_bytes for one in found.values()):
        found = cubin.kernels(_dump(made.cubin, code=True), job.arch, code=True)  # only code tells what is spilled
    return Built(ptx=made.ptx, kernels=found)


def compiled(job: Job) -> Compiled:
    """Compile one job, or find it in the cache.

    Raises:
        CompileError: the compiler refused the source.
    """

    def make() -> bytes:
        made = _nvcc(job) if job.toolkit.kind == "nvcc" else _nvrtc(job.toolkit).compile(job.source, job.arch)
        return made.ptx.encode() + b"\0" + made.cubin

    key = (_identity(job.toolkit), job.arch, json.dumps(asdict(job.source), sort_keys=True))
    ptx, _, code = _kept("compiled", key, make).partition(b"\0")
    return Compiled(ptx=ptx.decode(), cubin=code)


def _dump(code_of: bytes, *, code: bool) -> str:
    key = (cubin.tool_version(), str(code), hashlib.sha256(code_of).hexdigest())
    return _kept("dump", key, lambda: cubin.dump(code_of, code=code).encode()).decode()


def _kept(kind: str, key: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """What was made for this key before, or is made now: written aside, then moved into place."""
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    place = cache_folder() / "cuda" / f"{name}.{kind}"
    try:
        return zlib.decompress(place.read_bytes())
    except (OSError, zlib.error):
        made = make()
    draft = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(zlib.compress(made, 1))
        os.replace(draft, place)
    except OSError as error:
        raise CacheError(
            f"cannot write compiled kernels to {place.parent}: {error.strerror or error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return made


def _identity(toolkit: Toolkit) -> str:
    """What tells a toolkit's output from another's."""
    stat = toolkit.path.stat()
    return "\n".join((toolkit.name, str(toolkit.path), str(stat.st_size), str(stat.st_mtime_ns), *toolkit.options))


@functools.cache
def _nvrtc(toolkit: Toolkit) -> Nvrtc:
    return Nvrtc(toolkit.path, options=toolkit.options)


def _nvcc(job: Job) -> Compiled:
    toolkit, source = job.toolkit, job.source
    command = [str(toolkit.path), "-cubin", f"-arch={job.arch}", *toolkit.options, *definitions(source)]
    with tempfile.TemporaryDirectory(prefix="kvproof-nvcc-") as raw:
        folder = Path(raw)
        for name, text in {**source.headers, f"{source.name}.cu": source.text}.items():
            (folder / name).write_text(text)
        command += ["--keep", "--keep-dir", raw, "-o", "out.cubin", f"{source.name}.cu"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{source.name}.cu", command, f"it did not end within {_TIMEOUT_S} s") from None
        if done.returncode != 0:
            raise CompileError(f"{source.name}.cu for {job.arch}", command, done.stderr.strip())
        return Compiled(
            ptx=(folder / f"{source.name}.ptx").read_text(), cubin=(folder / "out.cubin").read_bytes(), log=done.stderr
        )


def _nvcc_programs() -> Iterator[Path]:
    if found := shutil.which("nvcc"):
        yield Path(found)
    yield from (program for folder in toolkit_folders() if (program := folder / "bin" / "nvcc").is_file())
