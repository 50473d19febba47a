"""The paper's qualitative findings against the result files: builds docs/findings.md.

    python docs/findings/page.py

Every figure of the page is read from experiments/: the comparisons' cells, and what analyses,
needles and ablations measured, on the real model and on the bundled one. A verdict is written in
the files beside this one and checked against the figures: if they no longer bear it out, the script
says which to think over again.
"""

from pathlib import Path

from baselines import BASELINES
from defaults import DEFAULTS
from findings import Models, Results, findings_page
from recovered import RECOVERY
from units import UNITS
from widths import WIDTHS

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
REAL = tuple(
    f"smollm2{name}/compare.json"
    for name in (
        "",
        "-sweep",
        "-fit-block",
        "-fit-sweep",
        "-fit-methods",
        "-fit-svdllm",
        "-distil-others",
        "-fit-others",
        "-distil",
        "-defaults",
        "-refit",
        "-search",
    )
)
BUNDLED = tuple(f"compare{name}/compare.json" for name in ("", "-sweep", "-ablations", "-pooled"))
HEAD = """# The paper's findings on a really pretrained model

Each finding is put to two models, neither of which is a Llama-3-8B. The real one counts:
SmolLM2-135M-Instruct (`rap fetch smollm2`; 30 layers, 3 KV heads of 64 channels, RoPE base
100,000, context 8,192). The bundled one (4.6M parameters, 6 layers, 2 KV heads of 64 channels, RoPE
base 500,000, context 2,048; `docs/reference-model.md`) comes second: it is easy to cut, and
misleads where the two differ.

Figures are perplexity, without BOS; the default protocol (32 x 1,024 tokens to calibrate, 8 x 2,048
to evaluate) differs. Real: 8 windows of 2,048 tokens of WikiText-2 test (dense {real}; analyses
read 1 to 4 windows of 1,024), cut only, calibrated on 24 windows of 1,024 tokens of its validation
text. Bundled: the bundled test novels (dense {bundled} over 48 windows of 512 tokens; analyses read
12), calibrated on 64 windows of 512 (analyses 16); "recovered" is the `fast` recovery there: a
refit, then 40 steps of distillation. All are from the tables in `docs/results/`.
Built by `python docs/findings/page.py` from the result files.
"""


def models(experiments: Path) -> Models:
    """What was measured of both, below a folder of experiments."""
    return Models(
        real=Results(experiments, REAL, analyses="smollm2-analyses", timed="smollm2-times/compare"),
        bundled=Results(experiments, BUNDLED),
    )


def page(measured: Models) -> str:
    """The page of all findings."""
    findings = (*UNITS, *WIDTHS, *RECOVERY, *BASELINES)
    return findings_page(HEAD, findings, DEFAULTS, measured)


def main() -> None:
    """Write docs/findings.md."""
    path = REPOSITORY / "docs" / "findings.md"
    path.write_text(page(models(EXPERIMENTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
