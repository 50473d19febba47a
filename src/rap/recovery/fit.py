"""Layer-wise distillation of pruned layers against the dense model, in layer order.

Every cut layer is trained to give, on what the cut model really hands it, what the dense layer
gives on what the dense model hands it, and to make up for a share of what the residual stream has
lost so far. No gradient passes through more than one layer, and one layer of each model works
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

from ..calibration.memory import computed
from ..checkpoint.files import whole_file
from ..checkpoint.reading import reading
from ..data.text import fingerprint_windows
from ..model.errors import RapError
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    text_config,
    text_decoder,
    trained_length,
)
from ..runtime.layerwise import FLOAT, LayerwiseRunner, new_stream
from ..runtime.memory import describe_memory
from ..runtime.products import Products, multiplying
from ..runtime.progress import Progress
from ..runtime.sources import REMOVE, LayerSource, source_of
from .data import check_rows
from .layer_fit import FitConfig, LayerFit, LayerProblem, trained_parameters
from .runs import begin, processes
from .streams import attention_outputs_of, is_cut, residual_scale

FIGURES = ("before", "after", "rate")  # of a LayerFit, in its file


def fit_layers(
    small: Any,
    dense: Any,
    windows: Tensor,
    config: FitConfig | None = None,
    *,
    work: Path | None = None,
    progress: bool = False,
) -> list[LayerFit]:
    """Distil every pruned layer of `small` in place and in order; each keeps the better version.

    `small` and `dense` are models or LayerSources. `windows` [N, T]; the last of them judge.
    Trained are all parameters of the attention, and by scope "block" the matrices of a dense
    feed-forward, in float32 whatever they are stored in.
    Three streams of N T E floats are held (see `new_stream`), and where layers work one layer of
    each model and a batch of activations. What was trained of a layer is written to `work`, where a
    killed run goes on: it walks the streams again and ends with the same bytes. Weights in files
    need one. Of several processes each fits its model by itself, and the main one writes. Raises
    RapError for offloaded weights, too few windows, or a loss that is not finite.
    """
    config, small, dense = config or FitConfig(), source_of(small), source_of(dense)
    held = [source.model for source in (small, dense) if source.in_memory]
    if any(parameter.is_meta for model in held for parameter in model.parameters()):
        raise RapError("fit needs all weights in memory: load the models without offloading")
    check_rows(small.model, dense.model, {"windows": windows})
    num_judging = max(1, round(len(windows) * config.held_out))
    if len(windows) - num_judging < config.batch:
        raise RapError(
            f"{len(windows)} windows leave fewer than a batch of {config.batch} to fit: give more"
        )
    if progress:
        estimate = estimate_fit(small.model, dense.model, windows, config)
        estimate |= {"total": sum(estimate.values())}
        said = describe_memory(estimate, "layer-wise distillation needs about")
        Console(stderr=True).print(said, soft_wrap=True)
    if work is not None:
        with processes().main_process_first():
            begin(work, _record(small, dense, windows, config))
    theirs, mine = (
        LayerwiseRunner(source, windows, config.batch, work, exact=True)
        for source in (dense, small)
    )
    return list(_Fitter(theirs, mine, config, num_judging, work).layers(progress))


def estimate_fit(
    small: Any, dense: Any, windows: Tensor, config: FitConfig | None = None
) -> dict[str, int]:
    """Bytes that `fit_layers` holds in addition to the weights, by part; `streams` on the host.

    Streams: what both models hand to a layer, what is wanted of it, and how much every token
    counts. Layers: the largest of each model in float32, and three times what is trained of one for
    gradients and Adam. Activations: what a batch keeps for the backward pass. Windows are no longer
    than the model's positions. Weights may be on the meta device.
    """
    longest = trained_length(dense.config) or windows.shape[1]
    length = min(longest, windows.shape[1])
    tokens, inside = len(windows) * length, text_config(dense.config)
    hidden = tokens * inside.hidden_size * FLOAT

    def largest(model: Any) -> int:
        layers = text_decoder(model).layers
        return max(sum(p.numel() for p in layer.parameters()) for layer in layers)

    config = config or FitConfig()
    scope, name = config.scope, attention_spec(small.config).attention
    trained = max(
        sum(p.numel() for p in trained_parameters(layer, getattr(layer, name), scope).values())
        for layer in text_decoder(small).layers
        if hasattr(layer, name)
    )
    layers = FLOAT * (largest(small) + largest(dense) + 3 * trained)
    batch = config.batch * length * FLOAT
    shapes = [layer.shape for layer in attention_layers(dense) if layer.shape is not None]
    return {
        "streams": 3 * hidden + tokens * FLOAT,
        "layers": layers,
        "activations": batch * computed(inside, shapes),
    }


class _Fitter:
    """Both models' streams at the input of the same layer."""

    def __init__(
        self,
        dense: LayerwiseRunner,
        small: LayerwiseRunner,
        config: FitConfig,
        num_judging: int,
        work: Path | None,
    ):
        self.dense, self.small, self.config, self.work = dense, small, config, work
        self.num_judging = num_judging
        self.attention = attention_spec(small.source.model.config).attention

    def layers(self, progress: bool) -> Iterator[LayerFit]:
        """Go through all layers in order; a result for each that was cut."""
        mine, theirs = (
            attention_layers(stream.source.model) for stream in (self.small, self.dense)
        )
        tokens = self.small.windows.numel()
        with Progress(
            "fitting layers", len(mine), "layers", tokens=tokens, shown=progress
        ) as shown:
            for layer, original in zip(mine, theirs, strict=True):
                if is_cut(layer, original):
                    result = self._fit(layer)
                    shown.update(layer.index + 1, f"error {result.before:.1e}, {result.after:.1e}")
                    yield result
                else:
                    for stream in (self.dense, self.small):
                        self._advance(stream, stream.source.working(layer.index), layer.index)
                    shown.update(layer.index + 1)

    def _fit(self, layer: AttentionLayer) -> LayerFit:
        index = layer.index
        mine = self.small.source.working(index)
        problem = self._problem(mine, index)
        result = self._stored(index, problem)
        if result is None:
            result = problem.solve()
            self._store(index, problem, result)
        # The stream goes on with what the model's dtype holds.
        trained = layer_file(self.work, index) if self.work is not None else None
        self.small.source.keep(index, mine, trained)
        self._advance(self.small, mine, index)
        return result

    def _advance(self, stream: LayerwiseRunner, layer: nn.Module, index: int) -> None:
        with multiplying(layer, self._products):
            stream.advance(layer, index)

    @property
    def _products(self) -> Products:
        """As in training, whose errors are a hundred times what bfloat16 loses of a stream.

        By scope "attention" float32: how a layer adds its attention's output is found from streams.
        """
        return self.config.products if self.config.scope == "block" else "float32"

    def _problem(self, mine: nn.Module, index: int) -> LayerProblem:
        """What the layer is to give; the dense stream goes on to the next layer's input."""
        theirs = self.dense.source.working(index)
        original, attention = (getattr(layer, self.attention) for layer in (theirs, mine))
        target = new_stream(tuple(self.dense.hidden.shape), self.work)
        weight, scale = torch.empty(*target.shape[:2], 1), None
        for rows in self.dense.batches():
            before, now = self.dense.hidden[rows].clone(), self.small.hidden[rows]
            with attention_outputs_of(original) as seen, multiplying(theirs, self._products):
                after = self.dense.run(theirs, index, before).float().cpu()
            added = seen.pop().cpu()
            self.dense.hidden[rows] = after
            if self.config.scope == "block":
                # What the layer gives as it was cut: no parameter of it wants gradients yet.
                with multiplying(mine, self._products):
                    given = self.small.run(mine, index, now).float().cpu()
                target[rows] = after - (1 - self.config.drift) * (before - now)
                weight[rows] = _weight(_mean_square(after) + _mean_square(given))
                continue
            if rows.start == 0:
                scale = residual_scale(self.dense, theirs, original, index, before[:1], added[:1])
            target[rows], weight[rows] = self._wanted(before, added, now, scale)
        return LayerProblem(
            self.small, mine, attention, index, target, weight, self.num_judging, self.config
        )

    def _wanted(
        self, before: Tensor, added: Tensor, now: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """What the attention is to give for some windows, and the factor of every token's error.

        The dense attention gives `added` for `before`; the cut one reads `now`.
        """
        if scale is None:  # a norm reads the output by itself, without the stream
            return added, _weight(_mean_square(added))
        target = added + self.config.drift / scale * (before - now)
        # Of both models: a stream that is large in one alone would rule the fit either way.
        return target, _weight(_mean_square(before / scale + added) + _mean_square(now / scale))

    def _stored(self, index: int, problem: LayerProblem) -> LayerFit | None:
        """The result of a run before this one, whose weights are loaded."""
        path = layer_file(self.work, index) if self.work is not None else None
        if path is None or not path.is_file():
            return None
        with reading(f"go on with {path}", REMOVE), safe_open(path, "pt") as stored:
            errors = stored.metadata()
            with torch.no_grad():
                for name, parameter in problem.trained.items():
                    parameter.copy_(stored.get_tensor(name))
            return LayerFit(index, *(float(errors[name]) for name in FIGURES))

    def _store(self, index: int, problem: LayerProblem, result: LayerFit) -> None:
        if self.work is None or not processes().is_main_process:
            return
        # Factors of low rank are transposed views, which safetensors refuses.
        tensors = {
            name: parameter.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, parameter in problem.trained.items()
        }
        errors = {name: repr(getattr(result, name)) for name in FIGURES}
        with whole_file(layer_file(self.work, index)) as partial:
            save_file(tensors, partial, metadata=errors)


def layer_file(work: Path, index: int) -> Path:
    """Where layer-wise distillation keeps a finished layer's tensors, by the names in the layer."""
    return work / f"layer-{index:03d}.safetensors"


def _mean_square(x_NTE: Tensor) -> Tensor:
    """Of every token, [N, T, 1]."""
    return x_NTE.square().mean(-1, keepdim=True)


def _weight(size: Tensor) -> Tensor:
    """The factor of an error that is to count relative to the root of a mean square."""
    return torch.rsqrt(size + torch.finfo(size.dtype).tiny)


def _record(
    small: LayerSource, dense: LayerSource, windows: Tensor, config: FitConfig
) -> dict[str, Any]:
    """What a run is of: another one may not go on with its layers."""
    return {
        "pruned": small.fingerprint,
        "dense": dense.fingerprint,
        "windows": fingerprint_windows(windows),
        "config": asdict(config),
    }
