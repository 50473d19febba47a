"""Every experiment says its question and command, and every result file what writes it.

Finished studies lie in experiments/archive: their results record the command as it ran, and their
README.md and `writes` name the folder where they lie today.
"""

import json
import shlex
from pathlib import Path

import pytest

from cases.scripts import load_script
from rap.cli.compare import ARCHIVE, default_sources
from rap.studies.compare.grid import CONFIG, RESULT

REPOSITORY = Path(__file__).parents[1]
AGAIN = load_script("experiments/again.py")
EXPERIMENTS = sorted(
    path
    for path in (*(REPOSITORY / "experiments").iterdir(), *(REPOSITORY / ARCHIVE).iterdir())
    if path.is_dir() and path != REPOSITORY / ARCHIVE
)
RESULTS = [
    path.relative_to(REPOSITORY)
    for folder in default_sources(REPOSITORY)
    for path in sorted(folder.glob("**/*.json"))
    if path.name not in (CONFIG, RESULT)  # cells of a comparison, by which it can be continued
]


def writes(command: str, path: Path) -> bool:
    """Whether a command's own folder or output is where the result file lies, or lay once."""
    program, script, *rest = words = shlex.split(AGAIN.in_place(command))
    for flag in {"-o", "--output"} & set(words):
        output = Path(words[words.index(flag) + 1])
        if output == path or (program == "rap" and output == path.parent):
            return True
        # The report of a checkpoint too large to keep lies beside where that was.
        made = words[:2] in (["rap", "compress"], ["rap", "recover"])
        if made and output == path.parent / "out":
            return True
    if program != "python" or not (REPOSITORY / script).is_file() or "--output" in rest:
        return False
    if Path(script).parent == Path("benchmarks"):
        return path.parent == Path("benchmarks/results") and path.name.startswith(Path(script).stem)
    return path.is_relative_to(Path(script).parent)


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_has_three_lines_and_a_result(folder):
    lines = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
    assert [line.partition(":")[0] for line in lines] == ["Question", "Command", "Result"]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    assert results
    # One command may write several files, and one script take several arguments.
    assert any(AGAIN.in_place(result["command"]) in lines[1] for result in results)


@pytest.mark.parametrize("path", RESULTS, ids=str)
def test_a_result_file_names_the_command_that_writes_it(path):
    result = json.loads((REPOSITORY / path).read_text(encoding="utf-8"))
    assert writes(result["command"], path), result["command"]
    recorded = result.get("provenance", {}).get("commit")
    assert bool(recorded) != bool(result.get("file_committed_in"))


def test_no_two_comparisons_write_the_same_file():
    found = [
        json.loads((REPOSITORY / path).read_text(encoding="utf-8"))["command"]
        for path in RESULTS
        if path.name == "compare.json"
    ]
    assert len(set(found)) == len(found) > 3


@pytest.mark.parametrize(
    ("command", "path", "right"),
    [
        ("rap compare -o experiments/compare", "experiments/compare/compare.json", True),
        ("rap compare -o runs/compare", "experiments/compare/compare.json", False),
        ("python experiments/cost/cost.py", "experiments/cost/cost.json", True),
        ("python experiments/cost/cost.py", "experiments/needle/needle.json", False),
        ("python benchmarks/cost.py", "experiments/cost/cost.json", False),
        (
            "rap compare -o experiments/smollm2-fit",
            "experiments/archive/smollm2-fit/compare.json",
            True,
        ),
        ("rap compare -o experiments/cost", "experiments/archive/cost/compare.json", False),
        ("python benchmarks/rope.py --device cpu", "benchmarks/results/rope-cpu.json", True),
        ("python benchmarks/rope.py", "benchmarks/results/decode-cpu.json", False),
        ("python benchmarks/rope.py --output x.json", "benchmarks/results/rope-cpu.json", False),
    ],
)
def test_a_command_that_writes_another_file_is_seen(command, path, right):
    assert writes(command, Path(path)) is right
