"""Every analysis on a tiny model, and the parts of them whose answer is known beforehand."""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import rap
from cases.command import error_violations, run
from cases.family_cases import CASES as FAMILIES
from cases.models import random_tokens, tiny_model
from rap.calibration.dense_context import DenseContext
from rap.cli import analyze
from rap.methods.dense import dense_layers
from rap.model.errors import RapError, UnsupportedModelError
from rap.model.fingerprint import fingerprint_model
from rap.model.layers import attention_layers, layer_frequencies
from rap.studies.analyses import ANALYSES, expected_loss, kept_pairs, orphans, rope_base
from rap.studies.analyses.study import Study, figure_of, overlap, paper_cut, ranks, spearman


def study_of(model: Any, windows_NT: torch.Tensor, tokens_N: torch.Tensor) -> Study:
    context = DenseContext.open(model, rap.assets.reference_tokenizer())
    context.windows = windows_NT
    return Study(context, tokens_N, 32, 3)


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(tiny_model(), random_tokens(2, 32), random_tokens(1, 99)[0])


@pytest.fixture(scope="module")
def found(study) -> dict[str, dict]:
    """What every analysis measured, as it comes back from a file."""
    return {
        name: json.loads(json.dumps(analysis.measure(study))) for name, analysis in ANALYSES.items()
    }


@pytest.mark.parametrize("name", ANALYSES)
def test_table_and_figure_are_made_of_the_data_alone(found, name, tmp_path):
    table = ANALYSES[name].table(found[name])
    assert table["rows"]
    assert {len(row) for row in table["rows"]} == {len(table["header"])}
    figure = figure_of(ANALYSES[name], found[name])
    axes = figure.axes[0]
    assert axes.get_title() == table["title"]
    assert axes.get_ylabel()
    assert axes.lines or axes.patches
    figure.savefig(tmp_path / "figure.svg")


@pytest.mark.parametrize("name", ["orphans", "share", "loss"])
def test_a_second_run_gives_the_same_digits(study, found, name):
    again = study_of(study.model, study.context.windows, study.tokens_N)
    assert ANALYSES[name].measure(again) == found[name]


def test_pair_damage_is_counted():
    # Of 4 pairs: head 0 keeps pair 0 whole and lone halves of 1 and 2, head 1 two whole pairs.
    kept = torch.tensor([[0, 1, 4, 6], [0, 1, 4, 5]])
    assert orphans.pair_damage([(kept, 4)]) == {"orphans": 2 / 8, "broken": 2 / 5}
    # Channels that never rotate have no partner to lose.
    assert orphans.pair_damage([(torch.tensor([[0, 4, 8, 9]]), 4)])["orphans"] == 0


def test_the_two_ratios_of_the_paper_are_one():
    # Of 1,000 pairs with a kept channel `lone` keep one: the paper's 12.1% and 62.7% of orphans,
    # and 21.5% and 77.1% of broken pairs, say the same.
    for lone, orphaned in ((215, 0.121), (771, 0.627)):
        first = torch.arange(1000)
        kept = torch.cat([first, first[lone:] + 1000])[None]
        damage = orphans.pair_damage([(kept, 1000)])
        assert damage["broken"] == lone / 1000
        assert damage["orphans"] == pytest.approx(orphaned, abs=1e-3)


def test_random_channels_are_orphans_as_often_as_chance_says():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 16, generator=generator).argsort(1)[:, :7].sort(1).values
    # 28,000 channels: a standard error of 0.003.
    measured = orphans.pair_damage([(draws, 8)])["orphans"]
    assert measured == pytest.approx(orphans.chance(7, 16), abs=0.012)


def test_pairs_lose_no_partner_and_channels_do(found):
    for row in found["orphans"]["rows"]:
        assert row["pairs"] == {"orphans": 0, "broken": 0}
    assert found["orphans"]["rows"][-1]["channels"]["orphans"] > 0.1


def test_kept_pairs_count_the_heads_of_the_plan(study, found):
    plan = study.plan(paper_cut(0.5))
    counts = Counter(int(i) for layer in plan.layers for i in layer.frequency_GM.flatten())
    heads = sum(len(layer.frequency_GM) for layer in plan.layers)
    assert found["kept-pairs"]["kept"]["0.5"] == pytest.approx(
        [counts[pair] / heads for pair in range(8)]
    )
    # theta_j = 10,000^(-j / 8)
    assert found["kept-pairs"]["wavelengths"] == pytest.approx(
        [2 * math.pi * 1e4 ** (j / 8) for j in range(8)], rel=1e-6
    )


