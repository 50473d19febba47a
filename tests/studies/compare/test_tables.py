"""Tables of a comparison, made of its cells alone: capabilities, matched compute, sweeps."""

import math
from typing import Any

import pytest

from cases.scripts import load_script
from rap.methods import METHODS
from rap.studies.compare.capability import (
    ORDER,
    capability,
    family,
    furthest,
    matched,
    nearest,
    saves,
)
from rap.studies.compare.closeness import closeness
from rap.studies.compare.tables import MATCHED_QUALITY, _steelman, tables

FORMULAS = load_script("experiments/cost/formulas.py")
sizes_of = FORMULAS.sizes_of


def cell(
    method: str,
    retain: float,
    perplexity: float = 10.0,
    recover: str = "none",
    *,
    kept: float | None = None,
    parameters: float | None = None,
    flops: float | None = None,
    prefill: float | None = None,
    reconstructs: bool = False,
) -> dict[str, Any]:
    """A record as `summarize` makes it, whose costs are 1,000 times a share; by default retain."""
    kept = retain if kept is None else kept
    return {
        "method": method,
        "retain": retain,
        "recover": recover,
        "perplexity": perplexity,
        "kv_bytes_per_token": round(1000 * kept),
        "prefill_kv_bytes_per_token": 1000 * (kept if prefill is None else prefill),
        "attention_parameters": round(1000 * (kept if parameters is None else parameters)),
        "projection_flops": round(1000 * (kept if parameters is None else parameters)),
        "attention_flops": {"context": 1024, "value": 1000 * (kept if flops is None else flops)},
        "evaluation": {"num_windows": 2, "window": 128},
        "recall": [{"distance": 64, "accuracy": 0.5, "num_facts": 4}],
        "reconstructs": reconstructs,
    }


DENSE = cell("dense", 1.0)
PALU = {
    retain: cell("palu", retain, parameters=share, flops=9 * retain, reconstructs=True)
    for retain, share in {0.9: 1.1, 0.7: 0.96, 0.5: 0.72, 0.3: 0.6}.items()
}


