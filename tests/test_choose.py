"""docs/measurements/cache-size.md: its table shows the measured row that is best at every size."""

from types import ModuleType

import pytest

from cases.scripts import REPOSITORY, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/choose.py, which is no package."""
    return load_script("docs/choose.py")


@pytest.fixture
def choices(script):
    """What is committed."""
    return script.Choices()


def test_the_committed_table_is_built_from_the_committed_results(script, choices):
    """If it is not: python docs/choose.py."""
    text = (REPOSITORY / script.PAGE).read_text(encoding="utf-8")
    assert script.with_table(text, choices) == text
    assert text.count(script.BEGIN) == 1


def test_every_entry_is_a_row_that_was_measured(script, choices):
    """The best merged model at half of the cache, read from its own result file."""
    found = script.best(choices.merged, 2.0)
    path = REPOSITORY / "experiments" / found["folder"] / "compare.json"
    cells = script._read(path)["cells"]
    dense = cells[0]
    (cell,) = [one for one in cells if "kl" in one and one["kl"]["value"] == found["kl"]]
    assert cell["kv_bytes_per_token"] / dense["kv_bytes_per_token"] == found["share"] <= 0.5
    shown = script.entry(choices, choices.merged, 2.0)
    assert f"[KL {cell['kl']['value']:.3f}](../results/README.md#smollm2-merged" in shown
    assert f"perplexity {cell['perplexity'] / dense['perplexity'] - 1:+.0%} (2.0x)" in shown


def test_what_is_too_large_or_not_there_is_not_shown(script, choices):
    large = {"name": "large", "folder": "x", "share": 0.51, "kl": 0.0, "loss": 0.0}
    small = large | {"name": "small", "share": 0.5, "kl": 0.2, "loss": -0.001}
    assert script.entry(choices, [large], 2.0) == script.EMPTY
    assert script.entry(choices, [large, small], 2.0) == (
        "small: [KL 0.200](../results/README.md#x), perplexity +0% (2.0x)"
    )
    assert script.entry(choices, [large, small], 1.4).startswith("large")


def test_the_verdict_follows_from_the_rows(script, choices):
    assert script.verdict(choices).startswith("At every size, quantization or eviction")
    choices.merged.append({"share": 0.25, "kl": 0.05})
    assert script.verdict(choices) == "Pruning or low rank has the lowest KL at 4x."
    choices.plain = [row for row in choices.plain if row["share"] > 0.125]
    assert script.verdict(choices) == "Pruning or low rank has the lowest KL at 4x, 8x."


def test_what_is_pruned_and_compressed_further_is_named_as_today(script, choices):
    assert {row["method"] for row in choices.plain} == {"dense"}
    quantized = [x for x in choices.combined if (x["bits"], x["press"]) == ("hqq8", None)]
    names = {script.combined_name(row).partition(" ")[0] for row in quantized}
    assert names == {"`rap:merge=1`", "`rap:merge=all:profile=stock`"}
    assert all(script.combined_name(row).endswith(" + `hqq8`") for row in quantized)


def test_a_page_without_the_place_is_refused(script, choices):
    with pytest.raises(SystemExit, match="has no place"):
        script.with_table("# Choose\n", choices)
