"""Pruned models of every served family, through vLLM's backend for models of transformers.

vLLM builds the transformers model itself and replaces its linears, norms, experts and attention by
its own. The pruned attention keeps its forward; `projections` gives it vLLM's linears.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
)
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR, Base
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from ...model.attention import RapAttention
from ...model.errors import CheckpointError, UnsupportedModelError
from ...model.layers import base_model_type
from ...model.modeling import RapModelMixin, config_class, model_class
from ..layout import check_division
from ..refusals import check_served
from .division import WholeLayers, divide_sparsity
from .projections import place_attention
from .routers import routers_kept
from .widths import PaddedAttention, ReadingAttention


class PrunedMixin(Base):
    """What a pruned model needs beside vLLM's backend: its class, its linears, its head sizes."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        # Before anything is allocated: a config that cannot be served is refused in one sentence.
        check_served(config)
        check_rope(config, vllm_config.model_config.max_model_len)
        check_division(config, vllm_config.parallel_config.tensor_parallel_size)
        register_backbone(base_model_type(config))
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, attention in self.pruned_layers():
            check_window(name, attention)
            check_heads(name, attention)
        scaling = getattr(config, "logits_scaling", None)
        if scaling is not None and hasattr(self, "logits_processor"):
            # Granite divides its logits, which vLLM's backend does not know.
            self.logits_processor.scale = 1 / scaling

    def pruned_layers(self) -> Iterator[tuple[str, RapAttention]]:
        """Every pruned attention of this rank by its name."""
        for name, module in self.model.named_modules(prefix="model"):
            if isinstance(module, RapAttention):
                yield name, module

    def recursive_replace(self) -> None:
        """As vLLM's, after the linears of pruned attention have been replaced."""
        stacked: dict[str, tuple[str, str]] = {}
        self.loaded_by_rows: set[str] = set()
        divided = get_tensor_model_parallel_world_size() > 1
        self.whole_layers = (
            WholeLayers(self.model, quantized=self.quant_config is not None) if divided else None
        )
        for name, attention in self.pruned_layers():
            mapped, rows = place_attention(attention, name, self.vllm_config)
            stacked |= mapped
            self.loaded_by_rows |= rows
        with routers_kept(self.model):
            super().recursive_replace()
        if divided:
            divide_sparsity(self.model)
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_stacked=stacked)
        for index, (name, fuser) in self.attention_fusers.items():
            told = tell_sinks(fuser, self.get_submodule(name))
            if told is not fuser:
                told.fuse(self.get_submodule(name), name, self.vllm_config)
                self.attention_fusers[index] = (name, told)

    def _create_attention_instances(self, prefix: str = "") -> None:
        self.sources = {
            maybe_prefix(prefix, f"{reader}.{VLLM_ATTN_ATTR}"): source
            for reader, source in sources(self)
        }
        super()._create_attention_instances(prefix)

    def _get_attn_cls(self) -> Any:
        found = super()._get_attn_cls()
        return self._make_attention if found is Attention else found

    def _make_attention(self, **settings: Any) -> nn.Module:
        source = self.sources.get(settings["prefix"])
        if source is None:
            return PaddedAttention(**settings)
        # Layers are made in order, and a source comes before its readers.
        return ReadingAttention(getattr(self.get_submodule(source), VLLM_ATTN_ATTR))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's; CheckpointError if an index or a ratio of a pruned layer is missing."""
        if self.whole_layers is not None:
            weights = self.whole_layers.converted(weights)
        loaded = super().load_weights(weights)
        missing = sorted(self.loaded_by_rows - loaded)
        if missing:
            raise CheckpointError(f"{missing[0]} is missing: the checkpoint is damaged")
        return loaded


class RapForCausalLM(PrunedMixin, TransformersForCausalLM):
    """A pruned model of a family without experts."""


class RapMoEForCausalLM(PrunedMixin, TransformersMoEForCausalLM):
    """A pruned model of a family with experts."""


def register_backbone(base_type: str) -> None:
    """Let AutoModel make the model of a pruned config without its head."""
    # A process that was sent the config has not made one: this tells it older names of weights.
    model_class(base_type)
    config: Any = config_class(base_type)
    models: Any = MODEL_MAPPING
    base: Any = models[CONFIG_MAPPING[base_type]]
    body = {"__module__": __name__, "config_class": config, "config": config}
    made = type(f"Rap{base.__name__}", (RapModelMixin, base), body)
    AutoModel.register(config, made, exist_ok=True)


def sources(model: Base) -> Iterator[tuple[str, str]]:
    """Every layer's attention that reads the cache of another, and that other, dense or pruned.

    Raises UnsupportedModelError if the other is on another device.
    """
    modules = {name: model.get_submodule(name) for name, _ in model.attention_fusers.values()}
    read: dict[Any, str] = {
        getattr(module, "layer_type", None): name
        for name, module in modules.items()
        if getattr(module, "store_full_length_kv", False)
    }
    for name, module in modules.items():
        if getattr(module, "is_kv_shared_layer", False):
            if module.layer_type not in read:
                raise UnsupportedModelError(
                    f"{name} reads the cache of a layer that another device has: serve with "
                    "--pipeline-parallel-size 1"
                )
            yield name, read[module.layer_type]


def tell_sinks(fuser: Any, attention: nn.Module) -> Any:
    """vLLM's note of an attention's arguments, with the sinks, which it finds written out alone."""
    arguments = dict(attention.spec.arguments) if isinstance(attention, RapAttention) else {}
    if "s_aux" not in arguments:
        return fuser
    return replace(fuser, s_aux_expr=ast.parse(f"self.{arguments['s_aux']}", mode="eval").body)


def check_rope(config: Any, max_model_len: int) -> None:
    """Raise UnsupportedModelError where frequencies would change with the longest of many texts."""
    whole = getattr(config, "rope_parameters", None) or {}
    # By layer type, where these rotate differently.
    for rope in [whole, *(part for part in whole.values() if isinstance(part, dict))]:
        kind = rope.get("rope_type")
        trained = next(
            length
            for length in (
                rope.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
                config.max_position_embeddings,
            )
            if length
        )
        if kind in ("longrope", "dynamic") and max_model_len > trained:
            raise UnsupportedModelError(
                f"rope_type {kind!r} changes its frequencies beyond {trained} tokens, for all "
                f"requests of a batch alike: serve with --max-model-len {trained} or less"
            )


def check_window(name: str, attention: Any) -> None:
    """Raise UnsupportedModelError if vLLM gave a layer another sliding window than it has."""
    found, own = attention.attn.sliding_window, attention.sliding_window
    if found != own:
        raise UnsupportedModelError(
            f"{name} has a sliding window of {own}, vLLM read {found} from config.json: no way to "
            "serve this model is known"
        )


def check_heads(name: str, attention: Any) -> None:
    """Raise UnsupportedModelError if vLLM gave a layer another number of heads than it caches.

    Its linears on CPUs check no sizes: they would write behind their outputs.
    """
    found, own = attention.attn.num_kv_heads, attention.num_kept_heads
    if found != own:
        raise UnsupportedModelError(
            f"{name} has {own} key and value heads, vLLM read {found} from config.json: no way to "
            "serve this model is known"
        )
