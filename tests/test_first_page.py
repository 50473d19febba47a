"""The first page: what it shows is what was measured."""

from pathlib import Path
from types import ModuleType

import pytest

from cases.scripts import load_script

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """docs/first_page.py, which is no package."""
    return load_script("docs/first_page.py")


def test_the_committed_table_is_built_from_the_committed_results(page):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert page.with_table(text, page.Measured()) == text
    assert text.count(page.BEGIN) == 1


def test_a_row_says_what_its_cell_does(page):
    measured = page.Measured()
    measured.cells["rap", 0.7, "none"] |= {"kv_bytes_per_token": 11_520, "perplexity": 38.26}
    measured.scores["rap 0.7"] = (0.25, 0.0125)
    (row,) = [
        line for line in page.table(measured).splitlines() if line.startswith("| **rap** | 5,760")
    ]
    dense = measured.dense["perplexity"]
    assert f"| 5,760 (25%) | nothing | 38.26 ({38.26 / dense - 1:+.0%}) |" in row
    assert row.endswith("| 25.0% +- 1.2% |")


def test_a_page_without_the_place_is_refused(page):
    with pytest.raises(SystemExit, match="has no place"):
        page.with_table("# rap\n", page.Measured())


def test_the_figure_can_be_drawn_again(page, tmp_path):
    page.draw(page.Measured(), tmp_path / "figure.svg")
    committed = (REPOSITORY / page.FIGURE).read_text(encoding="utf-8")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for row in page.ROWS:
        assert row.name.strip("*") in drawn
        assert row.name.strip("*") in committed
