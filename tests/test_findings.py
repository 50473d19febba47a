"""The page of findings says what the committed results say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rap.analysis.findings import Results
from rap.errors import RapError

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    """benchmarks/findings.py, which is no package."""
    path = REPOSITORY / "benchmarks" / "findings.py"
    spec = importlib.util.spec_from_file_location("findings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_built_from_the_committed_results(findings):
    committed = (REPOSITORY / "docs" / "findings.md").read_text(encoding="utf-8")
    assert committed == findings.page(Results(REPOSITORY / "results", findings.FILES))


def test_a_verdict_that_the_figures_contradict_is_refused(findings):
    results = Results(REPOSITORY / "results", findings.FILES)
    cells = dict(results.cells)
    key = ("kvpruner:paper", 0.7, "none")
    results.cells = {**cells, key: {**cells[key], "perplexity": 1.0}}
    with pytest.raises(RapError, match="no longer bear out"):
        findings.page(results)
    del results.cells[key]
    with pytest.raises(RapError, match=r"no cell kvpruner:paper at 0\.7"):
        findings.page(results)
