"""`fixtures write` and `verify`: the small set's bytes, damage by name, wrong values, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvproof.oracle import cli, fixture_set
from kvproof.oracle.cases import QUICK, at_check, cases
from kvproof.oracle.fixture_set import MANIFEST, File, holds_set, open_set, pack
from kvproof.oracle.fixture_tensors import SAME, TENSORS, WANTED
from kvproof.oracle.fixture_verify import verify_set
from kvproof.oracle.fixtures import Recipe, outward, write
from kvproof.oracle.interval import exact
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.operations import AXES
from kvproof.oracle.peer import FixtureError
from kvproof.reference.geometry import TINY
from kvproof.reference.layout import BF16
from kvproof.reference.numerics import widen
from kvproof.reference.results import Partials

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "fixtures" / "small"
GEOMETRY = at_check(TINY)
ALONE, PAGED = "sparse.contiguous.safetensors", "sparse.page4.shuffled.safetensors"


def recipe(*names, **options):
    return Recipe(geometry=GEOMETRY, cases=tuple(c for c in cases(GEOMETRY) if c.name in names), **options)


ONE = recipe("sparse", page_sizes=(4,))


@pytest.fixture(scope="module")
def kernels(engine):
    return FastKernels(engine)


@pytest.fixture(scope="module")
def written(kernels, tmp_path_factory):
    """A set of one case, contiguous and paged."""
    folder = tmp_path_factory.mktemp("written") / "set"
    write(folder, ONE, kernels)
    return folder


@pytest.fixture
def one(written, tmp_path):
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "set"))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def edit_manifest(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def entry_of(manifest, name):
    return next(entry for entry in manifest["files"] if entry["name"] == name)


def rewrite(folder, name, change, *, listed=True):
    """Change a file's tensors and metadata; the manifest gets its new bytes, and its new tensors if `listed`."""
    file = open_set(folder).load(name)
    tensors, metadata = {key: array.copy() for key, array in file.tensors.items()}, dict(file.metadata)
    change(tensors, metadata)
    data = pack(File(name=name, metadata=metadata, tensors=tensors))
    (folder / name).write_bytes(data)

    def update(manifest):
        entry = entry_of(manifest, name)
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if listed:
            names = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32", BF16: "BF16"}
            entry["tensors"] = {
                key: {"dtype": names[array.dtype], "shape": list(array.shape)} for key, array in tensors.items()
            }

    edit_manifest(folder, update)


def red(folder, kernels):
    return [finding for finding in verify_set(folder, kernels) if finding.message is not None]


# -- green -------------------------------------------------------------------------------------------------------------


def test_the_small_set_is_green(kernels):
    findings = list(verify_set(SMALL, kernels))
    assert [f.message for f in findings if f.message is not None] == []
    assert len({f.file for f in findings}) == 6
    assert {f.check for f in findings} == {"bits", "bound", "ends"}
    judged = {f.tensor.split(".", 1)[1] for f in findings if f.tensor.startswith("stream")}
    assert judged >= {name for name, tensor in TENSORS.items() if name.startswith(("want", "low", "high"))}
    assert {f.file for f in findings if f.tensor == "arena.after"} == {f for f in contents(SMALL) if "page" in f}


def test_writing_the_small_set_again_gives_its_bytes(kernels, tmp_path):
    write(tmp_path / "again", recipe(*QUICK), kernels)
    assert contents(tmp_path / "again") == contents(SMALL), "if that is meant: kvproof fixtures write fixtures/small"
    assert sum(map(len, contents(SMALL).values())) < 1_500_000


def test_an_empty_history_and_media_rows_make_a_round_trip(kernels, tmp_path):
    write(tmp_path / "set", recipe("start", "page-chunk", page_sizes=(12,), forms=("reversed",), seed=5), kernels)
    assert red(tmp_path / "set", kernels) == []


def test_every_output_of_every_operation_has_a_tensor():
    assert set(WANTED) | set(SAME) == set(AXES)
    assert {name: len(AXES[name]) for name in WANTED} == {name: len(x.shape) for name, x in WANTED.items()}


