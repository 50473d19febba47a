"""What calibration accumulates: one class per statistic, fed activations or gradients of a layer.

A new statistic is a class and a line of STATISTICS. Accumulators are float32 and live on the device
of the projection they watch.

Shapes: B batch, T tokens, H query heads, G KV heads, D head dim, E model dim.
"""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.errors import CalibrationError
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    layer_frequencies,
    norm_weights,
    projections,
    rotary_factor,
    rotary_module,
    split_heads,
)
from ..model.specs import QKNorm
from .backward import GradientMoment
from .forward import AveragedValues, InputMoment, LogitSamples, RotatedMoment
from .kv_sharing import has_part
from .moments import (
    JointMoment,
    NormedGradient,
    NormedMoment,
    NormMoment,
    PairMoment,
    centred,
    shares,
)
from .observers import (
    BackwardStatistic,
    ForwardStatistic,
    ObservedLayer,
    Statistic,
    by_query_head,
)


class Energy(ForwardStatistic):
    """Mean square of every channel of q, k (before rotation, which keeps pair norms) and v.

    With QK-norm, `energy` is that of normalised q and k, and `raw_energy` that of what the norm
    divides; so are values' energies where they are normalised.
    """

    need = "energy"
    names = ("energy_q", "energy_k", "energy_v")
    norm_names = ("raw_energy_q", "raw_energy_k")
    projections = ("q", "k", "v")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        shape = layer.shape
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        self.sums = {
            projection: layer.zeros(projection, n, shape.head_dim)
            for projection, n in heads.items()
        }
        raw = "qk" if layer.norm is not None else ""
        self.raw = {projection: torch.zeros_like(self.sums[projection]) for projection in raw}

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        states_BTHD = split_heads(outputs.float(), self.layer.shape.head_dim)
        norm = self.layer.value_norm if projection == "v" else self.layer.norm
        self.sums[projection] += shares(states_BTHD, norm).sum((0, 1))
        if projection in self.raw:
            self.raw[projection] += centred(states_BTHD, norm).square().sum((0, 1))

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        energies = {
            f"energy_{projection}": total / num_tokens for projection, total in self.sums.items()
        }
        for projection, weight in zip(self.raw, self.layer.norm_weights, strict=True):
            energies[f"energy_{projection}"] *= weight.to(energies[f"energy_{projection}"]).square()
            energies[f"raw_energy_{projection}"] = self.raw[projection] / num_tokens
        values = energies.pop("energy_v")
        ordered = {name: self.layer.canonical(x) for name, x in energies.items()}
        return ordered | {"energy_v": values}


class ValueMoment(ForwardStatistic):
    """Second moment of what every query head hands to o_proj."""

    need = "values"
    names = ("value_moment",)
    projections = ("o",)

    def __init__(self, layer: ObservedLayer):
        self.shape = layer.shape
        width = layer.shape.head_dim
        self.sum = layer.zeros("o", layer.shape.num_heads, width, width)

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        heads_HND = by_query_head(split_heads(inputs.float(), self.shape.head_dim))
        self.sum += heads_HND.mT @ heads_HND

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {"value_moment": self.sum / num_tokens}


