"""Attention found in live models of the families in `specs`: its place, shape and weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import CheckpointError, UnsupportedModelError
from .rope import AttentionShape, HeadGeometry
from .specs import ALIBI, FAMILIES, QK_NORM, REASONS, AttentionSpec

PREFIX = "rap_"


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention: where it is, its live module, and its dense shape.

    `shape` is None and `reason` says why when the layer has nothing to prune.
    """

    index: int
    path: str
    module: nn.Module | None
    shape: AttentionShape | None
    reason: str = ""


def base_model_type(config: Any) -> str:
    """The dense family of a config, with this package's own prefix removed."""
    return str(config.model_type).removeprefix(PREFIX)


def attention_spec(config: Any) -> AttentionSpec:
    """The family row for a config, before any weight is read.

    Raises UnsupportedModelError with the reason (what is missing), CheckpointError for a quantized
    checkpoint.
    """
    model_type = base_model_type(config)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"this {model_type} checkpoint is quantized: compress the unquantized weights first, "
            "then quantize the result"
        )
    spec = FAMILIES.get(model_type)
    if spec is None or getattr(config, "kv_lora_rank", None):
        reason = _refusal(config, model_type)
        raise UnsupportedModelError(f"model type {model_type!r} is not supported: {reason}")
    if getattr(config, "use_qk_norm", False) or getattr(config, "qk_layernorm", False):
        raise UnsupportedModelError(f"this {model_type} model is not supported: {QK_NORM}")
    return spec


def _refusal(config: Any, model_type: str) -> str:
    if getattr(config, "kv_lora_rank", None):
        return (
            "it caches one latent for all heads (MLA), so cutting head channels would save nothing"
        )
    if getattr(config, "alibi", False):
        return ALIBI
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder: cross-attention has no rotary positions"
    return REASONS.get(
        model_type,
        f"no row for it among the {len(FAMILIES)} families that docs/models.md lists",
    )


def refuse_pruned(config: Any) -> None:
    """Raise CheckpointError if the config is of an already pruned model."""
    if str(config.model_type).startswith(PREFIX):
        raise CheckpointError(
            "this model is already pruned: start again from the dense checkpoint it came from"
        )


def rotary_module(model: nn.Module) -> nn.Module:
    """The model-level rotary embedding, whose cos/sin every attention layer receives."""
    rotary = getattr(_decoder(model), "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary_emb module: it has no RoPE to prune"
        )
    return rotary


def attention_layers(model: Any) -> list[AttentionLayer]:
    """Every decoder layer of a live model (the meta device will do), in order."""
    spec, rotary = attention_spec(model.config), rotary_module(model)
    return [
        _describe(index, f"{prefix}.{spec.attention}", layer, spec, rotary)
        for index, (prefix, layer) in enumerate(_decoder_layers(model))
    ]


def _describe(
    index: int, path: str, layer: nn.Module, spec: AttentionSpec, rotary: nn.Module
) -> AttentionLayer:
    attention = getattr(layer, spec.attention, None)
    if attention is None:
        return AttentionLayer(index, path, None, None, "no attention in this layer")
    pruned = getattr(attention, "dense_shape", None)
    if pruned is not None:
        return AttentionLayer(index, path, attention, pruned)
    q, k, _, o = (getattr(attention, name) for name in spec.projections)
    head_dim = attention.head_dim
    rotary_dim = (
        2 * frequency_buffer(rotary, attention).shape[-1] if rotates(spec, attention) else 0
    )
    shape = AttentionShape(
        num_heads=q.out_features // head_dim,
        num_kv_heads=k.out_features // head_dim,
        hidden_size=o.out_features,
        geometry=HeadGeometry(head_dim, rotary_dim, spec.pairing),
    )
    return AttentionLayer(index, path, attention, shape)


def frequency_buffer(rotary: nn.Module, attention: nn.Module | None) -> Tensor:
    """The frequencies [P] a layer rotates at: its own layer type's, where there are several."""
    kinds = ("layer_type", "attention_type")
    kind = next((getattr(attention, name) for name in kinds if hasattr(attention, name)), None)
    found = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(
            f"{type(rotary).__name__} has no inv_freq: its RoPE frequencies cannot be read"
        )
    return found


def rotates(spec: AttentionSpec, attention: nn.Module) -> bool:
    """Whether this layer of the dense model rotates queries and keys (False: NoPE)."""
    return spec.rotates is None or spec.rotates(attention)


def sliding_window(spec: AttentionSpec, attention: nn.Module) -> int | None:
    """The sliding window this layer's dense module passes to the attention function."""
    if spec.sliding_window_from is None:
        return None
    source = attention if spec.sliding_window_from == "module" else attention.config
    return getattr(source, "sliding_window", None)


def projections(layer: AttentionLayer, spec: AttentionSpec) -> dict[str, nn.Linear]:
    """The q, k, v and o linears of a layer, by role."""
    return {role: getattr(layer.module, name) for role, name in spec.projection_names().items()}


def projection_tensors(
    layers: list[AttentionLayer], spec: AttentionSpec
) -> dict[str, tuple[AttentionLayer, str]]:
    """Checkpoint name of every attention weight and bias, to its layer and role."""
    names = {}
    for layer in layers:
        if layer.shape is None:
            continue
        for role, linear in projections(layer, spec).items():
            stem = f"{layer.path}.{spec.projection_names()[role]}"
            names[f"{stem}.weight"] = (layer, role)
            if linear.bias is not None:
                names[f"{stem}.bias"] = (layer, role)
    return names


def split_heads(states: Tensor, head_dim: int) -> Tensor:
    """[..., H * D] to [..., H, D]."""
    return states.unflatten(-1, (-1, head_dim))


def _decoder(model: Any) -> Any:
    find: Callable[[], Any] | None = getattr(model, "get_decoder", None)
    return find() if find is not None else model


def _decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    decoder = _decoder(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    for index, layer in enumerate(decoder.layers):
        yield f"{prefix}.layers.{index}".lstrip("."), layer
