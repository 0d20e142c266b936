"""What a kernel's PTX proves: how it rounds, where it reads the page table, and how wide it reads the caches.

A load is told by its address: every address is followed back to the pointer argument that it was computed from. A load
whose address comes from none, or from two, is reported and never passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...fast.backend import Source
from .flow import Flow, Loop
from .ptx import Entry, Instruction

CACHES = ("keys", "values", "index_keys", "pooled")
"""Arguments of the kernels that point into a cache."""
PAGES = "pages"
"""The by-value page argument; its first word points to the page table."""

ROUNDED = ("add", "sub", "mul", "fma", "mad", "div", "sqrt", "rcp")
"""Operations whose result is rounded where it is a floating-point number."""
REGISTER = re.compile(r"%\w+")
"""A register's name, special ones too."""

_FLOAT = re.compile(r"\.(?:b?f|tf|u?e\d+m)\d+(?:x\d+)?\b")
_WIDE = re.compile(r"\.f(?:32|64)(?:x2)?\b")
_INTEGER = re.compile(r"[subp]\d+")
_EXACT = ("mov", "ld", "st", "setp", "set", "selp", "slct", "neg", "abs", "max", "min", "testp", "copysign")
_LOADS = ("ld", "ldu", "atom")
_OTHER_SPACES = {"param", "shared", "local", "const"}
_SIZE = re.compile(r"[a-z](\d+)")

Origins = frozenset[str]
_NONE: Origins = frozenset()


@dataclass(frozen=True, kw_only=True)
class PtxFacts:
    """Facts of one kernel.

    Attributes:
        fp32: fp32 operations that round.
        fma: fp32 FMAs among them.
        double: double-precision operations that round.
        unrounded: floating-point opcodes that do not say `.rn`, so that they may be contracted, or that are unknown.
        narrow: opcodes that compute in less than fp32, such as bf16.
        approximate: opcodes with `.approx` or `.ftz`.
        table_reads: reads of the page table.
        read_depth: the most loops that one of them lies in.
        looping_reads: those in an innermost loop that loads or stores cache rows.
        kept_reads: those whose offset goes to one place of shared memory, which no other goes to: one read for a key.
        load_loops: innermost loops that load or store cache rows.
        cache_loads: how many loads of each width, in bytes, read a cache.
        untraced: global loads whose address does not come from exactly one pointer argument.
    """

    fp32: int
    fma: int
    double: int
    unrounded: tuple[str, ...]
    narrow: tuple[str, ...]
    approximate: tuple[str, ...]
    table_reads: int
    read_depth: int
    looping_reads: int
    kept_reads: int
    load_loops: int
    cache_loads: Mapping[int, int] = field(default_factory=dict)
    untraced: tuple[str, ...] = ()


def argument_names(source: Source) -> dict[str, tuple[str, ...]]:
    """The names of each entry's arguments, as its source spells them.

    Raises:
        ValueError: the source has no entry.
    """
    found = {
        name: tuple(argument.split()[-1].lstrip("*") for argument in arguments.split(","))
        for name, arguments in re.findall(r"__global__[^;{]*?\b(fn_\w+)\s*\(([^)]*)\)", source.text)
    }
    if not found:
        raise ValueError(f"{source.name}.cu has no `__global__` entry called fn_...")
    return found


def ptx_facts(entry: Entry, names: Sequence[str]) -> PtxFacts:
    """The facts of one entry, whose arguments have these names (see `argument_names`)."""
    floats = [one for one in entry.code if is_float(one)]
    rounding = [one for one in floats if one.words[0] in ROUNDED]
    loads = pointer_origins(entry, names)
    table = {number for number, found in loads.items() if found == {PAGES}}
    caches = {number for number, found in loads.items() if len(found) == 1 and found <= set(CACHES)}
    loops = innermost_loops(entry.flow, caches | cache_stores(entry, names))
    return PtxFacts(
        fp32=sum(".f32" in one.opcode for one in rounding),
        fma=sum(one.opcode.startswith("fma.") and ".f32" in one.opcode for one in rounding),
        double=sum(".f64" in one.opcode for one in rounding),
        unrounded=_distinct(one for one in floats if not _rounds_to_nearest(one)),
        narrow=_distinct(one for one in rounding if not _WIDE.search(one.opcode)),
        approximate=_distinct(one for one in entry.code if {"approx", "ftz"} & set(one.words)),
        table_reads=len(table),
        read_depth=max((_depth(entry.flow, number) for number in table), default=0),
        looping_reads=len(table & _inside(entry.flow, loops)),
        kept_reads=_kept(entry, table),
        load_loops=len(loops),
        cache_loads=dict(Counter(load_bytes(entry.code[number]) for number in caches)),
        untraced=_distinct(entry.code[number] for number, found in loads.items() if len(found) != 1),
    )


def pointer_origins(entry: Entry, names: Sequence[str]) -> dict[int, Origins]:
    """For each load from global memory, by its number, the pointer arguments that its address was computed from.

    Predicates carry none: which of two pointers is taken may hang on anything, where each points does not.
    """
    held = _pointers(entry, names)
    return {number: _origins_of(one.operands[1], held) for number, one in enumerate(entry.code) if _reads_global(one)}


