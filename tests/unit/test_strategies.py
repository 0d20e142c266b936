"""What the strategies draw: everything they promise, nothing that does not fit."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kvproof.oracle import strategies as kv
from kvproof.oracle.attention import DTYPES, AttentionCase
from kvproof.oracle.attention_controls import is_effective, planted_key, planted_value
from kvproof.oracle.cases import StreamCase
from kvproof.oracle.contract import Example, check_example
from kvproof.oracle.report import Report
from kvproof.oracle.variants import host_variants
from kvproof.reference.geometry import Geometry
from numpy_kernel import attend

CASE = AttentionCase(lengths=(9, 5), query_lengths=(1, 1), seeds=(1, 2), order=(3, 1, 0, 4, 2), tail=1)


def drawn(strategy, count=300):
    """Many draws of a strategy."""
    found = []

    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


def test_page_sizes_are_multiples_of_the_block_and_not_only_powers_of_two():
    sizes = set(drawn(kv.page_sizes(block=4, most=64)))
    assert all(size % 4 == 0 and 4 <= size <= 64 for size in sizes)
    assert {12, 20, 28} & sizes


def test_lengths_favour_the_edges():
    lists = drawn(st.lists(kv.lengths(page_size=16, most=80, edges=(64,)), min_size=8, max_size=8), 100)
    found = [n for drawn_list in lists for n in drawn_list]
    near = [n for n in found if n in {15, 16, 17, 31, 32, 33, 63, 64, 65}]
    assert 1 <= min(found) <= max(found) <= 80
    assert len(near) > len(found) / 4


def test_page_orders_are_permutations_of_every_kind():
    found = drawn(kv.page_orders(pages=5))
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in found)
    assert {(0, 1, 2, 3, 4), (4, 3, 2, 1, 0)} < set(found)
    assert len(set(found)) > 20


def test_cases_have_every_profile_fill_and_number_of_streams():
    found = drawn(kv.attention_cases(styles=("nhd", "hnd"), padding_unit=8), 400)
    assert {case.profile for case in found} == set(kv.PROFILES)
    assert {case.fill for case in found} == set(kv.FILLS)
    assert {len(case.lengths) for case in found} == {1, 2, 3}
    assert {case.style for case in found} == {"nhd", "hnd"}
    assert {case.padding for case in found} == {0, 8, 16}
    assert all(case.decode for case in found)


def test_controls_are_planted_rows_and_wrong_tables():
    assert {c.changes for c in drawn(kv.planted_rows(CASE), 60)} == {"keys", "values"}
    names = {c.name for c in drawn(kv.swapped_tables(CASE), 60)}
    assert {c.changes for c in drawn(kv.swapped_tables(CASE), 60)} == {"page table"}
    assert len(names) >= 3
    with pytest.raises(ValueError, match="no control changes the answer"):
        kv.controls(
            AttentionCase(profile="zeros", lengths=(1,), order=(0,), query_heads=1, kv_heads=1), arithmetic=WIDE
        )


WIDE = kv.Arithmetic(unit=2.0**-24, probability=1e30)

DROWNED = AttentionCase(query_heads=2, kv_heads=1, page_size=1, lengths=(5,), order=(0, 1, 2, 3, 4), profile="huge")
"""One key takes all the weight, no page is partly filled and none is foreign: what is planted elsewhere is drowned."""


def controls_seen(case, controls):
    """Whether a right kernel's result leaves the bound, by each control."""
    bound = case.bound(kv.FP32)
    with np.errstate(all="ignore"):
        return [bool((bound.fraction(attend(*c.arguments.values())) > 1).any()) for c in controls]


@settings(max_examples=60)
@given(data=st.data(), case=kv.attention_cases(most_streams=2, most_length=30))
def test_every_drawn_control_changes_a_right_kernels_result(data, case):
    control = data.draw(kv.controls(case), label="control")
    assert controls_seen(case, [control]) == [True]


def test_a_key_with_all_the_weight_drowns_no_control():
    found = {c.name: c for c in drawn(kv.controls(DROWNED), 60)}
    assert found.keys() == {
        "a planted row of keys",
        "a planted row of values",
        "a page table of stream 0 that names one page twice",
    }
    assert all(controls_seen(DROWNED, found.values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", kv.PROFILES)
def test_a_planted_row_is_effective_in_every_case(profile, dtype):
    """However peaked the weights are: from one page of one position on, over every fill, of narrow and wide heads."""
    for fill, length, page_size, head_dim in itertools.product(kv.FILLS, (1, 2, 5, 40), (1, 7), (1, 8)):
        pages = -(-length // page_size)
        case = AttentionCase(
            query_heads=2, kv_heads=1, head_dim=head_dim, page_size=page_size, lengths=(length,),
            order=tuple(range(pages)), fill=fill, profile=profile, dtype=dtype, seeds=(length,),
        )  # fmt: skip
        makers = [planted_value, planted_key] if length > 1 and head_dim > 1 else [planted_value]
        controls = [make(case) for make in makers]
        bound = case.bound(kv.FP32)
        assert all(is_effective(case, control, bound, kv.FP32) for control in controls), case
        assert all(controls_seen(case, controls)), case


def test_no_wrong_table_is_drawn_where_none_can_show():
    one_page = AttentionCase(lengths=(3,))
    assert kv.swapped_tables(one_page).is_empty
    assert not kv.planted_rows(one_page).is_empty


@settings(max_examples=60)
@given(steps=kv.neighbourhoods())
def test_a_stream_keeps_its_bits_while_its_neighbours_grow_and_shrink(steps):
    kv.judge_steps(attend, steps)


def test_a_neighbour_that_shows_is_found():
    def kernel(q, keys, values, page_table, lengths):
        return attend(q, keys, values, page_table, lengths) * q.dtype.type(1 + (len(lengths) > 2))

    @settings(max_examples=200, database=None, phases=[Phase.generate])
    @given(steps=kv.neighbourhoods())
    def run(steps):
        kv.judge_steps(kernel, steps)

    with pytest.raises(AssertionError, match="beside"):
        run()


def test_drawn_geometries_are_valid():
    found = drawn(kv.geometries(), 400)
    assert {g.block for g in found} > {1, 3, 5}


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_our_kernels_hold_the_contract_at_drawn_geometries(data):
    geometry = data.draw(kv.geometries(), label="geometry")
    variants = host_variants(seed=0)
    for _ in range(10):
        report = Report()
        check_example(data.draw(kv.cases(geometries=(geometry,)), label="example"), variants, report)
        assert report.green, report.failures


NARROW = Geometry(
    name="narrow", query_heads=1, kv_heads=1, head_dim=8, index_heads=1, index_dim=8, block=1, top_blocks=2,
    rotary_half=1, mrope_sections=(1, 0, 0), layers=2,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [282, 191], ids=["one-gate-open-over-a-large-element", "all-gates-shut"])
def test_one_narrow_head_of_huge_data_has_a_control_of_its_gate(seed):
    stream = StreamCase(cached=0, rows=1, profile="huge")
    report = kv.check(
        host_variants(seed=0), Example(geometry=NARROW, streams=(stream,), page_size=1, order=(0, 1), seed=seed)
    )
    assert report.green


def test_partial_kernels_can_be_judged_too():
    kv.judge(functools.partial(attend, hnd=True), AttentionCase(style="hnd", lengths=(5,), order=(1, 0)))
