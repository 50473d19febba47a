"""The paper's qualitative findings against the result files: builds docs/findings.md.

    python docs/findings/page.py

Every figure of the page is read from experiments/: the comparisons' cells, and what analyses,
needles and ablations measured. A verdict is written here and checked against the figures: if they
no longer bear it out, the script says which to think over again.
"""

from pathlib import Path

from analyses import ANALYSED
from comparisons import COMPARED

from rap.studies.report.findings import Results, findings_page

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
FILES = tuple(f"{name}/compare.json" for name in ("compare", "compare-sweep", "compare-ablations"))
HEAD = """# The paper's findings on the bundled model

The bundled model (4.6M parameters, 2 KV heads of 64 channels, RoPE base 500,000;
`docs/reference-model.md`) is no Llama-3-8B, so a finding that fails here may hold there; each entry
says what differs. Figures are perplexity on the bundled test novels (dense {dense} over 48 windows;
analyses read 12), from the tables in `docs/results/`; "recovered" is the `fast` recovery: a
refit, then 40 steps of distillation.
Built by `python docs/findings/page.py` from the result files.
"""


def page(results: Results) -> str:
    """The page of all findings."""
    return findings_page(HEAD, COMPARED + ANALYSED, results)


def main() -> None:
    """Write docs/findings.md."""
    path = REPOSITORY / "docs" / "findings.md"
    path.write_text(page(Results(EXPERIMENTS, FILES)), encoding="utf-8")


if __name__ == "__main__":
    main()