def cache_stores(entry: Entry, names: Sequence[str]) -> set[int]:
    """Numbers of the stores to global memory whose address may come from an argument that points into a cache."""
    held = _pointers(entry, names)
    stores = {number for number, one in enumerate(entry.code) if _writes_global(one)}
    return {number for number in stores if _origins_of(entry.code[number].operands[0], held) & set(CACHES)}


def is_float(one: Instruction) -> bool:
    """Whether it works on floating-point numbers."""
    return _FLOAT.search(one.opcode) is not None


def innermost_loops(flow: Flow, instructions: set[int]) -> list[Loop]:
    """The loops that have one of these instructions, and no loop inside that has one."""
    having = [loop for loop in flow.loops if instructions & _inside(flow, [loop])]
    return [loop for loop in having if not any(other.blocks < loop.blocks for other in having)]


def load_bytes(one: Instruction) -> int:
    """How many bytes a load reads."""
    if one.opcode.startswith("cp.async"):
        return int(one.operands[2])
    size = int(_SIZE.findall(one.words[-1])[0]) // 8
    return size * next((int(word[1:]) for word in one.words if word in ("v2", "v4", "v8")), 1)


def _distinct(instructions: Iterable[Instruction]) -> tuple[str, ...]:
    return tuple(sorted({one.opcode for one in instructions}))


def _rounds_to_nearest(one: Instruction) -> bool:
    if one.words[0] in _EXACT:
        return True
    if one.words[0] == "cvt":
        return _conversion_is_safe(one)
    return one.words[0] in ROUNDED and "rn" in one.words


def _conversion_is_safe(one: Instruction) -> bool:
    """To an integer, to double from fp32, or rounded to nearest."""
    to, source = one.words[-2:]
    return _INTEGER.fullmatch(to) is not None or "rn" in one.words or (to == "f64" and source == "f32")


def _reads_global(one: Instruction) -> bool:
    if one.opcode.startswith("cp.async"):
        return "global" in one.words
    return one.words[0] in _LOADS and not _OTHER_SPACES & set(one.words)


def _writes_global(one: Instruction) -> bool:
    return one.words[0] == "st" and not _OTHER_SPACES & set(one.words)


def _origins_of(address: str, held: Mapping[str, Origins]) -> Origins:
    return _NONE.union(*(held.get(register, _NONE) for register in REGISTER.findall(address)))


def _pointers(entry: Entry, names: Sequence[str]) -> dict[str, Origins]:
    """The pointer arguments that each register may have been computed from."""
    held = _loaded_pointers(entry, names)
    moving = [one for one in entry.code if one.targets and one.words[0] not in (*_LOADS, "setp")]
    changed = True
    while changed:
        changed = False
        for one in moving:
            origins = _NONE.union(*(held.get(register, _NONE) for register in one.sources))
            for register in one.targets:
                grown = held.get(register, _NONE) | origins
                changed = changed or grown != held.get(register, _NONE)
                held[register] = grown
    return held


def _loaded_pointers(entry: Entry, names: Sequence[str]) -> dict[str, Origins]:
    """Registers that pointer arguments are loaded into: 64-bit words at the start of an argument."""
    by_parameter = {parameter.name: name for parameter, name in zip(entry.parameters, names, strict=True)}
    held: dict[str, Origins] = {}
    for one in entry.code:
        parameter, _, offset = one.operands[1].strip("[]").partition("+") if len(one.operands) > 1 else ("", "", "")
        if one.words[:2] == ("ld", "param") and one.words[-1] in ("u64", "b64") and int(offset or 0) == 0:
            held[one.targets[0]] = frozenset((by_parameter[parameter],))
    return held


def _depth(flow: Flow, number: int) -> int:
    """How many loops an instruction lies in."""
    return sum(number in _inside(flow, [loop]) for loop in flow.loops)


def _inside(flow: Flow, loops: Sequence[Loop]) -> set[int]:
    """Numbers of the instructions of these loops."""
    return {number for loop in loops for block in loop.blocks for number in flow.blocks[block]}


def _kept(entry: Entry, table: set[int]) -> int:
    """How many of these reads go to one place of shared memory each, which no other goes to."""
    users = _users(entry)
    places = [_shared_stores(entry, number, users) for number in table]
    taken = Counter(place for found in places for place in found)
    return sum(len(found) == 1 and taken[next(iter(found))] == 1 for found in places)


def _users(entry: Entry) -> dict[str, list[int]]:
    """Numbers of the instructions that compute on, or store to shared memory, what each register holds."""
    found: dict[str, list[int]] = {}
    for number, one in enumerate(entry.code):
        stores = one.opcode.startswith("st.shared")
        if not stores and (not one.targets or one.words[0] in (*_LOADS, "setp")):
            continue
        for register in REGISTER.findall(one.operands[1]) if stores else one.sources:
            found.setdefault(register, []).append(number)
    return found


def _shared_stores(entry: Entry, load: int, users: Mapping[str, Sequence[int]]) -> set[int]:
    """Numbers of the stores to shared memory that what this load read goes into."""
    reached: set[int] = set()
    waiting = list(entry.code[load].targets)
    while waiting:
        for number in set(users.get(waiting.pop(), ())) - reached:
            reached.add(number)
            waiting.extend(entry.code[number].targets)
    return {number for number in reached if entry.code[number].opcode.startswith("st.shared")}
