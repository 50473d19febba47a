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


def test_plain_checkpoints_at_half_of_the_cache_are_no_larger_than_dense():
    """What the page says, and what an engine is to be faster with."""
    rows = json.loads((REPOSITORY / "experiments/scale/scale.json").read_text("utf-8"))["rows"]
    dense = {row["model"]: row["parameters"] for row in rows if row["heads"] == "dense"}
    plain = [row for row in rows if row["heads"] == "merged heads, plain" and row["retain"] == 0.5]
    assert {row["model"] for row in plain} == {*dense} - {"Qwen3-8B"}
    assert all(row["parameters"] < dense[row["model"]] for row in plain)
    assert all(row["break_even"] == 0 for row in plain)
    assert all(share < 1 for row in plain for share in row["decode"].values())
