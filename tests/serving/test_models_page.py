"""docs/models.md says what the table of families says."""

from pathlib import Path

from rap.model.families import FAMILIES
from rap.serving.models_page import models_page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_page_is_up_to_date():
    text = PAGE.read_text("utf-8")
    assert text == models_page(), "run: python -m rap.serving.models_page docs/models.md"
    assert all(f"`{name}`" in text for name in FAMILIES)
