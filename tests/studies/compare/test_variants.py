"""How a grid is written on the command line."""

import pytest

from rap.methods import METHODS, parse_method
from rap.studies.compare.variants import (
    all_variants,
    parse_names,
    parse_retains,
)


@pytest.mark.parametrize(
    ("text", "ratios"),
    [
        ("0.7", (0.7,)),
        ("0.5,0.7", (0.7, 0.5)),
        ("0.5:0.9:0.1", (0.9, 0.8, 0.7, 0.6, 0.5)),
        ("0.5:0.74:0.1", (0.7, 0.6, 0.5)),
        ("0.3, 0.5:0.6:0.05,0.5", (0.6, 0.55, 0.5, 0.3)),
        ("1", (1.0,)),
    ],
)
def test_retain_ratios(text, ratios):
    # Exact: a ratio is part of a cell's name, and 0.1 + 0.2 is not 0.3.
    assert parse_retains(text) == ratios


def test_names_once_and_in_order():
    assert parse_names("b, a,b,,") == ("b", "a")


def test_all_variants_are_the_registry_and_its_recipes():
    assert {spec.partition(":")[0] for spec in all_variants()} == {*METHODS}
    assert "rap:paper" in all_variants()
    for spec in all_variants():
        assert parse_method(spec, 0.5).retain == 0.5
