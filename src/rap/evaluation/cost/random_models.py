"""Models of a given shape with random weights: time and memory do not depend on the values.

They let a pruned checkpoint be timed beside the dense model it came from without that model's
weights, and large models be timed without any checkpoint.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...model.attention import RapAttention
from ...model.cache_layout import PairEntry
from ...model.layers import attention_layers, base_model_type
from ...model.modeling import CONFIG_VERSION
from ...model.rope import AttentionShape
from ...planning.budgets import check_retain
from ...surgery.weights import config_with


def dense_config(config: PreTrainedConfig) -> Any:
    """The dense config a pruned one came from: the same fields without the `rap` section."""
    kept = config.to_dict()
    for key in ("rap", "model_type", "architectures", "auto_map", "transformers_version"):
        kept.pop(key, None)
    return CONFIG_MAPPING[base_model_type(config)](**kept)


def uniform_config(config: PreTrainedConfig, retain: float, align: int = 8) -> Any:
    """A pruned config with all layers and heads at `retain` of the dense channels.

    Widths are multiples of `align` where heads are that wide; pass-through channels stay. Raises
    RapError unless 0 < retain <= 1.
    """
    check_retain(retain)
    dense = dense_config(config)
    with torch.device("meta"):
        layers = attention_layers(AutoModelForCausalLM.from_config(dense))
    entries = [
        None if layer.shape is None else _entry(layer.shape, retain, align).fields()
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
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for module in model.modules():
            if isinstance(module, RapAttention) and module.num_slots:
                pairs = module.dense_shape.geometry.num_pairs
                copies = -(-module.num_slots // pairs)
                for row in module.frequency_index:
                    chosen = torch.randperm(copies * pairs)[: module.num_slots] % pairs
                    row.copy_(chosen.sort().values)
    return model


def _entry(shape: AttentionShape, retain: float, align: int) -> PairEntry:
    """One layer's entry of the `rap` section: K and V of the same width."""
    geometry = shape.geometry
    step = align if shape.head_dim % align == 0 else 2
    width = max(step, round(retain * shape.head_dim / step) * step)
    width = max(width, geometry.num_free + 2 * (geometry.num_pairs > 0))
    pairs = (width - geometry.num_free) // 2
    return PairEntry(pairs, geometry.num_free, 2 * pairs + geometry.num_free)
