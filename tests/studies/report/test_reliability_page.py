"""The page of faults says what the committed cases say."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from cases.scripts import load_script

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """docs/reliability/page.py, which is no package."""
    return load_script("docs/reliability/page.py")


def test_the_committed_page_is_built_from_the_committed_cases(builder):
    committed = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert committed == builder.page(json.loads(builder.RESULT.read_text("utf-8")))


def test_every_case_is_counted_and_ended_as_it_may(builder):
    result = json.loads(builder.RESULT.read_text("utf-8"))
    ends = {case["ended"] for case in result["cases"]}
    assert ends <= {"whole", "refused", "finished when repeated", "old or new whole"}
    assert sum(int(row[-1]) for row in result["table"]["rows"]) == len(result["cases"])


def test_a_finding_that_no_case_shows_is_refused(builder):
    result = json.loads(builder.RESULT.read_text("utf-8"))
    result["cases"] = [case for case in result["cases"] if case["kind"] != "killed"]
    program = result["command"].rpartition(" ")[0]
    assert "| killed, not in this run |" in builder.page(result | {"command": f"{program} 0.1"})
    with pytest.raises(ValueError, match=r"no case of .*killed.* was run"):
        builder.page(result | {"command": f"{program} 1"})
