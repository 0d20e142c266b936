"""Builds of one kernel held against each other, and against the lines of its source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ...fast.backend import Source
from .ptx import Entry, Instruction
from .ptx_facts import CACHES, REGISTER, ROUNDED, is_float, pointer_origins

_LINE_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:.*/)?([^"/]+)"', re.MULTILINE)
_LINE = re.compile(r"^\s*(?:\.loc\s+(\d+)\s+(\d+)|(?:@!?%\w+\s+)?(fma|mul|add|sub)\.\S*f(?:32|64)\b)", re.MULTILINE)
_NAMED_FMA = re.compile(r"\bfmaf?\(")


def inner_work(entry: Entry, names: Sequence[str]) -> Counter[tuple[str, ...]]:
    """What each basic block that reads a cache or has an FMA does: its loads, copies and roundings, in order.

    Registers of the sums are numbered as they come, so that the same sums in the same order read the same; addresses
    are left out. Two builds with equal work read and sum alike.
    """
    origins = pointer_origins(entry, names)
    busy = {number for number, found in origins.items() if found & set(CACHES)}
    busy |= {number for number, one in enumerate(entry.code) if one.opcode.startswith("fma.") and is_float(one)}
    blocks = [block for block in entry.flow.blocks if busy & set(block)]
    return Counter(_work([entry.code[number] for number in block]) for block in blocks)


def fma_mismatches(ptx: str, source: Source) -> list[str]:
    """Lines of a source that do not have the FMAs which they name, in PTX that was compiled with `-lineinfo`.

    A line that names no `fma` may have none. One that does must have, each time that it was compiled, as many as it
    names, and of other products and sums as many as it writes.

    Raises:
        ValueError: the PTX has no source lines.
    """
    files = dict(_LINE_FILE.findall(ptx))
    if not files:
        raise ValueError("this PTX has no source lines; compile it with -lineinfo")
    texts = {**source.headers, f"{source.name}.cu": source.text}
    found: dict[tuple[str, int], Counter[str]] = {}
    at = ("", 0)
    for file, line, operation in _LINE.findall(ptx):
        if file:
            at = (files[file], int(line))
        else:
            found.setdefault(at, Counter())[operation] += 1
    return [
        f"{file}:{line}: {dict(counts)} of {_line(texts, file, line)!r}"
        for (file, line), counts in sorted(found.items())
        if not _as_written(counts, _line(texts, file, line))
    ]


def _line(texts: Mapping[str, str], file: str, line: int) -> str:
    return texts[file].splitlines()[line - 1].partition("//")[0].strip()


def _as_written(counts: Counter[str], text: str) -> bool:
    named = len(_NAMED_FMA.findall(text))
    if not named:
        return counts["fma"] == 0
    times, rest = divmod(counts["fma"], named)
    products, sums = text.count(" * "), text.count(" + ") + text.count(" - ")
    written = (times * products, times * sums)
    return times > 0 and rest == 0 and (counts["mul"], counts["add"] + counts["sub"]) == written


def _work(block: Sequence[Instruction]) -> tuple[str, ...]:
    numbers: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"%{len(numbers)}")

    kept = [one for one in block if one.words[0] in ("ld", "cp") or (is_float(one) and one.words[0] in ROUNDED)]
    return tuple(
        one.opcode
        if one.words[0] in ("ld", "cp")
        else f"{one.opcode} {REGISTER.sub(numbered, ', '.join(one.operands))}"
        for one in kept
    )
