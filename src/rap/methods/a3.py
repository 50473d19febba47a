"""A3: pairs by the energy they add to the logits, values by the best subspace.

The nearest prior work, https://arxiv.org/abs/2505.12942: attention is cut by what each part adds to
its own output, in closed form. Where keys rotate it keeps whole pairs, ranked by the product of
query and key energy (its CUR for RoPE); queries, keys and values read one second moment each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..model.rope import AttentionShape
from ..planning.budgets import Budget, LayerBudget
from ..planning.plan import PairPlan
from ..planning.scores import LayerScores, Named, score_layers
from .base import PairPruning
from .dense import DenseLayers
from .values import in_subspace, layer_values


@dataclass(frozen=True, kw_only=True)
class A3(PairPruning):
    """Pair energies for keys, the optimal subspace for values, every layer alike."""

    name: ClassVar[str] = "a3"
    summary: ClassVar[str] = "whole pairs by their energy, and the best subspace of values"

    budget: Budget = "uniform"

    @property
    def needs(self) -> frozenset[str]:
        """Energies of q and k, and the second moment of what o_proj reads."""
        return frozenset({"energy", "values"})

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Energy of the query pair, summed over the group, times that of the key pair."""
        return score_layers("energy", statistics, weights, shapes)

    def cut_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """Plain pairs, and values in a subspace unless a gate works on single channels."""
        cut = super().cut_layers(scores, budgets, dense)
        for layer in dense.present:
            if layer.mixes_values and (kept := cut[layer.index]) is not None:
                cut[layer.index] = in_subspace(kept, layer_values(layer, "output"))
        return cut
