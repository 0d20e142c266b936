"""`Arithmetic`: its depths against roundings counted on an explicit sum, and what it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
from kvproof.oracle.arithmetic import FP32, OURS, PAIRWISE, Arithmetic, arithmetic_of
from kvproof.reference.geometry import TILE

SIZES = [1, 2, 3, 5, 8, 9, 24, 64, 65, 256]
LANES = [1, 2, 5, 8, PAIRWISE]


def rounded(*sums):
    """The sum of these, which are {term: roundings so far}, after one more rounding."""
    return {term: count + 1 for part in sums for term, count in part.items()}


def added(a, b):
    """a + b; a sum with nothing rounds nothing."""
    return rounded(a, b) if a and b else a or b


def pairwise(sums):
    """Neighbours are added until one sum is left."""
    while len(sums) > 1:
        sums = [added(*sums[i : i + 2]) if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return sums[0]


def chains(n, lanes, join):
    """Roundings of n terms, term i in chain i mod lanes, once the chains' ends are added."""
    ends = [{} for _ in range(min(n, lanes))]
    for i in range(n):
        ends[i % lanes] = join(ends[i % lanes], i)
    found = pairwise(ends)
    return np.array([found[i] for i in range(n)])


def join_term(chain, i):
    return added(chain, {i: 0})


def join_product(chain, i):
    return added(chain, {i: 1})


def join_fused_product(chain, i):
    return rounded(chain, {i: 0})


COUNTED = {
    "terms": (join_term, Arithmetic().sum_depths),
    "products": (join_product, Arithmetic().product_depths),
    "fused products": (join_fused_product, Arithmetic(fused=True).product_depths),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("lanes", LANES, ids=["1", "2", "5", "8", "pairwise"])
@pytest.mark.parametrize("kind", COUNTED, ids=[kind.replace(" ", "-") for kind in COUNTED])
def test_depths_are_the_roundings_counted(kind, lanes, n):
    join, depths = COUNTED[kind]
    counted, declared = chains(n, lanes, join), depths(n, lanes)
    assert declared.dtype == np.float64
    assert (counted <= declared).all()
    assert counted.max() == declared.max()
    if n % lanes == 0 and lanes & (lanes - 1) == 0:  # chains of one length, and a power of two of them
        np.testing.assert_array_equal(counted, declared)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_a_sum_is_deeper_than_any_order(n, seed):
    rng = np.random.default_rng(seed)
    sums = [{i: 1} for i in range(n)]
    while len(sums) > 1:
        a, b = (sums.pop(rng.integers(len(sums))) for _ in range(2))
        sums.append(added(a, b))
    counted = np.array([sums[0][i] for i in range(n)])
    assert (counted <= FP32.product_depths(n, None)).all()
    assert (counted - 1 <= FP32.sum_depths(n, None)).all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_chain_is_as_deep_as_any_order_may_be(fused):
    any_order = Arithmetic(fused=fused)
    assert chains(64, 1, join_product).max() == any_order.product_depths(64, None).max() == 64
    assert chains(64, 1, join_term).max() == any_order.sum_depths(64, None).max() == 63


def test_depths_of_our_sums():
    """As tile.cuh, arithmetic.cuh and chunks.cu have them."""
    assert OURS.product_depths(256, OURS.dot_lanes)[[0, 7, 8, 255]].tolist() == [35, 35, 34, 4]
    assert OURS.sum_depths(256, OURS.square_lanes).tolist() == [8] * 256
    assert OURS.product_depths(TILE, OURS.value_lanes)[[0, 1, 63]].tolist() == [64, 63, 1]
    assert OURS.sum_depths(TILE, OURS.weight_lanes).tolist() == [6] * TILE


@pytest.mark.parametrize(("fused", "join"), [(True, 1), (False, 2)])
def test_join_is_one_rounding_where_fused(fused, join):
    assert Arithmetic(fused=fused).join == join


@pytest.mark.parametrize("h", [2, 7, 35, 520])
def test_gamma_covers_the_roundings_and_little_more(h):
    u, gamma = Fraction(OURS.unit), Fraction(float(OURS.gamma(h)))
    assert (1 + u) ** h - 1 <= gamma
    assert 1 / (1 - u) ** h - 1 <= gamma * (1 + Fraction(2) ** -50)  # equal to it but for h**2 u**2
    assert gamma <= h * u * (1 + 2 * h * u)


def test_gamma_goes_element_by_element():
    assert OURS.gamma(np.array([0.0, 1.0, 9.5])).tolist() == [0.0, *(float(OURS.gamma(h)) for h in (1, 9.5))]


def test_gamma_of_more_roundings_than_the_accumulator_bears_is_infinite():
    """h u / (1 - h u) would be negative."""
    narrow = Arithmetic(unit=2.0**-8)
    assert narrow.gamma(np.array([255, 256, 257])).tolist() == [255.0, np.inf, np.inf]


ERRORS = ["unit", "tiny", "exp", "exp_floor", "turn", "probability", "probability_floor"]
COUNTS = ["dot_lanes", "square_lanes", "value_lanes", "weight_lanes", "tile"]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf], ids=str)
def test_an_error_that_is_negative_or_not_finite_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; an error must be"):
        Arithmetic(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("count", [0, -8, 8.5, True], ids=str)
def test_a_count_that_is_no_whole_number_from_one_is_refused(name, count):
    with pytest.raises(ValueError, match=f"{name} is {count}; it must be a whole number from 1, or None"):
        Arithmetic(**{name: count})


def test_least_values_are_allowed():
    assert Arithmetic(**dict.fromkeys(ERRORS, 0.0), **dict.fromkeys(COUNTS, 1)).gamma(100) == 0


def test_a_description_is_keyword_only_and_does_not_change():
    with pytest.raises(TypeError):
        Arithmetic(2.0**-24)
    with pytest.raises(FrozenInstanceError):
        FP32.unit = 0.0


class Declaring:
    """Kernels with an `arithmetic`."""

    def __init__(self, arithmetic):
        self.arithmetic = arithmetic


def test_kernels_are_judged_by_what_they_declare_and_else_as_any_fp32_kernel():
    assert arithmetic_of(Declaring(OURS)) is OURS
    assert arithmetic_of(object()) is FP32
    assert Arithmetic() == FP32


def test_a_declaration_of_another_type_is_refused():
    with pytest.raises(TypeError, match="arithmetic is a dict; it must be an Arithmetic"):
        arithmetic_of(Declaring({"fused": True}))
