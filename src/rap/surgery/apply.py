"""Step 3, the pruned model: a plan applied to a dense model in memory."""

import copy
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.stored import untie
from ..model.errors import CheckpointError
from ..model.fingerprint import fingerprint_model, tied_names
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    check_dense,
    projection_tensors,
)
from ..model.modeling import CONFIG_VERSION, config_class, model_class
from ..model.norms import norm_names
from ..model.specs import AttentionSpec
from ..planning.plan import LayerPlan, Plan, PlanHeader
from .cut import cut


def apply(model: PreTrainedModel, plan: Plan) -> Any:
    """A new Rap<Family>ForCausalLM cut from `model` as planned; `model` is left untouched.

    The result holds its own copy of every weight, on the devices of the dense ones. Raises
    PlanError if the plan was made for another model, CheckpointError if the model is pruned
    already or has weights offloaded to the meta device.
    """
    check_dense(model)
    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if offloaded is not None:
        raise CheckpointError(
            f"{offloaded} is offloaded: load the model whole, or use `rap apply --stream`"
        )
    layers = attention_layers(model)
    shapes = [layer.shape for layer in layers]
    plan.check_model(base_model_type(model.config), shapes, fingerprint_model(model))
    state = pruned_state(model.state_dict(), plan, layers, attention_spec(model.config))

    return assemble(model, pruned_config(model.config, plan), state)


def assemble(model: PreTrainedModel, config: PreTrainedConfig, state: dict[str, Tensor]) -> Any:
    """The model of a config with the weights `state`, all else as in the dense `model`.

    A config of the dense family itself gives a model of the dense class. If it says that weights
    are tied which in `model` are not, it is changed.
    """
    if set(model.get_expanded_tied_weights_keys(all_submodels=True)) - tied_names(model):
        untie(config)
    stock = config.model_type == model.config.model_type
    with torch.device("meta"):
        small = (type(model) if stock else model_class(base_model_type(model.config)))(config)
    small.load_state_dict(state, assign=True, strict=True)
    _copy_buffers(model, small)
    small.tie_weights()
    # What peft records as the base of adapters. The dense checkpoint, named in the config, is not.
    small.name_or_path = ""
    small.config._attn_implementation = model.config._attn_implementation
    small.config._experts_implementation = model.config._experts_implementation
    small.generation_config = copy.deepcopy(model.generation_config)
    small.train(model.training)
    return _dispatch_like(model, small)


def pruned_config(dense_config: PreTrainedConfig, plan: Plan) -> Any:
    """The base config's own fields, unchanged, plus the `rap` section with every layer's widths."""
    widths = [widths_of(layer, plan.qk_norm) for layer in plan.layers]
    return config_with(dense_config, rap_section(plan, widths, plan.kept_fraction, plan.qk_norm))


def config_with(dense_config: PreTrainedConfig, section: dict[str, Any]) -> Any:
    """The base config's own fields, unchanged, plus a `rap` section."""
    kept = dense_config.to_dict()
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        kept.pop(key, None)
    base_type = base_model_type(dense_config)
    config = config_class(base_type)(**kept, rap=section)
    config.architectures = [model_class(base_type).__name__]
    return config


def rap_section(
    plan: PlanHeader,
    widths: list[dict[str, Any] | None],
    kept_fraction: float,
    qk_norm: str = "constant",
) -> dict[str, Any]:
    """The `rap` section of config.json: format version, widths, and where the model came from."""
    return {
        "version": CONFIG_VERSION,
        "base_model_type": plan.model_type,
        "layers": widths,
        "retain": plan.retain,
        "kept_fraction": kept_fraction,
        "qk_norm": qk_norm,
        "method": plan.method,
        "dense_fingerprint": plan.dense_fingerprint,
    }


