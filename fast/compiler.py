"""Finding a C++ compiler and building shared libraries once: a cache keyed by content.

An entry's key covers every byte of source, the flags, the compiler and, where code is made for this very CPU,
the CPU. An entry is written aside and renamed into place, and carries its own digest, so that processes may share
a folder and a damaged file is rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CACHE_VARIABLE = "KVPROOF_CACHE_DIR"
COMPILE_TIMEOUT_S = 300

OLDEST = {"g++": 12, "clang++": 17}
"""Compilers that are looked for, and the oldest major version that has the vector builtins of host/lanes.h."""

_MAGIC = b"kvproof1"
_SHOWN_ERRORS = 3
_SHOWN_LINES = 24
_NATIVE = "-march=native"


class CompileError(RuntimeError):
    """A compiler refused a source or could not be run.

    Attributes:
        source: file that was compiled.
        details: the compiler's message, shortened to its first errors.
    """

    def __init__(self, source: str, command: Sequence[str], details: str) -> None:
        self.source = source
        self.command = tuple(command)
        self.details = details
        super().__init__(f"{Path(command[0]).name} could not compile {source}:\n{details}")


class CacheError(RuntimeError):
    """The folder of compiled kernels cannot be written; the message names it and the variable that moves it."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: program and leading arguments; it takes g++'s options.
        identity: what tells its output from another compiler's, part of every cache key.
        is_zig: it keeps a cache of its own, which goes inside ours.
    """

    command: tuple[str, ...]
    identity: str
    is_zig: bool = False

    @property
    def name(self) -> str:
        """What people call it: the first line of its version, or its command."""
        if self.is_zig:
            return "zig cc"
        return self.identity.removeprefix("\n".join(self.command)).strip().partition("\n")[0]


@dataclass(frozen=True)
class Build:
    """One shared library to be made.

    Attributes:
        name: stem of the cached file.
        files: text by file name; all are written into the folder where the compiler runs.
        main: the one that is compiled.
        flags: compiler flags, without output and language.
    """

    name: str
    files: Mapping[str, str]
    main: str
    flags: tuple[str, ...] = field(default=())


def cache_folder() -> Path:
    """Folder of compiled kernels: `$KVPROOF_CACHE_DIR`, or `kvproof` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvproof"


def find_compiler() -> Compiler:
    """The compiler to use: `$CXX`, a g++ or clang++ that is new enough, else the one in the ziglang wheel.

    Raises:
        CompileError: `$CXX` does not run, or there is none of them.
    """
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_compiler(chosen: str, path: str) -> Compiler:
    del path  # part of the key only
    if chosen:
        try:
            words = shlex.split(chosen)
        except ValueError as error:
            raise CompileError("kernels", ("$CXX",), f"$CXX is {chosen!r}: {error}; set it to a command") from None
        if not words:
            raise CompileError("kernels", ("$CXX",), "$CXX is blank; set it to a C++ compiler, or unset it")
        return compiler_from(words)
    for name, oldest in OLDEST.items():
        if shutil.which(name) and _major_version(name) >= oldest:
            return compiler_from([name])
    if (zig := find_zig()) is not None:
        return zig
    raise CompileError(
        "kernels", ("c++",), "no C++ compiler found: set $CXX, install g++ or clang++, or run `pip install ziglang`"
    )


