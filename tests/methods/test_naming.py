"""One way to write a method and its settings; what is wrong is refused in tests/cli/test_errors."""

from typing import Any

import numpy as np
import pytest

import rap
from rap.methods import METHODS, Method, Rap, parse_method
from rap.methods.naming import named_today, read_method, recipes, result_today
from rap.model.errors import RapError
from rap.runtime.settings import read_settings, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("0.5", 0.5),
        ("1e-4", 1e-4),
        ("true", True),
        ("False", False),
        ("null", None),
        ("no", "no"),
        ("none", "none"),
        ("a,b", "a,b"),
        ("wikitext:train=1", "wikitext:train=1"),
    ],
)
def test_a_value_is_a_number_a_word_or_null(text: str, value: Any) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


def test_a_value_is_all_behind_the_first_sign() -> None:
    assert read_settings(["source=a=b"]) == {"source": "a=b"}


def test_settings_are_a_dictionary() -> None:
    assert read_settings(["learning-rate=2e-5", "steps = 3", "schedule=cosine", "top_k=null"]) == {
        "learning_rate": 2e-5,
        "steps": 3,
        "schedule": "cosine",
        "top_k": None,
    }


@pytest.mark.parametrize("texts", [["steps"], ["=3"], ["steps="], ["a=1", "a=2"]])
def test_settings_that_say_nothing_or_say_it_twice_are_refused(texts: list[str]) -> None:
    with pytest.raises(RapError, match=r"write name=value|set it once"):
        read_settings(texts)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("rap", Rap(retain=0.6)),
        ("rap:paper", Rap.paper(retain=0.6)),
        ("rap:paper:budget=uniform:align=4", Rap.paper(retain=0.6, budget="uniform", align=4)),
        ("rap:budget=uniform:paper", Rap.paper(retain=0.6, budget="uniform")),
        ("rap:qk-norm=rows:norm_rows=16", Rap(retain=0.6, qk_norm="rows", norm_rows=16)),
        ("rap:general", Rap(retain=0.6, shrinkage=1, reach="far")),
        ("rap:general:reach=512", Rap(retain=0.6, shrinkage=1, reach=512)),
        ("palu:group_size=1", METHODS["palu"](retain=0.6, group_size=1)),
        ("elitekv:plus", METHODS["elitekv"].plus(retain=0.6)),
        ("kvpruner:rotation=first", METHODS["kvpruner"](retain=0.6, rotation="first")),
    ],
)
def test_a_text_is_the_method_with_its_settings(text: str, method: Method) -> None:
    assert parse_method(text, 0.6) == method


def test_the_retain_ratio_and_shared_settings_come_beside_the_text() -> None:
    assert parse_method("rap", 0.6, align=2, rank=4) == Rap(retain=0.6, align=2)
    assert parse_method("rap", 0.6, align=None) == Rap(retain=0.6)
    assert parse_method("rap:align=4", 0.6, align=2) == Rap(retain=0.6, align=4)
    assert parse_method("rap:paper", 0.6, {"budget": "uniform"}, seed=3) == Rap.paper(
        retain=0.6, budget="uniform", seed=3
    )
    with pytest.raises(RapError, match="align is set by 'rap:align=4' and a second time"):
        parse_method("rap:align=4", 0.6, {"align": 4})
    with pytest.raises(RapError, match="has no setting 'rank'"):
        parse_method("rap", 0.6, {"rank": 4})


def test_recipes_are_the_public_class_methods() -> None:
    assert recipes(Rap) == ["general", "paper"]
    assert recipes(METHODS["elitekv"]) == ["plus"]
    assert recipes(METHODS["heads"]) == []
    assert read_method("rap:paper:align=2").settings == {"align": 2}


