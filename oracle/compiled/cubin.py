"""What a cubin holds, as NVIDIA's cuobjdump tells it: resources, arguments and machine code of each kernel."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...fast.nvrtc import toolkit_folders

TOOLS = ("cuobjdump", "nvdisasm")
"""Programs that must lie in one folder: the first calls the second."""

RESERVED_BYTES = 1024
"""Shared memory that a cubin for sm_90 or newer counts for the system, where a kernel has some of its own."""

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_RESOURCES = re.compile(r"Function (\w+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_TEXT_SECTION = re.compile(
    r"^ +\w+ +\w+ +(?P<size>\w+) +\w+ +\w+ +PROGBITS +(?P<flags>\w+) +\w+ +\w+ \.text\.(?P<name>\w+)$", re.MULTILINE
)
_KERNEL_INFO = re.compile(r"^\.nv\.info\.(\w+)\n(.*?)(?=^\.|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)")
_CONSTANT_BANK = re.compile(r"EIATTR_PARAM_CBANK\n.*\n\s+Value:\s+0x\w+ 0x(\w+)")
_BARRIERS = re.compile(r"EIATTR_NUM_BARRIERS\n.*\n\s+Value:\s+0x(\w+)")
_FUNCTION = re.compile(r"^\s+Function : (\w+)\n(.*?)(?=^\s+Function : |\Z)", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")


class CubinError(RuntimeError):
    """A cubin could not be read, or there is no tool that reads it."""


@dataclass(frozen=True)
class Sass:
    """One machine instruction.

    Attributes:
        address: in bytes from the kernel's start.
        opcode: with its modifiers, such as "LDG.E.128".
        operands: as written.
        guard: the predicate that it runs under, such as "!P0", "" where none is.
    """

    address: int
    opcode: str
    operands: tuple[str, ...]
    guard: str = ""

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The opcode's parts."""
        return tuple(self.opcode.split("."))

    @functools.cached_property
    def bytes(self) -> int:
        """What a load or store moves for each thread."""
        return next((_WIDTHS[word] for word in self.words if word in _WIDTHS), 4)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a kernel takes.

    Attributes:
        registers: of a thread.
        shared_bytes: static shared memory of a block, in bytes, what the system reserves left out.
        stack_bytes: of a thread.
        local_bytes: local memory of a thread, the stack left out.
        spill_bytes: bytes that the code's loads and stores of local memory move, each counted once; 0 where the text
            holds no code.
        barriers: of a block.
        code_bytes: of its machine code.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    local_bytes: int
    spill_bytes: int
    barriers: int
    code_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a cubin.

    Attributes:
        resources: what it takes.
        arguments: place of each argument in constant bank 0, in bytes, and its size.
        code: its instructions, empty where the text holds none.
    """

    resources: Resources
    arguments: tuple[tuple[int, int], ...]
    code: tuple[Sass, ...]


def find_tools() -> Path:
    """The folder of cuobjdump and nvdisasm: the wheels', one of `$PATH`, or a CUDA toolkit's.

    Raises:
        CubinError: there is none.
    """
    for folder in _folders():
        if all((folder / tool).is_file() for tool in TOOLS):
            return folder
    raise CubinError(
        "there is no cuobjdump with nvdisasm beside it: run `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
    )


def dump(cubin: bytes, *, code: bool = True) -> str:
    """cuobjdump's account of a cubin: ELF sections, resources and, where `code`, machine code, which takes a second.

    Raises:
        CubinError: there is no cuobjdump, or it does not take the cubin.
    """
    tools = find_tools()
    environment = {**os.environ, "PATH": os.pathsep.join((str(tools), os.environ.get("PATH", "")))}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / TOOLS[0]), "-elf", "-res-usage", *(["-sass"] if code else []), file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "Resource usage:" not in done.stdout:
        raise CubinError(f"cuobjdump does not take this cubin of {len(cubin)} bytes: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def tool_version() -> str:
    """cuobjdump's own version, such as "13.5.37"."""
    done = subprocess.run([find_tools() / TOOLS[0], "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\bV(\d[\d.]*)", done.stdout)
    return found[1] if found else "unknown"


def kernels(text: str, arch: str, *, code: bool = False) -> dict[str, Kernel]:
    """The kernels of a cubin for an architecture such as "sm_90", from `dump`'s text.

    Args:
        code: whether the text must hold machine code of every kernel.

    Raises:
        CubinError: the text is not as cuobjdump is known to write it.
    """
    sections = {match["name"]: match for match in _TEXT_SECTION.finditer(text)}
    information = dict(_KERNEL_INFO.findall(text))
    codes = {name: _code(body) for name, body in _FUNCTION.findall(text)}  # empty where it was not asked for
    usage = {name: tuple(map(int, numbers)) for name, *numbers in _RESOURCES.findall(text)}
    if not usage or not set(usage) <= set(sections) & set(information) or (codes and set(codes) != set(usage)):
        raise CubinError(f"cuobjdump {tool_version()} writes kernels in a form that is not known here")
    if code and (unread := [name for name in usage if not codes.get(name)]):
        raise CubinError(
            f"no machine instruction of {', '.join(unread)} is read from what cuobjdump {tool_version()} writes; "
            "install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm of one release"
        )
    return {
        name: Kernel(
            resources=_resources(numbers, sections[name], information[name], codes.get(name, ()), arch),
            arguments=_arguments(information[name]),
            code=codes.get(name, ()),
        )
        for name, numbers in usage.items()
    }


def _folders() -> Iterator[Path]:
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(root).glob("*/bin"), reverse=True)
    if found := shutil.which(TOOLS[0]):
        yield Path(found).parent
    yield from (folder / "bin" for folder in toolkit_folders())


def _resources(
    usage: tuple[int, ...], section: re.Match[str], information: str, code: tuple[Sass, ...], arch: str
) -> Resources:
    registers, stack, shared, local = usage
    reserved = RESERVED_BYTES if shared and int(re.sub(r"\D", "", arch)) >= 90 else 0
    return Resources(
        registers=registers,
        shared_bytes=shared - reserved,
        stack_bytes=stack,
        local_bytes=local,
        spill_bytes=sum(one.bytes for one in code if one.words[0] in ("LDL", "STL")),
        barriers=_barriers(section, information),
        code_bytes=int(section["size"], 16),
    )


def _barriers(section: re.Match[str], information: str) -> int:
    """From sm_100 on an attribute of its own, before that bits 20 to 26 of the section's flags."""
    if found := _BARRIERS.search(information):
        return int(found[1], 16)
    return int(section["flags"], 16) >> 20 & 0x7F


def _arguments(information: str) -> tuple[tuple[int, int], ...]:
    bank = _CONSTANT_BANK.search(information)
    if bank is None:
        return ()
    base = int(bank[1], 16) & 0xFFFF
    found = sorted(tuple(int(number, 16) for number in match) for match in _ARGUMENT.findall(information))
    return tuple((base + offset, size) for _, offset, size in found)


def _code(body: str) -> tuple[Sass, ...]:
    return tuple(
        Sass(int(address, 16), opcode, tuple(part.strip() for part in operands.split(",") if part.strip()), guard)
        for address, guard, opcode, operands in _INSTRUCTION.findall(body)
    )