class Fisher(BackwardStatistic):
    """Empirical Fisher F = E[(dL/dW)^2], entrywise over windows (paper, eq. `fisher`).

    Holds [G D, E] float32 for each of W_k and W_v until `result` reduces it over inputs.
    """

    need = "fisher"
    names = ("root_fisher_k", "root_fisher_v", "weighted_fisher_k", "weighted_fisher_v")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        self.sums = {
            projection: layer.zeros(projection, *layer.linears[projection].weight.shape)
            for projection in "kv"
        }

    def update(self, projection: str, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.ndim == 2:
            gradient = gradient.float()
            self.sums[projection].addcmul_(gradient, gradient)

    def compute(self, num_windows: int) -> dict[str, Tensor]:
        scores = {}
        for projection, total in self.sums.items():
            fisher = total / num_windows
            weight = self.layer.linears[projection].weight.detach().float()
            root = fisher.sqrt().sum(1).view(-1, self.layer.shape.head_dim)
            weighted = (fisher * weight.square()).sum(1).view(-1, self.layer.shape.head_dim)
            order = self.layer.canonical if projection == "k" else Tensor.contiguous
            scores[f"root_fisher_{projection}"] = order(root)
            scores[f"weighted_fisher_{projection}"] = order(weighted)
        return scores


class GateFisher(BackwardStatistic):
    """E[(dL/dz)^2] over windows for a gate z = 1 on every key pair, free key and value channel.

    For k_i = W_i x + b_i the gate's derivative is the sum over the pair's channels of
    W_i . dL/dW_i + b_i dL/db_i, so no activation is needed.
    """

    need = "gate"
    names = ("gate_fisher_k", "gate_fisher_v")
    biases = True

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        heads, width = layer.shape.num_kv_heads, layer.shape.head_dim
        self.window = {projection: layer.zeros(projection, heads, width) for projection in "kv"}
        gates = {"k": layer.shape.geometry.num_pairs + layer.shape.geometry.num_free, "v": width}
        self.sums = {
            projection: layer.zeros(projection, heads, count) for projection, count in gates.items()
        }

    def update(self, projection: str, parameter: Tensor, gradient: Tensor) -> None:
        product = parameter.detach().float() * gradient.float()
        rows = product.sum(1) if product.ndim == 2 else product
        self.window[projection] += rows.view_as(self.window[projection])

    def end_window(self) -> None:
        pairs, rotary = self.layer.shape.geometry.num_pairs, self.layer.shape.geometry.rotary_dim
        key = self.layer.canonical(self.window["k"])
        gates = torch.cat([key[:, :pairs] + key[:, pairs:rotary], key[:, rotary:]], dim=1)
        self.sums["k"] += gates.square()
        self.sums["v"] += self.window["v"].square()
        for total in self.window.values():
            total.zero_()

    def compute(self, num_windows: int) -> dict[str, Tensor]:
        return {
            f"gate_fisher_{projection}": total / num_windows
            for projection, total in self.sums.items()
        }


STATISTICS: dict[str, type[Statistic]] = {
    statistic.need: statistic
    for statistic in (
        Energy,
        NormMoment,
        ValueMoment,
        PairMoment,
        InputMoment,
        RotatedMoment,
        LogitSamples,
        Fisher,
        GateFisher,
        GradientMoment,
        JointMoment,
        AveragedValues,
        NormedMoment,
        NormedGradient,
    )
}
# No statistic of a layer: some of the text itself, to try cuts on.
WINDOWS = "windows"


def check_needs(needs: Collection[str]) -> frozenset[str]:
    """`needs` as a set; CalibrationError if there is no statistic of that name."""
    known = {*STATISTICS, WINDOWS}
    unknown = sorted(set(needs) - known)
    if unknown:
        raise CalibrationError(
            f"unknown statistics {', '.join(unknown)}: use any of {', '.join(sorted(known))}"
        )
    return frozenset(needs)


def statistics_of(needs: Collection[str]) -> list[type[Statistic]]:
    """The statistics of layers among `needs`, by name; CalibrationError for one that is unknown."""
    return [STATISTICS[need] for need in sorted(check_needs(needs) - {WINDOWS})]


def statistics_of_layer(needs: Collection[str], layer: ObservedLayer) -> list[type[Statistic]]:
    """Those of `statistics_of` that have an entry for the layer."""
    return [statistic for statistic in statistics_of(needs) if has_part(statistic, layer)]


def backward_needs(needs: Collection[str]) -> list[str]:
    """Those of `needs` that no forward pass gives: gradients of the loss, and trial pruning."""
    forward = {need for need, one in STATISTICS.items() if issubclass(one, ForwardStatistic)}
    return sorted(check_needs(needs) - forward)


def check_held(model: PreTrainedModel) -> None:
    """Raise CalibrationError if weights are not in memory."""
    absent = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if absent is not None:
        raise CalibrationError(
            f"{absent} has no weights in memory (offloaded, or the meta device): load the model "
            "with weights on devices"
        )


def observed_layers(model: PreTrainedModel) -> list[ObservedLayer]:
    """Every layer with attention to prune; CalibrationError if weights are not in memory."""
    check_held(model)
    layers = attention_layers(model)
    return [observed_layer(model, layer) for layer in layers if layer.shape is not None]


def observed_layer(model: PreTrainedModel, layer: AttentionLayer) -> ObservedLayer:
    """A layer of the model as statistics see it; its weights may be those of a copy."""
    assert layer.shape is not None
    spec, frequencies = attention_spec(model.config), layer_frequencies(model, layer)
    linears, values = projections(layer, spec), None if spec.value_norm is None else QKNorm()
    factor = rotary_factor(rotary_module(model), layer.module)
    turned = -frequencies if spec.clockwise else frequencies
    about = (linears, norm_weights(layer), turned, factor, layer.norm, values, layer.module)
    return ObservedLayer(layer.index, layer.shape, *about)
