"""One question about a dense model each: numbers, a table, a figure; one file and one row each.

In: a dense model, calibration windows, held-out tokens.
Out: a result file that `rap report` shows.
"""

from . import budgets, expected_loss, kept_pairs, orphans, probe, rope_base, scores, share, starve
from .study import Analysis

ANALYSES: dict[str, Analysis] = {
    module.ANALYSIS.name: module.ANALYSIS
    for module in (
        orphans,
        kept_pairs,
        probe,
        rope_base,
        scores,
        share,
        budgets,
        starve,
        expected_loss,
    )
}
