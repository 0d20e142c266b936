"""PTX as instructions: what a compiler's text says, line by line, nothing skipped that it does not know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .flow import Flow, Step

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{(.*?)^\}", re.DOTALL | re.MULTILINE)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)\s[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_LABEL = re.compile(r"^([\w$]+):$")
_INSTRUCTION = re.compile(r"^(?:@(!?%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*?))?\s*;$", re.DOTALL)
_LOCATION = re.compile(r"^\s*\.loc\b.*$", re.MULTILINE)
_DECLARATIONS = (".reg", ".shared", ".local", ".pragma")
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.[a-z](\d+)\s+\w+(?:\[(\d+)\])?")
_REGISTER = re.compile(r"%\w+(?:\.\w+)?")


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry: its name in PTX, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers, such as "ld.global.v4.u32".
        operands: as written, braces and brackets kept.
        guard: the predicate that it runs under, such as "!%p1", "" where none is.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The opcode's parts."""
        return tuple(self.opcode.split("."))

    @cached_property
    def targets(self) -> list[str]:
        """Registers that it writes; none for stores, branches and barriers."""
        if self.words[0] in ("st", "bra", "bar", "barrier", "ret", "exit", "trap", "cp", "membar", "red"):
            return []
        return _REGISTER.findall(self.operands[0]) if self.operands else []

    @cached_property
    def sources(self) -> list[str]:
        """Registers that it reads, its guard left out."""
        read = self.operands[1:] if self.targets else self.operands
        return [register for operand in read for register in _REGISTER.findall(operand)]


@dataclass(frozen=True)
class Entry:
    """One kernel.

    Attributes:
        name: of the entry.
        parameters: in order.
        shared_bytes: static shared memory that its body declares, in bytes; what several entries share is declared
            outside.
        code: its instructions.
        flow: how control goes through them.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shared_bytes: int
    code: tuple[Instruction, ...]
    flow: Flow


def parse(text: str) -> dict[str, Entry]:
    """The entries of a PTX module, by name.

    Raises:
        ValueError: there is none, or a line is not understood.
    """
    found = {name: _entry(name, parameters, body) for name, parameters, body in _ENTRY.findall(text)}
    if not found:
        raise ValueError("this PTX has no entry; is it the output of a CUDA compiler?")
    return found


def _entry(name: str, parameters: str, body: str) -> Entry:
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for line in _statements(body):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        else:
            code.append(_instruction(name, line))
    return Entry(
        name=name,
        parameters=tuple(map(_parameter, _PARAMETER.findall(parameters))),
        shared_bytes=sum(int(bits) // 8 * int(count or 1) for bits, count in _SHARED.findall(body)),
        code=tuple(code),
        flow=Flow([_step(one, labels) for one in code]),
    )


def _statements(body: str) -> list[str]:
    """Labels and instructions; declarations, comments, pragmas and source lines left out."""
    plain = _LOCATION.sub("", re.sub(r"//[^\n]*", "", body))
    spaced = re.sub(r"([\w$]+:)\s", r"\1;", plain)
    lines = [" ".join(line.split()) for line in spaced.split(";")]
    kept = (line for line in lines if line and line.partition(" ")[0] not in _DECLARATIONS)
    return [line if line.endswith(":") else f"{line};" for line in kept]


def _instruction(entry: str, line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"{entry}: this line of PTX is not understood: {line!r}")
    guard, opcode, operands = match.groups(default="")
    return Instruction(opcode, _split(operands), guard)


def _split(operands: str) -> tuple[str, ...]:
    """Operands at the commas that no brace or bracket holds."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)
    return tuple(part.strip() for part in parts)


def _parameter(match: tuple[str, str, str]) -> Parameter:
    kind, name, count = match
    return Parameter(name, int(count or 1) * (int(kind[1:]) // 8))


def _step(one: Instruction, labels: dict[str, int]) -> Step:
    if one.words[0] == "bra":
        return Step((labels[one.operands[0]],), falls=bool(one.guard))
    if one.words[0] in ("brx", "call"):
        raise ValueError(f"{one.opcode}: jumps through a register and calls are not followed; inline them")
    return Step(falls=bool(one.guard) or one.words[0] not in ("ret", "exit", "trap"))
