"""Configs of pruned models as methods make them, from their settings alone: time needs no weights.

Budgets are uniform, so that all layers of a model are alike.
"""

import re

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from rap.methods import parse_method
from rap.methods.merged import merged_budget, most_merged
from rap.methods.palu import Palu
from rap.methods.rap import Rap
from rap.methods.replacing import nearest_rank
from rap.model.cache_layout import Entry, FactoredEntry, PairEntry
from rap.model.kinds.latent import LatentEntry
from rap.model.layers import attention_layers
from rap.model.modeling import CONFIG_VERSION
from rap.model.rope import AttentionShape
from rap.surgery.weights import config_with

DENSE = "dense"
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")  # query heads x KV heads x head dimension


def pruned_config(config: LlamaConfig, name: str) -> PreTrainedConfig:
    """The config that a method at a retain ratio, `METHOD@RETAIN`, makes of a dense one.

    Merged heads of profile `stock` are a plain Llama, as `--target plain` writes it, and so is
    a SHAPE.
    """
    if name == DENSE:
        return config
    if shape := SHAPE.fullmatch(name):
        queries, heads, width = map(int, shape.groups())
        heads_of = {"num_attention_heads": queries, "num_key_value_heads": heads}
        return LlamaConfig(**config.to_dict() | heads_of | {"head_dim": width})
    text, _, retain = name.rpartition("@")
    method = parse_method(text, float(retain))
    shape = _shape(config)
    if isinstance(method, Palu):
        return _with_entry(config, _latent(method, shape))
    assert isinstance(method, Rap), text
    merge = _merge(method, shape)
    unit = max(1, method.alignment([shape]) // 2)  # pairs
    budget = merged_budget(method.retain, merge, shape, unit)
    if merge == 1:
        return _with_entry(config, PairEntry(budget.pairs, 0, budget.values))
    entry = PairEntry(budget.pairs, 0, budget.values, heads=shape.num_kv_heads // merge)
    if method.profile == "stock":
        plain = {"num_key_value_heads": entry.heads, "head_dim": entry.key_width}
        return LlamaConfig(**config.to_dict() | plain)
    return _with_entry(config, _smaller(entry, shape))


def _shape(config: LlamaConfig) -> AttentionShape:
    with torch.device("meta"):
        shape = attention_layers(AutoModelForCausalLM.from_config(config))[0].shape
    assert shape is not None
    return shape


def _merge(method: Rap, shape: AttentionShape) -> int:
    """KV heads of one cached head."""
    if method.merge == "all":
        return shape.num_kv_heads
    if isinstance(method.merge, int):
        return method.merge
    return most_merged(shape.num_kv_heads, shape.head_dim, method.retain)


def _smaller(entry: PairEntry, shape: AttentionShape) -> PairEntry:
    """With maps of every head where W_q and W_o would grow by more than these."""
    size, dim = shape.hidden_size, shape.head_dim
    queries, outputs = (
        width * size > dim * (size + width) for width in (entry.key_width, entry.values)
    )
    if not (queries or outputs):
        return entry
    sizes = (entry.pairs, entry.free, entry.values)
    return FactoredEntry(*sizes, heads=entry.heads, queries=queries, outputs=outputs)


def _latent(method: Palu, shape: AttentionShape) -> LatentEntry:
    size = min(method.group_size, shape.num_kv_heads)
    rank = nearest_rank(method.retain, size * shape.head_dim, method.multiple)
    return LatentEntry(shape.num_kv_heads // size, fold=True, keys=rank, values=rank)


def _with_entry(config: LlamaConfig, entry: Entry) -> PreTrainedConfig:
    layers = [entry.fields()] * config.num_hidden_layers
    return config_with(config, {"version": CONFIG_VERSION, "layers": layers})
