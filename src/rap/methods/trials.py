"""Trying cuts before one is planned: layers that stand in for dense ones, on kept windows.

For methods that divide their budget by what a cut does to the model itself. Only the attention that
is tried takes memory beside the model, which is left as it was found.

Shapes: N windows, T tokens, E model dim.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..calibration.loss import next_token_loss
from ..calibration.statistics import Statistics
from ..model.errors import CalibrationError
from ..model.kinds.base import DenseAttention, LayerPlan
from ..model.layers import AttentionLayer, attention_layers, attention_spec, projections
from ..model.modeling import build_attention
from ..runtime.logits import Head, chunk_tokens, decoder_of
from ..runtime.state import restored

Cuts = Mapping[int, LayerPlan]


class Trials:
    """A dense `model`, and the windows that calibration kept of its text.

    `norm_mode` is how cuts of pairs stand for the norms of queries and keys (rap.model.norms).
    All measures raise CalibrationError if a cut gives what is not finite.
    """

    def __init__(self, model: PreTrainedModel, statistics: Statistics, norm_mode: str = "constant"):
        assert statistics.windows is not None
        self.model, self.windows_NT, self.norm_mode = model, statistics.windows, norm_mode
        self._dense: list[Tensor] | None = None
        # A search tries one layer again and again beside others that stay: each is built once.
        self._built: dict[int, nn.Module] = {}  # by the identity of the plan, as long as it lives

    def perplexity(self, cuts: Cuts) -> float:
        """Of the windows, with these layers' attention replaced."""
        with self._replaced(cuts):
            losses = [float(next_token_loss(self.model, ids)) for ids in self._batches()]
        return math.exp(_finite(sum(losses) / len(losses), cuts))

    def change(self, cuts: Cuts) -> float:
        """Relative L2 change of the last hidden states from the dense model's."""
        pairs = self._pairs(cuts)
        moved = sum(float((cut - dense).double().square().sum()) for cut, dense in pairs)
        whole = sum(float(dense.double().square().sum()) for _, dense in pairs)
        return math.sqrt(_finite(moved, cuts) / whole)

    def divergence(self, cuts: Cuts) -> float:
        """Mean KL(dense || cut) of the next token, in nats a token of the windows."""
        pairs, head, step = self._pairs(cuts), Head(self.model), chunk_tokens(self.model)
        nats = 0.0
        with torch.no_grad():
            for states in pairs:
                ours, theirs = (
                    head.chunks(_output(state), state[0].to(self._device), step) for state in states
                )
                for cut, dense in zip(ours, theirs, strict=True):
                    found, expected = cut.float().log_softmax(-1), dense.float().log_softmax(-1)
                    nats += float(kl_div(found, expected, reduction="sum", log_target=True))
        return _finite(nats, cuts) / self.windows_NT.numel()

    def _pairs(self, cuts: Cuts) -> list[tuple[Tensor, Tensor]]:
        """Last hidden states [1, T, E] of every window, of the cut and of the dense model."""
        if self._dense is None:
            self._dense = self._hidden({})
        return list(zip(self._hidden(cuts), self._dense, strict=True))

    def _hidden(self, cuts: Cuts) -> list[Tensor]:
        with self._replaced(cuts):
            decoder = decoder_of(self.model)[1]
            states = (decoder(input_ids=i, use_cache=False) for i in self._batches())
            return [state.last_hidden_state.cpu() for state in states]

    def _batches(self) -> Iterator[Tensor]:
        return (ids.to(self._device) for ids in self.windows_NT.split(1))

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.get_input_embeddings().parameters()).device
        return device

    @contextmanager
    def _replaced(self, cuts: Cuts) -> Iterator[None]:
        """The model, in evaluation mode, with the attention of some layers replaced inside."""
        layers = [layer for layer in attention_layers(self.model) if layer.index in cuts]
        for layer in layers:
            new = cuts[layer.index]
            if id(new) not in self._built:
                self._built[id(new)] = _built(self.model, layer, new, self.norm_mode)
                finalize(new, self._built.pop, id(new), None)
        with restored(self.model, [], False), torch.no_grad():
            try:
                for layer in layers:
                    _put(self.model, layer, self._built[id(cuts[layer.index])])
                yield
            finally:
                for layer in layers:
                    _put(self.model, layer, layer.module)


def _finite(value: float, cuts: Cuts) -> float:
    if not math.isfinite(value):
        raise CalibrationError(
            f"a trial cut of layers {', '.join(map(str, sorted(cuts)))} gives {value}: calibrate "
            "in float32 or bfloat16"
        )
    return value


def _output(hidden_BTE: Any) -> BaseModelOutputWithPast:
    return BaseModelOutputWithPast(last_hidden_state=hidden_BTE)


def _put(model: PreTrainedModel, layer: AttentionLayer, module: Any) -> None:
    parent, _, name = layer.path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _built(
    model: PreTrainedModel, layer: AttentionLayer, new: LayerPlan, norm_mode: str
) -> nn.Module:
    """The attention of a layer's plan, on the device and in the dtype of the dense one."""
    spec, dense = attention_spec(model.config), cast(nn.Module, layer.module)
    tensors = new.convert(DenseAttention(layer, spec, dense.state_dict(), norm_mode))
    device = projections(layer, spec)["q"].weight.device
    # Linears are made with random weights, which come from no one's seed.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        entry = new.entry(norm_mode)
        built: nn.Module = build_attention(model, layer, spec, entry, layer.norm, norm_mode)
    # Hooks that move inputs between devices hang on the dense module as a `forward` of its own.
    vars(built).pop("forward", None)
    built.load_state_dict(tensors, assign=True)
    return built.eval()
