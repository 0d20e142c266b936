"""Control flow of compiled code: basic blocks, dominators and natural loops, for PTX and SASS alike."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Step:
    """Where one instruction can go.

    Attributes:
        jumps: numbers of the instructions that it may jump to.
        falls: whether it may go on to the next one.
    """

    jumps: tuple[int, ...] = ()
    falls: bool = True


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes:
        header: number of the block that every round begins with.
        blocks: numbers of its blocks.
    """

    header: int
    blocks: frozenset[int]


class Flow:
    """The control flow graph of one kernel; control enters at its first instruction.

    Args:
        steps: one for each instruction.

    Attributes:
        blocks: instruction numbers of each basic block.
        successors: numbers of the blocks that each block may go on to, the next one first.

    Raises:
        ValueError: control may leave the code.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        if not steps or steps[-1].falls:
            raise ValueError(f"control leaves the code of {len(steps)} instructions; is the listing cut off?")
        starts = _starts(steps)
        self.blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(steps)], strict=True)]
        number = {block.start: index for index, block in enumerate(self.blocks)}
        self.successors = [[number[to] for to in _targets(steps, block[-1])] for block in self.blocks]

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """Numbers of the blocks that each block may come from."""
        found: list[list[int]] = [[] for _ in self.blocks]
        for block, targets in enumerate(self.successors):
            for target in targets:
                found[target].append(block)
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, those of one header as one.

        Raises:
            ValueError: a loop is entered in its middle, so that it has no header.
        """
        self._require_reducible()
        bodies: dict[int, set[int]] = {}
        for tail, header in self._back_edges:
            bodies.setdefault(header, {header}).update(self._reaching(tail, header))
        return [Loop(header, frozenset(body)) for header, body in bodies.items()]

    @cached_property
    def _dominators(self) -> list[set[int]]:
        everything = set(range(len(self.blocks)))
        found = [{0}, *(set(everything) for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for block in range(1, len(self.blocks)):
                before = [found[one] for one in self.predecessors[block]]
                now = {block} | (set.intersection(*before) if before else set())
                changed = changed or now != found[block]
                found[block] = now
        return found

    @cached_property
    def _back_edges(self) -> list[tuple[int, int]]:
        return [
            (block, target)
            for block, targets in enumerate(self.successors)
            for target in targets
            if target in self._dominators[block]
        ]

    def _reaching(self, tail: int, header: int) -> set[int]:
        return _closure([tail], self.predecessors, {header})

    def _require_reducible(self) -> None:
        back = set(self._back_edges)
        forward = {
            block: [target for target in targets if (block, target) not in back]
            for block, targets in enumerate(self.successors)
        }
        try:
            graphlib.TopologicalSorter(forward).prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"blocks {error.args[1]} form a loop that is entered in its middle") from None


def _targets(steps: Sequence[Step], last: int) -> Iterator[int]:
    if steps[last].falls:
        yield last + 1
    yield from steps[last].jumps


def _starts(steps: Sequence[Step]) -> list[int]:
    found = {0}
    for number, step in enumerate(steps):
        found.update(step.jumps)
        if step.jumps or not step.falls:
            found.add(number + 1)
    return sorted(found - {len(steps)})


def _closure(seeds: Sequence[int], edges: Sequence[Sequence[int]], barred: set[int]) -> set[int]:
    found: set[int] = set()
    waiting = list(seeds)
    while waiting:
        block = waiting.pop()
        if block in found or block in barred:
            continue
        found.add(block)
        waiting.extend(edges[block])
    return found
