"""What a stream has submitted: the fence of its last work, and the arrays that this reads by their address.

A kernel keeps nothing alive. An allocator that hands memory on as soon as Python lets go of it, as CuPy's does, would
give a page table to others while kernels on another queue still read it. So whatever belongs to a stream that is gone
is kept until its work has ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from .backend import Backend, Fence


class Work:
    """The last work of a stream, on whatever queue that was.

    Args:
        backend: that it is submitted to.
        arrays: that it reads.
    """

    def __init__(self, backend: Backend, arrays: Sequence[Any]) -> None:
        self._backend = backend
        self._arrays = tuple(arrays)
        self._fence: Fence | None = None
        self._adrift = False

    def order(self) -> None:
        """Let what is submitted next, to whatever queue is current, run behind it.

        Nothing waits here, unless the backend could not fence what it had been given.
        """
        if self._adrift:
            _wait(self._backend)
            self._adrift = False
        if self._fence is not None:
            self._fence.order()

    def mark(self) -> None:
        """What is submitted to the current queue by now belongs to it; call it behind `order`.

        Raises:
            LaunchError: the backend has failed; what is on its way is covered all the same.
        """
        try:
            self._fence = self._backend.fence()
        except BaseException:
            before, self._adrift = self._adrift, True
            self._fence = self._backend.fence()
            self._adrift = before
            raise

    def ended(self) -> bool:
        """Whether all of it has ended; False where the backend cannot tell."""
        if self._adrift:
            return False
        with contextlib.suppress(Exception):
            return self._fence is None or self._fence.done()
        return False


class Keep:
    """Work of streams that are gone, kept with its arrays until it has ended."""

    def __init__(self) -> None:
        self._kept: deque[Work] = deque()  # the garbage collector may add to it at any time, in any thread

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, work: Work) -> None:
        """Keep what this work reads."""
        self._kept.append(work)

    def release(self) -> None:
        """Let go of what has ended."""
        for _ in range(len(self._kept)):
            work = self._kept.popleft()
            if not work.ended():
                self._kept.append(work)


def _wait(backend: Backend) -> None:
    """Wait on the host, where a backend has work that a call leaves behind."""
    synchronize = getattr(backend, "synchronize", None)
    if synchronize is not None:
        synchronize()
