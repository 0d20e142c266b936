"""What a kernel's machine code proves: how wide it reads the caches, and that it leaves local memory alone.

Every load from global memory is followed back, through the registers that its address was computed from, to the pointer
argument in the constant bank: what each register holds is carried along the flow of control until nothing changes. A
load that comes from no argument, or from two, is reported and never passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cubin import Kernel, Sass
from .flow import Flow, Step
from .ptx_facts import CACHES

_REGISTER = re.compile(r"\bU?R\d+\b")
_PREDICATE = re.compile(r"U?P\d")
_CONSTANT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_GLOBAL_LOADS = ("LDG", "LDGSTS", "LD", "ATOMG", "ATOM")
_CONSTANT_LOADS = ("LDC", "ULDC", "LDCU")
_NO_RESULT = ("BRA", "RET", "EXIT", "CALL", "WARPSYNC", "NANOSLEEP", "BAR", "DEPBAR", "NOP")
_PREDICATE_FIRST = ("R2UR", "SHFL", "MATCH")
_INDIRECT = ("BRX", "JMX", "BRXU", "JMXU")

Origins = frozenset[str]
_NONE: Origins = frozenset()


@dataclass(frozen=True, kw_only=True)
class SassFacts:
    """Facts of one kernel on one SM.

    Attributes:
        cache_loads: how many loads of each width, in bytes, read a cache.
        other_loads: how many loads of each width read something else: lists, counts, the page table, results.
        untraced: opcodes of global loads whose address does not come from exactly one pointer argument.
        local: loads and stores of local memory.
    """

    cache_loads: Mapping[int, int]
    other_loads: Mapping[int, int]
    untraced: tuple[str, ...]
    local: int


def sass_facts(kernel: Kernel, names: Sequence[str]) -> SassFacts:
    """The facts of one kernel, whose arguments have these names (see `ptx_facts.argument_names`).

    Args:
        kernel: one whose machine code was not read has no loads.

    Raises:
        ValueError: the code jumps through a register.
    """
    loads = load_origins(kernel, names)
    cached = [one for one, origins in loads if len(origins) == 1 and origins <= set(CACHES)]
    other = [one for one, origins in loads if len(origins) == 1 and not origins <= set(CACHES)]
    return SassFacts(
        cache_loads=dict(Counter(one.bytes for one in cached)),
        other_loads=dict(Counter(one.bytes for one in other)),
        untraced=tuple(sorted({one.opcode for one, origins in loads if len(origins) != 1})),
        local=sum(one.words[0] in ("LDL", "STL") for one in kernel.code),
    )


def load_origins(kernel: Kernel, names: Sequence[str]) -> list[tuple[Sass, Origins]]:
    """Each load from global memory, with the pointer arguments that its address was computed from.

    Raises:
        ValueError: the code jumps through a register.
    """
    if not kernel.code:
        return []
    code = _without_padding(kernel.code)
    pointers = _pointer_arguments(kernel, names)
    flow = Flow(_steps(code))
    found = []
    for block, entered in zip(flow.blocks, _entered(flow, code, pointers), strict=True):
        registers = _Registers(pointers, dict(entered))
        for number in block:
            if code[number].words[0] in _GLOBAL_LOADS:
                found.append((code[number], registers.of_address(code[number])))
            registers.run(code[number])
    return found


@dataclass
class _Registers:
    """What each register was computed from, at one place of the code.

    Attributes:
        pointers: name of the pointer argument at each place of the constant bank.
        held: origins of each register.
        guarded: what a register holds where a guard holds, such as "!P0": an instruction that runs under a guard leaves
            what was there, too, but the next one under that guard finds what it left.
    """

    pointers: Mapping[int, str]
    held: dict[str, Origins]
    guarded: dict[tuple[str, str], Origins] = field(default_factory=dict)

    def run(self, one: Sass) -> None:
        """Change the registers as an instruction does."""
        for predicate in _written_predicates(one):
            self.guarded = {key: held for key, held in self.guarded.items() if key[1].lstrip("!") != predicate}
        for register, origins in self._results(one):
            self._write(register, one.guard, origins)

    def where(self, guard: str) -> dict[str, Origins]:
        """What the registers hold where a guard is known to hold; "" says nothing."""
        return self.held | {register: held for (register, known), held in self.guarded.items() if known == guard}

    def of_address(self, one: Sass) -> Origins:
        """Origins of a load's address: its last bracket, the descriptor left out."""
        brackets = [re.sub(r"^desc\[\w+\]", "", operand) for operand in one.operands if "[" in operand]
        return self._of(brackets[-1], one.guard)

    def _of(self, operands: str, guard: str) -> Origins:
        found = [self.guarded.get((name, guard), self.held.get(name, _NONE)) for name in _REGISTER.findall(operands)]
        return _NONE.union(*found, *(self._at(int(place, 16)) for place in _CONSTANT.findall(operands)))

    def _at(self, place: int) -> Origins:
        return frozenset((self.pointers[place],)) if place in self.pointers else _NONE

    def _write(self, register: str, guard: str, origins: Origins) -> None:
        other = self.guarded.get((register, _opposite(guard)))
        self.guarded = {key: held for key, held in self.guarded.items() if key[0] != register}
        if not guard:
            self.held[register] = origins
            return
        self.held[register] = origins | (self.held.get(register, _NONE) if other is None else other)
        self.guarded[register, guard] = origins
        if other is not None:
            self.guarded[register, _opposite(guard)] = other

    def _results(self, one: Sass) -> list[tuple[str, Origins]]:
        registers = _targets(one)
        if not registers:
            return []
        if one.words[0] in _CONSTANT_LOADS:
            return [(name, self._at(place)) for name, place in zip(registers, _places(one), strict=True)]
        if one.words[0].startswith(("LD", "ATOM")):
            return [(name, _NONE) for name in registers]
        high = [(name, _NONE) for name in registers[1:]]  # an address is told by its low half
        return [(registers[0], self._of(" ".join(one.operands[1:]), one.guard)), *high]


