"""Builds docs/reliability.md from the cases that were run and from what they found.

    python docs/reliability/page.py

Counts are those of experiments/reliability/reliability.json; what was found is told by hand below,
each with the test that would see it again.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
RESULT = REPOSITORY / "experiments" / "reliability" / "reliability.json"
HEAD = """# Reliability

What was done to commands, and how they ended. Each case is a command in a process of its own, on a
tiny random model: it is killed, finds its disk full or a file closed to it, or reads what was cut
short, changed or never meant. Three ends are right. *Whole*: exit code 0, and what was written
loads with the weights that it describes. *Refused*: exit code 2, one line that says why, and every
file as it was. *Finished when repeated*: after a kill inputs are as they were, an output is whole
or not there, and the same command then leaves what an undisturbed one leaves, and nothing else.

`make test-faults` runs all of them and builds this page; `make test` runs a part. Kills come
before a process' n-th change of the file system (n drawn over all of them) and at random times;
disks are file systems of a given size, mounted for one process, and files that may not grow
(`RLIMIT_FSIZE`); permissions are taken from a process that gave up what lets root ignore them.
Built by `python docs/reliability/page.py`.
"""
TAIL = """
## What is not covered

* A dense checkpoint has no digest: a changed bit among its weights, or a config that is changed
  into another sensible one, is taken as it is. Pruned checkpoints are held against the fingerprint
  of their weights, plans and statistics against a digest of all they say.
* Power cuts: nothing forces a disk to write (`fsync`) before a file takes its place.
* Distillation killed at any point is in `tests/recovery/`, as are its full disks; GPU memory and
  networks are not here.
"""


class Found(NamedTuple):
    """A defect: what happened, what happens now, and the fault that showed it."""

    fault: str
    was: str
    now: str


FOUND = (
    Found(
        "damaged file",
        "configs and tokenizers of the wrong kind (`null`, a list, a missing entry) ended in "
        "tracebacks of three classes",
        "whatever class a library raises over a user's file is one line "
        "(`checkpoint.load.reading`)",
    ),
    Found(
        "damaged file",
        "`--stream` copied a generation config that nothing can load into a checkpoint that then "
        "did not load either",
        "refused before anything is written",
    ),
    Found(
        "damaged file",
        "a type that safetensors does not know, an index of endless brackets, and a GGUF file "
        "whose header and tensors disagree ended in tracebacks",
        "one line that names the file, and says to download it again",
    ),
    Found(
        "full disk",
        "`rap export gguf` said `262144 requested and 197152 written`, in the words of numpy",
        "the line of every other full disk",
    ),
    Found(
        "odd config",
        "numbers of heads, layers or channels that make no model ended in tracebacks from inside "
        "transformers",
        "one line, also in `inspect` and `--dry-run`",
    ),
    Found(
        "odd config",
        "a checkpoint with fewer tensors than its config asks for was filled up with random "
        "numbers, silently",
        "refused: the checkpoint lacks them",
    ),
    Found(
        "odd config",
        "`--stream` wrote weights of other shapes than the config's into a checkpoint that "
        "nothing could load",
        "refused before anything is written",
    ),
    Found(
        "odd config",
        "a RoPE base or a context of zero or less was taken",
        "refused, with the value",
    ),
    Found(
        "odd config",
        "100,000 layers in the config of a checkpoint with two were built one by one, for minutes "
        "and in gigabytes, before the first was found to lack its weights",
        "refused at once: the files have fewer tensors than that",
    ),
    Found(
        "odd config",
        "a fingerprint that is a number ended in a traceback, from the message that was to refuse "
        "it",
        "the line of weights that are not those of the config",
    ),
    Found(
        "changed bits",
        "4 of 40 changed bits in the first 600 bytes of a plan, and any in the numbers of plans "
        "and statistics, went unseen",
        "both carry a SHA-256 of all they say; files of earlier releases have none and are read "
        "as before",
    ),
    Found(
        "no file may grow",
        "safetensors and tokenizers report a full disk in classes of their own: a traceback "
        "outside of recovery",
        "one line with the folder and the room that is left, wherever a file or folder is written",
    ),
    Found(
        "no file may grow",
        "an output that failed left the folders behind that were made for it",
        "they go with it, unless something came into them",
    ),
    Found(
        "odd text",
        "half a character, 5,000 digits or endless brackets in a .jsonl ended in tracebacks",
        "one line with the file and the line in it",
    ),
    Found(
        "killed",
        "a killed `rap plan` or `rap export gguf` left its hidden half file beside the output for"
        " ever",
        "the next run removes it",
    ),
    Found(
        "damaged work",
        "a damaged layer or record of a killed recovery ended in a traceback when the command was"
        " repeated",
        "one line that names the file to remove",
    ),
)


def page(result: dict[str, Any]) -> str:
    """The page of one result; ValueError if it has no case of a fault that a finding names."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    commands: dict[str, set[str]] = defaultdict(set)
    for case in result["cases"]:
        kinds[case["kind"]][case["ended"]] += 1
        commands[case["kind"]].add(case["command"])
    share = float(result["command"].rpartition(" ")[2])
    missing = {found.fault for found in FOUND} - kinds.keys()
    if missing and share == 1:
        raise ValueError(f"no case of {', '.join(sorted(missing))} was run: run all of them")
    made, total = result["provenance"], len(result["cases"])
    lines = [
        HEAD,
        f"## {total:,} cases\n",
        *(
            [f"This run took a share of {share:g} of all faults, the same in every run.\n"]
            * (share < 1)
        ),
        f"rap {made['rap']}, commit {made['commit']}, Python {made['python']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(made["packages"].items()))
        + f"; {made['device']}, {made['time'][:10]}. Command: `{result['command']}`\n",
        "| fault | cases | ended | commands |",
        "|---|---|---|---|",
    ]
    for kind in sorted(kinds):
        ended = ", ".join(f"{count} {how}" for how, count in sorted(kinds[kind].items()))
        told = ", ".join(f"`{command}`" for command in sorted(commands[kind]))
        lines.append(f"| {kind} | {sum(kinds[kind].values())} | {ended} | {told} |")
    lines += [
        "\n## What they found\n",
        'Each was mended. "Not in this run" is a fault whose cases are outside of the share.\n',
        "| fault | what happened | what happens now |",
        "|---|---|---|",
        *(
            f"| {found.fault}{', not in this run' * (found.fault in missing)} | {found.was} "
            f"| {found.now} |"
            for found in FOUND
        ),
    ]
    return "\n".join(lines) + "\n" + TAIL


def main() -> None:
    """Write docs/reliability.md."""
    text = page(json.loads(RESULT.read_text("utf-8")))
    (REPOSITORY / "docs" / "reliability.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
