"""Models of a given shape with random weights: time and memory do not depend on the values.

They let a pruned checkpoint be timed beside the dense model it came from without that model's
weights, and large models be timed without any checkpoint.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...methods.dense import maps_keys, maps_values, merge_limit
from ...methods.keys import Queries, maps_are_smaller
from ...methods.merged import Merge, merged_budget, shape_merge
from ...model.attention import RapAttention
from ...model.cache_layout import FactoredEntry, PairEntry
from ...model.layers import AttentionLayer, attention_layers, base_model_type, windowed_layers
from ...model.modeling import CONFIG_VERSION, auto_class
from ...model.rope import AttentionShape
from ...planning.budgets import check_retain, nearest_width
from ...surgery.weights import config_with


def dense_config(config: PreTrainedConfig) -> Any:
    """The dense config a pruned one came from: the same fields without the `rap` section."""
    kept = config.to_dict()
    for key in ("rap", "model_type", "architectures", "auto_map", "transformers_version"):
        kept.pop(key, None)
    return CONFIG_MAPPING[base_model_type(config)](**kept)


def uniform_config(
    config: PreTrainedConfig,
    retain: float,
    align: int = 8,
    merge: Merge = 1,
    queries: Queries = "auto",
) -> Any:
    """A pruned config with layers and heads at `retain` of the dense channels.

    Layers with a window beside others without stay dense, as by default when a model is pruned.
    Widths are multiples of `align` where heads are that wide. `merge` is that of method `rap`: so
    many KV heads become one where that can be exact. Then `queries`, as there, decides where maps
    stand instead of larger projections.
    Raises RapError unless 0 < retain <= 1, and for a `merge` that does not divide the heads.
    """
    check_retain(retain)
    dense = dense_config(config)
    with torch.device("meta"):
        layers = attention_layers(auto_class(dense).from_config(dense))
    even, windowed = _Uniform(retain, align, merge, queries), windowed_layers(dense)
    entries = [
        None
        if layer.shape is None or layer.index in windowed
        else even.entry(layer, layers, dense).fields()
        for layer in layers
    ]
    section = {"version": CONFIG_VERSION, "layers": entries, "retain": retain}
    return config_with(dense, section)


def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Any:
    """A model of a dense or pruned config with random weights, in eval mode.

    Every cached head of a pruned layer gets random pairs of its own, as real plans have. A merged
    head with more slots than its dense heads have pairs gets some of them twice.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = auto_class(config).from_config(config, dtype=dtype).eval()
        for module in model.modules():
            if isinstance(module, RapAttention) and module.num_slots:
                pairs = module.dense_shape.geometry.num_pairs
                copies = -(-module.num_slots // pairs)
                for row in module.frequency_index:
                    chosen = torch.randperm(copies * pairs)[: module.num_slots] % pairs
                    row.copy_(chosen.sort().values)
    return model


@dataclass(frozen=True)
class _Uniform:
    """The settings of a `uniform_config`."""

    retain: float
    align: int
    merge: Merge
    queries: Queries

    def entry(
        self, layer: AttentionLayer, layers: Sequence[AttentionLayer], config: Any
    ) -> PairEntry:
        """A layer's entry of the `rap` section: K and V of the same width."""
        shape, merged = layer.shape, self.merged(layer, layers, config)
        assert shape is not None
        unit = self._unit(shape)
        size = merged * shape.head_dim // 2
        steps = max(unit, nearest_width(self.retain * size, size, unit))
        kept = merged_budget(self.retain, merged, shape, unit, steps)
        if merged == 1:
            return PairEntry(kept.pairs, kept.free, kept.values)
        plain = PairEntry(kept.pairs, kept.free, kept.values, heads=shape.num_kv_heads // merged)
        about = (layer, layers, config)
        queries = maps_keys(*about) or self._maps(shape, plain.key_width)
        outputs = maps_values(*about) or self._maps(shape, plain.values)
        if not (queries or outputs):
            return plain
        return FactoredEntry(**asdict(plain), queries=queries, outputs=outputs)

    def merged(self, layer: AttentionLayer, layers: Sequence[AttentionLayer], config: Any) -> int:
        """KV heads of a cached head of the layer, 1 where they stay apart."""
        mapped = self.queries != "absorbed"
        if self.merge == 1 or merge_limit(layer, layers, config, mapped=mapped):
            return 1
        assert layer.shape is not None
        unit = self._unit(layer.shape)
        return shape_merge(self.merge, layer.shape, self.retain, absorbed=not mapped, unit=unit)

    def _unit(self, shape: AttentionShape) -> int:
        return self.align // 2 if shape.head_dim % self.align == 0 else 1

    def _maps(self, shape: AttentionShape, width: int) -> bool:
        if self.queries == "auto":
            return maps_are_smaller(shape, width)
        return self.queries == "factored"