def by_method(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a table by their first cell, as dictionaries."""
    return {row[0]: dict(zip(table["header"], row, strict=True)) for row in table["rows"]}


def test_what_shrinks_with_the_cache_is_told_from_what_shrinks_less():
    assert saves("parameters", [cell("rap", 0.7), cell("rap", 0.5)], DENSE) == "yes (50%)"
    # Near enough at both ratios, and at one of them too much.
    near, far = cell("rap", 0.5, parameters=0.51), cell("rap", 0.7, parameters=0.72)
    assert saves("parameters", [near], DENSE) == "yes (51%)"
    assert saves("parameters", [near, far], DENSE) == "in part (51%)"
    assert saves("parameters", list(PALU.values()), DENSE) == "in part (60%)"
    assert saves("FLOPs", list(PALU.values()), DENSE) == "no (270%)"
    # No more of dense than the cache is, and still no saving.
    assert saves("parameters", [cell("rap", 1.0)], DENSE) == "yes (100%)"
    assert saves("parameters", [cell("rap", 1.0, parameters=1.005)], DENSE) == "no (100%)"


def test_a_cache_that_is_full_in_prefill_is_not_saved():
    assert saves("cache", [cell("palu", 0.5)], DENSE) == "yes (50%)"
    assert saves("cache", [cell("palu", 0.5, prefill=1.0)], DENSE) == "no (100%)"


def test_the_smallest_cache_is_the_last_one_that_stays_near_dense():
    records = [
        cell("rap", 0.9, 10.1),
        cell("rap", 0.7, 10.5, kept=0.71),
        cell("rap", 0.5, 10.6),
        cell("rap", 0.3, 10.0),  # near again, by luck: it did not stay
        cell("rap", 0.9, 11.0, recover="fast"),
        cell("rap", 0.5, float("nan"), recover="long"),
    ]
    assert furthest(records, "none", DENSE) == "71%"
    assert furthest(records[::-1], "none", DENSE) == "71%"
    assert furthest(records, "fast", DENSE) == "none"
    assert furthest(records, "long", DENSE) == "none"
    assert furthest(records, "paper", DENSE) == ""


def test_capabilities_are_sorted_by_family_and_read_from_the_cells():
    cut = [
        PALU[0.5],
        cell("heads", 0.7, 20.0, kept=0.5),
        cell("rap:paper", 0.5, 10.2, recover="fast"),
        cell("rap", 0.5),
    ]
    rows = by_method(capability("m", DENSE, cut))
    assert list(rows) == ["rap:paper", "rap", "heads", "palu"]
    assert rows["palu"] == {
        "method": "palu",
        "family": "low rank",
        "cache": "yes (50%)",
        "parameters": "in part (72%)",
        "FLOPs": "no (450%)",
        "reconstruction free": "no",
        "smallest cache, no recovery": "50%",
        "smallest cache, fast": "",
    }
    assert rows["heads"]["family"] == "head pruning"
    assert rows["heads"]["smallest cache, no recovery"] == "none"
    assert rows["rap:paper"]["smallest cache, fast"] == "50%"
    # One family: nothing to tell apart.
    assert capability("m", DENSE, cut[2:])["rows"] == []


def test_the_order_of_families_is_that_of_methods_there_are():
    assert {method.family for method in METHODS.values()} == {*ORDER}
    assert family("elitekv:plus") == "low rank"
    # A cell of a method that was taken out since is a family of its own.
    assert family("gone:paper") == "gone"


def test_the_nearest_parameters_are_found_at_whatever_ratio():
    cut = [*PALU.values(), cell("palu", 0.5, 12.0, recover="fast", parameters=0.72)]
    assert {record["retain"] for record in nearest(cut, "palu", DENSE, 0.7)} == {0.5}
    assert {record["retain"] for record in nearest(cut, "palu", DENSE, 0.62)} == {0.3}
    assert len(nearest(cut, "palu", DENSE, 0.7)) == 2


def test_matched_compute_sets_rap_beside_what_rebuilds():
    far = cell("svdllm", 0.5, 30.0, parameters=0.9, reconstructs=True)
    cut = [cell("rap", 0.7, 10.5), cell("rap", 0.5, 11.0), cell("heads", 0.5), far]
    table = matched("m", DENSE, [*cut, *PALU.values()], MATCHED_QUALITY)
    rows = by_method(table)
    assert list(rows) == ["rap at 0.7", "svdllm at 0.5", "palu at 0.5"]
    assert rows["palu at 0.5"]["KV"] == "50.0%"
    assert rows["palu at 0.5"]["parameters"] == "72.0%"
    assert rows["rap at 0.7"]["PPL, no recovery"] == "10.50"
    assert rows["rap at 0.7"]["recall, no recovery"] == "50%"
    assert "the 70.0% of rap at 0.7" in table["note"]
    assert "comes within 5% of dense: svdllm." in table["note"]
    # Without the reference, or without anything that reconstructs, there is nothing to match.
    for fewer in (cut[1:], cut[:3]):
        assert matched("m", DENSE, fewer, MATCHED_QUALITY)["rows"] == []


def titled(records: list[dict[str, Any]], start: str) -> list[dict[str, Any]]:
    """The tables whose title starts so."""
    return [t for t in tables("m", [DENSE, *records], []) if t["title"].startswith(start)]


def test_a_sweep_has_a_row_a_ratio_and_a_column_a_method():
    records = [
        cell(method, retain, 100 * retain, recover)
        for recover in ("none", "fast")
        for retain in (0.9, 0.7, 0.5)
        for method in ("rap", "palu")
        if (method, retain) != ("palu", 0.9)
    ]
    records[0]["kv_bytes_per_token"] = 750
    plain, fast = titled(records, "Perplexity over the retain ratio")
    assert plain["header"] == ["retain", "rap", "palu"]
    assert plain["rows"] == [
        ["dense", "10.00", "10.00"],
        ["0.5", "50.00", "50.00"],
        ["0.7", "70.00", "70.00"],
        ["0.9", "90.00", ""],
    ]
    assert plain["note"] == "Caches another part of dense than asked: rap 75% at 0.9."
    assert fast["title"].endswith("fast, m")
    assert fast["note"] == ""
    assert titled([r for r in records if r["retain"] != 0.9], "Perplexity over") == []
    assert titled(records, "KL to the dense model over") == []  # it was not measured


def test_divergence_is_swept_where_it_was_measured():
    records = [cell("rap", retain, 100 * retain) for retain in (0.9, 0.7, 0.5)]
    for record in records[:2]:
        record["kl"] = {"value": 1 - record["retain"], "low": 0, "high": 1}
    [table] = titled(records, "KL to the dense model over")
    assert table["rows"] == [["dense", ""], ["0.7", "0.3"], ["0.9", "0.1"]]


def test_what_was_not_measured_has_no_column():
    """A comparison without recall and copying, as `recall_documents=0` leaves it."""
    bare = {"recall": [], "copy_gain": None}
    records = [{**cell("rap", 0.7, 20), **bare}, {**cell("palu", 0.7, 12), **bare}]
    for record in records:
        del record["copy_gain"]
    dense = {k: v for k, v in DENSE.items() if k not in bare}
    [table] = [t for t in tables("m", [dense, *records], []) if t["title"].startswith("At retain")]
    assert not any("recall" in column or "copying" in column for column in table["header"])
    assert any("PPL" in column for column in table["header"])


@pytest.mark.parametrize("recipe", ["", ":paper"])
def test_single_channels_stand_beside_pairs_whatever_recipe_they_follow(recipe):
    records = [
        cell(method, retain, perplexity / retain)
        for retain in (0.7, 0.5)
        for method, perplexity in (
            ("rap", 10.0),
            ("rap:paper", 12.0),
            (f"kvpruner-indexed{recipe}", 24.0),
            (f"kvpruner{recipe}", 120.0),
        )
    ]
    (table,) = titled(records, "Single channels")
    rows = by_method(table)
    assert list(rows) == [f"kvpruner{recipe}", f"kvpruner-indexed{recipe}", "rap:paper", "rap"]
    worst = rows[f"kvpruner{recipe}"]
    assert (worst["retain 0.5"], worst["times rap:paper, 0.5"]) == ("240.00", "10.00")
    assert rows["rap:paper"]["times rap:paper, 0.7"] == "1.00"
    assert titled(records[:3], "Single channels") == []


def test_methods_that_did_not_come_back_have_a_row_a_ratio():
    records = [
        cell("elitekv", 0.7, 60.0),
        cell("elitekv", 0.5, 5e4),
        cell("elitekv", 0.7, 12.0, recover="fast"),
    ]
    (table,) = titled(records, "Methods that")
    assert table["header"] == ["method", "retain", "no recovery", "fast"]
    assert table["rows"] == [["elitekv", "0.5", "50,000", ""], ["elitekv", "0.7", "60.00", "12.00"]]
    assert titled(records[:2], "Methods that") == []


def near(one: dict[str, Any], nats: list[float], kl: float, **more: Any) -> dict[str, Any]:
    """A record with what tells how near it is to dense."""
    figures = {"kl": {"value": kl, "low": kl / 2, "high": 2 * kl}, "kl_p99": 9 * kl}
    agreed = {"top1": {"value": 0.75, "low": 0.7, "high": 0.8}}
    scored = {**one["evaluation"], "window_nats": nats, **more}
    return {**one, **figures, **agreed, "evaluation": scored}


def test_nearness_to_dense_has_intervals_of_pairs():
    hard, easy = 4.0, 1.0
    dense = near(DENSE, [hard, easy], 0.0)
    # Much harder windows for both, and always the same difference: no doubt about the ratio.
    sure = near(cell("rap", 0.5, 10.0 * math.e), [hard + 1, easy + 1], 0.25)
    unsure = near(cell("palu", 0.5, 10.0, "fast"), [hard - 1, easy + 1], 0.25)
    table = closeness("m", 0.5, dense, [sure, unsure, cell("rap", 0.7)])
    rows = by_method(table)
    assert list(rows) == ["dense", "rap, no recovery", "palu, fast"]
    assert rows["rap, no recovery"] == {
        "method": "rap, no recovery",
        "PPL": "27.18",
        "PPL of dense": "2.718",
        "KL": "0.25 (0.125 to 0.5)",
        "KL p99": "2.25",
        "top-1": "75.0% (70.0% to 80.0%)",
    }
    assert rows["palu, fast"]["PPL of dense"] == "1.000 (0.368 to 2.718)"
    assert rows["dense"]["PPL of dense"] == "1.000"


def test_recall_near_dense_has_intervals_of_its_questions():
    def recalled(one: dict[str, Any], *shares: float) -> dict[str, Any]:
        entries = [
            {"distance": 10**n, "accuracy": share, "num_documents": 12, "num_facts": 4}
            for n, share in enumerate(shares, start=3)
        ]
        return {**one, "recall": entries}

    dense = recalled(near(DENSE, [4.0, 1.0], 0.0), 1.0, 0.75)
    rap, palu = near(cell("rap", 0.5), [5.0, 2.0], 0.1), near(cell("palu", 0.5), [5.0, 2.0], 0.1)
    table = closeness("m", 0.5, dense, [recalled(rap, 0.5, 0.0), {**palu, "recall": []}])
    rows = by_method(table)
    # As scipy.stats.binomtest(k, 12).proportion_ci(method="wilson") says for k of 12, 9, 6, 0.
    assert rows["dense"]["recall at 1,000"] == "100% (76% to 100%)"
    assert rows["dense"]["recall at 10,000"] == "75% (47% to 91%)"
    assert rows["rap"]["recall at 1,000"] == "50% (25% to 75%)"
    assert rows["rap"]["recall at 10,000"] == "0% (0% to 24%)"
    assert rows["palu"]["recall at 1,000"] == ""
    assert "in 12 documents" in table["note"]
    assert "Recall" not in closeness("m", 0.5, near(DENSE, [4.0], 0.0), [rap])["note"]


def test_cells_of_an_earlier_release_have_no_intervals():
    old = cell("rap", 0.5, 12.0)
    assert closeness("m", 0.5, DENSE, [old])["rows"] == []
    assert titled([old], "KL to the dense model") == []
    # Beside newer ones they have a ratio alone, as have cells of other windows.
    dense = near(DENSE, [4.0, 1.0], 0.0)
    for other in ({"window": 64}, {"bos": 1}):
        newer = near(cell("palu", 0.5), [5.0, 2.0], 0.1, **other)
        rows = by_method(closeness("m", 0.5, dense, [old, newer]))
        assert (rows["rap"]["PPL of dense"], rows["rap"]["KL"]) == ("1.200", "")
        assert rows["palu"]["PPL of dense"] == "1.000"


@pytest.fixture(scope="module")
def experiment() -> Any:
    """experiments/matched/matched.py, which is no package."""
    return load_script("experiments/matched/matched.py")


def test_the_formula_finds_the_papers_matching_ratio(experiment):
    # Table isoparam: RAP at 0.703 of the parameters beside PaLU at 0.5, in steps of one direction.
    retain, share = experiment.by_formula(sizes_of("Llama-3-8B"), 1, True, 0.703)
    assert retain == pytest.approx(0.5, abs=1 / 128)
    assert share == pytest.approx(0.703, abs=0.002)
    # Both factors of SVD-LLM stay online, and W_q and W_o whole: four fifths at any rank.
    assert experiment.by_formula(sizes_of("Llama-3-8B"), 0, False, 0.703)[1] > 0.8


def test_the_ratio_is_searched_on_counted_models(experiment):
    counts = experiment.Counts.__new__(experiment.Counts)
    asked: list[int] = []

    def share(spec: str, step: int) -> float:
        asked.append(step)
        return 0.5 + step / 250

    counts.share = share
    assert counts.nearest("palu", 0.7) == (0.5, 0.7)
    assert counts.nearest("palu", 0.2) == (0.02, 0.508)
    assert len(set(asked)) < 20


def test_a_ratio_that_does_not_match_is_not_called_one(experiment):
    found = [{"method": "svdllm", "llama": (0.001, 0.8), "bundled": (0.06, 0.7)}]
    (row,) = experiment.solution_table(found, 0.698)["rows"]
    assert row == ["svdllm", "none (nearest 0.001)", "80.0%", "0.06", "70.0%"]


def test_single_channels_without_rap_beside_them_are_compared_with_nothing():
    records = [
        {"method": "kvpruner", "retain": 0.5, "recover": "none", "perplexity": 9.0},
        {"method": "kvpruner-indexed", "retain": 0.5, "recover": "none", "perplexity": 8.0},
    ]
    table = _steelman("m", "none", {"perplexity": 7.0}, records)
    assert table["header"] == ["method", "retain 0.5"]
    assert [len(row) for row in table["rows"]] == [2, 2]
    records.append({**records[0], "method": "rap:merge=1", "perplexity": 6.0})
    table = _steelman("m", "none", {"perplexity": 7.0}, records)
    assert table["header"][-1] == "times rap:merge=1, 0.5"
    assert [row[-1] for row in table["rows"]] == ["1.50", "1.33", "1.00"]