def test_the_manifest_tells_of_each_tensor_and_each_file(written):
    manifest = json.loads((written / MANIFEST).read_text())
    assert (manifest["format"], manifest["version"]) == ("kvproof fixtures", 1)
    assert manifest["geometry"]["head_dim"] == 32
    assert [entry["name"] for entry in manifest["files"]] == [ALONE, PAGED]
    for entry in manifest["files"]:
        assert entry["sha256"] == hashlib.sha256((written / entry["name"]).read_bytes()).hexdigest()
        for name in entry["tensors"]:
            described = manifest["tensors"][re.sub(r"stream\d+", "stream*", name)]
            assert described["dtype"] == entry["tensors"][name]["dtype"]
            assert len(described["shape"]) == len(entry["tensors"][name]["shape"])
            assert described["meaning"]


def test_a_file_is_packed_as_documented(written):
    data = (written / PAGED).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        assert begin == end
        assert begin % (2 if entry["dtype"] == "BF16" else 4) == 0
        end = stop
    assert 8 + length + end == len(data)


def test_the_reader_in_the_documentation_compiles_and_agrees(tmp_path):
    text = (ROOT / "docs" / "fixtures.md").read_text()
    source = tmp_path / "reader.c"
    source.write_text(re.search(r"```c\n(.*?)```", text, re.DOTALL)[1])
    compiler = [shutil.which("cc")] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    subprocess.run([*compiler, "-O1", "-o", str(tmp_path / "reader"), str(source)], check=True)
    for file in sorted(SMALL.glob("*.page*.safetensors")):
        done = subprocess.run([tmp_path / "reader", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0 of ")


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_bounds_are_rounded_outward_by_less_than_one_step(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 30, 4000)
    x[:4] = np.inf, -np.inf, np.nan, -0.0
    low, high = outward(exact(x), dtype)
    assert low.dtype == high.dtype == dtype
    assert str(low[0]) == "inf"
    assert str(high[1]) == "-inf"
    assert str(low[2]) == str(high[2]) == "nan"
    assert not np.signbit(low[2:4].astype(np.float32)).any()
    some = ~np.isnan(x)
    assert (widen(low)[some] <= x[some]).all()
    assert (x[some] <= widen(high)[some]).all()
    finite = np.isfinite(x)
    at_most = np.where(low == high, low, np.nextafter(low, np.array(np.inf, dtype)))
    assert (at_most[finite] == high[finite]).all()


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(folder):
    data = bytearray((folder / PAGED).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / PAGED).write_bytes(data)


def truncate(folder):
    (folder / PAGED).write_bytes((folder / PAGED).read_bytes()[:-5])


def lengthen(folder):
    (folder / PAGED).write_bytes((folder / PAGED).read_bytes() + b"x")


def forge_sha(folder):
    edit_manifest(folder, lambda m: entry_of(m, ALONE).update(sha256="0" * 64))


def later_file(folder):
    rewrite(folder, ALONE, lambda tensors, metadata: metadata.update(version="2"))


def no_safetensors(folder):
    data = b"\xff" * 100
    (folder / ALONE).write_bytes(data)
    edit_manifest(folder, lambda m: entry_of(m, ALONE).update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))


def drop(tensor, *, listed):
    return lambda folder: rewrite(folder, ALONE, lambda tensors, _: tensors.pop(tensor), listed=listed)


def reshape(tensor, shape, *, listed):
    def change(tensors, _):
        tensors[tensor] = np.zeros(shape, tensors[tensor].dtype)

    return lambda folder: rewrite(folder, ALONE, change, listed=listed)


def retype(folder):
    def change(tensors, _):
        tensors["stream0.in.keys"] = tensors["stream0.in.keys"].astype(np.float32)

    rewrite(folder, ALONE, change)


def note(name, value):
    def change(_, metadata):
        metadata[name] = value

    return lambda folder: rewrite(folder, PAGED, change)


def forget(folder):
    rewrite(folder, PAGED, lambda _, metadata: metadata.pop("stream1.pos0"))


def bad_table(folder):
    def change(tensors, _):
        tensors["stream0.in.table"][1] = 1000

    rewrite(folder, PAGED, change)


def manifest(**change):
    return lambda folder: edit_manifest(folder, lambda m: m.update(change))


DAMAGE = {
    "flipped": (flip, rf"^{PAGED}: is damaged: its sha256 is \w+, manifest\.json says \w+$"),
    "truncated": (truncate, rf"^{PAGED}: is truncated: \d+ bytes, manifest\.json says \d+$"),
    "too long": (lengthen, rf"^{PAGED}: is too long: \d+ bytes"),
    "missing": (lambda folder: (folder / ALONE).unlink(), rf"^{ALONE}: is missing$"),
    "extra": (
        lambda folder: (folder / "more.txt").write_text(""),
        r"^more\.txt: is not in manifest\.json; move it away$",
    ),
    "sha in the manifest": (forge_sha, rf"^{ALONE}: is damaged: its sha256 is \w+, manifest\.json says 0{{64}}$"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), r"^manifest\.json: is missing from .*set$"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), r"^manifest\.json: not a readable JSON file"),
    "no object": (
        lambda folder: (folder / MANIFEST).write_text("[]"),
        r"^manifest\.json: holds a list; it must hold an",
    ),
    "later version": (manifest(version=2), r"^manifest\.json: is of version 2, and this kvproof reads version 1; use"),
    "no version": (manifest(version=None), r"^manifest\.json: is of version None"),
    "other format": (manifest(format="x"), r"^manifest\.json: its format is 'x'; it must be 'kvproof fixtures'$"),
    "no files": (manifest(files=[]), r"^manifest\.json: lists no files$"),
    "half an entry": (manifest(files=[{"name": ALONE}]), r"manifest\.json: an entry of files lacks one of name, bytes"),
    "a file elsewhere": (
        lambda folder: edit_manifest(folder, lambda m: entry_of(m, ALONE).update(name="../x")),
        r"manifest\.json: names the file '\.\./x'; files lie in the folder itself",
    ),
    "no descriptions": (manifest(tensors={}), r"^manifest\.json: tensors lack weights\.q_scale, or what it is$"),
    "other gates": (
        lambda folder: edit_manifest(folder, lambda m: m["tensors"]["stream*.want.select.ids"].update(gates=[])),
        r"^manifest\.json: tensors say that stream\*\.want\.select\.ids is .*'gates': \[\]",
    ),
    "later file": (later_file, rf"^{ALONE}: is of version '2', and this kvproof reads version '1'"),
    "no safetensors": (no_safetensors, rf"^{ALONE}: not a whole safetensors file"),
    "tensor missing in the file": (
        drop("stream0.want.prep.q", listed=False),
        rf"^{ALONE}: lacks tensor stream0\.want\.prep\.q, which manifest\.json lists$",
    ),
    "tensor missing in both": (drop("stream0.in.keys", listed=True), rf"^{ALONE}: lacks tensor stream0\.in\.keys$"),
    "tensor too many": (
        lambda folder: rewrite(folder, ALONE, lambda t, _: t.update(x=np.zeros(1, np.int32)), listed=False),
        rf"^{ALONE}: holds tensor x, which manifest\.json does not list$",
    ),
    "shape other than the manifest's": (
        reshape("stream0.want.prep.q", (9, 4, 32), listed=False),
        rf"^{ALONE}: tensor stream0\.want\.prep\.q is BF16 \[9, 4, 32\], manifest\.json says BF16 \[10, 4, 32\]$",
    ),
    "shape other than the call's": (
        reshape("stream0.want.chunks.m", (10, 2, 4), listed=True),
        rf"^{ALONE}: tensor stream0\.want\.chunks\.m is float32 \[10, 2, 4\]; by the metadata it must be F32 "
        r"\[10, 1, 4\], \[rows, chunks, query_heads\]$",
    ),
    "other type": (retype, rf"^{ALONE}: tensor stream0\.in\.keys is float32 .* it must be BF16"),
    "metadata missing": (forget, rf"^{PAGED}: its metadata lack 'stream1\.pos0'$"),
    "an address": (note("values.base", "8"), rf"^{PAGED}: its metadata say values\.base 8; it must be \d+$"),
    "a geometry": (note("geometry.kv_heads", "3"), rf"^{PAGED}: geometry 'tiny': 4 query heads do not divide among 3"),
    "no number": (note("pages", "many"), rf"^{PAGED}: invalid literal for int"),
    "a table": (bad_table, rf"^{PAGED}: page table entry 1 names page 1000; the arena has pages 0 to"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(one, kernels, damage, message):
    damage(one)
    assert holds_set(one)
    with pytest.raises(FixtureError, match=message):
        list(verify_set(one, kernels))


def test_all_damaged_files_are_named_at_once(one, kernels):
    flip(one)
    (one / ALONE).unlink()
    (one / "more.txt").write_text("")
    with pytest.raises(FixtureError) as caught:
        list(verify_set(one, kernels))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [ALONE, PAGED, "more.txt"]


# -- wrong values ------------------------------------------------------------------------------------------------------


def bump(array, index):
    """Another value nearby, by one bit of its representation."""
    array.view(np.dtype(f"u{array.dtype.itemsize}"))[index] ^= 1


@pytest.mark.parametrize("tensor", [name for name in TENSORS if name.startswith("want.")])
def test_a_wrong_expected_bit_is_red_and_names_tensor_and_element(one, kernels, tensor):
    def change(tensors, _):
        array = tensors[f"stream0.{tensor}"]
        bump(array, tuple(n - 1 for n in array.shape))

    rewrite(one, ALONE, change)
    shape = open_set(one).load(ALONE).tensors[f"stream0.{tensor}"].shape
    place = ", ".join(f"{axis} {n - 1}" for axis, n in zip(AXES[tensor.removeprefix("want.")], shape, strict=True))
    messages = [f.message for f in red(one, kernels)]
    assert any(m.startswith(f"stream0.{tensor} by") and f"stream 0, {place}, byte" in m for m in messages), messages


def test_each_wrong_bound_is_red(one, kernels):
    names = [f"stream1.{name}" for name in TENSORS if name.startswith(("low.", "high."))]

    def change(tensors, _):
        for name in names:
            array = tensors[name]
            array.view(np.dtype(f"u{array.dtype.itemsize}")).flat[0] ^= 2

    rewrite(one, ALONE, change)
    assert sorted((f.tensor, f.check) for f in red(one, kernels)) == sorted((name, "ends") for name in names)


@pytest.mark.parametrize("tensor", ["arena.before", "arena.after"])
@pytest.mark.parametrize("index", [(0, 0), (-1, -1)])
def test_a_wrong_arena_is_red_wherever_it_is(one, kernels, tensor, index):
    rewrite(one, PAGED, lambda tensors, _: bump(tensors[tensor], index))
    assert "arena.after" in [f.tensor for f in red(one, kernels)]


@pytest.mark.parametrize(
    "tensor",
    ["weights.q_scale", "weights.inv_freq", "stream0.in.projection", "stream0.in.close_scores", "stream1.in.values"],
)
def test_a_wrong_input_is_red(one, kernels, tensor):
    def change(tensors, _):
        tensors[tensor].flat[3] += 1

    rewrite(one, ALONE, change)
    assert red(one, kernels)


def test_a_history_whose_pooled_rows_do_not_follow_is_red(one, kernels):
    """No kernel reads a raw indexer key of a block that was complete before the window."""
    rewrite(one, ALONE, lambda tensors, _: np.add.at(tensors["stream1.in.index_keys"], (0, 0, 0), BF16.type(4)))
    assert [(f.kernel, f.tensor, f.check) for f in red(one, kernels)] == [("history", "stream1.in.pooled", "bound")]


def test_an_expected_value_out_of_the_reference_bound_is_red(one, kernels):
    def change(tensors, _):
        tensors["stream0.want.gate.gated"][1, 2, 3] += BF16.type(1)

    rewrite(one, ALONE, change)
    found = {f.check: f for f in red(one, kernels)}
    assert set(found) == {"bits", "bound"}
    assert found["bound"].worst > 1
    assert found["bound"].message.startswith("stream0.want.gate.gated: stream 0, row 1, head 2, element 3, ")


def test_swapped_table_entries_are_red(one, kernels):
    def change(tensors, _):
        tensors["stream0.in.table"][:2] = tensors["stream0.in.table"][1::-1]

    rewrite(one, PAGED, change)
    assert red(one, kernels)


def test_a_key_list_that_no_kernel_can_run_on_is_red_and_said(one, kernels):
    def change(tensors, _):
        tensors["stream0.want.select.ids"][-1, 0] = 9999

    rewrite(one, ALONE, change)
    told = [f.message for f in red(one, kernels) if f.check == "run"]
    assert len(told) == 2
    assert told[0].startswith("chunks of stream 0 cannot run on the file's results: position 9999 does not fit")


def test_a_kernel_with_one_wrong_bit_is_red_everywhere(written, kernels):
    class Wrong(FastKernels):
        def gate(self, geometry, out, projection):
            gated = super().gate(geometry, out, projection)
            bump(gated, (0, 0, 0))
            return gated

    found = red(written, Wrong(kernels.engine))
    assert {(f.file, f.kernel) for f in found} == {(ALONE, "gate"), (PAGED, "gate")}


def test_a_wrong_store_is_laid_to_the_kernel_that_made_it(written, kernels):
    class Wrong(FastKernels):
        def prep(self, geometry, weights, cache, projection, pos0, rope):
            prepared = super().prep(geometry, weights, cache, projection, pos0, rope)
            cache.write("keys", [pos0], -cache.read("keys", [pos0]))
            return prepared

    found = red(written, Wrong(kernels.engine))
    assert {(f.kernel, f.tensor.split(".", 1)[1]) for f in found} == {("prep", "want.prep.keys")}


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["kvproof", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_verify_exits_0_1_and_2(one, monkeypatch, capsys, tmp_path):
    report = tmp_path / "report.json"
    assert run(monkeypatch, "fixtures", "verify", one, "--json", report) == 0
    assert "GREEN: " in capsys.readouterr().out
    assert json.loads(report.read_text())["green"] is True

    rewrite(one, ALONE, lambda tensors, _: bump(tensors["stream0.want.merge.out"], (2, 1, 7)))
    assert run(monkeypatch, "fixtures", "verify", one, "--json", report) == 1
    shown = capsys.readouterr().out
    assert f"{ALONE}, bits: stream0.want.merge.out by merge: stream 0, row 2, head 1, element 7" in shown
    assert "RED: " in shown
    assert json.loads(report.read_text())["green"] is False

    flip(one)
    assert run(monkeypatch, "fixtures", "verify", one) == 2
    caught = capsys.readouterr()
    assert f"{PAGED}: is damaged" in caught.err
    assert caught.out == ""


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_write_and_its_options(monkeypatch, capsys, tmp_path):
    options = ["--case", "sparse", "--page", "8", "--layout", "reversed", "--seed", "3"]
    assert run(monkeypatch, "fixtures", "write", tmp_path / "set", *options) == 0
    assert sorted(contents(tmp_path / "set")) == [MANIFEST, "sparse.page8.reversed.safetensors"]
    assert str(tmp_path / "set" / MANIFEST) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--geometry", "huge"), "--geometry is 'huge'; it must be one of"),
        (("--case", "nope"), "--case is 'nope'; it must be one of"),
        (("--layout", "nope"), "--layout is 'nope'; it must be one of contiguous, reversed, shuffled"),
        (("--page", "6"), "page size 6 does not hold whole blocks"),
        (("--seed", "-1"), "seed is -1; it must be 0 or more"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_wrong_options_exit_2_and_write_nothing(monkeypatch, capsys, tmp_path, words, message):
    assert run(monkeypatch, "fixtures", "write", tmp_path / "set", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"forms": ()}, "without forms"), ({"forms": ("x",)}, "layout 'x'"), ({"page_sizes": ()}, "needs a page size")],
)
def test_a_recipe_checks_its_fields(options, message):
    with pytest.raises(ValueError, match=message):
        recipe("sparse", **options)


