"""How a grid is written on the command line."""

import pytest

from rap.methods import METHODS, Rap
from rap.studies.compare.variants import (
    Variant,
    all_variants,
    parse_names,
    parse_retains,
    parse_settings,
    recipes,
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


def test_settings():
    assert parse_settings(["learning-rate=2e-5", "steps=3", "schedule=cosine", "top_k=null"]) == {
        "learning_rate": 2e-5,
        "steps": 3,
        "schedule": "cosine",
        "top_k": None,
    }


def test_a_variant_is_the_method_with_its_settings():
    assert Variant("rap").build(0.6) == Rap(retain=0.6)
    assert Variant("rap:paper").build(0.6) == Rap.paper(retain=0.6)
    assert Variant("rap:paper:budget=uniform:align=4").build(0.6, align=2, seed=1) == Rap.paper(
        retain=0.6, budget="uniform", align=4, seed=1
    )


def test_common_settings_reach_only_those_that_have_them():
    assert Variant("rap").build(0.6, align=2, rank=4) == Rap(retain=0.6, align=2)
    assert Variant("rap").build(0.6, align=None) == Rap(retain=0.6)


def test_all_variants_are_the_registry_and_its_recipes():
    assert {spec.partition(":")[0] for spec in all_variants()} == {*METHODS}
    assert "rap:paper" in all_variants()
    assert recipes(Rap) == ["paper"]
    for spec in all_variants():
        assert Variant(spec).build(0.5).retain == 0.5
