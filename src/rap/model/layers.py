"""Attention found in live models of the families in `families`: its place, shape and weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .errors import CheckpointError, UnsupportedModelError
from .families import FAMILIES, WRAPPERS
from .projections import ProjectionPart, projection_rows
from .refusals import refusal
from .rope import AttentionShape, HeadGeometry, Tables
from .specs import PROJECTIONS, AttentionSpec, QKNorm

PREFIX = "rap_"
SOFT_CAP = "attn_logit_softcapping"  # as the configs of Gemma 2 and its kin have it
# Layers of these types cache no more tokens than their window, or chunk, holds.
BOUNDED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention: where it is, its live module, and its dense shape.

    `shape` is None and `reason` says why when the layer has nothing to prune. `norm` is how the
    layer normalises queries and keys, if it does.
    """

    index: int
    path: str
    module: nn.Module | None
    shape: AttentionShape | None
    reason: str = ""
    norm: QKNorm | None = None

    @property
    def pruned(self) -> bool:
        """Whether the module is one of this package's, and not the family's own."""
        return hasattr(self.module, "projection_widths")

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Heads of every projection (q, k, v, o, gate) and the rows, or columns, of one of them."""
        assert self.shape is not None
        if self.pruned:
            module: Any = self.module
            return {
                projection: (module.projection_heads[projection], x)
                for projection, x in module.projection_widths.items()
            }
        queries, cached = (self.shape.num_heads, self.shape.num_kv_heads)
        heads = {**dict.fromkeys(("q", "o", "gate"), queries), **dict.fromkeys("kv", cached)}
        return {projection: (count, self.shape.head_dim) for projection, count in heads.items()}


def base_model_type(config: PreTrainedConfig) -> str:
    """The dense family of a config, with this package's own prefix removed."""
    return str(config.model_type).removeprefix(PREFIX)


def text_config(config: PreTrainedConfig) -> Any:
    """The config of the language model: of a multimodal model that is taken, the one inside."""
    return config.text_config if base_model_type(config) in WRAPPERS else config


def trained_length(config: PreTrainedConfig) -> int | None:
    """The positions a model was made for, if its config states them."""
    return getattr(text_config(config), "max_position_embeddings", None)


def windowed_layers(config: PreTrainedConfig) -> frozenset[int]:
    """Layers with a sliding window or chunks, of a model that also has full-attention layers.

    Their cache stops growing, so that with the context the others become all of it. None of a model
    whose layers are of one type.
    """
    types = getattr(text_config(config), "layer_types", None) or ()
    if "full_attention" not in types:
        return frozenset()
    return frozenset(index for index, name in enumerate(types) if name in BOUNDED)


def attention_window(config: PreTrainedConfig) -> int | None:
    """Tokens that `windowed_layers` cache at most; None of a model that has none."""
    text = text_config(config)
    if not windowed_layers(config):
        return None
    return getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)


def attention_spec(config: PreTrainedConfig) -> AttentionSpec:
    """The family row for a config, before any weight is read.

    Raises UnsupportedModelError with the reason (what is missing).
    """
    model_type = base_model_type(config)
    text = text_config(config)
    spec = FAMILIES.get(base_model_type(text))
    if spec is None or getattr(text, "kv_lora_rank", None):
        reason = refusal(config, text, model_type)
        raise UnsupportedModelError(f"model type {model_type!r} is not supported: {reason}")
    return spec