def test_probe_leaves_the_other_layers_dense(study, found):
    row = found["probe"]["rows"][-1]
    method = paper_cut(row["retain"], budget="uniform")
    small = method.apply(study.model, study.plan(method))
    mixed = tiny_model()
    # The same cut as the dense model sees it: removed pairs and channels are zero in its weights.
    layer, shape = study.plan(method).layers[row["layer"]], attention_layers(mixed)[0].shape
    attention = mixed.model.layers[row["layer"]].self_attn
    keep_k, keep_v = (torch.zeros(2, 16, dtype=torch.bool) for _ in range(2))
    keep_k.scatter_(1, torch.cat([layer.frequency_GM, layer.frequency_GM + 8], 1).long(), True)
    keep_v.scatter_(1, layer.channels_GC.long(), True)
    assert shape.geometry.pairing == "half"
    attention.k_proj.weight.data[~keep_k.flatten()] = 0
    attention.v_proj.weight.data[~keep_v.flatten()] = 0
    assert row["perplexity"] == pytest.approx(study.perplexity(mixed), rel=1e-6)
    assert row["perplexity"] != pytest.approx(study.perplexity(small), rel=1e-4)


def test_only_the_base_changes():
    model = tiny_model()
    same, other = (rope_base.with_base(model, base) for base in (1e4, 1e5))
    ids = random_tokens(1, 20)
    assert torch.equal(same(ids).logits, model(ids).logits)
    assert fingerprint_model(other) == fingerprint_model(model)
    assert not torch.equal(other(ids).logits, model(ids).logits)
    frequencies = layer_frequencies(other, attention_layers(other)[0])
    assert frequencies.tolist() == pytest.approx([1e5 ** (-j / 8) for j in range(8)], rel=1e-6)
    assert model.config.rope_parameters["rope_theta"] == 1e4


def test_channels_that_never_rotate_count_as_a_head_s():
    """By chance a kept channel's partner is one of all the others."""
    case = next(case for case in FAMILIES if case.name == "stablelm")
    part = study_of(case.model(dtype=torch.float32), random_tokens(2, 32), random_tokens(1, 99)[0])
    for row in orphans.measure(part)["rows"]:
        assert 0 <= row["chance"] <= 1


def test_pairs_of_several_frequencies_have_no_one_axis():
    case = next(case for case in FAMILIES if case.name == "gemma3_text")
    mixed = study_of(case.model(dtype=torch.float32), random_tokens(2, 32), random_tokens(1, 99)[0])
    with pytest.raises(UnsupportedModelError, match="rotate at different frequencies"):
        kept_pairs.measure(mixed)


def test_layers_that_never_rotate_have_no_pairs_to_count():
    case = next(case for case in FAMILIES if case.name == "smollm3")
    part = study_of(case.model(dtype=torch.float32), random_tokens(2, 32), random_tokens(1, 99)[0])
    rotating = [pairs for pairs in dense_layers(part.model).frequencies if len(pairs)]
    assert 0 < len(rotating) < len(attention_layers(part.model))
    found = kept_pairs.measure(part)
    assert len(found["wavelengths"]) == len(rotating[0])
    kept = [
        len(layer.frequency_GM[0]) / len(rotating[0])
        for layer in part.plan(paper_cut(0.5)).layers
        if layer.frequency_GM.numel()
    ]
    mean = sum(found["kept"]["0.5"]) / len(rotating[0])
    assert mean == pytest.approx(sum(kept) / len(kept)), "of the heads that have pairs"


def test_a_note_counts_the_windows_that_were_read(study):
    assert study.note.startswith("Perplexity over 3 windows of 32 tokens")
    short = replace(study, tokens_N=study.tokens_N[:70])
    assert short.note.startswith("Perplexity over 2 windows of 32 tokens")


def test_a_model_without_one_base_is_refused():
    model = tiny_model()
    model.config.rope_parameters = {"local": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="no one base"):
        rope_base.with_base(model, 1e5)


def test_ranks_share_the_mean_on_a_tie():
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 0.0])).tolist() == [2.5, 1, 2.5, 0]


@pytest.mark.parametrize(
    ("other", "expected"),
    [([2.0, 4, 8, 16], 1), ([4.0, 3, 2, 1], -1), ([1.0, 3, 2, 4], 0.8), ([5.0, 5, 5, 5], 0)],
)
def test_spearman(other, expected):
    first = torch.tensor([1.0, 2, 3, 4])
    assert float(spearman(first, torch.tensor(other))) == pytest.approx(expected)


def test_overlap_of_the_best():
    first = torch.tensor([[4.0, 3, 2, 1], [4, 3, 2, 1]])
    second = torch.tensor([[4.0, 3, 2, 1], [1, 3, 2, 4]])
    assert overlap(first, second, 2).tolist() == [1, 0.5]


def test_share_says_what_keys_and_values_keep(found):
    rows = {row["share"]: row for row in found["share"]["rows"]}
    assert (rows[0.5]["keys"], rows[0.5]["values"]) == (0.5, 0.5)
    for row in rows.values():
        assert row["keys"] + row["values"] == pytest.approx(1, abs=1 / 8)
    assert rows[0.35]["keys"] < 0.5 < rows[0.65]["keys"]


