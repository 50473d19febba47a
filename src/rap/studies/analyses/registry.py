"""Every analysis by its name: one file and one row each."""

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
