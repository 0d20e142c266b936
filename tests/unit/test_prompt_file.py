"""Prompt files: the same bytes for the same prompt, every damage refused by name, written whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from kvproof import fast
from kvproof.fast import PromptFileError, read_prompt, write_prompt
from kvproof.fast.prompt_header import UNSEALED
from kvproof.reference import TINY
from kvproof.reference.layout import PARTS
from prompts import assert_same_prompt, changed_part, computed, extend, make_pool, page_bits, rope_of, there, weights_of
from safetensors import safe_open
from streams import ODD, SLIM, assert_bits, normal
from windows import assert_same_window

MODES = ["text", "delta", "media"]


def made(geometry, positions, mode, seed=5):
    """A saved prompt of random rows; no kernel has seen them."""
    layers = []
    for layer in range(geometry.layers):
        heads, at = (geometry.kv_heads, geometry.head_dim), seed + 10 * layer
        layers.append(
            fast.SavedLayer(
                keys=normal(at, positions, *heads),
                values=normal(at + 1, positions, *heads),
                index_keys=normal(at + 2, positions, 1, geometry.index_dim),
                pooled=normal(at + 3, positions // geometry.block, 1, geometry.index_dim),
            )
        )
    digest = hashlib.sha256(b"weights").hexdigest()
    return fast.SavedPrompt(
        geometry=geometry, positions=positions, rope=rope_of(mode), weights_digest=digest, layers=tuple(layers)
    )


SMALL = made(SLIM, 5, "text")
"""About 1.3 KB of file, most of it header."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


@pytest.fixture
def small(path):
    write_prompt(SMALL, path)
    return path


