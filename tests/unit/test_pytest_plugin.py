"""The pytest plugin: its options, its fixtures, and the section that names what broke a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvproof.fast import HostBackend, KernelSources
from kvproof.oracle import strategies
from kvproof.oracle.cases import StreamCase, at_check
from kvproof.oracle.contract import Example
from kvproof.oracle.judge import ContractError
from kvproof.oracle.variants import host_variants
from kvproof.reference import TINY

MINE = """
import functools
from hypothesis import given, settings
from kvproof.oracle import strategies as kv
from numpy_kernel import attend

@settings(max_examples=40, database=None, deadline=None)
@given(case=kv.attention_cases())
def test_right(case):
    kv.judge(attend, case)
    assert case.page_size in (SIZES or [case.page_size])

@settings(max_examples=40, database=None, deadline=None)
@given(case=kv.attention_cases())
def test_ignores_its_table(case):
    kv.judge(functools.partial(attend, bug="table ignored"), case)

def test_fixtures(kv_page_size, kv_seed):
    assert (kv_page_size, kv_seed) == (SIZES[0] if SIZES else 16, SEED)
"""


def run(folder: Path, *words: str, sizes: list[int] | None = None, seed: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(f"SIZES, SEED = {sizes}, {seed}\n" + MINE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "test_mine.py"]
    helpers = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    (folder / "conftest.py").write_text(helpers)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_broken_kernel_is_named_with_a_line_to_replay(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    section = done.stdout[done.stdout.index("= kvproof =") :].splitlines()
    assert re.fullmatch(r"test_mine\.py::test_ignores_its_table: \w+ broken", section[1])
    assert "page table" in section[2]
    replay = section[3].removeprefix("  replay: ")
    explain = [sys.executable, "-c", "from kvproof.oracle.cli import main; main()", *replay.split()[1:]]
    told = subprocess.run(explain, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert f"diagnosis: {section[2].strip()}" in told.stdout


def test_options_reach_the_strategies_and_the_fixtures(tmp_path):
    done = run(tmp_path, "--kv-page-size", "3", "--kv-page-size", "5", "--kv-seed", "7", sizes=[3, 5], seed=7)
    assert "1 failed, 2 passed" in done.stdout


def test_a_block_sparse_failure_is_kept_and_explained_too(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_FAILURES", str(tmp_path))
    sources = KernelSources().edit("pages.cuh", "if (!pages.table) return", "return")
    variants = host_variants(seed=0, sources=sources, backend=HostBackend(flags=("-O1",)))
    example = Example(
        geometry=at_check(TINY), streams=(StreamCase(cached=40, rows=3),), page_size=12, order=(3, 2, 1, 0, 4)
    )
    with pytest.raises(ContractError) as caught:
        strategies.check(variants, example)
    assert "layer 1: the page table was ignored" in caught.value.diagnosis
    explain = [sys.executable, "-c", "from kvproof.oracle.cli import main; main()", *caught.value.replay.split()[1:]]
    told = subprocess.run(explain, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "the page table was ignored" in told.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-page-size", "0"), "--kv-page-size is 0; a page holds at least one position"),
        (("--kv-seed", "-2"), "--kv-seed is -2; it must be 0 or more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_wrong_options_are_refused(tmp_path, words, message):
    done = run(tmp_path, *words)
    assert done.returncode == 4
    assert message in done.stderr
