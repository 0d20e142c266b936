"""`fixtures verify`: green on an independent implementation's files, red on a wrong element, clear on damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  # safetensors.numpy reads bf16 once NumPy knows it
import numpy as np
import pytest
from kvproof.oracle.memory import FastKernels
from kvproof.oracle.peer import FixtureError, read, verify
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

PEER = Path(__file__).parents[2] / "fixtures" / "peer"


@pytest.fixture
def one(tmp_path):
    """A folder with one small file in it."""
    shutil.copy(PEER / "tiny_sparse.safetensors", tmp_path)
    return tmp_path / "tiny_sparse.safetensors"


def rewrite(file, change):
    tensors = load_file(file)
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    change(tensors, metadata)
    save_file(tensors, file, metadata)


def test_every_small_file_is_within_its_bounds(engine):
    verdicts = list(verify(PEER, FastKernels(engine)))
    assert len({v.file for v in verdicts}) == 6
    assert {v.form for v in verdicts} == {"contiguous", "paged"}
    assert [v.message for v in verdicts if v.message] == []


@pytest.mark.parametrize(
    "tensor", ["out.q", "out.kc", "out.pooled", "out.scores", "out.ids", "out.partial_o", "out.out"]
)
def test_a_wrong_element_is_red(engine, one, tensor):
    def change(tensors, metadata):
        place = tensors[tensor]
        row = (
            int(metadata["pos0"]) if tensor == "out.kc" else int(metadata["pos0"]) // 4 if tensor == "out.pooled" else 0
        )
        value = place[row].flat[1]
        place[row].flat[1] = (
            value + 1 if place.dtype == np.int32 else np.asarray(float(value) + 0.5).astype(place.dtype)
        )

    rewrite(one, change)
    red = [v.tensor for v in verify(one.parent, FastKernels(engine)) if v.message]
    assert tensor in red


def test_a_folder_without_files_is_named(engine, tmp_path):
    with pytest.raises(FixtureError, match=r"holds no \.safetensors file"):
        list(verify(tmp_path, FastKernels(engine)))


def test_a_truncated_file_is_named(one):
    one.write_bytes(one.read_bytes()[:-100])
    with pytest.raises(FixtureError, match=r"tiny_sparse\.safetensors: not a whole safetensors file"):
        read(one)


def test_missing_tensors_and_metadata_are_named(one):
    rewrite(one, lambda tensors, metadata: tensors.pop("out.kc"))
    with pytest.raises(FixtureError, match=r"tiny_sparse\.safetensors: lacks out\.kc"):
        read(one)
    shutil.copy(PEER / one.name, one)
    rewrite(one, lambda tensors, metadata: metadata.pop("pos0"))
    with pytest.raises(FixtureError, match="its metadata lack 'pos0'"):
        read(one)


def test_metadata_that_no_geometry_has_are_named(one):
    rewrite(one, lambda tensors, metadata: metadata.update(kv_heads="3"))
    with pytest.raises(FixtureError, match="4 query heads do not divide among 3"):
        read(one)
