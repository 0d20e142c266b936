"""Judging anyone's plain paged attention kernel: green when right, red with the right gate and sentence when not."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from kvproof.oracle import strategies as kv
from kvproof.oracle.arithmetic import FP32, Arithmetic
from kvproof.oracle.attention import AttentionCase
from kvproof.oracle.attention_controls import CONTROLS, effective_control, is_effective, swapped_table
from kvproof.oracle.judge import ContractError, judge, load_failure
from kvproof.reference import KV_STYLES
from numpy_kernel import attend

CASE = AttentionCase(
    lengths=(9, 6), query_lengths=(2, 1), seeds=(1, 2), order=(3, 1, 0, 4, 2, 5, 6), tail=2, fill="nan"
)


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("style", KV_STYLES)
def test_a_right_kernel_is_green_in_every_layout(style, padding):
    case = replace(CASE, style=style, padding=padding)
    worst = judge(functools.partial(attend, hnd=style.endswith("hnd")), case)
    assert 0 < worst <= 1


@settings(max_examples=100)
@given(case=kv.attention_cases(styles=("nhd", "interleaved_nhd"), padding_unit=4, dtypes=("bf16", "f16", "f32")))
def test_a_right_decode_kernel_is_green(case):
    kv.judge(attend, case)


@settings(max_examples=60)
@given(case=kv.attention_cases(prefill=True))
def test_a_right_prefill_kernel_is_green(case):
    kv.judge(attend, case)


@pytest.mark.parametrize(
    ("bug", "gate", "sentence"),
    [
        ("table ignored", "memory", "stream 0, row 0: the page table was ignored"),
        ("other table", "memory", "stream 0, row 0: the page table of stream 1 was used"),
        (
            "value page",
            "bound",
            "stream 0, row 0: the values of logical page 1 were read from physical 3; the table says 1",
        ),
        ("stale tail", "memory", "stream 0, row 0: the stream's whole last page was read, its stale tail included"),
        ("row past the end", "memory", "stream 0, row 0: the row read the keys behind it: the mask is not causal"),
        ("last key dropped", "bound", "stream 0, row 0: the last key was left out"),
        ("not causal", "bound", "stream 0, row 0: the row read the keys behind it: the mask is not causal"),
        ("writes its input", "memory", "the kernel wrote to what it only reads"),
        ("wrong normaliser", "bound", "no substitution of pages or rows that was tried explains it"),
        ("scale left out", "bound", "stream 0, row 0: the scores were not scaled"),
        (
            "heads dealt in turn",
            "bound",
            "stream 0, row 0: query heads were dealt to the key/value heads in turn, not in groups",
        ),
        ("keys ignore the table", "memory", "stream 0, row 0: the page table was ignored for the keys"),
    ],
)  # fmt: skip
def test_a_broken_kernel_is_red_and_explained(bug, gate, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_FAILURES", str(tmp_path))
    with pytest.raises(ContractError) as caught:
        judge(functools.partial(attend, bug=bug), CASE)
    assert caught.value.gate == gate
    if sentence is not None:
        assert caught.value.diagnosis == sentence
    assert str(tmp_path) in caught.value.replay
    saved = load_failure(next(tmp_path.glob("*.json")))
    assert (saved.gate, saved.diagnosis) == (gate, caught.value.diagnosis)


def test_a_result_that_depends_on_its_neighbours_breaks_bits():
    def kernel(q, keys, values, page_table, lengths, query_start=None):
        out = attend(q, keys, values, page_table, lengths, query_start)
        return out if len(lengths) == 1 else np.nextafter(out.astype(np.float32), 9).astype(out.dtype)

    case = replace(CASE, dtype="f32", fill="zero")
    with pytest.raises(ContractError, match="with stream 0 alone") as caught:
        judge(kernel, case, save=False)
    assert caught.value.gate == "bits"
    assert "the order of the sums depends on" in caught.value.diagnosis
    assert judge(kernel, case, batch_bits=False, save=False) <= 1


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused-buffer"])
def test_a_kernel_that_gives_another_result_each_time_breaks_bits(reused):
    calls, buffer = iter(range(1000)), np.empty((8, 4, 8), np.float32)

    def kernel(q, *rest):
        out = buffer[: len(q)] if reused else np.empty_like(q)
        out[...] = attend(q, *rest)
        out[0, 0, 0] += np.float32(2.0**-20 * next(calls))
        return out

    with pytest.raises(ContractError, match="called again"):
        judge(kernel, replace(CASE, dtype="f32", fill="zero"), save=False)


def test_a_kernel_blind_to_its_cache_fails_the_controls(monkeypatch):
    """Only a check that compares a kernel with itself would call this one green."""
    right = CASE.reference(CASE.arguments())

    def kernel(q, *rest):
        return right.astype(q.dtype)

    with pytest.raises(ContractError) as caught:
        judge(kernel, CASE, save=False)
    assert caught.value.gate == "controls"
    assert caught.value.diagnosis.startswith("the result may not follow from the ")


@pytest.mark.parametrize("make", CONTROLS, ids=lambda make: make.__name__)
def test_each_control_is_effective_where_it_has_room(make):
    control = make(CASE)
    assert control is not None
    assert is_effective(CASE, control, CASE.bound(FP32), FP32)


def test_swapping_full_pages_of_a_dense_row_is_no_control():
    case = AttentionCase(lengths=(8,), order=(1, 0, 2), page_size=4)
    control = swapped_table(case)
    assert control is not None
    assert not is_effective(case, control, case.bound(FP32), FP32)
    other = effective_control(case, case.bound(FP32), FP32)
    assert other is not None
    assert other.name != control.name


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda q: None, "the kernel returned a NoneType; it must return an array"),
        (lambda q: q.astype(np.float64), r"returned float64 \[3, 4, 8\]; it must return bfloat16 \[3, 4, 8\]"),
        (lambda q: q[:1], r"returned bfloat16 \[1, 4, 8\]; it must return bfloat16 \[3, 4, 8\]"),
    ],
    ids=["nothing", "dtype", "shape"],
)
def test_a_result_of_another_kind_is_refused(result, message):
    with pytest.raises(TypeError, match=message):
        judge(lambda q, *rest: result(q), CASE, save=False)


def test_anything_with_dlpack_will_do():
    class Wrapped:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    judge(lambda *a: Wrapped(attend(*a)), replace(CASE, dtype="f32"))


def test_the_table_as_csr_names_the_same_pages():
    indptr, indices, last = replace(CASE, lengths=(8, 9)).csr()
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 5], [3, 1, 0, 4, 2], [4, 1])
    assert all(x.dtype == np.int32 for x in (indptr, indices, last))


def test_a_case_comes_back_from_its_repr_and_its_json():
    assert eval(repr(CASE)) == CASE
    assert AttentionCase.from_json(json.loads(json.dumps(CASE.as_json()))) == CASE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_heads": 3}, "3 query heads do not divide among 2"),
        ({"lengths": (9,)}, "give one of each per stream"),
        ({"seeds": (1, 1)}, "the seeds all different"),
        ({"query_lengths": (10, 1)}, "10 query rows of a stream of 9 positions; allowed are 1 to 9"),
        ({"order": (0, 0, 1, 2, 3)}, "must be a permutation of the arena's pages, at least 5"),
        ({"order": (0, 1)}, "at least 5"),
        ({"fill": "ones"}, "fill is 'ones'; it must be one of zero"),
        ({"dtype": "f8"}, "dtype is 'f8'; it must be one of bf16"),
        ({"page_size": 0}, "page_size is 0; it must be at least 1"),
        ({"query_heads": 0}, "query_heads is 0; it must be at least 1"),
        ({"tail": -3}, "tail is -3"),
        ({"seeds": (-1, 2)}, "none may be negative"),
        ({"style": "hdn"}, "cache style is 'hdn'; it must be one of nhd"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_fields_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CASE, **change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv.page_sizes(block=8, most=4), "most is 4; a page holds at least one block of 8"),
        (lambda: kv.attention_cases(styles=("nhd", "xyz")), "styles is .*; give some of nhd"),
        (lambda: kv.attention_cases(dtypes=()), "dtypes is .*; give some of bf16"),
        (lambda: kv.attention_cases(groups=(0,)), "a size of groups is 0; it must be at least 1"),
        (lambda: kv.attention_cases(most_length=0), "most_length is 0; it must be at least 1"),
        (lambda: kv.cases(geometries=()), r"geometries is \(\); give at least one Geometry"),
        (lambda: kv.cases(most_streams=0), "most_streams is 0"),
        (lambda: kv.cases(page_size=16), "page_size is 16; give a strategy"),
        (lambda: kv.attention_cases(page_size=16), "page_size is 16; give a strategy"),
        (lambda: kv.attention_cases(head_dims=(8.5,)), "a size of head_dims is 8.5; it must be an integer"),
        (lambda: kv.attention_cases(kv_heads=2), "kv_heads is 2; give a sequence"),
        (lambda: kv.attention_cases(most_length="9"), "most_length is '9'; it must be an integer"),
        (lambda: kv.cases(geometries="tiny"), "geometries is 'tiny'; give at least one Geometry"),
        (lambda: kv.lengths(page_size=0, most=4), "page_size is 0"),
        (lambda: kv.page_orders(pages=0), "pages is 0"),
        (lambda: kv.neighbourhoods(most_steps=0), "most_steps is 0"),
    ],
)
def test_strategies_refuse_wrong_arguments_before_they_draw(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_damaged_failure_file_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a failure that kvproof saved"):
        load_failure(file)


def test_a_right_kernel_that_uses_its_buffer_again_is_green():
    buffer = np.empty((8, 4, 8), np.float32)

    def kernel(q, *rest):
        buffer[: len(q)] = attend(q, *rest)
        return buffer[: len(q)]

    judge(kernel, replace(CASE, dtype="f32"), save=False)


def test_a_right_kernel_that_refuses_wrong_tables_is_green():
    def kernel(q, keys, values, page_table, lengths, query_start=None):
        for own, length in zip(page_table, lengths, strict=True):
            used = own[: -(-int(length) // keys.shape[1])]
            if len(set(used)) != len(used):
                raise ValueError("a page is named twice")
        return attend(q, keys, values, page_table, lengths, query_start)

    for seed in range(1, 9):
        judge(kernel, replace(CASE, seeds=(seed, seed + 1)), save=False)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(query_heads=1, kv_heads=1, page_size=8, lengths=(70,), order=(1, 8, 7, 0, 5, 6, 9, 2, 3, 4),
                      seeds=(572640,)),
        AttentionCase(query_heads=1, kv_heads=1, lengths=(56,), profile="heavy", seeds=(344690,),
                      order=(1, 3, 4, 5, 2, 13, 0, 11, 14, 10, 9, 8, 6, 7, 12)),
    ],
    ids=["stale-tail", "planted-value"],
)  # fmt: skip
def test_a_control_within_rounding_of_the_right_answer_does_not_count(case):
    judge(attend, case, save=False)


def test_the_padding_behind_a_page_is_no_place_to_write():
    def kernel(q, keys, *rest):
        out = attend(q, keys, *rest)
        whole = (keys.shape[0], keys.strides[0] // keys.itemsize)
        np.lib.stride_tricks.as_strided(keys, whole, (keys.strides[0], keys.itemsize))[:, -1] = 7
        return out

    with pytest.raises(ContractError, match="the kernel changed its argument arena of keys"):
        judge(kernel, replace(CASE, padding=8), save=False)


def test_the_arithmetic_is_kept_with_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_FAILURES", str(tmp_path / "with space"))
    narrow = Arithmetic(probability=0.0)
    with pytest.raises(ContractError) as caught:
        judge(functools.partial(attend, bug="wrong normaliser"), CASE, arithmetic=narrow)
    assert "'" in caught.value.replay
    assert load_failure(next(tmp_path.glob("*/*.json"))).arithmetic == narrow


def test_a_failure_that_cannot_be_kept_says_why(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPROOF_FAILURES", str(tmp_path / "file"))
    with pytest.raises(ContractError, match=r"not saved: .*set \$KVPROOF_FAILURES"):
        judge(functools.partial(attend, bug="table ignored"), CASE)