def test_a_foreign_folder_is_refused_and_left_as_it_is(kernels, tmp_path):
    for name, text in (("notes.txt", "mine"), (MANIFEST, '{"format": "another"}')):
        (tmp_path / name).write_text(text)
        before = contents(tmp_path)
        with pytest.raises(FixtureError, match=r"and was not written by `fixtures write`; give a new or empty folder"):
            write(tmp_path, ONE, kernels)
        assert contents(tmp_path) == before


def test_a_set_with_something_beside_it_is_refused(one, kernels):
    (one / "notes.txt").write_text("mine")
    before = contents(one)
    with pytest.raises(FixtureError, match=r"holds notes\.txt beside the set .* move it away first"):
        write(one, ONE, kernels)
    assert contents(one) == before


def test_places_where_no_folder_can_be_are_refused(kernels, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FixtureError, match="is a file; give a new or empty folder"):
        write(tmp_path / "file", ONE, kernels)
    with pytest.raises(FixtureError, match=r"there is no folder .*none; make it first"):
        write(tmp_path / "none" / "set", ONE, kernels)
    assert contents(tmp_path) == {"file": b"mine"}


def test_an_older_or_damaged_set_and_an_empty_folder_are_replaced(one, written, kernels, tmp_path):
    (one / PAGED).unlink()
    edit_manifest(one, lambda m: m.update(version=99))
    write(one, ONE, kernels)
    assert contents(one) == contents(written)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", ONE, kernels)
    assert contents(tmp_path / "empty") == contents(written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "set"]