@pytest.mark.parametrize("name", METHODS)
def test_a_record_of_a_run_makes_the_method_again(name: str) -> None:
    method = parse_method(name, 0.6)
    settings = dict(method.describe())
    assert METHODS[settings.pop("name")](**settings) == method


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"retain": "0.5"}, "retain cannot be '0.5': it should be a valid number"),
        ({"retain": True}, "retain cannot be True"),
        ({"align": 2.5}, "align cannot be 2.5: it should be a valid integer"),
        ({"key_share": "all"}, "it should be a valid number or 'pooled'"),
        ({"keys": "whole"}, "keys cannot be 'whole': it should be 'pairs' or 'fold'"),
    ],
)
def test_a_field_of_another_type_is_refused_in_python_too(settings: Any, reason: str) -> None:
    with pytest.raises(RapError, match=reason):
        Rap(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    assert Rap(retain=np.float32(0.5), align=np.int64(4)) == Rap(retain=0.5, align=4)
    with pytest.raises(RapError, match="align cannot be"):
        Rap(align=np.float64(4.5))


def test_compress_takes_the_text_in_python() -> None:
    with pytest.raises(RapError, match="unknown method 'rapp'"):
        rap.compress("bundled", method="rapp:paper")
    found = rap.compress(
        "bundled", 0.5, method="rap:paper:align=2", num_windows=1, window=32, evaluate=None, seed=4
    )
    assert found.report["method"] == Rap.paper(retain=0.5, align=2, seed=4).describe()
    assert found.plan.retain == found.report["retain"] == 0.5


@pytest.mark.parametrize(
    ("text", "recorded", "today"),
    [
        ("rap", {}, "rap:merge=1"),
        ("rap", {"name": "rap", "budget": "error"}, "rap:merge=1"),
        ("rap", {"merge": "auto"}, "rap"),
        ("rap:shrinkage=1:reach=1024", {}, "rap:shrinkage=1:reach=1024:merge=1"),
        ("rap:merge=all", {"merge": "all"}, "rap:merge=all"),
        ("rap:merge=1", {}, "rap:merge=1"),
        # Heads are as separate today as they were then.
        ("rap:paper", {}, "rap:paper"),
        ("rap:general", {}, "rap:general:merge=1"),
        ("rap:key_share=pooled", {}, "rap:key_share=pooled"),
        ("rap:profile=stock", {}, "rap:profile=stock"),
        ("rap:budget=search", {}, "rap:budget=search"),
        ("palu", {}, "palu"),
        ("dense", {}, "dense"),
        ("rap:of=another-release", {}, "rap:of=another-release"),
    ],
)
def test_a_recorded_method_is_named_as_it_is_today(
    text: str, recorded: dict[str, Any], today: str
) -> None:
    assert named_today(text, recorded) == today
    assert named_today(today, recorded) == today


RECORDED = {
    "command": "rap compare smollm2 --methods rap,palu --retain 0.7 -o runs/one",
    "title": "One",
    "cells": [
        {"method": "dense", "settings": None, "command": "rap compare smollm2 --methods rap"},
        {"method": "rap", "settings": {"name": "rap"}, "command": "rap compare a --methods rap"},
        {"method": "palu", "settings": {"name": "palu"}, "command": "rap compare a --methods palu"},
    ],
    "tables": [
        {
            "title": "What has the parameters of rap at 0.7",
            "note": "Those of rap at 0.7. Caches another part: rap 71% at 0.7. A rap checkpoint.",
            "header": ["method", "rap", "palu"],
            "rows": [
                ["rap", 1.5],
                ["rap, no recovery", "rap"],
                ["rap at 0.7", 1],
                ["rap:paper", 2],
            ],
        }
    ],
}


def test_a_result_of_an_earlier_release_is_shown_as_of_today() -> None:
    found = result_today(RECORDED)
    assert found["command"].startswith("rap compare smollm2 --methods rap:merge=1,palu ")
    assert [cell["method"] for cell in found["cells"]] == ["dense", "rap:merge=1", "palu"]
    assert found["cells"][0]["command"] == "rap compare smollm2 --methods rap:merge=1"
    (table,) = found["tables"]
    assert table["title"] == "What has the parameters of rap:merge=1 at 0.7"
    assert "Those of rap:merge=1 at 0.7. " in table["note"]
    assert "part: rap:merge=1 71% at 0.7. A rap checkpoint." in table["note"]
    assert table["header"] == ["method", "rap:merge=1", "palu"]
    assert table["rows"] == [
        ["rap:merge=1", 1.5],
        ["rap:merge=1, no recovery", "rap:merge=1"],
        ["rap:merge=1 at 0.7", 1],
        ["rap:paper", 2],
    ]
    assert result_today(found) == found
    assert RECORDED["cells"][1]["method"] == "rap"  # nothing is changed in place


@pytest.mark.parametrize(
    ("command", "today"),
    [
        ("rap compare a --methods=rap,palu", "rap compare a --methods=rap:merge=1,palu"),
        ("rap compress a --method=rap -o b", "rap compress a --method=rap:merge=1 -o b"),
        # Without a list it was of all methods, which today's are not.
        ("rap compare a --retain 0.7", "rap compare a --retain 0.7 --methods rap:merge=1,palu"),
        ("rap report a", "rap report a"),
        ("python rap.py --methods rap", "python rap.py --methods rap"),
    ],
)
def test_a_recorded_command_is_written_as_of_today(command: str, today: str) -> None:
    assert result_today({**RECORDED, "command": command})["command"] == today


def test_a_result_of_this_release_stays() -> None:
    settings = {"name": "rap", "retain": 0.7, "merge": "auto"}
    cells = [{**cell, "settings": settings} for cell in RECORDED["cells"]]
    assert result_today({**RECORDED, "cells": cells}) == {**RECORDED, "cells": cells}
    alone = {key: x for key, x in RECORDED.items() if key != "cells"}
    assert result_today(alone)["tables"] == result_today(RECORDED)["tables"]
    assert result_today({**alone, "rows": [{"method": settings}]}) == {
        **alone,
        "rows": [{"method": settings}],
    }
