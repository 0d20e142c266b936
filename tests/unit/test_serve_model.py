"""The deterministic model: exact sums, ties, and a text that hangs on its history."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kvproof.oracle.serving import model as serve_model
from kvproof.oracle.serving.model import LIMIT, ServeModel, require_exact
from kvproof.reference import FLASH_NEXT, TINY
from kvproof.reference.layout import BF16
from streams import ODD, assert_bits, normal, refused

SERVED = dataclasses.replace(TINY, layers=3)


@pytest.fixture(scope="module")
def model():
    return ServeModel(SERVED, seed=1)


def rows_of(model, rows=70, seed=3):
    return np.rint(900 * np.random.default_rng(seed).standard_normal((rows, model.hidden)))


def test_bits_do_not_depend_on_the_batch(model):
    hidden = rows_of(model)
    gated = normal(5, len(hidden), SERVED.query_heads, SERVED.head_dim)
    tokens = np.arange(len(hidden)) % model.vocabulary
    places = 3 * np.arange(len(hidden))
    for what, call in {
        "projection": lambda i: model.projection(1, hidden[i]),
        "absorb": lambda i: model.absorb(1, hidden[i], gated[i]),
        "next": lambda i: model.next_tokens(hidden[i], tokens[i], places[i]),
        "draft": lambda i: model.draft_tokens(hidden[i], tokens[i], places[i]),
        "head": lambda i: model.head_input(hidden[i], tokens[i]),
    }.items():
        whole = call(slice(None))
        for size in (1, 7, 64):
            parts = [call(slice(start, start + size)) for start in range(0, len(hidden), size)]
            assert_bits(np.concatenate(parts), whole, f"{what} in parts of {size}")


def test_projections_are_the_integers_that_int64_gives(model):
    steps = serve_model._quantised(rows_of(model))
    assert abs(steps).max() <= LIMIT
    assert (steps == np.rint(steps)).all()
    exact = steps.astype(np.int64) @ model._into[2].astype(np.int64)
    want = (exact.astype(np.float32) * model._to_unit).astype(BF16)
    assert_bits(model.projection(2, rows_of(model)), want, "projection")
    assert (abs(exact) < serve_model.EXACT_FLOAT32).all()


def test_all_hidden_rows_stay_integers(model):
    gated = normal(5, 4, SERVED.query_heads, SERVED.head_dim)
    for rows in (
        model.embed([0, 5]),
        model.head_input(rows_of(model, 4), [1, 2, 3, 4]),
        model.absorb(0, rows_of(model, 4), gated),
    ):
        assert (rows == np.rint(rows)).all()
        assert rows.any()


def test_a_tie_goes_to_the_lowest_token(model):
    tied = ServeModel(SERVED, seed=1)
    tied._unembed = [np.zeros_like(u) for u in tied._unembed]
    tied._pairs = np.zeros_like(tied._pairs)
    tied._pairs[..., [40, 9, 77]] = 5
    assert tied.next_tokens(rows_of(tied, 3), [0, 1, 2], [5, 6, 7]).tolist() == [9, 9, 9]


def test_the_same_seed_gives_the_same_model_and_another_does_not(model):
    same, other = ServeModel(SERVED, seed=1), ServeModel(SERVED, seed=2)
    hidden = rows_of(model, 3)
    assert_bits(same.projection(0, hidden), model.projection(0, hidden), "projection")
    assert (other.projection(0, hidden) != model.projection(0, hidden)).any()


@pytest.mark.parametrize("geometry", [ODD, dataclasses.replace(FLASH_NEXT, layers=2)], ids=lambda g: g.name)
def test_any_geometry_with_two_layers_has_a_model(geometry):
    made = ServeModel(geometry)
    rows = made.projection(0, made.embed([1, 2, 3]))
    assert rows.shape == (3, geometry.projection_width)
    assert 0.3 < np.std(rows.astype(np.float64)) < 3
    assert made.head_layer == geometry.layers - 1
    assert made.main_layers == tuple(range(geometry.layers - 1))


def test_sums_that_might_round_are_refused():
    require_exact("x", 2**24 // (LIMIT * 3), 2)
    message = (
        "x: 50000 products of integers up to 127 and 3 may add up to 19050000, which is not below 16777216: sums would "
        "depend on their order. Make the model narrower"
    )
    with refused(ValueError, message):
        require_exact("x", 50000, 3)
    with pytest.raises(ValueError, match=r"^draft head: 60000 products"):
        ServeModel(SERVED, hidden=30000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": dataclasses.replace(TINY, layers=1)}, "geometry 'tiny' has 1 layer; the model needs at least 2"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"vocabulary": 1}, "vocabulary is 1; it must be at least 2"),
        ({"hidden": 0}, "hidden is 0; it must be at least 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_served_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ServeModel(**{"geometry": SERVED, **change})
