"""Runs the tests of the reference on a changed reference: what `reference_judge` starts in a process of its own.

This module loads nothing of kvproof, and what the tests load besides. A process that is forked where it is loaded has
that at hand, and still no module of the reference, so the changed text is the only one that the tests can see.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import CodeType, ModuleType
from typing import Any

import hypothesis
import hypothesis.strategies
import ml_dtypes  # noqa: F401 - loaded once, before the fork
import mpmath  # type: ignore[import-untyped]  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import safetensors  # noqa: F401

from .isolate import isolated

LIMIT_S = 300.0
"""Seconds of one trial: several times what the tests take."""
MEMORY = 8 * 2**30
"""Bytes of address space: a changed size ends in MemoryError, not in a machine without memory."""
PROFILE = "kvproof-mutants"
NOT_NEEDED = ("cacheprovider", "unraisableexception", "threadexception")
"""Plugins of pytest that take more time than most trials."""
OPTIONS = (
    *("-x", "-q", "--tb=no", "--noconftest", f"--hypothesis-profile={PROFILE}"),
    *(word for name in NOT_NEEDED for word in ("-p", f"no:{name}")),
)
"""The shared fixtures of tests/conftest.py compile kernels; the tests of the reference must do without."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a text instead of its file, past the cache of byte code."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one changed module, before anything else does."""

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.loader.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.loader.path, loader=self.loader)


class _Watch:
    """Notes the first test, or file of tests, that fails."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid


def trial(module: str, path: str, text: str, stages: Sequence[Sequence[str]]) -> str:
    """Run tests, stage by stage, with one module's text in place of its file.

    Args:
        module: full name; neither it nor its package may be loaded yet.
        path: of its file, for tracebacks.
        text: its source.
        stages: arguments of pytest, each a run of its own; the first red one ends the trial.

    Returns:
        The first test that failed; "" where all passed.

    Raises:
        RuntimeError: the module was loaded before, so the tests would not have seen the text, or there are no tests.
    """
    package = module.rpartition(".")[0]
    if package in sys.modules:
        raise RuntimeError(f"{package} is loaded already; a trial needs a process that has not loaded it")
    sys.meta_path.insert(0, _Finder(_Loader(module, path, text)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _settle_hypothesis()
    for stage in stages:
        failed = _run(stage)
        if failed:
            return failed
    return ""


def _settle_hypothesis() -> None:
    """The same examples in every trial, none kept, and no time spent on shrinking them."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(PROFILE, deadline=None, derandomize=True, database=None, phases=phases)


def _run(stage: Sequence[str]) -> str:
    watch = _Watch()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*OPTIONS, *stage], plugins=[watch])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"pytest {' '.join(stage)} found no tests")
    if code == pytest.ExitCode.OK:
        return ""
    return watch.first or "loading of the tests"


def serve() -> None:
    """Read {"jobs", "trials": arguments of `trial`} as JSON, and write how each ended, one JSON object a line."""
    asked = json.load(sys.stdin)
    for end in isolated(trial, map(tuple, asked["trials"]), jobs=asked["jobs"], limit_s=LIMIT_S):
        print(json.dumps(asdict(end)), flush=True)
