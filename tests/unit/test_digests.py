"""Recorded digests: what differs is told by kernel, geometry and case; a damaged record is named; data are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvproof.oracle import cli, digests
from kvproof.oracle.cases import at_check, cases, fill
from kvproof.oracle.digests import TAKES, Comparison, Digests, compare, read, write
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.operations import OPERATIONS, calls_of
from kvproof.oracle.peer import FixtureError
from kvproof.oracle.scene import Workspace, contiguous, with_pooled
from kvproof.reference.geometry import TINY

RECORDED = Path(__file__).parents[2] / "fixtures" / "digests.json"
GEOMETRY = at_check(TINY)
ZERO = "0" * 16


@pytest.fixture(scope="module")
def kernels(engine):
    return FastKernels(engine)


@pytest.fixture(scope="module")
def tiny():
    return read(RECORDED)["tiny"]


@pytest.fixture
def copy(tmp_path):
    """A copy of the record that a test may change."""
    path = tmp_path / "digests.json"
    path.write_bytes(RECORDED.read_bytes())
    return path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["kvproof", "fixtures", "digests", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def edited(path, *, geometry="tiny", kernel="merge", case="sparse", digest=ZERO):
    record = json.loads(path.read_text())
    record["geometries"][geometry]["kernels"][kernel][case] = digest
    path.write_text(json.dumps(record))


def changed(recorded, **digest_by_name):
    """A record in which the named kernels, or the inputs, have another digest in case "sparse"."""
    inputs = dict(recorded.inputs)
    kernels = {name: dict(by_case) for name, by_case in recorded.kernels.items()}
    for name, digest in digest_by_name.items():
        (inputs if name == "inputs" else kernels[name])["sparse"] = digest
    return Digests(inputs=inputs, kernels=kernels)


def states(compared):
    """(kernel, state, cases) of what is not as recorded."""
    return {(one.kernel, one.state, one.cases) for one in compared if one.state != "same"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_kernels_give_the_recorded_digests(monkeypatch, capsys, tmp_path):
    report = tmp_path / "report.json"
    assert run(monkeypatch, "--file", RECORDED, "--json", report) == 0, capsys.readouterr().out
    assert "GREEN: 24 digests as recorded" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["green"] is True
    assert found["digests"] == json.loads(RECORDED.read_text())["geometries"]


def test_another_digest_is_red_and_names_kernel_geometry_and_case(monkeypatch, capsys, tmp_path, copy):
    edited(copy)
    report = tmp_path / "report.json"
    assert run(monkeypatch, "--file", copy, "--geometry", "tiny", "--json", report) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "merge at tiny, case sparse: other bits from the same inputs, so its arithmetic changed" in shown
    assert "gate at tiny" not in shown, "its own bits are as recorded"
    assert "RED: 1 of 12 digests are not as recorded" in shown
    assert "accept it with `kvproof fixtures digests --update`" in shown
    found = json.loads(report.read_text())
    assert found["green"] is False
    assert [one["kernel"] for one in found["compared"] if one["state"] == "CHANGED"] == ["merge"]


def test_update_tells_what_changed_and_gives_the_recorded_bytes(monkeypatch, capsys, copy):
    edited(copy)
    assert run(monkeypatch, "--file", copy, "--geometry", "tiny", "--update") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "merge at tiny, case sparse: other bits" in shown
    assert "1 of 12 digests changed" in shown
    assert copy.read_bytes() == RECORDED.read_bytes()


def test_update_of_one_geometry_leaves_the_other(monkeypatch, copy):
    edited(copy, geometry="flash_next")
    edited(copy, geometry="tiny")
    assert run(monkeypatch, "--file", copy, "--geometry", "tiny", "--update") == 0
    record = read(copy)
    assert record["flash_next"].kernels["merge"]["sparse"] == ZERO
    assert record["tiny"] == read(RECORDED)["tiny"]


def test_update_makes_a_new_file_but_no_folder(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--file", tmp_path / "new.json", "--geometry", "tiny", "--update") == 0
    assert read(tmp_path / "new.json") == {"tiny": read(RECORDED)["tiny"]}
    assert run(monkeypatch, "--file", tmp_path / "no" / "new.json", "--update") == 2
    assert f"there is no folder {tmp_path / 'no'}; make it first" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_geometry_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "--geometry", "huge") == 2
    assert "--geometry is 'huge'; it must be one of flash_next, tiny" in " ".join(capsys.readouterr().err.split())


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable JSON file"),
        ("\udcff", "not a readable JSON file"),
        ("[]", "its format is None; it must be 'kvproof digests'"),
        ('{"format": "kvproof fixtures"}', "its format is 'kvproof fixtures'; it must be 'kvproof digests'"),
        ('{"format": "kvproof digests", "version": 9}', "is of version 9, and this kvproof reads version 1"),
        ('{"format": "kvproof digests", "version": 1}', "geometries is None; it must be an object"),
    ],
    ids=["cut-short", "no-text", "a-list", "another-format", "another-version", "no-geometries"],
)
@pytest.mark.parametrize("options", [(), ("--update",)], ids=["compare", "update"])
def test_a_file_that_is_no_record_is_named(monkeypatch, capsys, tmp_path, text, message, options):
    path = tmp_path / "digests.json"
    before = text.encode(errors="surrogateescape")
    path.write_bytes(before)
    assert run(monkeypatch, "--file", path, "--geometry", "tiny", *options) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert message in " ".join(caught.err.split())
    assert path.read_bytes() == before


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    with pytest.raises(FixtureError, match=r"there is no such file; .* or record it with --update"):
        read(tmp_path / "digests.json")
    assert read(tmp_path / "digests.json", new=True) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiny: tiny.pop("inputs"), "geometries.tiny has kernels; it must have inputs and kernels"),
        (lambda tiny: tiny.update(kernels=3), "geometries.tiny.kernels is 3; it must be an object"),
        (lambda tiny: tiny["kernels"].update(gate=[]), "geometries.tiny.kernels.gate is []; it must be an object"),
        (
            lambda tiny: tiny["kernels"]["gate"].update(start="ABC"),
            "geometries.tiny.kernels.gate.start is 'ABC'; it must be 16 hexadecimal digits",
        ),
        (lambda tiny: tiny["inputs"].update(start=1), "geometries.tiny.inputs.start is 1; it must be 16"),
    ],
    ids=["lacks-inputs", "kernels-a-number", "kernel-a-list", "digest-too-short", "digest-a-number"],
)
def test_a_damaged_record_says_where(copy, change, message):
    record = json.loads(copy.read_text())
    change(record["geometries"]["tiny"])
    copy.write_text(json.dumps(record))
    with pytest.raises(FixtureError) as caught:
        read(copy)
    assert str(caught.value).startswith(f"{copy}: {message}")


def test_a_record_is_written_whole_or_not_at_all(monkeypatch, copy, tiny):
    def fails(*_):
        raise OSError("disk full")

    before = copy.read_bytes()
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write(copy, {"tiny": changed(tiny, gate=ZERO)})
    assert copy.read_bytes() == before
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


# -- what a difference means -------------------------------------------------------------------------------------------


def test_a_kernel_whose_inputs_are_the_recorded_ones_changed(tiny):
    assert states(compare("tiny", tiny, tiny)) == set()
    assert states(compare("tiny", tiny, changed(tiny, merge=ZERO))) == {("merge", "CHANGED", ("sparse",))}


def test_a_kernel_that_was_given_other_results_is_not_blamed(tiny):
    found = changed(tiny, chunks=ZERO, merge=ZERO, gate=ZERO, dense=ZERO)
    assert states(compare("tiny", tiny, found)) == {
        ("chunks", "CHANGED", ("sparse",)),
        ("merge", "other inputs", ("sparse",)),
        ("gate", "other inputs", ("sparse",)),
        ("dense", "CHANGED", ("sparse",)),
    }


def test_no_kernel_is_blamed_for_other_data(tiny):
    compared = compare("tiny", tiny, changed(tiny, inputs=ZERO, prep=ZERO, select_close=ZERO))
    assert states(compared) == {
        ("inputs", "CHANGED", ("sparse",)),
        ("prep", "other inputs", ("sparse",)),
        ("select_close", "other inputs", ("sparse",)),
    }
    told = next(str(one) for one in compared if one.kernel == "inputs" and one.state != "same")
    assert told.startswith("inputs at tiny, case sparse: other data than recorded")
    assert f"NumPy {np.__version__}" in told


def test_kernels_and_cases_that_come_and_go_are_told(tiny):
    less = replace(tiny, kernels={k: v for k, v in tiny.kernels.items() if k != "gate"})
    every = tuple(tiny.inputs)
    assert states(compare("tiny", less, tiny)) == {("gate", "not recorded", every)}
    assert states(compare("tiny", tiny, less)) == {("gate", "gone", every)}
    assert {state for _, state, _ in states(compare("tiny", None, tiny))} == {"not recorded"}
    shorter = replace(tiny, kernels={**tiny.kernels, "gate": {"sparse": tiny.kernels["gate"]["sparse"]}})
    assert states(compare("tiny", shorter, tiny)) == {
        ("gate", "not recorded", tuple(c for c in every if c != "sparse"))
    }


def test_a_digest_over_all_cases_changes_with_any_of_them(tiny):
    other = changed(tiny, gate=ZERO)
    assert other.whole("gate") != tiny.whole("gate")
    assert other.whole("merge") == tiny.whole("merge")
    assert tiny.whole("chunks") == tiny.whole("chunks_ahead"), "the same sums"


def test_every_comparison_is_a_sentence():
    one = Comparison(geometry="tiny", kernel="gate", state="gone", cases=("start", "9000"))
    assert str(one) == "gate at tiny, case start, 9000: recorded, but not run any more"


# -- what is hashed ----------------------------------------------------------------------------------------------------


class Noted(dict):
    """Results that note of which kernels they were asked."""

    def __init__(self):
        self.asked = set()

    def __getitem__(self, name):
        self.asked.add(name.partition(".")[0])
        return super().__getitem__(name)


def test_takes_names_every_kernel_and_what_each_asks_for(kernels):
    assert list(TAKES) == [operation.name for operation in OPERATIONS]
    data = with_pooled(fill(GEOMETRY, cases(GEOMETRY)[3], seed=0))
    scene = contiguous(data, Workspace())
    for call in calls_of(data):
        given, cache = Noted(), scene.cache(call.stream, digests.LAYER)
        for operation in OPERATIONS:
            given.asked = set()
            given.update(operation.run(kernels, call, given, cache, cache))
            assert given.asked <= set(TAKES[operation.name]), operation.name


@pytest.mark.parametrize(("part", "kernel"), [("pooled", "pool"), ("keys", "prep"), ("values", "prep")])
def test_takes_names_what_each_kernel_reads_of_the_cache(kernels, part, kernel):
    data = with_pooled(fill(GEOMETRY, cases(GEOMETRY)[3], seed=0))
    call, cache = calls_of(data)[0], contiguous(data, Workspace()).cache(0, digests.LAYER)
    given = {}
    for operation in OPERATIONS:
        given.update(operation.run(kernels, call, given, cache, cache))
    stored = call.completed if part == "pooled" else np.arange(call.pos0, call.end)
    cache.write(part, stored, -cache.read(part, stored))
    readers = {
        operation.name
        for operation in OPERATIONS
        if not operation.stores
        for name, array in operation.run(kernels, call, given, cache, cache).items()
        if array.tobytes() != given[name].tobytes()
    }
    assert readers
    assert all(kernel in TAKES[name] for name in readers), readers


def test_what_no_kernel_computes_is_one_nan(kernels):
    """A CPU's own NaN has a sign that depends on the CPU."""
    seen = set()
    for case in cases(GEOMETRY):
        data = with_pooled(fill(GEOMETRY, case, seed=0))
        scene = contiguous(data, Workspace())
        for call in calls_of(data):
            given, cache = {}, scene.cache(call.stream, digests.LAYER)
            for operation in OPERATIONS:
                given.update(operation.run(kernels, call, given, cache, cache))
            for name, array in given.items():
                if array.dtype != np.int32 and np.isnan(array).any():
                    seen |= {(name, hex(word)) for word in np.unique(array[np.isnan(array)].view(np.uint32))}
    assert seen == {("scores.scores", "0x7fc00000")}


