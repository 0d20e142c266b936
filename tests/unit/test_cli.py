"""The command: exit codes, the table, JSON, and what it says to wrong options."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kvproof.oracle import cli
from kvproof.oracle.report import Failure, Report, write_json

PEER = Path(__file__).parents[2] / "fixtures" / "peer"


def kvproof(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvproof.oracle.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_small_check_is_green_and_writes_json(tmp_path):
    file = tmp_path / "out.json"
    done = kvproof("check", "--geometry", "tiny", "--case", "sparse", "--page", "16", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "GREEN: paged equals contiguous, bit for bit" in done.stdout
    report = json.loads(file.read_text())
    assert report["green"] is True
    assert report["facts"]["page_sizes"] == [16]
    gates = {(count["gate"], count["kernel"]) for count in report["counts"]}
    kernels = {"prep", "pool", "scores", "select", "chunks", "chunks_ahead", "merge", "gate", "dense", "dense_ahead"}
    assert gates >= {(gate, kernel) for gate in ("bits", "bound", "memory", "controls") for kernel in kernels}
    assert gates >= {(gate, "select_close") for gate in ("bits", "bound", "memory")}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "--geometry", "huge"), "--geometry is 'huge'; it must be one of flash_next, tiny"),
        (("check", "--case", "nope"), "--case is 'nope'; it must be one of start, block-tile"),
        (("check", "--page", "10"), "page size 10 does not hold whole blocks"),
        (("check", "--page", "0"), "page size 0 does not hold whole blocks"),
        (("check", "--backend", "tpu"), "--backend is 'tpu'; it must be one of auto, host, cuda"),
        (("check", "--seed", "-1"), "--seed is -1; it must be 0 or more"),
        (("check", "--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
        (("check", "--nonsense"), "No such option"),
        (("fixtures", "verify", "/no/such/folder"), "holds no .safetensors file"),
        (("bench", "--rounds", "0"), "--rounds is 0; it must be at least 1"),
        (("bench", "--accuracy", "--rounds", "3"), "--rounds is 3; it must be left out with --accuracy"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_misuse_exits_2_and_says_what_is_allowed(words, message):
    done = kvproof(*words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_a_compiler_that_does_not_run_exits_2(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    done = kvproof("check", "--geometry", "tiny", "--case", "sparse", "--page", "16")
    assert done.returncode == 2
    assert "/no/such/compiler" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (" ", "$CXX is blank; set it to a C++ compiler, or unset it"),
        ('"', "No closing quotation; set it to a command"),
        ("/bin/true", "it ended without an error, but wrote no library"),
    ],
    ids=["blank", "quote", "does-nothing"],
)
def test_a_cxx_that_is_no_compiler_is_named(monkeypatch, tmp_path, chosen, message):
    monkeypatch.setenv("CXX", chosen)
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    done = kvproof("check", "--geometry", "tiny", "--case", "sparse", "--page", "16")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_folder_is_no_file_for_json(tmp_path):
    done = kvproof("check", "--json", str(tmp_path))
    assert done.returncode == 2
    assert "is a folder; name a file in it" in done.stderr
    assert list(tmp_path.parent.glob("*.part")) == []


def test_what_is_no_regular_file_is_written_to_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"green": True})
    assert json.loads(os.read(reader, 1000)) == {"green": True}
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_the_version_is_told():
    assert kvproof("--version").stdout.startswith("kvproof 0.")


def test_verify_is_green_on_the_small_peer_files():
    done = kvproof("fixtures", "verify", str(PEER))
    assert done.returncode == 0, done.stderr
    assert "GREEN" in done.stdout


def test_a_red_report_exits_1_and_tells_how_to_replay(monkeypatch, capsys):
    def red(plan, variants, report):
        report.passed("bits", "prep")
        report.failed(
            Failure(gate="bits", kernel="merge", where="case x", message="it differs", replay="kvproof check")
        )

    monkeypatch.setattr(cli, "run_check", red)
    monkeypatch.setattr(sys, "argv", ["kvproof", "check", "--geometry", "tiny", "--quick"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    shown = capsys.readouterr().out
    assert "RED: 1 of 2 checks failed" in shown
    assert "replay: kvproof check" in shown


def test_nothing_checked_is_not_green():
    assert not Report().green