def split(path):
    """The header as JSON, and the tensors' bytes."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def seal(path, header, data):
    """Write a file whose checksum is right, whatever it says."""

    def text(checksum):
        header["__metadata__"]["checksum"] = checksum
        body = json.dumps(header, separators=(",", ":")).encode()
        body += b" " * (-len(body) % 8)
        return len(body).to_bytes(8, "little") + body

    digest = hashlib.sha256(text(UNSEALED) + data).hexdigest()
    path.write_bytes(text(digest) + data)


# ---- what is written is read ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("geometry", "positions"), [(TINY, 37), (ODD, 7), (SLIM, 1), (ODD, 64)])
def test_what_is_read_is_what_was_written(path, geometry, positions, mode):
    saved = made(geometry, positions, mode)
    write_prompt(saved, path)
    found = read_prompt(path, geometry=geometry)
    assert_same_prompt(found, saved)
    assert found.geometry == geometry
    for part in PARTS:
        assert not found.layers[0].part(part).flags.writeable
    assert all(layer.part(part).ctypes.data % 2 == 0 for layer in found.layers for part in PARTS)


def test_the_bytes_follow_from_the_prompt(path, tmp_path):
    for mode in MODES:
        saved = made(TINY, 9, mode)
        write_prompt(saved, path)
        write_prompt(read_prompt(path), tmp_path / "again")
        assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_any_safetensors_reader_can_read_it(path):
    saved = made(TINY, 37, "media")
    write_prompt(saved, str(path))
    with safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
        assert (metadata["format"], metadata["version"], metadata["positions"]) == ("kvproof-prompt", "1", "37")
        assert json.loads(metadata["geometry"]) == json.loads(json.dumps(dataclasses.asdict(TINY)))
        assert len(opened.keys()) == 4 * TINY.layers + 1
        assert_bits(opened.get_tensor("rope.triples"), saved.rope.triples, "triples")
        for i, layer in enumerate(saved.layers):
            for part in PARTS:
                assert_bits(opened.get_tensor(f"layer{i}.{part}"), layer.part(part), part)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_goes_on_from_a_file(engine, path, mode):
    stream = computed(make_pool(TINY, 16, engine), mode, 37)
    write_prompt(fast.save(stream, 37), path)
    pool = make_pool(TINY, 48, engine)
    other = fast.restore(pool, read_prompt(path), there(pool))
    for end in (38, 55):
        for got, want in zip(extend(other, end), extend(stream, end), strict=True):
            assert_same_window(got, want)
    own = computed(make_pool(TINY, 48, engine), mode, 55)
    assert_bits(page_bits(other), page_bits(own), "page")


def test_another_model_is_refused_when_it_is_restored(engine, path):
    write_prompt(made(TINY, 37, "text"), path)
    pool = make_pool(TINY, 48, engine)
    with pytest.raises(fast.PromptError, match="it is another model's"):
        fast.restore(pool, read_prompt(path), weights_of(TINY))
    assert pool.free == pool.layout.pages


# ---- damage ----


def refused(path, message="", **options):
    """Reading raises PromptFileError, whose message names the file."""
    __tracebackhide__ = True
    with pytest.raises(PromptFileError, match=f"^{re.escape(str(path))} .*{message}"):
        read_prompt(path, **options)


def test_every_byte_is_checked(small):
    raw = small.read_bytes()
    for at in range(len(raw)):
        for flip in (0x01, 0x20):  # 0x20 turns a space into NUL and a letter into its other case
            small.write_bytes(raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])
            refused(small)
    small.write_bytes(raw)
    assert_same_prompt(read_prompt(small), SMALL)


@pytest.mark.slow
def test_every_bit_is_checked(path):
    write_prompt(made(SLIM, 5, "media"), path)
    raw = path.read_bytes()
    for at in range(len(raw)):
        for bit in range(8):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            refused(path)


@pytest.mark.parametrize("blank", [b"\t", b"\n", b"\r"])
def test_another_blank_is_damage_too(path, blank):
    """JSON reads the same; the bytes are not those that were written."""
    for positions in range(1, 200):  # until a header is filled up with blanks
        write_prompt(made(SLIM, positions, "text"), path)
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        if raw[end - 1 : end] == b" ":
            break
    path.write_bytes(raw[: end - 1] + blank + raw[end:])
    refused(path, "its header is not written as a prompt's is")


def test_a_file_of_any_other_length_is_refused(small):
    raw = small.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    for length in range(len(raw)):
        small.write_bytes(raw[:length])
        refused(small, "no whole header: truncated" if length < end else f"truncated: {length} bytes, .* {len(raw)};")
    for more in (b"\0", raw):
        small.write_bytes(raw + more)
        refused(small, f"too long: {len(raw + more)} bytes")


def test_missing_and_unreadable_files_are_refused(tmp_path):
    refused(tmp_path / "none", "could not be read: No such file or directory")
    refused(tmp_path, "could not be read: Is a directory")


def test_another_geometry_is_refused(small):
    deeper = dataclasses.replace(SLIM, layers=2, eps=1e-5)
    refused(small, "eps is 1e-06 instead of 1e-05", geometry=deeper)
    refused(small, "of geometry 'slim', and 'tiny' is wanted: name is 'slim' instead of 'tiny'", geometry=TINY)
    assert_same_prompt(read_prompt(small, geometry=SLIM), SMALL)


def metadata(**changes):
    def change(header, data):
        header["__metadata__"].update(changes)
        return data

    return change


def fact(name, **changes):
    """Change a field of the JSON in the metadata."""

    def change(header, data):
        facts = json.loads(header["__metadata__"][name]) | changes
        header["__metadata__"][name] = json.dumps(facts, separators=(",", ":"))
        return data

    return change


def without(*names):
    def change(header, data):
        for name in names:
            del header["__metadata__"][name]
        return data

    return change


def no_metadata(header, data):
    header["__metadata__"] = {}
    return data


def lacking(header, data):
    del header["layer0.pooled"]
    return data


def extra(header, data):
    header["layer0.more"] = {"dtype": "BF16", "shape": [1], "data_offsets": [len(data), len(data) + 2]}
    return data + b"\0\0"


def tensor(**changes):
    def change(header, data):
        header["layer0.keys"].update(changes)
        return data

    return change


def no_object(header, data):
    header["layer0.keys"] = 3
    return data


def swapped(header, data):
    keys, values = header["layer0.keys"], header["layer0.values"]
    keys["data_offsets"], values["data_offsets"] = values["data_offsets"], keys["data_offsets"]
    return data


def reordered(header, data):
    header["layer0.keys"] = header.pop("layer0.keys")
    return data


FOREIGN = {
    "format": (metadata(format="pt"), "its format is 'pt'; it must be 'kvproof-prompt'; give a prompt file"),
    "no metadata": (no_metadata, "its format is None; it must be"),
    "future version": (metadata(version="2"), "is of version '2', and this kvproof reads version '1'; use the kvproof"),
    "no version": (without("version"), "is of version None"),
    "no positions": (without("positions"), "its metadata lack 'positions'"),
    "no rope": (without("rope"), "its metadata lack 'rope'"),
    "positions": (metadata(positions="0"), "they must be integers in range"),
    "infinite positions": (metadata(positions=float("inf")), "its metadata are no prompt's: cannot convert float inf"),
    "infinite block": (fact("geometry", block=float("inf")), "its metadata are no prompt's"),
    "words": (metadata(positions="five"), "its metadata are no prompt's: invalid literal"),
    "more positions": (metadata(positions="6"), r"tensor layer0.keys is BF16 \[5, 2, 8\]; it must be BF16 \[6, 2, 8\]"),
    "blank in positions": (metadata(positions=" 5"), "its header is not written as a prompt's is"),
    "geometry no object": (metadata(geometry="[]"), "its metadata are no prompt's"),
    "geometry no text": (metadata(geometry=3), "its metadata are no prompt's"),
    "geometry lacks": (metadata(geometry="{}"), "its metadata lack 'mrope_sections'"),
    "unknown field": (fact("geometry", heads=3), "its metadata are no prompt's: .*unexpected keyword argument 'heads'"),
    "bad field": (fact("geometry", block=0), "block is 0; it must be a positive integer"),
    "more layers": (fact("geometry", layers=2), "it lacks tensor layer1.keys"),
    "a million layers": (fact("geometry", layers=10**6), "it holds 4 tensors, too few for 1000000 layers"),
    "rope mode": (fact("rope", mode="alibi"), "rope mode is 'alibi'; it must be one of text, delta, media"),
    "rope delta": (fact("rope", delta=4), "its metadata do not fit: rope mode 'text' takes no delta"),
    "rope delta in words": (fact("rope", delta="4"), "they must be integers in range"),
    "rope of true": (fact("rope", media_length=False), "they must be integers in range"),
    "triples of a text": (fact("rope", media_length=3), "rope mode 'text' takes no triples, but media_length is 3"),
    "media without triples": (fact("rope", mode="media", media_length=3), "it lacks tensor rope.triples"),
    "media of nothing": (fact("rope", mode="media"), "it lacks tensor rope.triples"),
    "weights": (metadata(weights="0123"), "its metadata do not fit: weights_digest is '0123'"),
    "weights no text": (metadata(weights=7), "its metadata do not fit"),
    "tensor lacking": (lacking, "it lacks tensor layer0.pooled, which every prompt of its geometry has"),
    "tensor too many": (extra, "it holds tensor 'layer0.more', which no prompt of its geometry has"),
    "shape": (tensor(shape=[5, 16]), r"layer0.keys is BF16 \[5, 16\]; it must be BF16 \[5, 2, 8\]"),
    "dtype": (tensor(dtype="F16"), r"layer0.keys is F16 \[5, 2, 8\]; it must be BF16"),
    "entry no object": (no_object, "tensor layer0.keys is 3 None; it must be BF16"),
    "offsets": (swapped, "its header is not written as a prompt's is"),
    "offsets outside": (tensor(data_offsets=[0, 1 << 60]), "its header is not written as a prompt's is"),
    "order": (reordered, "its header is not written as a prompt's is"),
    "more metadata": (metadata(note="mine"), "its header is not written as a prompt's is"),
    "short data": (lambda header, data: data[:-2], "is truncated"),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused_though_its_checksum_is_right(small, change, message):
    header, data = split(small)
    seal(small, header, change(header, data))
    refused(small, message)


def test_a_file_sealed_by_hand_is_read(small):
    """So that the refusals above are not the checksum's."""
    header, data = split(small)
    seal(small, header, data)
    assert_same_prompt(read_prompt(small), SMALL)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b"nonsense", b"[" * 100_000, b'{"__metadata__":3}', b"\xff\xfe\x00"]
)
def test_a_header_of_anything_else_is_refused(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    refused(path)


def test_rows_that_changed_on_disk_are_called_damage(small):
    header, data = split(small)
    raw = small.read_bytes()
    small.write_bytes(raw[: len(raw) - len(data)] + data[:3] + bytes([data[3] ^ 4]) + data[4:])
    refused(small, f"damaged: its checksum says '{header['__metadata__']['checksum']}'")


# ---- whole or not at all ----


OTHER = changed_part(SMALL, 0, "keys", lambda rows: rows.fill(2))


def left_over(folder):
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(".part"))