def _major_version(name: str) -> int:
    """Major version of a compiler, 0 where it tells none."""
    try:
        done = subprocess.run([name, "-dumpversion"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    major = done.stdout.strip().partition(".")[0]
    return int(major) if major.isdigit() else 0


def compiler_from(command: Sequence[str]) -> Compiler:
    """A compiler from its command line.

    Raises:
        CompileError: it cannot be run.
    """
    program = shutil.which(command[0])
    if program is None:
        raise CompileError(
            "kernels", command, f"there is no program {command[0]!r}; set $CXX to a C++ compiler, or unset it"
        )
    words = (program, *command[1:])
    try:
        done = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError("kernels", words, f"it does not run: {error}") from None
    if done.returncode != 0:
        raise CompileError("kernels", words, f"`{shlex.join(words)} --version` failed: {_shorten(done.stderr)}")
    return Compiler(words, "\n".join((*words, done.stdout)))


def find_zig() -> Compiler | None:
    """The C++ compiler of the ziglang wheel, or None where that is not installed."""
    try:
        import ziglang  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    program = Path(ziglang.__file__).with_name("zig.exe" if os.name == "nt" else "zig")
    if not program.exists():
        return None
    stat = program.stat()
    # `c++` would build a C++ standard library first, which nothing here uses.
    return Compiler((str(program), "cc"), f"{program}\n{stat.st_size}\n{stat.st_mtime_ns}", is_zig=True)


def build(job: Build, compiler: Compiler) -> Path:
    """Path of the compiled library, made now or found in the cache.

    Raises:
        CompileError: the compiler refused the source.
        CacheError: the cache folder cannot be written.
    """
    key = _key(job, compiler)
    target = cache_folder() / "host" / f"{job.name}-{key}.so"
    if _is_sound(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent, key):
            if not _is_sound(target):
                _compile(job, compiler, target)
    except OSError as error:
        raise CacheError(
            f"cannot write compiled kernels to {target.parent}: {error.strerror or error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return target


def _key(job: Build, compiler: Compiler) -> str:
    digest = hashlib.sha256()

    def add(*parts: str) -> None:
        for part in parts:
            raw = part.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)

    add(compiler.identity, job.main, str(len(job.files)))
    for name in sorted(job.files):
        add(name, job.files[name])
    add(*job.flags)
    if _NATIVE in job.flags:
        add(_cpu_identity())
    return digest.hexdigest()[:32]


@functools.cache
def _cpu_identity() -> str:
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant", "cpu family", "model")
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    # Cores of one machine may differ, so all of them count, each kind once.
    lines = {line for line in text.splitlines() if line.split("\t")[0].strip(" :") in wanted}
    return platform.machine() + "\n" + "\n".join(sorted(lines))


def _is_sound(path: Path) -> bool:
    try:
        raw = path.read_bytes()
    except OSError:
        return False
    body, tail = raw[: -len(_MAGIC) - 32], raw[-len(_MAGIC) - 32 :]
    return tail == _MAGIC + hashlib.sha256(body).digest()


@contextlib.contextmanager
def _lock(folder: Path, key: str) -> Iterator[None]:
    """Lets one thread of one process compile a key while others wait; without file locks all do, harmlessly."""
    with open(folder / f"lock-{key[:2]}", "ab") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


_refused_native: set[str] = set()


def _compile(job: Build, compiler: Compiler, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as raw:
        folder = Path(raw)
        for name, text in job.files.items():
            (folder / name).write_text(text)
        flags = [flag for flag in job.flags if flag != _NATIVE or compiler.identity not in _refused_native]
        result = _run(job, compiler, flags, folder)
        if result.returncode != 0 and _NATIVE in flags and "march" in result.stderr:
            _refused_native.add(compiler.identity)
            flags.remove(_NATIVE)
            result = _run(job, compiler, flags, folder)
        if result.returncode != 0:
            raise CompileError(job.main, compiler.command, _shorten(result.stderr or result.stdout))
        made = folder / "out.so"
        if not made.exists():
            raise CompileError(job.main, compiler.command, "it ended without an error, but wrote no library")
        body = made.read_bytes()
        with open(made, "ab") as handle:  # what follows the last section is not loaded
            handle.write(_MAGIC + hashlib.sha256(body).digest())
        made.chmod(0o644)
        os.replace(made, target)


def _run(job: Build, compiler: Compiler, flags: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*compiler.command, *flags, "-fPIC", "-shared", "-x", "c++", job.main, "-o", "out.so", "-lm", "-lpthread"]
    environment = dict(os.environ, LC_ALL="C")
    if compiler.is_zig:
        own = str(cache_folder() / "zig")
        environment |= {"ZIG_GLOBAL_CACHE_DIR": own, "ZIG_LOCAL_CACHE_DIR": own}
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise CompileError(job.main, command, f"it does not run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CompileError(job.main, command, f"it did not end within {COMPILE_TIMEOUT_S} s") from None


def _shorten(text: str) -> str:
    """The first errors of a compiler's output with what belongs to each, warnings left out."""
    kept: list[str] = []
    errors = 0
    keeping = False
    for line in text.splitlines():
        if re.search(r"\b(fatal )?error\b|undefined (reference|symbol)", line):
            errors += 1
            keeping = errors <= _SHOWN_ERRORS
        elif re.search(r"\bwarning\b", line):
            keeping = False
        if keeping and len(kept) < _SHOWN_LINES:
            kept.append(line.rstrip()[:300])
    if not errors:
        kept = [line[:300] for line in text.splitlines()[-_SHOWN_LINES:]]
    if errors > _SHOWN_ERRORS:
        kept.append(f"... and {errors - _SHOWN_ERRORS} more")
    return "\n".join(kept) or "no message"
