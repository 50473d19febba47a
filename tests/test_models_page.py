"""docs/models.md says what the table of families says."""

from pathlib import Path

from cases.scripts import load_script
from rap.model.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_page_is_up_to_date():
    text = PAGE.read_text("utf-8")
    page = load_script("docs/models_page.py").models_page()
    assert text == page, "run: python docs/models_page.py"
    assert all(f"`{name}`" in text for name in FAMILIES)


def test_a_norm_is_said_in_short():
    """A norm that is as most are by its kind alone."""
    norms = {
        line.split("|")[4].strip()
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("| `") and line.count("|") == 9
    }
    assert {"-", "RMS", "RMS, over all heads", "RMS, after rotation"} < norms
    assert "LayerNorm, `exact` alone" in norms
