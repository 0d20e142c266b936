"""How tight the bounds are: the spread of error / bound, what is left without a rounding, and the planted changes."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from kvproof.oracle import accuracy_report, adversary, cli, detection
from kvproof.oracle.accuracy import GEOMETRY, answers_at, before_rounding, peer_spreads, spread, spreads
from kvproof.oracle.adversary import Looseness, ValueErrors
from kvproof.oracle.detection import AttentionRow, WindowChanges, shares, smallest
from kvproof.oracle.interval import Interval, around, exact, stored
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.peer import FixtureError
from kvproof.reference.numerics import bf16
from rich.console import Console
from typer.testing import CliRunner

PEER = Path(__file__).parents[2] / "fixtures" / "peer"

LENGTH = 64


@pytest.fixture(scope="module")
def kernels(engine):
    return FastKernels(engine)


@pytest.fixture(scope="module")
def measured(kernels):
    return answers_at(kernels, LENGTH, seed=0)


@pytest.fixture(scope="module")
def row(kernels, measured):
    return AttentionRow(kernels, *measured)


# ---- spreads ----


def test_the_spread_counts_only_elements_that_have_a_bound():
    value = np.array([0.0, 0.0, 0.0, 0.0, np.nan])
    reach = np.array([1.0, 1.0, 1.0, 0.0, 1.0])
    bound = Interval(value, value - reach, value + reach, reach)
    found = spread("kernel.tensor", [(bound, np.array([0.25, -0.5, 1.0, 0.0, np.nan], np.float32))])
    assert (found.elements, found.median, found.worst) == (3, 0.5, 1.0)
    assert found.high == pytest.approx(0.99)
    assert found.decided is None


def test_an_error_above_the_bound_shows_in_the_spread():
    bound = around(np.ones(4), np.full(4, 0.5))
    assert spread("kernel.tensor", [(bound, np.full(4, 2.0, np.float32))]).worst == pytest.approx(2, rel=1e-5)


def test_an_exact_output_has_no_spread():
    copy = bf16(np.arange(4.0))
    assert spread("kernel.tensor", [(exact(copy), copy)]) is None


def test_the_spread_says_how_often_one_value_of_bf16_is_left():
    near_a_midpoint = np.array([1.0, 1.0 + 2.0**-8, 1.0 + 2.0**-7, 1.5])
    bound = stored(around(near_a_midpoint, np.full(4, 2.0**-12)))
    assert spread("kernel.tensor", [(bound, bf16(near_a_midpoint))]).decided == 0.75


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_rounding_to_the_other_side_shows_the_error_before_it(share):
    error = 2.0**-12
    value = np.array([1.0 + 2.0**-8 + share * error])
    bound = stored(around(value, np.array([error])))
    assert before_rounding(bound, bf16(np.array([1.0]))) == pytest.approx(share, rel=1e-5)
    assert before_rounding(bound, bf16(value)) == 0


def test_outputs_at_a_length_are_within_their_bounds(measured):
    answers, cache = measured
    assert answers.call.end == cache.layout.page_size - GEOMETRY.block == LENGTH
    found = {one.tensor: one for one in spreads(answers)}
    assert found.keys() >= {"prep.q", "pool.pooled", "chunks.o", "chunks.m", "chunks.l", "dense.out", "gate.gated"}
    assert "prep.values" not in found
    assert all(0 < one.worst <= 1 for one in found.values())
    assert all((one.decided is None) == (one.tensor[-2:] in (".o", ".m", ".l")) for one in found.values())


def test_another_profile_is_other_data(kernels):
    (_, plain), (_, zeros) = (answers_at(kernels, 8, seed=0, profile=profile) for profile in ("normal", "zeros"))
    assert (zeros.read("keys", np.arange(4)) == 0).mean() > 0.3
    assert (plain.read("keys", np.arange(4)) == 0).mean() < 0.1


def test_a_length_shorter_than_the_window_is_refused(kernels):
    with pytest.raises(ValueError, match="length is 3; it must hold the window's 4 rows"):
        answers_at(kernels, 3, seed=0)


# ---- peer files ----


def test_peer_files_are_within_the_bound_of_any_arithmetic():
    files: list[str] = []
    found = {one.tensor: one for one in peer_spreads(PEER, files.append)}
    assert len(files) == 6
    assert found.keys() >= {"prep.q", "pool.pooled", "scores.scores", "chunks.o", "merge.out"}
    assert all(one.worst <= 1 for one in found.values())


def test_a_wrong_number_in_a_peer_file_is_above_it(tmp_path):
    file = tmp_path / "tiny_dense.safetensors"
    shutil.copy(PEER / file.name, file)
    raw = bytearray(file.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    first = 8 + header + json.loads(raw[8 : 8 + header])["out.partial_l"]["data_offsets"][0]
    raw[first : first + 4] = (np.frombuffer(raw[first : first + 4], np.float32) * np.float32(1.01)).tobytes()
    file.write_bytes(raw)
    worst = {one.tensor: one.worst for one in peer_spreads(tmp_path, lambda step: None)}
    assert worst["chunks.l"] > 1
    assert worst["chunks.o"] <= 1


def test_a_folder_without_peer_files_is_refused(tmp_path):
    with pytest.raises(FixtureError, match=r"holds no \.safetensors file"):
        peer_spreads(tmp_path, lambda step: None)


# ---- planted changes ----


@pytest.mark.parametrize("edge", [2.0**-7, 0.01, 3.0, 1000.0])
def test_the_smallest_change_is_found_to_a_sixteenth_of_an_octave(edge):
    assert edge <= smallest(lambda x: x >= edge) <= edge * 2 ** (1 / 16)


def test_the_first_of_several_changes_is_the_smallest():
    assert smallest(lambda x: 0.011 < x < 0.04 or x > 50) == pytest.approx(0.011, rel=0.05)


def test_a_change_that_nothing_sees_has_no_smallest():
    assert smallest(lambda x: False) == float("inf")


def test_a_row_read_rightly_is_not_seen(row):
    seen = row.seen(0, row.positions(0))
    assert not seen["partials"]
    assert not seen["row"]


def test_a_row_read_wrongly_is_seen(row):
    assert all(row.seen(0, row.positions(0)[:-1])[way] for way in ("partials", "row"))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_scaled_element_is_seen_and_put_back(row, part):
    before = row.cache.buffer.copy()
    assert not row.sees(part, "partials", 5, 0.0)
    assert row.sees(part, "partials", 5, 8.0)
    assert np.array_equal(before.view(np.uint16), row.cache.buffer.view(np.uint16))


def test_shares_of_what_every_bound_sees_are_whole(row, monkeypatch):
    monkeypatch.setattr(detection, "TRIALS", 5)
    found = {one.fault: one.seen for one in shares(row, seed=0)}
    assert found.keys() == {"none", "a wrong page of 16 keys", "one wrong key and value", "one key left out"}
    right = found.pop("none")
    assert right["partials"] == right["row"] == 0.0
    assert all(seen["partials"] == seen["row"] == 1.0 for seen in found.values())


@pytest.mark.parametrize("kind", ["query", "index_key", "partial", "attended"])
def test_a_change_of_what_a_kernel_is_given_is_seen_and_put_back(kernels, measured, kind):
    answers, cache = measured
    before = cache.buffer.copy()
    sees = getattr(WindowChanges(kernels, answers, cache), kind)
    assert not sees(0, 0.0)
    assert sees(0, 8.0)
    assert np.array_equal(before.view(np.uint16), cache.buffer.view(np.uint16))


# ---- the command ----


@pytest.fixture
def small(monkeypatch):
    """One short length, few trials, one attack."""
    monkeypatch.setattr(adversary, "RECORDED", adversary.RECORDED[:1])
    monkeypatch.setattr(accuracy_report, "LENGTHS", (LENGTH,))
    monkeypatch.setattr(accuracy_report, "MAIN", LENGTH)
    monkeypatch.setattr(accuracy_report, "OTHERS", ("zeros",))
    monkeypatch.setattr(detection, "TRIALS", 2)
    monkeypatch.setattr(detection, "PLACES", 1)


def test_the_command_prints_every_table_and_writes_json(small, tmp_path, monkeypatch):
    monkeypatch.chdir(PEER.parents[1])
    file = tmp_path / "accuracy.json"
    done = CliRunner().invoke(cli.app, ["bench", "--accuracy", "--json", str(file)])
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["green"] is True
    assert told["spreads"].keys() == told["shares"].keys() == {str(LENGTH)}
    assert told["others"].keys() == told["other_shares"].keys() == {"zeros"}
    assert {one["judged"] for one in told["kernels"]} == {"prep", "pool", "scores", "merge", "gate"}
    assert told["peer"]
    assert told["looseness"][0]["attack"].startswith("TieErrors(")


def test_the_command_says_where_peer_files_are_missing(small, tmp_path, kernels):
    found = accuracy_report.measure(kernels, peer=tmp_path / "none", progress=lambda step: None)
    text = io.StringIO()
    assert accuracy_report.print_accuracy(Console(file=text, width=160), found)
    assert found.peer is None
    assert "peer files: not measured" in text.getvalue()
    assert "GREEN: no error is above its bound" in text.getvalue()


def test_an_error_above_its_bound_is_red(small, tmp_path, kernels, monkeypatch):
    attack = ValueErrors(keys=2, ups=1, later=0)
    loose = [Looseness(output="chunks.o", ratio=1.5, before=1.5, spare=0.7, attack=attack)]
    monkeypatch.setattr(accuracy_report, "replay", lambda kernels: loose)
    found = accuracy_report.measure(kernels, peer=tmp_path / "none", progress=lambda step: None)
    text = io.StringIO()
    assert not accuracy_report.print_accuracy(Console(file=text, width=160), found)
    assert "RED: an error is 1.5 times its bound" in text.getvalue()
    assert accuracy_report.accuracy_json(found)["green"] is False
