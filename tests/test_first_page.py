"""The table of methods and the figure of README.md show what was measured."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from cases.scripts import load_script

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """docs/first_page.py, which is no package."""
    return load_script("docs/first_page.py")


@pytest.fixture
def experiments(page, tmp_path) -> Path:
    """A copy of the results that the page reads, with results of merged heads."""
    for name in (*page.COMPARED, page.WHOLE):
        (tmp_path / name).mkdir()
        for file in (REPOSITORY / "experiments" / name).glob("*.json"):
            shutil.copy(file, tmp_path / name)
    (tmp_path / page.SCORED).parent.mkdir()
    shutil.copy(REPOSITORY / "experiments" / page.SCORED, tmp_path / page.SCORED)
    merged = tmp_path / page.MERGED[0]
    merged.mkdir()
    result = json.loads((tmp_path / "smollm2-fit-block" / "compare.json").read_text("utf-8"))
    for cell in result["cells"]:
        if cell["method"] == "rap":
            cell |= {"method": "rap:merge=auto:profile=stock", "perplexity": 22.93}
        else:  # the dense model, and whatever is no merged model, is that of the comparisons
            cell["perplexity"] = 1.0
    result["provenance"]["settings"]["num_windows"] = 32
    (merged / "compare.json").write_text(json.dumps(result), encoding="utf-8")
    return tmp_path


def test_the_committed_table_is_built_from_the_committed_results(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_table(text, page.Measured()) == text
    assert text.count(page.BEGIN) == 1


def test_a_row_says_what_its_cell_does(page):
    measured = page.Measured()
    measured.cells["rap:merge=1", 0.7, "fit"] |= {"kv_bytes_per_token": 11_520, "perplexity": 38.26}
    (row,) = [
        line
        for line in page.table(measured).splitlines()
        if line.startswith("| **`rap`**, separate heads (`rap:merge=1`) | 5")
    ]
    dense = measured.dense["perplexity"]
    assert f"| 5,760 (25%) | none | 38.26 ({38.26 / dense - 1:+.0%}) |" in row
    kl = measured.cells["rap:merge=1", 0.7, "fit"]["kl"]["value"]
    assert row.endswith(f"| {kl:.2f} |")


def test_results_of_merged_heads_are_shown_once_there_are_some(page, experiments):
    merged = "**`rap`, merged heads**, plain checkpoint"
    found = page.Measured(experiments)
    rows = [line for line in page.table(found).splitlines() if line.startswith(f"| {merged}")]
    assert [row.split("|")[4].strip() for row in rows] == ["22.93 (+20%)"] * 2
    assert found.dense["perplexity"] == page.Measured().dense["perplexity"]
    assert "* Merged heads: Calibrated on 32 samples" in page.table(found)
    for name in page.MERGED:
        shutil.rmtree(experiments / name, ignore_errors=True)
    assert "erged" not in page.table(page.Measured(experiments))


def test_scores_of_merged_heads_are_found_beside_their_comparison(page, experiments):
    key = ("rap:merge=auto:profile=stock", 0.5, "fit")
    scores = {"rows": [{"name": f"{key[0]} 0.5 fit", "mean": 0.4, "mean_stderr": 0.01}]}
    (experiments / page.MERGED[0] / "zero-shot.json").write_text(
        json.dumps(scores), encoding="utf-8"
    )
    found = page.Measured(experiments).score(*key)
    assert found == "40.0%&nbsp;&plusmn;&nbsp;1.0%"


def test_the_default_has_a_row_of_its_own_once_it_is_measured(page, experiments):
    """A run that is spelled `rap` is of separate heads, unless its record says that it merges."""
    assert "| **`rap`** |" not in page.table(page.Measured(experiments))
    file = experiments / page.MERGED[0] / "compare.json"
    result = json.loads(file.read_text("utf-8"))
    for cell in result["cells"]:
        if "merge=" in cell["method"]:
            cell |= {"method": "rap", "settings": {**cell["settings"], "merge": "auto"}}
    file.write_text(json.dumps(result), encoding="utf-8")
    table = page.table(page.Measured(experiments))
    found = [line.split("|")[4].strip() for line in table.splitlines() if "| **`rap`** |" in line]
    assert found == ["22.93 (+20%)"] * 2
    assert table.count("`rap:merge=1`") == 2


def test_a_page_without_the_place_is_refused(page):
    with pytest.raises(SystemExit, match="has no place"):
        page.with_table("# rap\n", page.Measured())


def test_the_figure_can_be_drawn_again(page, tmp_path, experiments):
    page.draw(page.Measured(), tmp_path / "figure.svg")
    committed = (REPOSITORY / page.FIGURE).read_text(encoding="utf-8")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for label in ("RAP as published", "PaLU", "rap, separate heads", "no recovery", "recovered"):
        for text in (drawn, committed):
            assert text.count(f">{label}<") == 1, label
    for text in (drawn, committed):
        assert text.count("stroke-dasharray") > 3  # a curve without recovery per method
        for tick in ("1,000%", "10,000%", "25%"):
            assert text.count(f">{tick}<") == 1, tick
    page.draw(page.Measured(experiments), tmp_path / "merged.svg")
    merged = (tmp_path / "merged.svg").read_text("utf-8")
    assert merged.count(">rap, merged heads, plain checkpoint<") == 1


def test_figures_follow_the_page_light_and_dark(page, tmp_path):
    page.draw(page.Measured(), tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in drawn
    assert "#0000" not in drawn
    assert drawn.count("--page:") == 2


def test_a_drawing_in_a_page_has_the_palette_of_the_page(page, tmp_path):
    page.draw(page.Measured(), tmp_path / "figure.svg")
    inside = page.themed.embedded((tmp_path / "figure.svg").read_text(encoding="utf-8"))
    assert inside.startswith("<svg")
    assert "var(--one)" in inside
    assert "prefers-color-scheme" not in inside
    assert "fill: var(--page)" not in inside
    with pytest.raises(ValueError, match="write it again"):
        page.themed.embedded("<svg></svg>")


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/**/*.svg"))
)
def test_ids_of_a_drawing_are_its_own(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids)) > 10
    assert {one for one in ids if not one.startswith(f"{Path(name).stem}-")} == set()
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)


def test_the_site_has_the_colors_of_drawings(page):
    style = (REPOSITORY / "docs" / "site" / "static" / "site.css").read_text(encoding="utf-8")
    for palette, count in ((page.themed.LIGHT, 1), (page.themed.DARK, 2)):
        for name, color in palette.items():
            assert style.count(f"--{name}: {color};") == count, name


def test_pages_show_the_drawings_that_are_made():
    figures = load_script("docs/figures.py")
    folder = REPOSITORY / "docs" / "explanation"
    shown = [
        name
        for page in folder.glob("*.md")
        for name in re.findall(r"^!\[.+\]\((\w+)\.svg\)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(figures.DRAWINGS)


def test_sketches_of_the_explanation_are_those_of_today(tmp_path, monkeypatch):
    figures = load_script("docs/figures.py")
    monkeypatch.setattr(figures, "DRAWINGS", figures.sketches.SKETCHES)
    figures.main(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == len(figures.sketches.SKETCHES) > 5
    for path in drawn:
        committed = (REPOSITORY / "docs" / "explanation" / path.name).read_text("utf-8")
        assert _texts(path.read_text("utf-8")) == _texts(committed), path.name
    assert {"KV head 2", "merged head", "slot 4"} <= {
        *_texts((tmp_path / "merging.svg").read_text())
    }


def _texts(svg):
    return re.findall(r">([^<>]*\w[^<>]*)</text>", svg)