class StoppedError(Exception):
    """What a test injects."""


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_nothing_behind(monkeypatch, kernels, tmp_path, error):
    real, calls = fixture_set.pack, []

    def packed(file):
        calls.append(file.name)
        if len(calls) == 2:
            raise error
        return real(file)

    monkeypatch.setattr(fixture_set, "pack", packed)
    with pytest.raises(error):
        write(tmp_path / "set", ONE, kernels)
    assert calls == [ALONE, PAGED]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [1, 2])
def test_an_error_in_replacing_a_set_keeps_the_older_one(monkeypatch, one, kernels, at):
    real, calls, before = os.rename, [], contents(one)

    def rename(source, target):
        calls.append(target)
        if len(calls) == at:
            raise StoppedError
        real(source, target)

    monkeypatch.setattr(fixture_set.os, "rename", rename)
    with pytest.raises(StoppedError):
        write(one, recipe("block-tile", page_sizes=(4,)), kernels)
    assert contents(one) == before
    assert [path.name for path in one.parent.iterdir()] == ["set"]


def test_kernels_that_break_the_contract_write_nothing(kernels, tmp_path):
    class PagesDiffer(FastKernels):
        def chunks(self, geometry, cache, q, lists):
            partials = super().chunks(geometry, cache, q, lists)
            if cache.table is not None:
                bump(partials.m, (0, 0, 0))
            return Partials(partials.o, partials.m, partials.l)

    class Stray(FastKernels):
        def scores(self, geometry, cache, iq, pos0):
            cache.buffer[0] = 7
            return super().scores(geometry, cache, iq, pos0)

    class Inexact(FastKernels):
        def gate(self, geometry, out, projection):
            return (super().gate(geometry, out, projection).astype(np.float32) * 2 + 1).astype(BF16)

    for broken, what in ((PagesDiffer, r"chunks\.m: .*row 0"), (Stray, "elements? changed"), (Inexact, r"gate\.gated")):
        with pytest.raises(FixtureError, match=f"the kernels break the contract, so nothing was written; .*{what}"):
            write(tmp_path / "set", ONE, broken(kernels.engine))
    assert list(tmp_path.iterdir()) == []
