"""docs/models.md says what the table of families says."""

from pathlib import Path

from rap.documentation import models_page
from rap.specs import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_page_is_up_to_date():
    text = PAGE.read_text("utf-8")
    assert text == models_page(), "run: python -m rap.documentation docs/models.md"
    assert all(f"`{name}`" in text for name in FAMILIES)
