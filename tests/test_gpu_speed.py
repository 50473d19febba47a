"""docs/measurements/decode-speed.md: its table of a GPU is what the result file says."""

import json

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/gpu_speed.py")


def test_the_committed_table_is_built_from_the_committed_result():
    """If it is not: python docs/gpu_speed.py."""
    text = (REPOSITORY / SCRIPT.PAGE).read_text(encoding="utf-8")
    assert SCRIPT.table(REPOSITORY / SCRIPT.RESULT) in text


def test_an_entry_is_the_ratio_of_its_row():
    """Of merged heads at half of the cache, on the longest and largest point."""
    rows = json.loads((REPOSITORY / SCRIPT.RESULT).read_text(encoding="utf-8"))["rows"]
    (one,) = [
        row
        for row in rows
        if (row["model"], row["batch"], row["context"]) == ("rap:merge=2@0.5", 16, 32768)
    ]
    (line,) = [
        line
        for line in SCRIPT.table(REPOSITORY / SCRIPT.RESULT).splitlines()
        if line.startswith("| pairs of heads merged | 50%")
    ]
    assert line.split("|")[-2].strip() == f"{one['ratio']:.2f}x"
