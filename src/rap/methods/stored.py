"""Planning for weights that are not in memory: one layer's attention is read at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..calibration.sources import StoredLayers
from ..calibration.statistics import Statistics
from ..model.errors import RapError
from ..model.layers import attention_layers, attention_spec, base_model_type
from ..planning.plan import Plan
from ..planning.scores import Named
from .base import Method, PairPruning
from .dense import dense_layers, layer_weights


class StoredAttention(Sequence[Named | None]):
    """The weights of every layer's attention by role; those asked for last are kept."""

    def __init__(self, layers: StoredLayers):
        self._stored, self._layers = layers, attention_layers(layers.model)
        self._kept: tuple[int, Named | None] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        if self._kept is None or self._kept[0] != index:
            self._kept = index, self._read(index)
        return self._kept[1]

    def __iter__(self) -> Iterator[Named | None]:
        return (self[index] for index in range(len(self)))

    def _read(self, index: int) -> Named | None:
        layer = self._layers[index]
        if layer.shape is None:
            return None
        live = replace(layer, module=self._stored.attention(index))
        return layer_weights(live, attention_spec(self._stored.model.config))


def check_streams(method: Method) -> PairPruning:
    """The method itself; RapError unless it cuts weights, which can be done tensor by tensor."""
    if isinstance(method, PairPruning):
        return method
    raise RapError(
        f"method {method.name} gives layers another attention, which does not stream: use rap, a3, "
        "random or magnitude, or leave --stream out"
    )


def plan_stored(method: PairPruning, layers: StoredLayers, statistics: Statistics) -> Plan:
    """What `method.plan` decides for the loaded model, from its statistics."""
    model = layers.model
    fingerprint = method.check_statistics(statistics, layers.fingerprint)
    dense = dense_layers(model, StoredAttention(layers))
    return method.plan_layers(dense, statistics, base_model_type(model.config), fingerprint)
