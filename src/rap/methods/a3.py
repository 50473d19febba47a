"""A3: pairs by the energy they add to the logits, values by the best subspace.

The nearest prior work, https://arxiv.org/abs/2505.12942: attention is cut by what each part adds to
its own output, in closed form. Where keys rotate it keeps whole pairs, ranked by the product of
query and key energy (its CUR for RoPE); queries, keys and values read one second moment each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..allocation import Budget
from ..plan import LayerPlan
from ..rope import AttentionShape
from ..scoring import LayerScores, Named, score_layers
from ..statistics import Statistics
from ..subspace import output_gram, weighted_subspace
from .base import DenseLayers, PairPruning


@dataclass(frozen=True, kw_only=True)
class A3(PairPruning):
    """Pair energies for keys, the optimal subspace for values, every layer alike."""

    name: ClassVar[str] = "a3"

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
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerPlan | None]:
        """Plain pairs, and values in a subspace unless a gate works on single channels."""
        cut: list[LayerPlan | None] = []
        for index, layer in enumerate(super().cut_layers(scores, statistics, dense)):
            shape, weights = dense.shapes[index], dense.weights[index]
            if layer is None or shape is None or weights is None or not dense.mixes_values[index]:
                cut.append(layer)
                continue
            moment = (statistics.layers[index] or {})["value_moment"].double()
            gram = output_gram(weights["o"], shape).cpu()
            factors = weighted_subspace(moment, gram, layer.value_width)
            fields: dict[str, Any] = layer.tensors()
            fields["channels_GC"] = None
            fields["value_down_GCD"] = factors.down.contiguous()
            fields["value_up_GDC"] = factors.up.contiguous()
            cut.append(LayerPlan(**fields))
        return cut