def check_dense(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise CheckpointError for a model, or a config of one, that is pruned or quantized already.

    So for a live model with adapters, whose weights are not what it computes with.
    """
    if _has_adapters(model):
        raise CheckpointError(
            f"this {type(model).__name__} has adapters; merge them into the weights first "
            "(model = model.merge_and_unload() of peft)"
        )
    config = model if isinstance(model, PreTrainedConfig) else model.config
    if str(config.model_type).startswith(PREFIX):
        raise CheckpointError(
            "this model is already pruned: start again from the dense checkpoint it came from"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"this {base_model_type(config)} checkpoint is quantized: compress the unquantized "
            "weights first, then quantize the result"
        )


def _has_adapters(model: object) -> bool:
    # By what peft puts in, for it takes seconds to import and leaves its config behind after it
    # merged: a wrapper of the model, or of linear layers.
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return hasattr(model, "get_base_model") or any(hasattr(m, "base_layer") for m in modules)


def rotary_module(model: nn.Module) -> nn.Module:
    """The model-level rotary embedding, whose cos/sin every attention layer receives.

    Raises UnsupportedModelError if there is none.
    """
    decoder = text_decoder(model)
    names = ("rotary_emb", "pos_emb")
    rotary = next((getattr(decoder, name) for name in names if hasattr(decoder, name)), None)
    if not isinstance(rotary, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary_emb module: it has no RoPE to prune"
        )
    return rotary


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Every decoder layer of a live model (the meta device will do), in order."""
    spec, rotary = attention_spec(model.config), rotary_module(model)
    found: list[AttentionLayer] = []
    for index, (prefix, layer) in enumerate(decoder_layers(model)):
        found.append(_describe(index, f"{prefix}.{spec.attention}", layer, spec, rotary, found))
    return found


def _describe(
    index: int,
    path: str,
    layer: nn.Module,
    spec: AttentionSpec,
    rotary: nn.Module,
    before: list[AttentionLayer],
) -> AttentionLayer:
    attention = getattr(layer, spec.attention, None)
    if attention is None:
        return AttentionLayer(index, path, None, None, "no attention in this layer")
    dense_shape = getattr(attention, "dense_shape", None)
    if dense_shape is not None:
        return AttentionLayer(index, path, attention, dense_shape, norm=attention.norm)
    head_dim = getattr(attention, "head_dim", None) or attention.head_size
    output = getattr(attention, spec.projections[3])
    num_heads = output.in_features // head_dim
    rotary_dim = (
        2 * frequency_buffer(rotary, attention).shape[-1] if rotates(spec, attention) else 0
    )
    num_kv_heads, source = num_heads, None
    if spec.of(attention).reads:
        source, num_kv_heads = _source(attention, before)
    elif spec.fused != "heads":
        key = getattr(attention, spec.projections[1]).out_features // head_dim
        num_kv_heads = key if spec.fused is None else (key - num_heads) // 2
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden_size=output.out_features,
        geometry=HeadGeometry(head_dim, rotary_dim, spec.pairing),
        source=source,
    )
    norm = spec.norm if spec.norm and hasattr(attention, spec.norm.names[0]) else None
    return AttentionLayer(index, path, attention, shape, norm=norm)


def _source(reader: nn.Module, before: list[AttentionLayer]) -> tuple[int, int]:
    """The layer whose keys and values a reader attends to, and its number of KV heads.

    It is the last one of the reader's type with keys and values of its own.
    """
    kind = getattr(reader, "layer_type", None)
    return max(
        (x.index, x.shape.num_kv_heads)
        for x in before
        if x.shape is not None and x.shape.source is None
        if getattr(x.module, "layer_type", None) == kind
    )


def frequency_buffer(rotary: nn.Module, attention: nn.Module | None) -> Tensor:
    """The frequencies [P] a layer rotates at: its own layer type's, where there are several.

    Raises UnsupportedModelError if the rotary module has none for the layer.
    """
    buffer = _of_its_type(rotary, attention, "inv_freq")
    if not isinstance(buffer, Tensor):
        raise UnsupportedModelError(
            f"{type(rotary).__name__} has no inv_freq: its RoPE frequencies cannot be read"
        )
    return buffer


def layer_rotary(rotary: nn.Module, attention: nn.Module) -> Callable[[Tensor, Tensor], Tables]:
    """What gives a layer's cos and sin for states and positions [B, T]: its own type's."""
    if hasattr(rotary, "inv_freq"):
        return rotary
    return partial(rotary, layer_type=_layer_type(rotary, attention))


def rotary_factor(rotary: nn.Module, attention: nn.Module | None) -> float:
    """What the cos and sin of a layer are multiplied by (YaRN's attention factor)."""
    return float(_of_its_type(rotary, attention, "attention_scaling") or 1.0)


def _of_its_type(rotary: nn.Module, attention: nn.Module | None, name: str) -> Any:
    """An attribute of a rotary module that may have one for every type of layer; None without."""
    kind = _layer_type(rotary, attention)
    return getattr(rotary, f"{kind}_{name}", getattr(rotary, name, None))


def _layer_type(rotary: nn.Module, attention: Any) -> str | None:
    names = ("layer_type", "attention_type")
    kind = next((getattr(attention, name) for name in names if hasattr(attention, name)), None)
    if kind is None and attention is not None and not hasattr(rotary, "inv_freq"):
        layer_types = getattr(attention.config, "layer_types", None)
        kind = layer_types and layer_types[attention.layer_idx]
    return kind


def layer_frequencies(model: PreTrainedModel, layer: AttentionLayer) -> Tensor:
    """Angular frequency per position of every pair of a layer, float64 [P]; P is 0 without RoPE."""
    assert layer.shape is not None
    num_pairs = layer.shape.geometry.num_pairs
    if not num_pairs:  # a rotary module may have none for such layers
        return torch.zeros(0, dtype=torch.float64)
    frequencies = frequency_buffer(rotary_module(model), layer.module)
    return frequencies[:num_pairs].detach().double().cpu()


