"""Cut attention fitted to the dense model's, one layer after another, on text alone.

Every cut layer is trained to give, on what the cut model really hands it, what the dense layer
gives on what the dense model hands it, and to make up for a share of what the residual stream has
lost so far. No gradient passes through more than one attention, and one layer of each model works
at a time. In the line of BRECQ (https://arxiv.org/abs/2102.05426), which reconstructs blocks of
quantized networks, and of SparseGPT (https://arxiv.org/abs/2301.00774), which solves layers in
order.

Shapes: N windows, T tokens of a window, E model dim.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..calibration.progress import Progress
from ..calibration.state import evaluating
from ..checkpoint.files import whole_file
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    text_config,
    text_decoder,
)
from .data import fingerprint_windows
from .layer_fit import FitConfig, LayerFit, LayerProblem
from .runs import begin, explained
from .streams import Stream, attention_outputs_of, residual_scale

_FLOAT = 4


def fit_layers(
    small: Any,
    dense: Any,
    windows: Tensor,
    config: FitConfig | None = None,
    *,
    work: Path | None = None,
    progress: bool = False,
) -> list[LayerFit]:
    """Fit every cut attention of `small` in place, in order; each keeps the better of old and new.

    `windows` [N, T]; the last of them judge. All parameters of the attention are trained, and by
    scope "block" the other matrices of its layer, in float32 whatever the model is stored in. Host
    memory: three streams of N T E floats; on the device one layer of each model and a batch of
    activations. Every finished layer is written to `work`, where a killed run goes on: it walks the
    streams again and ends with the same bytes.

    Raises RapError for too few windows, weights that are not in memory, or a loss that is not
    finite.
    """
    config = config or FitConfig()
    num_judging = max(1, round(len(windows) * config.held_out))
    if len(windows) - num_judging < config.batch:
        raise RapError(
            f"{len(windows)} windows leave fewer than a batch of {config.batch} to fit: give more"
        )
    if any(parameter.is_meta for model in (small, dense) for parameter in model.parameters()):
        raise RapError("fit needs all weights in memory: load the models without offloading")
    if progress:
        estimate = estimate_fit(small, dense, windows, config)
        Console(stderr=True).print(_describe(estimate), soft_wrap=True)
    if work is not None:
        begin(work, _record(small, dense, windows, config))
    with evaluating(small), evaluating(dense):
        dense_stream = Stream(dense, windows, config.batch)
        small_stream = Stream(small, windows, config.batch)
        fitter = _Fitter(dense_stream, small_stream, config, num_judging, work)
        return list(fitter.layers(progress))


def estimate_fit(
    small: Any, dense: Any, windows: Tensor, config: FitConfig | None = None
) -> dict[str, int]:
    """Bytes that `fit_layers` will hold beside the weights: `streams` on the host, `layers`.

    Streams: what both models hand to a layer, and of the dense one its input, its attention's
    output, what is wanted, and one more for a moment. Layers: the largest of each model in float32,
    and three times what is trained for gradients and Adam.
    """
    hidden = windows.numel() * text_config(dense.config).hidden_size * _FLOAT

    def largest(model: Any) -> int:
        layers = text_decoder(model).layers
        return max(sum(p.numel() for p in layer.parameters()) for layer in layers)

    attention = max(
        sum(parameter.numel() for parameter in layer.module.parameters())
        for layer in attention_layers(small)
        if layer.module is not None
    )
    trained = largest(small) if config is not None and config.scope == "block" else attention
    layers = _FLOAT * (largest(small) + largest(dense) + 3 * trained)
    return {"streams": 6 * hidden, "layers": layers}


def _describe(estimate: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in estimate.items())
    total = f"{sum(estimate.values()) / 2**20:,.1f} MiB"
    return f"the fit needs about {total} beside the weights ({parts})"


class _Fitter:
    """Both models' streams at the input of the same layer."""

    def __init__(
        self,
        dense: Stream,
        small: Stream,
        config: FitConfig,
        num_judging: int,
        work: Path | None,
    ):
        self.dense, self.small, self.config, self.work = dense, small, config, work
        self.num_judging = num_judging
        self.attention = attention_spec(small.model.config).attention

    def layers(self, progress: bool) -> Iterator[LayerFit]:
        """Go through all layers in order; a result for each that was cut."""
        mine, theirs = attention_layers(self.small.model), attention_layers(self.dense.model)
        tokens = self.small.hidden[..., 0].numel()
        with Progress(
            "fitting layers", len(mine), "layers", tokens=tokens, shown=progress
        ) as shown:
            for layer, original in zip(mine, theirs, strict=True):
                # Whole heads can be cut into a stock model, whose attention is the family's own.
                if hasattr(layer.module, "dense_shape") or layer.shape != original.shape:
                    result = self._fit(layer)
                    shown.update(layer.index + 1, f"error {result.before:.1e}, {result.after:.1e}")
                    yield result
                else:
                    for stream in (self.dense, self.small):
                        stream.advance(stream.working(layer.index), layer.index)
                    shown.update(layer.index + 1)

    def _fit(self, layer: AttentionLayer) -> LayerFit:
        index = layer.index
        mine = self.small.working(index)
        attention = getattr(mine, self.attention)
        problem = self._problem(mine, attention, index)
        result = self._stored(index, problem.trained)
        if result is None:
            result = problem.solve()
            self._store(index, problem.trained, result)
        assert layer.module is not None
        place = layer.module if problem.trained is attention else self.small.layers[index]
        with torch.no_grad():
            pairs = zip(place.parameters(), problem.trained.parameters(), strict=True)
            for parameter, fitted in pairs:
                parameter.copy_(fitted)
                fitted.copy_(parameter)  # the stream goes on with what the model's dtype holds
        self.small.advance(mine, index)
        return result

    def _problem(self, mine: nn.Module, attention: nn.Module, index: int) -> LayerProblem:
        """What the layer is to give; the dense stream goes on to the next layer's input."""
        wanted = self._of_layer if self.config.scope == "block" else self._of_attention
        target, size = wanted(mine, index)
        weight = torch.rsqrt(size + torch.finfo(size.dtype).tiny)
        return LayerProblem(
            self.small, mine, attention, index, target, weight, self.num_judging, self.config
        )

    def _of_attention(self, mine: nn.Module, index: int) -> tuple[Tensor, Tensor]:
        """What the attention is to give, and the size of the streams it is added to."""
        theirs = self.dense.working(index)
        before = self.dense.hidden.clone()
        added = torch.empty_like(before)
        with attention_outputs_of(getattr(theirs, self.attention)) as seen:
            for rows in self.dense.batches():
                output = self.dense.run(theirs, index, before[rows])
                self.dense.hidden[rows], added[rows] = output.cpu(), seen.pop().cpu()
        one = slice(0, 1)
        scale = residual_scale(
            self.dense, theirs, getattr(theirs, self.attention), index, before[one], added[one]
        )
        if scale is None:  # a norm reads the output by itself, without the stream
            return added, _mean_square(added)
        target = added + self.config.drift / scale * (before - self.small.hidden)
        # Of both models: a stream that is large in one alone would rule the fit either way.
        size = _mean_square(before / scale + added) + _mean_square(self.small.hidden / scale)
        return target, size

    def _of_layer(self, mine: nn.Module, index: int) -> tuple[Tensor, Tensor]:
        """What the layer is to give, and the size of what both models' layers do."""
        lost = self.dense.hidden - self.small.hidden
        self.dense.advance(self.dense.working(index), index)
        size = _mean_square(self.dense.hidden)
        with torch.no_grad():
            for rows in self.small.batches():
                output = self.small.run(mine, index, self.small.hidden[rows])
                size[rows] += _mean_square(output.cpu())
        return self.dense.hidden - (1 - self.config.drift) * lost, size

    def _file(self, index: int) -> Path | None:
        return None if self.work is None else self.work / f"layer-{index:03d}.safetensors"

    def _stored(self, index: int, trained: nn.Module) -> LayerFit | None:
        """The result of a run before this one, whose weights are loaded."""
        path = self._file(index)
        if path is None or not path.is_file():
            return None
        with safe_open(path, "pt") as stored:
            errors = stored.metadata()
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                parameter.copy_(tensors[name])
        return LayerFit(index, float(errors["before"]), float(errors["after"]))

    def _store(self, index: int, trained: nn.Module, result: LayerFit) -> None:
        path = self._file(index)
        if path is None or self.work is None:
            return
        tensors = {name: p.detach().cpu().clone() for name, p in trained.named_parameters()}
        errors = {"before": repr(result.before), "after": repr(result.after)}
        with explained(self.work), whole_file(path) as partial:
            save_file(tensors, partial, metadata=errors)


def _mean_square(x_NTE: Tensor) -> Tensor:
    """Of every token, [N, T, 1]."""
    return x_NTE.square().mean(-1, keepdim=True)


def _record(small: Any, dense: Any, windows: Tensor, config: FitConfig) -> dict[str, Any]:
    """What a run is of: another one may not go on with its layers."""
    return {
        "pruned": fingerprint_model(small),
        "dense": fingerprint_model(dense),
        "windows": fingerprint_windows(windows),
        "config": asdict(config),
    }