def _entered(flow: Flow, code: Sequence[Sass], pointers: Mapping[int, str]) -> list[dict[str, Origins]]:
    """Origins of each register where each block begins, over every path that leads there."""
    entered: list[dict[str, Origins]] = [{} for _ in flow.blocks]
    waiting = set(range(len(flow.blocks)))
    while waiting:
        block = min(waiting)
        waiting.remove(block)
        registers = _Registers(pointers, dict(entered[block]))
        for number in flow.blocks[block]:
            registers.run(code[number])
        for target, guard in zip(flow.successors[block], _edge_guards(code[flow.blocks[block][-1]]), strict=False):
            if _join(entered[target], registers.where(guard)):
                waiting.add(target)
    return entered


def _edge_guards(last: Sass) -> tuple[str, str]:
    """What holds where control goes on to the next block, and where it jumps."""
    return (_opposite(last.guard), last.guard) if last.words[0] == "BRA" and last.guard else ("", "")


def _join(into: dict[str, Origins], other: Mapping[str, Origins]) -> bool:
    """Add what another path brings; whether that was anything."""
    grown = {name: into.get(name, _NONE) | origins for name, origins in other.items()}
    changed = any(origins != into.get(name, _NONE) for name, origins in grown.items())
    into.update(grown)
    return changed


def _pointer_arguments(kernel: Kernel, names: Sequence[str]) -> dict[int, str]:
    """Name of the pointer at each place of constant bank 0; a struct's pointer is its first word."""
    placed = zip(kernel.arguments, names, strict=True)
    return {place: name for (place, size), name in placed if size >= 8}


def _without_padding(code: Sequence[Sass]) -> Sequence[Sass]:
    """The code up to its last instruction that is no filling."""
    end = max(number for number, one in enumerate(code) if one.words[0] != "NOP")
    return code[: end + 1]


def _steps(code: Sequence[Sass]) -> list[Step]:
    at = {one.address: number for number, one in enumerate(code)}
    return [_step(one, at) for one in code]


def _step(one: Sass, at: Mapping[int, int]) -> Step:
    kind = one.words[0]
    if kind in _INDIRECT:
        raise ValueError(f"{one.opcode} at {one.address:#x} jumps through a register; its flow is not followed")
    if kind in ("BRA", "CALL"):  # a subroutine returns behind its call, and computes no address
        target = at[int(one.operands[-1].split()[-1], 16)]
        return Step((target,), falls=kind == "CALL" or bool(one.guard) or len(one.operands) > 1)
    return Step(falls=bool(one.guard) or kind not in ("EXIT", "RET", "KILL"))


def _targets(one: Sass) -> tuple[str, ...]:
    """The registers that hold the result, the low half first."""
    place = 1 if one.words[0] in _PREDICATE_FIRST and _PREDICATE.match(one.operands[0]) else 0
    if one.words[0] in _NO_RESULT or len(one.operands) <= place or not _REGISTER.fullmatch(one.operands[place]):
        return ()
    kind, number = one.operands[place].rstrip("0123456789"), int(one.operands[place].lstrip("UR"))
    return tuple(f"{kind}{number + n}" for n in range(_result_registers(one)))


def _result_registers(one: Sass) -> int:
    """How many registers the result fills."""
    if one.words[0].startswith(("LD", "ULD")):
        return max(1, one.bytes // 4)
    doubles = one.words[0] in ("CS2R", "DADD", "DMUL", "DFMA") and "32" not in one.words
    return 2 if doubles or {"64", "WIDE", "F64"} & set(one.words) else 1


def _places(one: Sass) -> list[int]:
    """Places in constant bank 0 of what a load of constants brings; none where it is indexed."""
    place = _CONSTANT.fullmatch(one.operands[1])
    return [int(place[1], 16) + 4 * n if place else -1 for n in range(len(_targets(one)))]


def _opposite(guard: str) -> str:
    return guard[1:] if guard.startswith("!") else f"!{guard}"


def _written_predicates(one: Sass) -> tuple[str, ...]:
    """Predicates that may be results: those among the first three operands."""
    if one.operands[:1] == ("PR",):
        return tuple(f"P{number}" for number in range(7))
    return tuple(operand for operand in one.operands[:3] if _PREDICATE.fullmatch(operand))