def logit_scales(model: PreTrainedModel, layer: AttentionLayer) -> tuple[float, float]:
    """What a layer's attention multiplies q.k by: of pairs, and of channels that never rotate.

    Families differ: 1/sqrt(D), a constant, or 1 where queries are normalised.
    """
    attention: Any = layer.module
    scale = float(attention.scaling) * getattr(attention, "key_multiplier", 1.0)
    return scale * rotary_factor(rotary_module(model), attention) ** 2, scale


def rotates(spec: AttentionSpec, attention: nn.Module) -> bool:
    """Whether this layer of the dense model rotates queries and keys (False: NoPE)."""
    return spec.rotates is None or spec.rotates(attention)


def sliding_window(spec: AttentionSpec, attention: nn.Module) -> int | None:
    """The sliding window this layer's dense module passes to the attention function."""
    if spec.sliding_window_from is None:
        return None
    if getattr(attention, "is_sliding", True) is False:
        return None
    source = attention if spec.sliding_window_from == "module" else attention.config
    return getattr(source, "sliding_window", None)


def norm_weights(layer: AttentionLayer) -> tuple[Tensor, ...]:
    """The factors [H, D] and [G, D] that multiply normalized q and k; () without norm.

    Those of keys are 1 in a layer that reads another's.
    """
    norm, shape = layer.norm, layer.shape
    if norm is None or shape is None:
        return ()
    weights = []
    for name, heads in zip(norm.names, (shape.num_heads, shape.num_kv_heads), strict=True):
        module: Any = getattr(layer.module, name, None)
        parts = [module] if not norm.one_module_per_head else module.norms
        stored = [part.weight for part in parts if getattr(part, "weight", None) is not None]
        factors = torch.cat(
            [w.detach().reshape(-1, shape.head_dim) for w in stored]
            or [torch.ones(1, shape.head_dim)]
        )
        weights.append((factors + norm.weight_offset).expand(heads, -1))
    return tuple(weights)


def projections(layer: AttentionLayer, spec: AttentionSpec) -> dict[str, Any]:
    """The q, k, v and o of a layer by name: linear layers, or parts of shared ones.

    q and o alone of a layer that reads another's keys and values.
    """
    assert layer.shape is not None
    spec = spec.of(layer.module)
    by_projection: dict[str, Any] = {}
    for name, projections in spec.linears().items():
        linear = getattr(layer.module, name)
        rows = projection_rows(
            projections, layer.sizes, per_head=spec.per_head and not layer.pruned
        )
        whole = len(projections) == 1 or (spec.ties_values and not layer.pruned)
        for projection in set(projections) & set(PROJECTIONS):
            by_projection[projection] = (
                linear if whole else ProjectionPart(linear, rows[projection])
            )
    return {
        projection: by_projection[projection]
        for projection in PROJECTIONS
        if projection in by_projection
    }


def projection_tensors(
    layers: list[AttentionLayer], spec: AttentionSpec
) -> dict[str, tuple[AttentionLayer, str]]:
    """Checkpoint name of every attention tensor that is pruned, to its layer and projection.

    A linear of several projections has them joined by "+", or by "=" where they are of the same
    rows; norms are "q_norm.weight" and the like.
    """
    names = {}
    for layer in layers:
        if layer.shape is None:
            continue
        own = spec.of(layer.module)
        joint = "=" if own.ties_values else "+"
        modules = {name: joint.join(projections) for name, projections in own.linears().items()}
        if layer.norm is not None and not layer.norm.one_module_per_head:
            norms = zip(layer.norm.names, ("q_norm", "k_norm"), strict=True)
            modules |= {
                name: projection for name, projection in norms if hasattr(layer.module, name)
            }
        for name, projection in modules.items():
            for leaf, _ in getattr(layer.module, name).named_parameters(recurse=False):
                full_projection = f"{projection}.{leaf}" if "norm" in projection else projection
                names[f"{layer.path}.{name}.{leaf}"] = (layer, full_projection)
    return names


def split_heads(states: Tensor, head_dim: int) -> Tensor:
    """[..., H * D] to [..., H, D]."""
    return states.unflatten(-1, (-1, head_dim))


def text_decoder(model: nn.Module) -> Any:
    """The module that holds the decoder layers of the language model."""
    find: Callable[[], Any] | None = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else model
    # Llama 4's text model gives itself.
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers of the language model in order, each with its name in the model."""
    decoder = text_decoder(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    for index, layer in enumerate(decoder.layers):
        yield f"{prefix}.layers.{index}".lstrip("."), layer
