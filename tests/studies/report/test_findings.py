"""The page of findings says what the committed results say."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases.scripts import load_script
from rap.model.errors import RapError

load_script("docs/findings/page.py")
FINDINGS = sys.modules["findings"]
CONFIRMED, CONTRADICTED, OPEN, Answer, Default, Finding, Models, Results, findings_page = (
    FINDINGS.CONFIRMED,
    FINDINGS.CONTRADICTED,
    FINDINGS.OPEN,
    FINDINGS.Answer,
    FINDINGS.Default,
    FINDINGS.Finding,
    FINDINGS.Models,
    FINDINGS.Results,
    FINDINGS.findings_page,
)

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    """docs/findings/page.py, which is no package."""
    return load_script("docs/findings/page.py")


def test_the_committed_page_is_built_from_the_committed_results(findings):
    committed = (REPOSITORY / findings.PAGE).read_text(encoding="utf-8")
    assert committed == findings.page(findings.models(findings.EXPERIMENTS))


@pytest.mark.parametrize("model", ["real", "bundled"])
def test_a_verdict_that_the_figures_contradict_is_refused(findings, model):
    models = findings.models(findings.EXPERIMENTS)
    results = getattr(models, model)
    cells = dict(results.cells)
    key = ("kvpruner:paper", 0.7, "none")
    results.cells = {**cells, key: {**cells[key], "perplexity": 1.0}}
    with pytest.raises(RapError, match="no longer support the verdict"):
        findings.page(models)


def test_a_cell_that_is_not_there_is_refused(findings):
    models = findings.models(findings.EXPERIMENTS)
    del models.bundled.cells["kvpruner:paper", 0.7, "none"]
    with pytest.raises(RapError, match=r"no cell kvpruner:paper at 0\.7"):
        findings.page(models)


@pytest.mark.parametrize(
    ("real", "said", "disagree"),
    [
        (CONFIRMED, "| SmolLM2 | 2 and 4 | Confirmed |", False),
        (CONTRADICTED, "| SmolLM2 | 2 and 4 | Contradicted |", True),
        (OPEN, "| SmolLM2 | 2 and 4 | Open |", False),
        (None, "| SmolLM2 | not measured | Not measured |", False),
    ],
)
def test_the_real_model_answers_first_and_disagreement_is_said(tmp_path, real, said, disagree):
    file = tmp_path / "cells.json"
    cells = [
        {"method": "dense", "retain": 1, "recover": "none", "perplexity": 2.0},
        {"method": "rap", "retain": 0.7, "recover": "none", "perplexity": 4.0},
    ]
    file.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    results = Results(tmp_path, [file.name])

    def answer(verdict: str) -> Answer:
        return Answer(
            verdict=verdict,
            figures=lambda r: f"{r.dense['perplexity']:.0f} and {r.ppl('rap:merge=1'):.0f}.",
            holds=lambda r: r.loss("rap:merge=1") == 1,
            why="So it is.",
        )

    finding = Finding(
        title="Cuts cost",
        paper="twice.",
        real=answer(real) if real else "not measured.",
        bundled=answer(CONFIRMED),
        follows="cut less.",
    )
    default = Default(
        title="`retain`", bundled=lambda r: f"{r.loss('rap:merge=1'):.0%}.", real="not measured."
    )
    page = findings_page("# Title\n", [finding], [default], Models(results, results))
    section, closing = page.split("## Differences between the models")
    assert f"| Paper | twice | |\n{said}\n| Bundled test model | 2 and 4 | Confirmed |\n" in section
    assert ("* **SmolLM2**: So it is.\n" in section) is (real is not None)
    assert "* **Bundled test model**: So it is." in section
    assert ("The models differ: cut less." in section) is disagree
    assert ("| Cuts cost | Contradicted | Confirmed | cut less. |" in closing) is disagree
    assert "| `retain` | 100% | not measured | Not measured |" in closing
    tally = page.partition("| --- | ---: | ---: |\n")[2].partition("\n\n")[0].splitlines()
    counts = [[int(cell) for cell in row.split("|")[2:4]] for row in tally]
    assert [sum(column) for column in zip(*counts, strict=True)] == [1, 1]


def _worst_first_layer(result: dict[str, Any]) -> None:
    for row in result["data"]["rows"]:
        if row["layer"] == 0:
            row["perplexity"] = 99.0


def _sensitive_to_the_base(result: dict[str, Any]) -> None:
    result["data"]["rows"][0]["channels"] *= 2


def _unlike_scores(result: dict[str, Any]) -> None:
    result["data"]["spearman"] = [[0.67]]


def _every_needle(result: dict[str, Any]) -> None:
    for cell in result["needle"]["palu at 0.5"]:
        cell["accuracy"] = 1.0


def _low_rank_ahead(result: dict[str, Any]) -> None:
    result["cells"][2]["perplexity"] = 42.2


def _rank_of_no_weight(result: dict[str, Any]) -> None:
    for row in result["table"]["rows"]:
        row[1] = "50.00"


def _lone_channels_alone(result: dict[str, Any]) -> None:
    result["data"]["rows"][-1]["channels"]["orphans"] = 0.99


def _fast_pairs(result: dict[str, Any]) -> None:
    result["data"]["kept"]["0.5"].reverse()


def _adaptive_ahead(result: dict[str, Any]) -> None:
    result["data"]["rows"][-1]["perplexity"]["K as wide as V"] = 20.0


def _values_ahead(result: dict[str, Any]) -> None:
    result["data"]["rows"][0]["perplexity"] = 100.0


@pytest.mark.parametrize(
    ("name", "change", "title"),
    [
        ("smollm2-analyses/analysis-orphans", _lone_channels_alone, "Channel pruning orphans"),
        ("smollm2-analyses/analysis-kept-pairs", _fast_pairs, "Fisher keeps the slow pairs"),
        ("smollm2-analyses/analysis-allocation", _adaptive_ahead, "Fisher scores and adaptive"),
        ("smollm2-analyses/analysis-share", _values_ahead, "K and V need equal budgets"),
        ("analyses/analysis-probe", _worst_first_layer, "Early and late layers"),
        ("analyses/analysis-rope-base", _sensitive_to_the_base, "The base frequency"),
        ("analyses/analysis-scores", _unlike_scores, "The two Fisher scores"),
        ("needle/needle", _every_needle, "Finding a needle"),
        ("matched/matched", _low_rank_ahead, "At equal attention compute"),
        ("recovery-ablations/ablation-rank", _rank_of_no_weight, "Neither the LoRA rank"),
    ],
)
def test_every_result_file_can_overturn_its_verdict(
    findings: ModuleType,
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, Any]], None],
    title: str,
) -> None:
    folder = tmp_path / "experiments"
    shutil.copytree(findings.EXPERIMENTS, folder, ignore=shutil.ignore_patterns("ladder"))
    path = folder / f"{name}.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    change(result)
    path.write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(RapError, match=f"no longer support the verdict on .{title}"):
        findings.page(findings.models(folder))
    path.unlink()
    with pytest.raises(RapError, match=rf"there is no .*{name}\.json: run the experiment"):
        findings.page(findings.models(folder))
