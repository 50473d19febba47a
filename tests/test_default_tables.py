"""README.md and docs/measurements/defaults.md: their tables are what the result files say."""

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/default_tables.py")


@pytest.mark.parametrize("page", [SCRIPT.README, SCRIPT.PAGE])
def test_the_committed_tables_are_built_from_the_committed_results(page):
    """If they are not: python docs/default_tables.py."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for name, table in SCRIPT.made()[page].items():
        begun = text.split(SCRIPT.BEGIN.format(name))[1].split(SCRIPT.END)[0]
        assert begun.strip() == table.strip()


def test_half_of_the_cache_is_half():
    """What the page says of every model that it has a row of."""
    for model in SCRIPT.MODELS:
        dense, pruned = model.cache()
        assert pruned == dense / 2, model.name


def test_a_column_or_row_without_a_result_is_left_out():
    table = {"header": ["model", "a", "b"], "rows": [["x", "", "1"], ["y", "", ""]]}
    lines = SCRIPT.filled(table).splitlines()
    assert lines[0] == "| model | b |"
    assert lines[2:] == ["| x | 1 |"]
