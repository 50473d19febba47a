"""Pruned attention, and the generated Rap<Family>Config / Rap<Family>ForCausalLM classes.

Every class is derived from the family's own, so generation, tensor-parallel plans, gradient
checkpointing and output capture are inherited. The `rap` section of the config holds the widths,
the frequency index of every layer is a persistent buffer. This file and its siblings `families`,
`fingerprint`, `rope` and `errors` are also copied into checkpoints, where they load as remote code:
they may import torch, transformers and each other, nothing else.

Shapes: B batch, T tokens, H query heads, G KV heads, E model dim, M slots, W key width, C value
width, P dense pairs.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from .errors import CheckpointError
from .families import (
    FAMILIES,
    PREFIX,
    AttentionLayer,
    AttentionSpec,
    attention_layers,
    attention_spec,
    sliding_window,
)
from .fingerprint import fingerprint_model, fingerprint_tensors, tied_names
from .rope import gather_pairs, pair_table, rotate_pairs

CONFIG_VERSION = 1


class RapAttention(nn.Module):
    """Attention over kept pairs only: narrow q, k, v and o, the dense head's softmax scale.

    Built from the family's own attention module, whose settings (scale, dropout, layer index,
    sliding window, biases) it keeps. `frequency_index` [G, M] says which dense pair's frequency
    each slot rotates at. Cache and attention see W = 2M + N channels of K and C of V.
    """

    def __init__(self, dense: nn.Module, spec: AttentionSpec, dense_shape: Any, widths: Mapping):
        nn.Module.__init__(self)
        for name, value in vars(dense).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.dense_shape = dense_shape
        self.spec = spec
        self.sliding_window = sliding_window(spec, dense)
        self.eager_attention = sys.modules[type(dense).__module__].eager_attention_forward
        self.num_slots, self.value_width = widths["pairs"], widths["values"]
        self.key_width = 2 * widths["pairs"] + widths["free"]
        heads, groups = dense_shape.num_heads, dense_shape.num_kv_heads
        sizes = {
            "q": (dense_shape.hidden_size, heads * self.key_width),
            "k": (dense_shape.hidden_size, groups * self.key_width),
            "v": (dense_shape.hidden_size, groups * self.value_width),
            "o": (heads * self.value_width, dense_shape.hidden_size),
        }
        for role, name in spec.projection_names().items():
            old = getattr(dense, name)
            like = {"device": old.weight.device, "dtype": old.weight.dtype}
            setattr(self, name, nn.Linear(*sizes[role], bias=old.bias is not None, **like))
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=old.weight.device)
        # Persistent: from_pretrained refills non-persistent buffers with uninitialised memory.
        self.register_buffer("frequency_index", slots.expand(groups, -1).clone())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, E]; the cache receives rotated keys [B, G, T, W] and values."""
        shape = hidden_states.shape[:-1]
        q_name, k_name, v_name, o_name = self.spec.projections
        q = getattr(self, q_name)(hidden_states).view(*shape, -1, self.key_width).transpose(1, 2)
        k = getattr(self, k_name)(hidden_states).view(*shape, -1, self.key_width).transpose(1, 2)
        v = getattr(self, v_name)(hidden_states).view(*shape, -1, self.value_width).transpose(1, 2)

        q, k = self.rotate(q, k, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)

        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )
        output, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.reshape(*shape, -1).contiguous()
        return getattr(self, o_name)(output), weights

    def rotate(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotate [B, H, T, W] and [B, G, T, W] by every slot's own dense frequency."""
        pairs, index = self.dense_shape.geometry.num_pairs, self.frequency_index
        cos, sin = (gather_pairs(pair_table(t, pairs, self.spec.table), index) for t in tables)
        if not self.spec.rope_in_float32:
            return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        cos, sin = cos.float(), sin.float()
        return (
            rotate_pairs(q.float(), cos, sin).to(q.dtype),
            rotate_pairs(k.float(), cos, sin).to(k.dtype),
        )


class RapModelMixin:
    """Replaces the attention of every layer the config's `rap` section gives widths for."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        spec, layers = attention_spec(config), attention_layers(self)
        for layer, widths in zip(layers, layer_widths(config, len(layers)), strict=True):
            if widths is None:
                continue
            _check_fits(layer, widths)
            build = attention_class(type(layer.module))
            pruned = build(layer.module, spec, layer.shape, widths)
            if pruned.frequency_index.device.type != "meta":
                pruned.apply(self._init_weights)
            parent, _, name = layer.path.rpartition(".")
            setattr(self.get_submodule(parent), name, pruned)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """As the base class; the config records the fingerprint of exactly these weights."""
        state = kwargs.get("state_dict")
        self.config.rap["fingerprint"] = (
            fingerprint_model(self)
            if state is None
            else fingerprint_tensors((n, t) for n, t in state.items() if n not in tied_names(self))
        )
        return super().save_pretrained(save_directory, **kwargs)

    def _get_static_cache_init_shape(self) -> None:
        """Head widths differ from config.head_dim: a static cache takes them from the tensors."""
        return None


@functools.cache
def attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """RapAttention as a subclass of the family's attention class, so isinstance checks hold."""
    return type(f"Rap{base.__name__}", (RapAttention, base), {"__module__": __name__})


@functools.cache
def config_class(base_type: str) -> type:
    """Rap<Family>Config: the family's own config plus the `rap` section."""
    base = CONFIG_MAPPING[base_type]
    body = {
        "__module__": __name__,
        "__annotations__": {"rap": dict | None},
        "__init__": _registering_init(base_type),
        "model_type": PREFIX + base_type,
        "rap": None,
    }
    made = type(f"Rap{base.__name__}", (base,), body)
    made.register_for_auto_class()
    return made


@functools.cache
def model_class(base_type: str) -> type:
    """Rap<Family>ForCausalLM, registered with AutoModelForCausalLM."""
    base = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base_type]]
    config = config_class(base_type)
    body = {"__module__": __name__, "config_class": config, "config": config}
    made = type(f"Rap{base.__name__}", (RapModelMixin, base), body)
    made.register_for_auto_class("AutoModelForCausalLM")
    AutoModelForCausalLM.register(config, made, exist_ok=True)
    return made


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know every supported rap_<family>."""
    for base_type in FAMILIES:
        AutoConfig.register(PREFIX + base_type, config_class(base_type), exist_ok=True)


def __getattr__(name: str) -> type:
    """RapLlamaConfig, RapLlamaForCausalLM, ... made on first use (also by remote-code loading)."""
    for base_type in FAMILIES:
        if name == f"Rap{CONFIG_MAPPING_NAMES[base_type]}":
            return config_class(base_type)
        if name == f"Rap{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base_type]}":
            return model_class(base_type)
    if name.startswith("Rap") and name.endswith("Attention"):
        # Unpickling a model asks for the class of its attention by name.
        for base_type in FAMILIES:
            family = sys.modules[model_class(base_type).__mro__[2].__module__]
            if hasattr(family, name.removeprefix("Rap")):
                return attention_class(getattr(family, name.removeprefix("Rap")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _registering_init(base_type: str) -> Callable[..., None]:
    # The model class imports the family's modeling file: wait until a config of it exists.
    def init(self: Any, **kwargs: Any) -> None:
        super(type(self), self).__init__(**kwargs)
        model_class(base_type)

    return init


def layer_widths(config: Any, num_layers: int) -> list[Mapping | None]:
    """Widths of every layer in the `rap` section (None: dense); CheckpointError if it is wrong."""
    section = getattr(config, "rap", None)
    if not isinstance(section, dict) or "layers" not in section:
        raise CheckpointError(
            "config.json has no `rap` section with layer widths: this is not a complete pruned "
            "checkpoint, apply the plan again"
        )
    version = section.get("version", 0)
    if version > CONFIG_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, this release reads up to "
            f"{CONFIG_VERSION}: upgrade the package"
        )
    widths = section["layers"]
    if len(widths) != num_layers:
        raise CheckpointError(
            f"the `rap` section lists widths for {len(widths)} layers, the model has {num_layers}"
        )
    for index, entry in enumerate(widths):
        if entry is not None and (
            not {"pairs", "free", "values"} <= entry.keys()
            or 2 * entry["pairs"] + entry["free"] < 1
            or entry["values"] < 1
        ):
            raise CheckpointError(
                f"layer {index} has impossible widths in the `rap` section: {entry}"
            )
    return widths


def _check_fits(layer: AttentionLayer, widths: Mapping) -> None:
    shape = layer.shape
    if (
        shape is None
        or widths["pairs"] > shape.geometry.num_pairs
        or widths["free"] > shape.geometry.num_free
        or widths["values"] > shape.head_dim
    ):
        raise CheckpointError(
            f"layer {layer.index} has impossible widths in the `rap` section: {dict(widths)} of a "
            f"dense {shape}"
        )
