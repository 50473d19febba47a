"""Pruned models of every served family, through vLLM's backend for models of transformers.

vLLM builds the transformers model itself and replaces its linears, norms, experts and attention by
its own. The pruned attention keeps its forward; `projections` gives it vLLM's linears.

Two things the backend cannot do by itself are here. It cannot divide all of a layer over devices
(`WholeLayers`, `divide_sparsity`). And it takes over a block of experts whose router scores and
chooses, with the tensors of the router and nothing else, and replaces every linear by one that
returns a product and nothing else: routers it would change are kept as they are (`routers_kept`).

Shapes: G KV heads, P pairs, F channels that do not rotate, D head dim, I channels of this rank.
"""

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from statistics import NormalDist
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
)
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR, Base
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from ...model.attention import RapAttention
from ...model.errors import CheckpointError, UnsupportedModelError
from ...model.kinds.pairs import PairPlan
from ...model.layers import AttentionLayer, attention_layers, attention_spec, base_model_type
from ...model.modeling import RapModelMixin, build_attention, config_class, model_class, norm_mode
from ...model.rope import AttentionShape
from ...model.specs import AttentionSpec
from ...surgery.weights import converted
from ..layout import check_division
from ..refusals import check_precision, check_served
from .projections import place_attention
from .widths import PaddedAttention, ReadingAttention


class PrunedMixin(Base):
    """What a pruned model adds to vLLM's backend: its class, its linears, its head sizes."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        # Before anything is allocated: a config that cannot be served is refused in one sentence.
        check_served(config)
        check_precision(config, vllm_config.model_config.dtype)
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
    body = {
        "__module__": __name__,
        "config_class": config,
        "config": config,
        # `projections` divides pruned attention itself: the family's plan divides the others.
        "init_parallel_plans": base.init_parallel_plans,
    }
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
    """Raise UnsupportedModelError where frequencies would change with the longest request."""
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


class WholeLayers:
    """Layers that a plan left dense, as pruned ones that keep everything: those can be divided.

    vLLM divides what it finds in a module's code: q, k and v in linears of their own, and norms of
    each head whose weights all heads share. Of a layer that has something else it would take some
    heads of one thing and all of another.
    """

    def __init__(self, model: Any, *, quantized: bool = False):
        """Replace such layers of a model on the meta device.

        Raises UnsupportedModelError if there are any and the checkpoint is quantized: its scales
        would have to be put in another order too.
        """
        config = model.config
        self.spec, self.layers = attention_spec(config), attention_layers(model)
        planned = [
            _keep_all(layer.shape) if _is_beyond(layer, self.spec) else None
            for layer in self.layers
        ]
        first = next((index for index, kept in enumerate(planned) if kept is not None), None)
        if quantized and first is not None:
            raise UnsupportedModelError(
                f"layer {first} was left dense, and vLLM cannot divide quantized ones of "
                f"{self.spec.model_type}: use --tensor-parallel-size 1, or prune every layer"
            )
        self.planned, self.mode = planned, norm_mode(config)
        # Named while the modules are dense: they are replaced below.
        self.stored = {
            layer.path: {
                f"{layer.path}.{name}"
                for name, _ in cast(nn.Module, layer.module).named_parameters()
            }
            for layer, kept in zip(self.layers, planned, strict=True)
            if kept is not None
        }
        self.dense = {layer.path: layer for layer in self.layers if layer.path in self.stored}
        for layer, kept in zip(self.layers, planned, strict=True):
            if kept is not None:
                entry = kept.entry(self.mode)
                whole = build_attention(model, layer, self.spec, entry, layer.norm, self.mode)
                model.set_submodule(layer.path, whole)

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Stored weights with those of such layers as `rap apply` would have stored them.

        A layer's are held until all of them are there.
        """
        paths = {name: path for path, names in self.stored.items() for name in names}
        held: dict[str, dict[str, Tensor]] = {path: {} for path in self.stored}
        for stored, tensor in weights:
            # What comes before the layers is called otherwise in a model without its head.
            start = stored.find("layers.")
            path = paths.get(stored[start:])
            if path is None:
                yield stored, tensor
                continue
            held[path][stored[start:]] = tensor
            if held[path].keys() == self.stored[path]:
                layer = self.dense[path]
                kept = self.planned[layer.index]
                assert kept is not None
                made = converted(kept, layer, self.spec, held.pop(path), self.mode)
                yield from ((f"{stored[:start]}{name}", x) for name, x in made.items())


def divide_sparsity(model: nn.Module) -> None:
    """Let gates that keep the largest of their channels (Gemma 3n) know those of all ranks."""
    for module in model.modules():
        if getattr(module, "activation_sparsity", 0.0) and hasattr(module, "_gaussian_topk"):
            vars(module)["_gaussian_topk"] = MethodType(_sparse_gate, module)


def _sparse_gate(module: Any, gate_TI: Tensor) -> Tensor:
    """What a gate has above the quantile of a normal distribution with its mean and deviation."""
    count = gate_TI.shape[-1] * get_tensor_model_parallel_world_size()

    def mean(x_TI: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(x_TI.sum(-1, keepdim=True)) / count

    centre_T1 = mean(gate_TI)
    deviation_T1 = mean((gate_TI - centre_T1).square()).sqrt()
    quantile = NormalDist().inv_cdf(module.activation_sparsity)
    return functional.relu(gate_TI - (centre_T1 + deviation_T1 * quantile))


def _is_beyond(layer: AttentionLayer, spec: AttentionSpec) -> bool:
    """Whether a layer is dense and has what vLLM does not divide."""
    if layer.shape is None or layer.pruned:
        return False
    if spec.fused is not None or spec.gate is not None:
        return True
    if spec.norm is not None and spec.norm.one_module_per_head:
        # Its code also counts all heads where it has no norm.
        return True
    if layer.norm is None:
        return False
    if layer.norm.over == "all":
        return True
    weight = getattr(getattr(layer.module, layer.norm.names[0]), "weight", None)
    return weight is not None and weight.ndim > 1


def _keep_all(shape: AttentionShape | None) -> PairPlan:
    assert shape is not None
    geometry, heads = shape.geometry, shape.num_kv_heads
    sizes = (geometry.num_pairs, geometry.num_free, geometry.head_dim)
    pairs, free, values = (torch.arange(size).expand(heads, -1) for size in sizes)
    return PairPlan(pairs, free, values)


_MARK = "tensors_of_the_block"


@contextmanager
def routers_kept(model: nn.Module) -> Iterator[None]:
    """While vLLM replaces modules of `model`: their routing stays that of transformers.

    Blocks with tensors of their own (a bias on the choice: MiniMax-M2, HunYuan-V3) route outside of
    vLLM's experts, which take weights and choices then. Linears with a forward of their own
    (Phi-3.5-MoE) are put back, whole on every device.
    """
    blocks = [block for block in model.modules() if _has_own_tensors(block)]
    linears = {name: module for name, module in model.named_modules() if _has_own_forward(module)}
    for block in blocks:
        # vLLM looks at children: one with a tensor that it cannot account for keeps it away.
        block.add_module(_MARK, nn.ParameterList([torch.empty(0)]))
    yield
    for block in blocks:
        delattr(block, _MARK)
    for name, linear in linears.items():
        model.set_submodule(name, linear)


def _has_own_tensors(module: nn.Module) -> bool:
    own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return hasattr(module, "experts") and next(own, None) is not None


def _has_own_forward(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
