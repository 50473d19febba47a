"""The page of findings says what the committed results say."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rap.model.errors import RapError
from rap.studies.report.findings import Results

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    """docs/findings/page.py, which is no package."""
    path = REPOSITORY / "docs" / "findings" / "page.py"
    spec = importlib.util.spec_from_file_location("findings_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_built_from_the_committed_results(findings):
    committed = (REPOSITORY / "docs" / "findings.md").read_text(encoding="utf-8")
    assert committed == findings.page(Results(findings.EXPERIMENTS, findings.FILES))


def test_a_verdict_that_the_figures_contradict_is_refused(findings):
    results = Results(findings.EXPERIMENTS, findings.FILES)
    cells = dict(results.cells)
    key = ("kvpruner:paper", 0.7, "none")
    results.cells = {**cells, key: {**cells[key], "perplexity": 1.0}}
    with pytest.raises(RapError, match="no longer bear out"):
        findings.page(results)
    del results.cells[key]
    with pytest.raises(RapError, match=r"no cell kvpruner:paper at 0\.7"):
        findings.page(results)


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


@pytest.mark.parametrize(
    ("name", "change", "title"),
    [
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
    with pytest.raises(RapError, match=f"no longer bear out .{title}"):
        findings.page(Results(folder, findings.FILES))
    path.unlink()
    with pytest.raises(RapError, match=rf"there is no .*{name}\.json: run the experiment"):
        findings.page(Results(folder, findings.FILES))
