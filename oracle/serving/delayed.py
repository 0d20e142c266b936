"""Work that is late: a host backend with several queues, of which nothing runs before something waits for it.

A GPU's queues run behind the caller's back, and a missing order between two of them shows on some days only. Here it
shows always: what nobody waits for stays pending for as long as it can, or takes turns with what is waited for. There
are no threads and no clocks, so that a failure repeats.

    engine = DelayedEngine()
    with engine.backend.queue(1):
        stream.append(projections)      # pending
    engine.backend.synchronize()        # done
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ...fast import Engine, HostBackend, KernelSources
from ...fast.backend import Argument, Dim3, Launch, Module, Parameter, Pointer, Source
from ...fast.host_backend import LaunchList
from ...reference.arrays import Place
from .recycled import RecycledMemory, by_address, is_lent

Policy: TypeAlias = Literal["late", "turns"]
"""What else runs while one queue is waited for: nothing that it does not need, or one task of each queue in turn."""


class DelayedFence:
    """A place in a queue: behind its first `place` tasks."""

    def __init__(self, backend: DelayedBackend, queue: int, place: int) -> None:
        self._backend = backend
        self.queue = queue
        self.place = place

    def done(self) -> bool:
        """Whether the queue has passed it."""
        return self._backend.passed(self.queue) >= self.place

    def order(self) -> None:
        """Let the current queue's later tasks run behind it; nothing runs now."""
        self._backend.submit(self)


class _Queue:
    """Tasks in order; a fence among them is passed once its own queue has passed it."""

    def __init__(self) -> None:
        self.tasks: deque[Launch | DelayedFence] = deque()
        self.passed = 0

    @property
    def submitted(self) -> int:
        return self.passed + len(self.tasks)


class DelayedModule(Module):
    """A module whose launches are submitted to the queue that is current when they are made."""

    def __init__(self, module: Module, backend: DelayedBackend) -> None:
        self._module = module
        self._backend = backend

    @property
    def entries(self) -> tuple[str, ...]:
        """Names that can be launched."""
        return self._module.entries

    def parameters(self, entry: str) -> tuple[Parameter, ...]:
        """What one of them takes."""
        return self._module.parameters(entry)

    def bind(
        self, entry: str, *, grid: Dim3 | int, block: Dim3 | int, args: Sequence[Argument], shared: int = 0
    ) -> Launch:
        """Check and pack a launch; see `Module.bind`."""
        launch = self._module.bind(entry, grid=grid, block=block, args=args, shared=shared)
        held = tuple(argument for argument in args if not _is_lent(argument))
        return functools.partial(self._backend.submit, functools.partial(_run_holding, launch, held))


def _run_holding(launch: Launch, held: tuple[Argument, ...]) -> None:
    """Run a launch; arrays that are not the backend's live until then."""
    launch()


def _is_lent(argument: Argument) -> bool:
    return isinstance(argument, Pointer) and is_lent(argument.array)


