"""The default property run: our kernels, every gate, over drawn streams, pages, tables, data and poison."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from kvproof import fast
from kvproof.oracle import strategies as kv
from kvproof.oracle.cases import StreamCase, at_check
from kvproof.oracle.contract import Example
from kvproof.oracle.judge import ContractError
from kvproof.oracle.variants import host_variants
from kvproof.reference import TINY
from streams import ODD


@pytest.fixture(scope="module")
def variants():
    return host_variants(seed=0)


@settings(max_examples=200)
@given(example=kv.cases())
def test_our_kernels_hold_the_contract(variants, example):
    report = kv.check(variants, example)
    assert not report.not_judged


@settings(max_examples=30)
@given(example=kv.cases(geometries=(ODD,)))
def test_a_geometry_without_powers_of_two_holds_it_too(variants, example):
    kv.check(variants, example)


class OnlyAttention:
    """Someone's kernels that have two of the functions."""

    chunks = staticmethod(fast.chunks)
    merge = staticmethod(fast.merge)


@settings(max_examples=20)
@given(example=kv.cases())
def test_what_is_not_implemented_is_not_judged(example):
    report = kv.check(OnlyAttention(), example)
    ours = {"prep", "pool", "scores", "select", "select_close", "chunks_ahead", "dense_ahead", "gate"}
    assert report.not_judged == ours
    assert {kernel for _, kernel in report.counts} == {"chunks", "merge", "dense"}


class Boastful(OnlyAttention):
    """The same, but it claims that nothing errs."""

    arithmetic = kv.Arithmetic(unit=0.0, tiny=0.0, exp=0.0, exp_floor=0.0)


def test_kernels_are_judged_by_the_arithmetic_that_they_declare(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_FAILURES", str(tmp_path))
    stream = StreamCase(cached=70, rows=2)
    example = Example(geometry=at_check(TINY), streams=(stream,), page_size=16, order=tuple(range(6)))
    assert kv.check(OnlyAttention(), example).green
    with pytest.raises(ContractError, match=r"bound chunks: .*allowed is"):
        kv.check(Boastful(), example)


def test_kernels_without_any_function_are_refused():
    with pytest.raises(ValueError, match="object has no function that can be judged; it needs some of prep, pool"):
        kv.check(object(), None)
