"""docs/explanation/pruning-vs-quantization.md: its decode times are what the result file says."""

import json

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/cache_times.py")


def test_the_committed_table_is_built_from_the_committed_result():
    """If it is not: python docs/cache_times.py."""
    result = json.loads(SCRIPT.RESULT.read_text(encoding="utf-8"))
    text = (REPOSITORY / SCRIPT.PAGE).read_text(encoding="utf-8")
    assert SCRIPT.table(result) in text


def test_every_entry_that_was_timed_has_a_name():
    """Also one at the end: a context in every column."""
    result = json.loads(SCRIPT.RESULT.read_text(encoding="utf-8"))
    lines = SCRIPT.table(result).splitlines()
    contexts = {row["context"] for row in result["rows"]}
    assert len(lines) == 2 + len(SCRIPT.NAMES)
    assert all(line.count("|") == 3 + len(contexts) for line in lines)
