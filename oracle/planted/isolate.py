"""Runs functions in processes of their own, several at a time: a kernel with a fault in it may write anywhere."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Ended(Generic[Result]):
    """How one process ended.

    Attributes:
        number: of its arguments.
        result: what the function returned; None where it did not return.
        died: how it ended instead, in words; None where it returned.
        seconds: it took.
    """

    number: int
    result: Result | None
    died: str | None
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Running:
    number: int
    process: Any
    pipe: Connection
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def isolated(
    function: Callable[..., Result],
    arguments: Iterable[tuple[Any, ...]],
    *,
    jobs: int,
    limit_s: float,
    environment: dict[str, str] | None = None,
) -> Iterator[Ended[Result]]:
    """Call a function with each of the arguments, each call in a process of its own; yields as they end.

    Args:
        function: of a module that can be imported; it and its arguments are pickled.
        jobs: processes at a time.
        limit_s: seconds after which a process is killed.
        environment: variables of the processes, on top of this one's.

    Raises:
        Exception: what the function raised.
        RuntimeError: a process could not load the function or its arguments.
    """
    # A server that has imported everything and runs no threads forks them: that is quick, and safe.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    queue = enumerate(arguments)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < jobs and (following := next(queue, None)) is not None:
                number, words = following
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_call, args=(theirs, environment or {}, function, words), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running(number=number, process=process, pipe=ours, started=time.monotonic()))
            if not running:
                return
            ready = wait([r.pipe for r in running] + [r.process.sentinel for r in running], timeout=0.5)
            for run in [r for r in running if r.pipe in ready or r.process.sentinel in ready or r.seconds > limit_s]:
                running.remove(run)
                yield _end(run, limit_s)
    finally:
        for run in running:
            run.process.kill()
            run.process.join()


def _end(run: _Running, limit_s: float) -> Ended[Any]:
    seconds, result, died = run.seconds, None, None
    try:
        if run.pipe.poll():
            result = run.pipe.recv()
        elif run.process.is_alive():
            died = f"ran past {limit_s:g} s"
    except EOFError:
        run.process.join()
    finally:
        run.pipe.close()
        run.process.kill()
        run.process.join()
    if isinstance(result, Exception):
        raise result
    status = run.process.exitcode
    if result is None and died is None:
        died = f"crashed with exit status {status}"
    if status is not None and status > 0:  # no signal: Python could not start or load what it was to run
        raise RuntimeError(f"process {run.number} never ran its function: it ended with exit status {status}")
    return Ended(number=run.number, result=result, died=died, seconds=seconds)


def _call(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], words: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a crash prints is no news
    try:
        pipe.send(function(*words))
    except Exception as error:
        pipe.send(error)
    pipe.close()