def test_other_data_change_the_digest_of_the_inputs(monkeypatch, kernels, tiny):
    monkeypatch.setattr(digests, "SEED", 1)
    found = digests.digests(GEOMETRY, kernels)
    assert {one.state for one in compare("tiny", tiny, found) if one.kernel == "inputs"} == {"CHANGED"}
    assert {state for name, state, _ in states(compare("tiny", tiny, found)) if name != "inputs"} == {"other inputs"}


@pytest.mark.parametrize(
    "name", ["q_scale", "inv_freq", "keys", "values", "index_keys", "pooled", "projection", "triples"]
)
def test_each_input_is_hashed(name):
    data = with_pooled(fill(GEOMETRY, cases(GEOMETRY)[2], seed=0))
    before = digests._of_inputs(data)
    stream = data.streams[0]
    held = {
        **stream.history[digests.LAYER],
        "q_scale": data.weights.q_scale,
        "inv_freq": data.weights.inv_freq,
        "projection": stream.projection,
        "triples": stream.rope.triples,
    }
    held[name].flat[-1] += held[name].dtype.type(1)
    assert digests._of_inputs(data) != before


def test_data_do_not_depend_on_numpys_vector_code(tiny):
    from numpy._core._multiarray_umath import __cpu_dispatch__ as vector_code

    program = (
        "from kvproof.oracle import digests as d; from kvproof.oracle.cases import at_check, cases, fill;"
        "from kvproof.oracle.scene import with_pooled; from kvproof.reference import TINY; import json;"
        "g = at_check(TINY);"
        "print(json.dumps({c.name: d._of_inputs(with_pooled(fill(g, c, seed=d.SEED))) for c in cases(g)}))"
    )
    plain = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(vector_code)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=plain)
    assert json.loads(done.stdout) == tiny.inputs