@pytest.mark.parametrize("name", ["fsync", "replace", "fdopen"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failing_write_leaves_the_old_file_and_nothing_else(small, monkeypatch, name, error):
    before = small.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, lambda *args, **options: throw(error))
        with pytest.raises(PromptFileError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            write_prompt(OTHER, small)
    if isinstance(error, OSError):
        assert str(caught.value).startswith(f"{small} could not be written: No space left on device; an older file")
    assert small.read_bytes() == before
    assert os.listdir(small.parent) == [small.name]
    write_prompt(OTHER, small)
    assert_same_prompt(read_prompt(small), OTHER)


def test_a_folder_that_cannot_be_synced_is_told_with_the_new_file_in_place(small, monkeypatch):
    real, calls = os.fsync, []

    def fsync(number):
        calls.append(number)
        return real(number) if len(calls) == 1 else throw(OSError(errno.EIO, "Input/output error"))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PromptFileError) as caught:
        write_prompt(OTHER, small)
    assert str(caught.value) == (
        f"{small} is written and whole, and an older file there is replaced, but its folder could not be synced "
        "(Input/output error): a power cut may undo it; write it again"
    )
    assert_same_prompt(read_prompt(small), OTHER)
    assert os.listdir(small.parent) == [small.name]


def throw(error):
    raise error


def test_a_folder_that_is_missing_is_told(tmp_path):
    with pytest.raises(PromptFileError, match="could not be written: No such file or directory"):
        write_prompt(SMALL, tmp_path / "none" / "prompt")


def test_a_link_stays_and_its_file_is_replaced(small, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(small)
    write_prompt(OTHER, link)
    assert link.is_symlink()
    assert_same_prompt(read_prompt(small), OTHER)


def test_the_disk_has_the_file_before_it_is_moved_and_the_folder_after(path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(done, name, getattr(os, name)))
    write_prompt(SMALL, path)
    assert done == ["fsync", "replace", "fsync"]


def recorded(done, name, operation):
    def call(*args):
        done.append(name)
        return operation(*args)

    return call


DYING = """
import os, signal, sys
from kvproof.fast import prompt_file, read_prompt, write_prompt
source, target, stage = sys.argv[1:]
def die(*args): os.kill(os.getpid(), signal.SIGKILL)
def pieces(found, count):
    for i, piece in enumerate(found):
        if i == count: die()
        yield piece
if stage.isdecimal():
    replace = prompt_file._replace
    prompt_file._replace = lambda path, found: replace(path, pieces(found, int(stage)))
else:
    setattr(os, stage, die)
write_prompt(read_prompt(source), target)
"""


@pytest.mark.parametrize("stage", ["0", "3", "fsync", "replace"])
def test_a_writer_killed_at_any_step_leaves_the_old_file(small, tmp_path, stage):
    write_prompt(OTHER, tmp_path / "other")
    ended = subprocess.run([sys.executable, "-c", DYING, tmp_path / "other", small, stage], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(left_over(tmp_path)) == 1
    assert_same_prompt(read_prompt(small), SMALL)
    write_prompt(OTHER, small)  # what was left over is in nobody's way
    assert_same_prompt(read_prompt(small), OTHER)


WRITING = """
import itertools, sys
from kvproof.fast import read_prompt, write_prompt
prompts = [read_prompt(path) for path in sys.argv[1:3]]
for prompt in itertools.cycle(prompts):
    write_prompt(prompt, sys.argv[3])
    print("written", flush=True)
"""


@pytest.mark.parametrize("writers", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path, writers):
    choices = [made(TINY, 1500, "text", seed) for seed in (1, 2)]  # 1 MB
    names = [tmp_path / "a", tmp_path / "b"]
    for prompt, name in zip(choices, names, strict=True):
        write_prompt(prompt, name)
    target, rng = tmp_path / "target", random.Random(writers)
    for _ in range(writers):
        writer = subprocess.Popen([sys.executable, "-c", WRITING, *names, target], stdout=subprocess.PIPE)
        with writer:
            for _ in range(rng.randint(1, 4)):
                writer.stdout.readline()
            time.sleep(rng.random() * 0.01)
            writer.kill()
        found = read_prompt(target)
        same = [np.array_equal(found.layers[0].keys, prompt.layers[0].keys) for prompt in choices]
        assert sum(same) == 1
        assert_same_prompt(found, choices[same.index(True)])


def test_an_older_file_may_be_read_while_a_newer_is_written(small):
    """What was read does not follow the file."""
    found = read_prompt(small)
    write_prompt(OTHER, small)
    assert_same_prompt(found, SMALL)
