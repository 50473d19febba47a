"""MatryoshkaKV: keys after rotation, and values, in the leading directions of each head's own PCA.

https://arxiv.org/abs/2410.14731, per KV head (its code repeats keys for every query head, which
saves nothing where heads are grouped), with one width for all heads. It is an activation-side
method: projections stay whole and every token is multiplied with the bases. Its own training, of
the bases alone, is the recovery `projections`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..projected import ProjectedAttention, projected_tensors
from ..replacement import ReplacedLayer
from ..statistics import Statistics
from .replacing import DenseLayer, Replacing, every_pair, nearest_rank


@dataclass(frozen=True, kw_only=True)
class Matryoshka(Replacing):
    """PCA of rotated keys and of values, about their means, the same width in every head."""

    name: ClassVar[str] = "matryoshka"

    @property
    def needs(self) -> frozenset[str]:
        """Covariances of rotated keys and of values."""
        return frozenset({"rotated"})

    def replaced(
        self, layers: Sequence[DenseLayer], model: Any, statistics: Statistics
    ) -> Iterator[ReplacedLayer]:
        """The leading eigenvectors of every head."""
        return (self._layer(layer) for layer in layers)

    def _layer(self, layer: DenseLayer) -> ReplacedLayer:
        shape, found = layer.shape, layer.found
        width = nearest_rank(self.retain, shape.head_dim)
        key = _leading(found["rotated_key_moment"], width)
        value = _leading(found["value_moment_about_mean"], width)
        tensors: dict[str, Tensor] = {"frequency_index": every_pair(shape)}
        tensors |= layer.dense("q", "k", "v")
        tensors |= projected_tensors(
            key,
            value,
            found["value_mean"].double(),
            layer.weight("o"),
            layer.bias("o"),
            layer.names["o"],
        )
        widths = {"kind": ProjectedAttention.kind, "keys": width, "values": width}
        return ReplacedLayer(widths, tensors, cached=2 * shape.num_kv_heads * width)


def _leading(covariance_GDD: Tensor, width: int) -> Tensor:
    """Eigenvectors of the largest eigenvalues, float64 [G, D, width]."""
    vectors = torch.linalg.eigh(covariance_GDD.double()).eigenvectors
    return vectors.flip(-1)[..., :width]