def pruned_state(
    state: dict[str, Tensor], plan: Plan, layers: list[AttentionLayer], spec: AttentionSpec
) -> dict[str, Tensor]:
    """The pruned model's state dict: cut attention weights, copies of everything else."""
    cuts = projection_tensors(layers, spec)
    result = {}
    for name, tensor in state.items():
        layer, role = cuts.get(name, (None, ""))
        if layer is None or plan.layers[layer.index] is None:
            result[name] = tensor.detach().clone()
        else:
            result[name] = cut_layer(role, tensor.detach(), layer, plan, spec)
    devices = {cuts[name][0].path: state[name].device for name in state if name in cuts}
    for path, added in added_tensors(plan, layers).items():
        result |= {f"{path}.{name}": value.to(devices[path]) for name, value in added.items()}
    return result


def cut_layer(
    role: str, tensor: Tensor, layer: AttentionLayer, plan: Plan, spec: AttentionSpec
) -> Tensor:
    """The pruned form of one tensor that `projection_tensors` names, of a planned layer."""
    planned = plan.layers[layer.index]
    assert planned is not None
    assert layer.shape is not None
    return cut(
        role,
        tensor,
        planned,
        layer.shape,
        norm=layer.norm,
        norm_mode=plan.qk_norm,
        per_head=spec.per_head,
        value_norm=spec.value_norm is not None,
    )


def added_tensors(plan: Plan, layers: list[AttentionLayer]) -> dict[str, dict[str, Tensor]]:
    """By a pruned layer's path: the tensors it has and the dense one has not, by name.

    `frequency_index` int32 [G, M]; with QK-norm also the dense channel of every kept one,
    `kept_channels` int32 [G, W] (mode `exact`), or each norm's energy `ratio` [heads] (else).
    """
    by_path = {}
    for layer, planned in zip(layers, plan.layers, strict=True):
        if planned is None:
            continue
        assert layer.shape is not None
        # Copies, because readers share their source's.
        index = planned.frequency_GM.to(torch.int32, copy=True)
        added = {"frequency_index": index.contiguous()}
        if layer.norm is not None and plan.qk_norm == "exact":
            added["kept_channels"] = planned.kept_channels(layer.shape).to(torch.int32)
        elif layer.norm is not None:
            names = norm_names(layer.norm, exact=False)
            ratios = (planned.query_ratio_H, planned.key_ratio_G)
            counts = (layer.shape.num_heads, layer.shape.num_kv_heads)
            for name, ratio, count in zip(names, ratios, counts, strict=True):
                if name == names[1] and layer.shape.source is not None:
                    continue
                ratio = torch.ones(count) if ratio is None else ratio
                added[f"{name}.ratio"] = ratio.to(torch.float32, copy=True)
        by_path[layer.path] = added
    return by_path


def widths_of(layer: LayerPlan | None, norm_mode: str) -> dict[str, int] | None:
    """A layer's entry in the `rap` section; None for one that is left dense."""
    if layer is None:
        return None
    widths = {"pairs": layer.num_pairs, "free": layer.num_free, "values": layer.value_width}
    rows = layer.norm_rows if norm_mode == "rows" else 0
    return widths | ({"norm_rows": rows} if rows else {})


def _copy_buffers(dense: nn.Module, small: nn.Module) -> None:
    """Non-persistent buffers (RoPE frequencies) are in no state dict."""
    # After a forward pass longrope has one tensor under two names.
    source = dict(dense.named_buffers(remove_duplicate=False))
    for name, buffer in small.named_buffers():
        if buffer.device.type == "meta":
            parent, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(parent), leaf, source[name].clone())
    # Frequencies that grew with a long text shrink again by the length that they are known to have.
    modules = dict(small.named_modules())
    for name, module in dense.named_modules():
        grown = {key: x for key, x in vars(module).items() if key.endswith("max_seq_len_cached")}
        if grown and name in modules:
            modules[name].__dict__.update(grown)


def _dispatch_like(dense: PreTrainedModel, small: PreTrainedModel) -> Any:
    device_map = getattr(dense, "hf_device_map", None)
    if not device_map or len(set(device_map.values())) < 2:
        return small
    return dispatch_model(small, device_map=device_map)
