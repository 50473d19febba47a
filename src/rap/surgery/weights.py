"""Step 3, the one driver of pruning: a plan and dense weights to the pruned model's weights.

The unit is one layer's attention, converted when one of its tensors is asked for; everything else
is the dense model's. `apply` loads the result into a module, the writer of checkpoints, the
layer-wise distillation and searches read it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.load import load_config
from ..checkpoint.stored import Weights, without_weights
from ..model.cache_layout import Entry
from ..model.errors import PlanError
from ..model.fingerprint import fingerprint_model
from ..model.kinds.base import DenseAttention, LayerPlan
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    check_dense,
    text_config,
)
from ..model.modeling import CONFIG_VERSION, config_class, model_class
from ..planning.plan import Plan


class LoadedWeights:
    """The weights of a model in memory, as `checkpoint.stored.Weights` are of one that is not."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.state = model, model.state_dict()

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights as they are when it is first asked for."""
        return fingerprint_model(self.model)

    def tensor(self, name: str) -> Tensor:
        """The model's own tensor, not a copy."""
        return self.state[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its type."""
        return self.state[name].dtype


@dataclass(frozen=True, eq=False)
class PrunedLayer:
    """One layer's attention as it becomes: its entry in config.json, and its tensors by name."""

    entry: Entry
    tensors: Mapping[str, Tensor]


class PrunedWeights:
    """The weights that a plan makes of dense ones, lazily, by the pruned model's names.

    As `checkpoint.stored.Weights`. `changed` are those that were trained since, by name. The layer
    that was asked for last is kept. Raises PlanError if the plan is of another model.
    """

    def __init__(self, dense: Weights, plan: Plan, changed: Mapping[str, Tensor] | None = None):
        self.dense, self.plan, self.changed = dense, plan, changed or {}
        self.spec, layers = attention_spec(dense.model.config), attention_layers(dense.model)
        shapes = [layer.shape for layer in layers]
        plan.check_model(base_model_type(dense.model.config), shapes)
        self.layers = {
            layer.index: layer
            for layer, planned in zip(layers, plan.layers, strict=True)
            if planned is not None
        }
        self.inside: dict[int, list[str]] = {index: [] for index in self.layers}
        paths = {f"{layer.path}.": index for index, layer in self.layers.items()}
        self._own, self._owner = dense.model.state_dict(), dict[str, int]()
        for name in self._own:
            index = next((i for path, i in paths.items() if name.startswith(path)), None)
            if index is not None:
                self.inside[index].append(name)
                self._owner[name] = index
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        self._sketches: dict[int, dict[str, Tensor]] = {}

    @cached_property
    def model(self) -> Any:
        """The pruned model, on the meta device."""
        return without_weights(pruned_config(self.dense.model.config, self.plan))

    def names(self) -> Iterator[str]:
        """Of every tensor: the dense model's outside planned layers, then those of each layer."""
        yield from (name for name in self._own if name not in self._owner)
        for index in self.layers:
            yield from self.sketch(index)

    def owner(self, name: str) -> int | None:
        """The planned layer whose attention has a tensor, by the dense or the pruned name."""
        if name in self._own:
            return self._owner.get(name)
        return next(
            (i for i, layer in self.layers.items() if name.startswith(f"{layer.path}.")), None
        )

    def tensor(self, name: str) -> Tensor:
        """A tensor by the pruned model's name: trained, converted, or as in the dense model."""
        if name in self.changed:
            return self.changed[name].to(self.dtype(name))
        index = self.owner(name)
        return self.dense.tensor(name) if index is None else self._layer(index)[name]

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in."""
        index = self.owner(name)
        return self.dense.dtype(name) if index is None else self.sketch(index)[name].dtype

    def sketch(self, index: int) -> dict[str, Tensor]:
        """Names, shapes and types of a planned layer's tensors, on the meta device."""
        if index not in self._sketches:
            empty = {
                name: torch.empty(
                    self._own[name].shape, dtype=self.dense.dtype(name), device="meta"
                )
                for name in self.inside[index]
            }
            self._sketches[index] = self._converted(index, empty)
        return self._sketches[index]

    def layer(self, index: int) -> PrunedLayer:
        """A planned layer."""
        planned, path = self.plan.layers[index], f"{self.layers[index].path}."
        assert planned is not None
        tensors = {name.removeprefix(path): x for name, x in self._layer(index).items()}
        return PrunedLayer(planned.entry(self.plan.qk_norm), tensors)

    def _layer(self, index: int) -> dict[str, Tensor]:
        if self._kept is None or self._kept[0] != index:
            dense = {name: self.dense.tensor(name) for name in self.inside[index]}
            self._kept = index, self._converted(index, dense)
        return self._kept[1]

    def _converted(self, index: int, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layer, planned = self.layers[index], self.plan.layers[index]
        assert planned is not None
        return converted(planned, layer, self.spec, dense, self.plan.qk_norm)

    @cached_property
    def fingerprint(self) -> str:
        """Of the dense weights and the plan; what was trained does not count."""
        digest = hashlib.sha256(self.dense.fingerprint.encode())
        digest.update(repr(sorted(self.plan.method.items())).encode())
        for index, layer in enumerate(self.plan.layers):
            for name, tensor in sorted((layer.tensors() if layer else {}).items()):
                digest.update(f"{index} {name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def converted(
    planned: LayerPlan,
    layer: AttentionLayer,
    spec: Any,
    dense: Mapping[str, Tensor],
    norm_mode: str,
) -> dict[str, Tensor]:
    """A layer's pruned tensors by the model's names, of its dense ones by the model's names."""
    path = f"{layer.path}."
    inside = {name.removeprefix(path): tensor for name, tensor in dense.items()}
    made = planned.convert(DenseAttention(layer, spec, inside, norm_mode))
    return {f"{path}{name}": tensor for name, tensor in made.items()}


def pruned_config(dense_config: PreTrainedConfig, plan: Plan) -> Any:
    """The base config's own fields, unchanged, plus the `rap` section with every layer's entry.

    If the dense family's config can describe the kept layers (whole heads), that config instead.
    Raises UnsupportedModelError if it describes only some of them.
    """
    for kind in {type(layer) for layer in plan.layers if layer is not None}:
        config = kind.family_config(dense_config, plan.layers, plan.shapes)
        if config is not None:
            return config
    entries = [layer and layer.entry(plan.qk_norm).fields() for layer in plan.layers]
    section = {
        "version": CONFIG_VERSION,
        "base_model_type": plan.model_type,
        "layers": entries,
        "retain": plan.retain,
        "kept_fraction": plan.kept_fraction,
        "qk_norm": plan.qk_norm,
        "method": plan.method,
        "dense_fingerprint": plan.dense_fingerprint,
    }
    return config_with(dense_config, section)


def config_with(dense_config: PreTrainedConfig, section: dict[str, Any]) -> Any:
    """The base config's own fields, unchanged, plus a `rap` section."""
    kept = dense_config.to_dict()
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        kept.pop(key, None)
    base_type = base_model_type(dense_config)
    config = config_class(base_type)(**kept, rap=section)
    config.architectures = [model_class(base_type).__name__]
    return config


def check_config(config: PreTrainedConfig, plan: Plan) -> None:
    """Raise PlanError unless a plan was made for models of this config; no weight is read.

    Raises CheckpointError for a model that is pruned or quantized, UnsupportedModelError for a
    family that is not known.
    """
    check_dense(config)
    attention_spec(config)
    # Before layers are built, which a wrong number of them makes long.
    plan.check_kind(base_model_type(config), text_config(config).num_hidden_layers)
    shapes = [layer.shape for layer in attention_layers(without_weights(config))]
    plan.check_model(base_model_type(config), shapes)


def check_teacher(plan: Plan, source: str) -> None:
    """Raise PlanError unless the plan is for models of this shape, by the config of `source`."""
    try:
        check_config(load_config(source), plan)
    except PlanError as error:
        raise PlanError(
            f"{source} is not the dense model of this pruned checkpoint; name that model"
        ) from error
