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
