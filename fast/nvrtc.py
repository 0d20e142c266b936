"""NVRTC, the CUDA compiler that is a library: a kernel family to PTX and a cubin, without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .backend import Source
from .compiler import CompileError

NVRTC_VARIABLE = "KVPROOF_NVRTC"

COMPILE_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "-std=c++17")
"""How every CUDA compiler, NVRTC or nvcc, compiles the kernels: IEEE, and an FMA only where the source names one."""

_LIBRARY = "libnvrtc.so.*"
_RELEASES = range(12, 20)
"""Of CUDA, whose wheels are looked for."""


class NvrtcError(CompileError):
    """NVRTC is not there, or refused a source.

    Attributes:
        family: the kernel family, "" where none was compiled.
        arch: the architecture, such as "sm_90", "" where none was asked for.
        log: what the compiler said.
    """

    def __init__(self, message: str, *, family: str = "", arch: str = "", log: str = "") -> None:
        super().__init__(f"{family}.cu" if family else "kernels", ("nvrtc",), log or message)
        self.args = (message,)
        self.family = family
        self.arch = arch
        self.log = log


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One family compiled for one architecture.

    Attributes:
        ptx: its PTX.
        cubin: its machine code, an ELF file; empty for a virtual architecture.
        log: the compiler's warnings.
    """

    ptx: str
    cubin: bytes
    log: str = ""


def find_nvrtc() -> Path:
    """The library: `$KVPROOF_NVRTC`, a wheel's, or a CUDA toolkit's.

    Of several wheels (CUDA 12 and 13 may both be installed) it is that of the CUDA release which the installed CuPy is
    built for (cupy-cuda12x, cupy-cuda13x), as CuPy loads what is compiled; without such a pair, the newest.

    Raises:
        NvrtcError: there is none, or `$KVPROOF_NVRTC` names no file.
    """
    if chosen := os.environ.get(NVRTC_VARIABLE):
        if not Path(chosen).is_file():
            raise NvrtcError(f"${NVRTC_VARIABLE} is {chosen!r}, which is no file; set it to a libnvrtc.so, or unset it")
        return Path(chosen)
    for folder in _folders():
        if found := sorted(folder.glob(_LIBRARY), key=lambda file: (len(file.name), file.name)):
            return found[0]
    raise NvrtcError(
        "there is no NVRTC: run `pip install nvidia-cuda-nvrtc-cu12`, or set "
        f"${NVRTC_VARIABLE} to the libnvrtc.so of a CUDA toolkit"
    )


def toolkit_folders() -> Iterator[Path]:
    """Where CUDA toolkits are: `$CUDA_HOME`, `$CUDA_PATH`, /usr/local/cuda, /usr/local/cuda-*, the newest first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if chosen := os.environ.get(variable):
            yield Path(chosen)
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), key=_release_in, reverse=True)


def _release_in(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.name)))


def _folders() -> Iterator[Path]:
    spec = find_spec("nvidia")
    roots = () if spec is None else spec.submodule_search_locations or ()
    for release in sorted(_RELEASES, key=lambda release: (_has_cupy(release), release), reverse=True):
        # The wheels of CUDA 12 have a folder for each library, later ones one for them all.
        yield from (Path(root) / ("cuda_nvrtc" if release == 12 else f"cu{release}") / "lib" for root in roots)
    yield from (folder / "lib64" for folder in toolkit_folders())


def _has_cupy(release: int) -> bool:
    try:
        return bool(metadata.version(f"cupy-cuda{release}x"))
    except metadata.PackageNotFoundError:
        return False


class Nvrtc:
    """One NVRTC library. Threads may share it: they compile one after another.

    Args:
        path: the library; `find_nvrtc()` when None.
        options: of every compilation.

    Attributes:
        path, options: as given, or found.
        version: its release, such as "12.9".

    Raises:
        NvrtcError: there is no NVRTC, or it does not load.
    """

    def __init__(self, path: Path | None = None, *, options: Sequence[str] = COMPILE_OPTIONS) -> None:
        self.path = path if path is not None else find_nvrtc()
        self.options = tuple(options)
        self._lock = threading.Lock()
        try:
            self._library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise NvrtcError(f"{self.path} does not load: {error}") from None
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Source, arch: str) -> Compiled:
        """Compile a family.

        Args:
            arch: a real architecture, such as "sm_90", or a virtual one, such as "compute_90", for PTX alone.

        Raises:
            ValueError: this NVRTC does not know the architecture.
            NvrtcError: the source was refused; it holds the compiler's log.
        """
        self._require_arch(arch)
        with self._lock:
            program = self._create(source)
            try:
                return self._compile(program, source, arch)
            finally:
                self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _require_arch(self, arch: str) -> None:
        known = [f"sm_{number}" for number in self._architectures()]
        if re.sub(r"[af]$", "", arch.replace("compute_", "sm_")) not in known:
            raise ValueError(f"arch is {arch!r}; NVRTC {self.version} compiles for {', '.join(known)}")

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return list(numbers)

    def _create(self, source: Source) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        names, texts = _words(list(source.headers)), _words(list(source.headers.values()))
        name = f"{source.name}.cu".encode()
        count = len(source.headers)
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.text.encode(), name, count, texts, names)
        return program

    def _compile(self, program: ctypes.c_void_p, source: Source, arch: str) -> Compiled:
        options = [f"-arch={arch}", *self.options, *definitions(source)]
        code = self._library.nvrtcCompileProgram(program, len(options), _words(options))
        log = self._text(program, "ProgramLog")
        if code:
            raise NvrtcError(
                f"NVRTC {self.version} could not compile {source.name}.cu for {arch}:\n{log or self._reason(code)}",
                family=source.name,
                arch=arch,
                log=log,
            )
        cubin = self._bytes(program, "CUBIN") if arch.startswith("sm_") else b""
        return Compiled(ptx=self._text(program, "PTX"), cubin=cubin, log=log)

    def _text(self, program: ctypes.c_void_p, kind: str) -> str:
        return self._bytes(program, kind).rstrip(b"\0").decode()

    def _bytes(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise NvrtcError(f"{name} of {self.path} failed: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()


def definitions(source: Source) -> list[str]:
    """The preprocessor definitions of a source as compiler options."""
    return [f"-D{name}" if value in (None, "") else f"-D{name}={value}" for name, value in source.defines.items()]


def _words(items: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(items))(*(item.encode() for item in items))
