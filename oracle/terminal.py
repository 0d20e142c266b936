"""What the commands share: consoles, the progress bar, and the checks of their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..reference.geometry import PRESETS, Geometry

PIPE_WIDTH = 120
"""Columns of a table that no terminal shows."""


def _console(*, stderr: bool = False) -> Console:
    made = Console(stderr=stderr, soft_wrap=True)
    return made if made.is_terminal else Console(stderr=stderr, soft_wrap=True, width=PIPE_WIDTH)


console = _console()
errors = _console(stderr=True)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")]


def choose(option: str, value: str, allowed: Sequence[str]) -> str:
    """An option's value.

    Raises:
        ValueError: it is not one of those allowed.
    """
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def geometry_named(name: str) -> Geometry:
    """The geometry of `--geometry`.

    Raises:
        ValueError: there is none of this name.
    """
    return PRESETS[choose("--geometry", name, tuple(PRESETS))]


def require_writable(json_file: Path | None) -> None:
    """Fail before the work, not after it.

    Raises:
        ValueError: the file of `--json` cannot be written.
    """
    if json_file is None:
        return
    if not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file}: there is no folder {json_file.absolute().parent}; make it first")
    if json_file.is_dir():
        raise ValueError(f"--json {json_file} is a folder; name a file in it")


@contextmanager
def progress(total: int | None, name: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, on a terminal only; yields a function to call before each step."""
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield advance
