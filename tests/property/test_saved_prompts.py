"""Any prompt in any layout is restored into any other, and any damage to its file is refused."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvproof import fast
from kvproof.fast import PromptFileError, read_prompt, write_prompt
from kvproof.reference import TINY
from prompts import assert_same_prompt, computed, extend, make_pool, page_bits, there
from streams import ODD, SLIM, assert_bits, bits
from windows import assert_same_window

CONTEXT = 70
MODES = st.sampled_from(["text", "delta", "media"])


def pages(geometry):
    """Contiguous, or pages of a few blocks."""
    return st.none() | st.integers(1, 7).map(lambda blocks: blocks * geometry.block)


@settings(max_examples=60)
@given(data=st.data(), mode=MODES, geometry=st.sampled_from([TINY, ODD, SLIM]))
def test_a_prompt_moves_into_any_layout_and_goes_on(engine, data, mode, geometry):
    end = data.draw(st.integers(1, CONTEXT - 4), label="positions that the source holds")
    positions = data.draw(st.integers(1, end), label="positions saved")
    source = make_pool(geometry, data.draw(pages(geometry), label="page"), engine, context=CONTEXT)
    prompt = fast.save(computed(source, mode, end), positions)

    page = data.draw(pages(geometry), label="page of the target")
    pool = make_pool(geometry, page, engine, context=CONTEXT)
    gone = computed(pool, "text", data.draw(st.integers(1, CONTEXT), label="positions of one that goes"))
    neighbour = computed(pool, "text", data.draw(st.integers(1, CONTEXT), label="positions of a neighbour"))
    gone.close()
    before = page_bits(neighbour)

    stream = fast.restore(pool, prompt, there(pool))
    own = computed(make_pool(geometry, page, engine, context=CONTEXT), mode, positions)
    assert_bits(page_bits(stream), page_bits(own), "page")
    more = data.draw(st.integers(1, 4), label="rows of the next window")
    for got, want in zip(extend(stream, positions + more), extend(own, positions + more), strict=True):
        assert_same_window(got, want)
    assert_bits(page_bits(stream), page_bits(own), "page")
    assert_bits(page_bits(neighbour), before, "page of the neighbour")
    assert_same_prompt(fast.save(stream, positions), prompt)
    assert pool.audit() == []


@pytest.fixture(scope="module")
def files(engine):
    """Bytes of a file for each rope."""
    found = {}
    for mode in ("text", "delta", "media"):
        prompt = fast.save(computed(make_pool(TINY, 8, engine), mode, 23), 23)
        with tempfile.TemporaryDirectory() as folder:
            write_prompt(prompt, Path(folder) / "prompt")
            found[mode] = (prompt, (Path(folder) / "prompt").read_bytes())
    return found


@settings(max_examples=300)
@given(data=st.data(), mode=MODES)
def test_any_damage_to_a_file_is_refused(files, data, mode):
    prompt, raw = files[mode]
    damaged = bytearray(raw)
    kind = data.draw(st.sampled_from(["flip", "cut", "add", "move", "none"]), label="damage")
    header = 8 + int.from_bytes(raw[:8], "little")
    at = data.draw(st.integers(0, 7) | st.integers(8, header - 1) | st.integers(header, len(raw) - 1), label="byte")
    if kind == "flip":
        damaged[at] ^= data.draw(st.integers(1, 255), label="bits")
    elif kind == "cut":
        del damaged[at:]
    elif kind == "add":
        damaged[at:at] = data.draw(st.binary(min_size=1, max_size=20), label="bytes")
    elif kind == "move":
        other = data.draw(st.integers(0, len(raw) - 1), label="other byte")
        damaged[at], damaged[other] = damaged[other], damaged[at]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt"
        path.write_bytes(damaged)
        if damaged == raw:
            assert_same_prompt(read_prompt(path), prompt)
        else:
            with pytest.raises(PromptFileError, match=f"^{re.escape(str(path))} "):
                read_prompt(path)


@settings(max_examples=200)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_refused(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(PromptFileError, match="is refused"):
            read_prompt(path)


def test_the_pages_that_are_compared_are_not_all_alike(engine):
    """What the first test compares tells positions, ropes and layers apart."""
    found = [page_bits(computed(make_pool(TINY, 8, engine), mode, n)) for mode in ("text", "media") for n in (30, 31)]
    assert len({bits(one).tobytes() for one in found}) == len(found)
    assert not np.array_equal(*np.split(found[0][0], TINY.layers))
