"""A plan applied to a dense model, in memory or in files."""

import copy
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.stored import untie
from ..model.errors import CheckpointError
from ..model.fingerprint import tied_names
from ..model.layers import attention_layers, base_model_type, check_dense
from ..model.modeling import model_class
from ..planning.plan import Plan
from ..runtime.sources import LayerSource, LoadedLayers, StoredLayers
from .weights import LoadedWeights, PrunedWeights, pruned_config


def prune(dense: LayerSource, plan: Plan) -> LayerSource:
    """The pruned model of a plan, by its layers; of weights in files pruned when they are read."""
    if isinstance(dense, StoredLayers):
        return StoredLayers(PrunedWeights(dense.weights, plan), dense.device)
    return LoadedLayers(apply(dense.whole("pruning"), plan))


def apply(model: PreTrainedModel, plan: Plan) -> Any:
    """The smaller model that a plan makes of the dense `model`, which is left untouched.

    A new Rap<Family>ForCausalLM, or of whole heads one of the dense class. It holds its own copy of
    every weight, on the devices of the dense ones. Raises PlanError if the plan was made for
    another model, CheckpointError if the model is pruned already or has weights offloaded to the
    meta device.
    """
    check_dense(model)
    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if offloaded is not None:
        raise CheckpointError(
            f"{offloaded} is offloaded: load the model whole, or use `rap apply --stream`"
        )
    dense = LoadedWeights(model)
    shapes = [layer.shape for layer in attention_layers(model)]
    plan.check_model(base_model_type(model.config), shapes, dense.fingerprint)
    weights = PrunedWeights(dense, plan)
    state = {
        name: tensor.detach().clone() if weights.owner(name) is None else tensor
        for name, tensor in ((name, weights.tensor(name)) for name in weights.names())
    }
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
