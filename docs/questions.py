"""The index of experiments/README.md: every experiment by the question that it answers.

    python docs/questions.py

A question is the first line of an experiment's README.md. The pages that show an experiment are
those that link to its runs (`sources.link`), else the page of tables of `rap report`, else the log.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from sources import REPOSITORY, anchor, linked, put

from rap.studies.report.page import read_topics
from rap.studies.report.report import markdown_table

README, DOCS = REPOSITORY / "experiments" / "README.md", REPOSITORY / "docs"
BEGIN, END = "<!-- measured: python docs/questions.py -->\n", "<!-- end of what is measured -->\n"
ARCHIVE, LOG = "archive", "log.md"
QUESTION = "Question: "
RECORDS = ("results", LOG)  # in docs: they show every experiment
# Names or patterns of experiments; archived studies have a table of their own.
GROUPS: dict[str, tuple[str, ...]] = {
    "What does each method lose?": (
        *("smollm2", "smollm2-sweep", "smollm2-quarter", "smollm2-starkv", "smollm2-whole-test"),
        *("compare", "compare-sweep", "quality", "gemma3-methods"),
    ),
    "How much does recovery regain?": (
        *("smollm2-fit-block", "smollm2-fit-sweep", "smollm2-fit-methods", "smollm2-fit-svdllm"),
        *("smollm2-fit-others", "smollm2-distil*", "smollm2-refit", "ladder"),
        *("recovery-ablations", "smollm2-*-h200", "smollm2-others-short-fits", "smollm2-fits-*"),
        "gemma3-fit-methods",
    ),
    "What do the defaults keep?": (
        *("smollm2-default", "smollm2-default-*", "recovered-forms"),
        *("gemma3-default*", "gemma3-whole-test", "gemma3-zero-shot", "gemma3-needles"),
    ),
    "What do merged heads keep?": (
        *("smollm2-merged*", "smollm2-plain-reach*", "merged-bundled", "joint-latent"),
    ),
    "What remains on other data and tasks?": (
        *("smollm2-texts*", "smollm2-fit-texts", "smollm2-fit-mixed", "smollm2-fit-general"),
        *("smollm2-fit-shrinkage", "smollm2-zero-shot", "smollm2-recall", "smollm2-recall-fit"),
        "smollm2-facts",
    ),
    "What remains in long contexts?": (
        "smollm2-ruler*",
        "smollm2-needle-layers",
        "smollm2-wide-layers*",
        "needle",
    ),
    "Does it combine with quantization and eviction?": (
        *("smollm2-pareto", "smollm2-presses", "smollm2-answers", "composition", "width-bits"),
    ),
    "What does it cost, and how fast is it?": (
        *("smollm2-times", "smollm2-sweep-times", "cost", "merged-cost", "scale"),
    ),
    "Is it exact and reliable?": ("gguf-fidelity", "qk-norm", "reliability"),
    "Which parts of the method matter?": (
        *("smollm2-analyses", "smollm2-defaults", "smollm2-search", "analyses", "matched"),
        *("smollm2-budgets*", "gemma3-budgets*"),
        *("compare-ablations", "compare-pooled", "gemma3-qk-norm*", "gemma3-windows*"),
    ),
}


def experiments(folder: Path = README.parent) -> list[Path]:
    """The folders of experiments, without finished studies."""
    return sorted(path.parent for path in folder.glob("*/README.md"))


def groups_of(name: str) -> list[str]:
    """The groups whose patterns name an experiment: one, or the index is incomplete."""
    return [group for group, ones in GROUPS.items() if any(fnmatch(name, one) for one in ones)]


def question(folder: Path) -> str:
    """The question of an experiment."""
    first = (folder / "README.md").read_text(encoding="utf-8").splitlines()[0]
    if not first.startswith(QUESTION):
        raise SystemExit(f"{folder}/README.md does not begin with {QUESTION!r}")
    return first.removeprefix(QUESTION).replace("|", r"\|")


def index() -> str:
    """A table for each group, then the finished studies."""
    pages = dict(_pages())
    tables = []
    for group in GROUPS:
        folders = [path for path in experiments() if group in groups_of(path.name)]
        rows = [[question(path), _link(path), _shown(path, pages)] for path in folders]
        tables += [f"### {group}", _table(["question", "experiment", "shown in"], rows)]
    archived = experiments(README.parent / ARCHIVE)
    rows = [[question(path), _link(path)] for path in archived]
    tables += [
        "### Finished studies",
        f"Their verdicts are in the [log](../docs/{LOG}), their tables on [a page apart]"
        f"(../docs/results/{ARCHIVE}.md).",
        _table(["question", "experiment"], rows),
    ]
    return "\n\n".join(tables)


def _table(header: list[str], rows: list[list[str]]) -> str:
    return markdown_table({"header": header, "rows": rows}).replace("---:", "---")


def _link(folder: Path) -> str:
    return f"[{folder.name}]({folder.relative_to(README.parent).as_posix()}/README.md)"


def _pages() -> Iterator[tuple[str, set[str]]]:
    """Every page of the documentation that links to runs, with their anchors."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path.relative_to(DOCS).parts[0] not in RECORDS and (found := linked(text)):
            title = next(line for line in text.splitlines() if line.startswith("# "))
            target = path.relative_to(REPOSITORY).as_posix()
            yield f"[{title.removeprefix('# ')}](../{target})", found


def _shown(folder: Path, pages: dict[str, set[str]]) -> str:
    """Links to the pages that show an experiment."""
    named = [page for page, anchors in pages.items() if anchor(folder.name) in anchors]
    if named:
        return ", ".join(named)
    files = sorted(folder.glob("*.json"))
    tables = [
        f"[{topic.title}](../docs/results/{topic.name}.md)"
        for topic in read_topics(DOCS / "results")
        if any(
            "table" in file.read_text("utf-8") and topic.place(file) is not None for file in files
        )
    ]
    return ", ".join(tables) or f"[log](../docs/{LOG})"


def with_index(text: str) -> str:
    """experiments/README.md with the index as it is."""
    return put(text, BEGIN, END, f"{index()}\n", README)


def main() -> None:
    """Write the index."""
    lost = [path.name for path in experiments() if len(groups_of(path.name)) != 1]
    if lost:
        raise SystemExit(f"experiments in no group or in several: {', '.join(lost)}; edit GROUPS")
    README.write_text(with_index(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