class DelayedBackend:
    """A host backend that runs what it is given when something waits for it.

    `download` and `upload` wait for the current queue, as CuPy's do, `synchronize` for all. Any error of a kernel shows
    there. Memory is CuPy's too (`RecycledMemory`): tasks know arrays of `empty` and `upload` by their address, and who
    lets go of one gives it to the next that asks on the same queue.

    Args:
        backend: what runs the kernels in the end; a fresh `HostBackend` when None.
        queues: how many there are; queue 0 is current outside `queue`.
        policy: what runs beside what is waited for.

    Raises:
        ValueError: an option is out of its range.
    """

    name = "host"
    device = None

    def __init__(self, backend: HostBackend | None = None, *, queues: int = 2, policy: Policy = "late") -> None:
        if queues < 1:
            raise ValueError(f"queues is {queues}; it must be at least 1")
        if policy not in get_args(Policy):
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(get_args(Policy))}")
        self.host = backend or HostBackend()
        self.policy: Policy = policy
        self._queues = tuple(_Queue() for _ in range(queues))
        self._current = 0
        self._memory = RecycledMemory()

    # ---- queues ----

    @contextlib.contextmanager
    def queue(self, number: int) -> Iterator[None]:
        """Make a queue current in a `with` block.

        Raises:
            ValueError: there is no such queue.
        """
        self._require_queue(number)
        before, self._current = self._current, number
        try:
            yield
        finally:
            self._current = before

    def submit(self, task: Launch | DelayedFence) -> None:
        """Add a task to the current queue."""
        self._queues[self._current].tasks.append(task)

    def passed(self, queue: int) -> int:
        """Tasks that a queue has run."""
        return self._queues[queue].passed

    def pending(self, queue: int) -> int:
        """Tasks that a queue has not run yet."""
        self._require_queue(queue)
        return len(self._queues[queue].tasks)

    def run(self, queue: int, count: int | None = None) -> None:
        """Run a queue's next tasks, all when None, and what they were ordered behind.

        Raises:
            ValueError: there is no such queue.
            LaunchError: a kernel failed.
        """
        self._require_queue(queue)
        chosen = self._queues[queue]
        self._run_to(queue, chosen.submitted if count is None else min(chosen.passed + count, chosen.submitted))

    def synchronize(self) -> None:
        """Wait for everything: the current queue first, the others from the last to the first.

        Raises:
            LaunchError: a kernel failed.
        """
        self._wait(self._current)
        for queue in reversed(range(len(self._queues))):
            self._wait(queue)

    def fence(self) -> DelayedFence:
        """A place in the current queue."""
        return DelayedFence(self, self._current, self._queues[self._current].submitted)

    # ---- what a backend does ----

    def load(self, source: Source) -> DelayedModule:
        """Compile a source, or find it compiled, at once; see `HostBackend.load`."""
        return DelayedModule(self.host.load(source), self)

    def load_all(
        self, sources: Sequence[Source], progress: Callable[[Source], None] | None = None
    ) -> list[DelayedModule]:
        """Load several sources at once; see `HostBackend.load_all`."""
        return [DelayedModule(module, self) for module in self.host.load_all(sources, progress)]

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A fresh array, holding anything."""
        return self._memory.empty(self._current, shape, dtype)

    def fill(self, array: npt.NDArray[Any], value: float) -> None:
        """Set every element, in the current queue."""
        self.submit(functools.partial(self.host.fill, by_address(array), value))

    def zero(self, array: npt.NDArray[Any]) -> None:
        """Set every byte to 0, in the current queue."""
        self.submit(functools.partial(self.host.zero, by_address(array)))

    def write(self, array: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Set every element, in the current queue; the values are copied now."""
        self.submit(functools.partial(self.host.write, by_address(array), np.array(values)))

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy, behind the current queue."""
        self._wait(self._current)
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy, behind the current queue."""
        self._wait(self._current)
        return self.host.download(array)

    def recorder(self) -> LaunchList:
        """Begin to record launches; a replay submits them to the queue that is current then."""
        return self.host.recorder()

    def describe(self) -> str:
        """The backend's name and its compiler, and how it is delayed."""
        return f"{self.host.describe()}, {len(self._queues)} delayed queues, {self.policy}"

    # ---- how tasks come to run ----

    def _wait(self, queue: int) -> None:
        place = self._queues[queue].submitted
        while self.policy == "turns" and self.passed(queue) < place:
            for other in self._queues:
                self._run_one(other)
        self._run_to(queue, place)

    def _run_one(self, queue: _Queue) -> None:
        """Run a queue's next task, if it may run."""
        if queue.tasks and not self._blocker(queue):
            self._take_turn(queue)

    def _run_to(self, queue: int, place: int) -> None:
        """Run a queue up to a place, and every other up to what that was ordered behind."""
        waiting = [(self._queues[queue], place)]
        while waiting:
            now, end = waiting[-1]
            if now.passed >= end:
                waiting.pop()
            elif fence := self._blocker(now):
                waiting.append((self._queues[fence.queue], fence.place))
            else:
                self._take_turn(now)

    def _blocker(self, queue: _Queue) -> DelayedFence | None:
        """The fence that a queue stands before, not passed yet."""
        task = queue.tasks[0]
        return task if isinstance(task, DelayedFence) and not task.done() else None

    def _take_turn(self, queue: _Queue) -> None:
        task = queue.tasks.popleft()
        queue.passed += 1
        if not isinstance(task, DelayedFence):
            task()

    def _require_queue(self, number: int) -> None:
        if not 0 <= number < len(self._queues):
            raise ValueError(f"queue {number} does not exist; there are queues 0 to {len(self._queues) - 1}")


class DelayedEngine(Engine):
    """An engine over a `DelayedBackend`, whose checks look at no array: it may not be computed yet.

    Args:
        backend: a fresh `DelayedBackend` when None.
        sources, threads, gpu_split: as `Engine`.
    """

    backend: DelayedBackend

    def __init__(
        self,
        backend: DelayedBackend | None = None,
        *,
        sources: KernelSources | None = None,
        threads: int | None = None,
        gpu_split: bool = False,
    ) -> None:
        super().__init__(backend or DelayedBackend(), sources=sources, threads=threads, gpu_split=gpu_split)

    @property
    def place(self) -> Place:
        """On the host, not to be read."""
        return Place(device=None, now=False)
