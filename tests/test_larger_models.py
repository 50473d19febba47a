"""docs/measurements/larger-models.md: its tables are what the result files say."""

import json

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/larger_models.py")


@pytest.mark.parametrize("name", SCRIPT.FILES)
def test_the_committed_table_is_built_from_the_committed_result(name):
    """If it is not: python docs/larger_models.py."""
    text = (REPOSITORY / SCRIPT.PAGE).read_text(encoding="utf-8")
    found = json.loads((REPOSITORY / f"experiments/scale/{name}.json").read_text("utf-8"))
    whole = SCRIPT.shown(found["table"], every=True).splitlines()
    begun = text.split(SCRIPT.begin(name))[1].split(SCRIPT.END)[0].strip().splitlines()
    assert begun[:2] == whole[:2]
    left_out = {line.split("|")[1].strip() for line in whole[2:] if line not in begun}
    assert begun[2:] == [line for line in whole[2:] if line in begun]
    assert not left_out & {*SCRIPT.SHOWN}
    assert bool(left_out) is (name != "scale-fit")


def test_a_pair_of_heads_keeps_the_weights_within_their_dense_size():
    """What the page and choose.md advise `--target plain --method rap:merge=2` for."""
    rows = json.loads((REPOSITORY / "experiments/scale/scale.json").read_text("utf-8"))["rows"]
    dense = {row["model"]: row["parameters"] for row in rows if row["heads"] == "dense"}
    pairs = [row for row in rows if row["heads"].startswith("pairs of")]
    assert {row["model"] for row in pairs} == {*dense} - {"Qwen3-8B"}
    assert all(row["parameters"] < dense[row["model"]] for row in pairs)
    grown = [row for row in rows if row["heads"] == "merged heads, plain" and row["retain"] == 0.5]
    assert all(row["parameters"] > dense[row["model"]] for row in grown)