def test_expected_loss_rises_with_the_cut_and_is_zero_without_one(study, found):
    for budget in ("error", "uniform"):
        rows = [row for row in found["loss"]["rows"] if row["budget"] == budget]
        losses = [row["expected"] for row in rows]
        assert losses == sorted(losses)
        assert losses[0] > 0
    whole = study.plan(rap.Rap(retain=1.0, align=2))
    assert expected_loss.expected(whole, expected_loss.curves(study)) == 0


def test_expected_loss_adds_up_over_layers(study):
    plan = study.plan(rap.Rap(retain=0.5, align=2, budget="uniform", merge=1))
    curves = expected_loss.curves(study)
    alone = [
        replace(plan, layers=(plan.layers[0], None)),
        replace(plan, layers=(None, plan.layers[1])),
    ]
    parts = [expected_loss.expected(one, curves) for one in alone]
    assert expected_loss.expected(plan, curves) == pytest.approx(sum(parts))
    assert all(part > 0 for part in parts)


def test_command_writes_a_result_that_a_report_shows(tmp_path):
    small = ("--windows", 1, "--window", 64, "--max-windows", 1, "--figure", "svg")
    result = run("analyze", "kept-pairs", "bundled", "-o", tmp_path, *small, "--json")
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "analysis-kept-pairs.json").read_text()) == result.json
    model = rap.assets.reference_model()
    assert result.json["fingerprint"] == fingerprint_model(model)
    assert result.json["provenance"]["settings"]["windows"] == 1
    assert (tmp_path / "analysis-kept-pairs.svg").read_text().startswith("<?xml")
    assert list(tmp_path.glob("statistics-*.safetensors"))  # for the next question
    page = run("report", tmp_path)
    assert result.json["table"]["title"] in page.out
    assert "rap analyze kept-pairs bundled" in page.out


def test_all_leaves_out_what_a_model_cannot_be_asked(tmp_path, monkeypatch):
    def fails(study):
        raise RapError("method kvpruner-indexed is not made for norms: use method rap")

    known = ANALYSES["kept-pairs"]
    both = {"orphans": replace(ANALYSES["orphans"], measure=fails), "kept-pairs": known}
    monkeypatch.setattr(analyze, "ANALYSES", both)
    small = ("--windows", 1, "--window", 64, "--max-windows", 1)
    result = run("analyze", "all", "bundled", "-o", tmp_path, *small)
    assert result.code == 0, result.err
    assert "left out orphans: method kvpruner-indexed is not made for norms" in result.err
    assert (tmp_path / "analysis-kept-pairs.json").exists()
    assert not (tmp_path / "analysis-orphans.json").exists()
    alone = run("analyze", "orphans", "bundled", "-o", tmp_path, *small)
    assert (alone.code, "is not made for norms" in alone.err) == (2, True)
    monkeypatch.setattr(analyze, "ANALYSES", {"orphans": both["orphans"]})
    none = run("analyze", "all", "bundled", "-o", tmp_path, *small)
    assert (none.code, "no analysis supports this model" in none.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "unknown analysis 'nothing': use one of orphans"),
        (("probe", "--figure", "gif"), "'gif' figure: use png or svg"),
        (("probe", "no/such/model"), "no/such/model"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path):
    result = run("analyze", *arguments, "-o", tmp_path)
    assert error_violations(result) == []
    assert message in result.err


def test_units_are_compared_in_the_same_layers():
    """Also those with a window beside full attention, of which KVPruner spares them elsewhere."""
    model = tiny_model(
        "cohere2",
        layers=4,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    found = orphans.measure(study_of(model, random_tokens(2, 32), random_tokens(1, 99)[0]))
    assert all(0 < row["channels"]["orphans"] < 1 for row in found["rows"])


@pytest.mark.parametrize("name", ["loss", "probe"])
def test_layers_that_read_the_keys_of_another_are_counted_with_it(name):
    model = next(case for case in FAMILIES if case.name == "gemma4_text").model(dtype=torch.float32)
    windows, tokens = random_tokens(2, 32), random_tokens(1, 99)[0]
    found = ANALYSES[name].measure(study_of(model, windows, tokens))
    assert all(math.isfinite(row["perplexity"]) for row in found["rows"])


def test_layers_that_do_not_rotate_have_no_pairs_to_rank():
    model = next(case for case in FAMILIES if case.name == "smollm3").model(dtype=torch.float32)
    study = study_of(model, random_tokens(2, 32), random_tokens(1, 99)[0])
    rotating = sum(bool(x.shape.geometry.num_pairs) for x in attention_layers(model))
    assert len(ANALYSES["scores"].measure(study)["spearman"]) == rotating < 3
