"""pytest: --kv-page-size and --kv-seed, the fixtures of the same names, and a report of broken kernels.

Loaded by pytest wherever kvproof is installed; it imports the rest of kvproof only where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

_REPLAYS = pytest.StashKey[list[tuple[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("kvproof")
    group.addoption(
        "--kv-page-size", type=int, action="append", metavar="N", help="page size of all drawn cases; may be repeated"
    )
    group.addoption("--kv-seed", type=int, metavar="S", help="seed of all data and of Hypothesis")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hand the options to the strategies and to Hypothesis."""
    config.stash[_REPLAYS] = []
    sizes, seed = config.getoption("--kv-page-size"), config.getoption("--kv-seed")
    if not sizes and seed is None:
        return
    if sizes and min(sizes) < 1:
        raise pytest.UsageError(f"--kv-page-size is {min(sizes)}; a page holds at least one position")
    if seed is not None and seed < 0:
        raise pytest.UsageError(f"--kv-seed is {seed}; it must be 0 or more")
    from . import strategies

    strategies.DEFAULT_PAGE_SIZES[:] = sizes or []
    strategies.BASE_SEED[0] = seed or 0
    if seed is not None and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed)


@pytest.fixture
def kv_page_size(request: pytest.FixtureRequest) -> int:
    """The page size of --kv-page-size, the first if it is repeated; 16 without it."""
    return int((request.config.getoption("--kv-page-size") or [16])[0])


@pytest.fixture
def kv_seed(request: pytest.FixtureRequest) -> int:
    """The seed of --kv-seed; 0 without it."""
    return int(request.config.getoption("--kv-seed") or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember what broke a test."""
    report = yield
    if call.excinfo is not None:
        for error in _leaves(call.excinfo.value):
            if type(error).__name__ == "ContractError":  # compared by name: nothing of ours is imported for it
                item.config.stash[_REPLAYS].append((item.nodeid, error))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One section with a line of diagnosis and a line to replay for each broken test."""
    found = config.stash.get(_REPLAYS, [])
    if not found:
        return
    terminalreporter.section("kvproof")
    for nodeid, error in found:
        terminalreporter.line(f"{nodeid}: {error.gate} broken")
        terminalreporter.line(f"  {error.diagnosis or str(error).splitlines()[0]}")
        if error.replay:
            terminalreporter.line(f"  replay: {error.replay}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, or the one there is."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
