"""Windows of tokens to per-layer statistics, in one reading of the text.

No activation or gradient is kept longer than its window needs. A model in memory reads window by
window; one whose weights are in files layer by layer, of which gradients cannot come.

Shapes: N windows, B batch, T tokens, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..model.errors import CalibrationError
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    check_dense,
    trained_length,
)
from ..runtime.layerwise import LayerwiseRunner
from ..runtime.logits import decoder_of
from ..runtime.progress import Progress, track
from ..runtime.sources import LayerSource, source_of
from ..runtime.state import removed, restored
from .backward import check_gradient, output_gradient, watch_gradients
from .forward import watch_activations
from .kv_sharing import join_statistics, values_apart
from .memory import FORWARD_BATCH, must_recompute
from .observers import (
    BackwardStatistic,
    CalibrationStep,
    ForwardStatistic,
    GradientStatistic,
    ObservedLayer,
    linear_of,
)
from .registry import (
    WINDOWS,
    backward_needs,
    check_needs,
    observed_layer,
    observed_layers,
    statistics_of_layer,
)
from .statistics import Statistics

# Kept where a method asks for windows: it tries many cuts, and compares them on the same tokens.
KEPT_WINDOWS = 8


def calibrate(
    model: Any,
    windows: Tensor,
    needs: Collection[str],
    *,
    batch_size: int = FORWARD_BATCH,
    checkpointing: bool | None = None,
    folder: Path | None = None,
    progress: bool = False,
) -> Statistics:
    """Statistics of every attention layer over `windows`, LongTensor [N, T], read once.

    `model` is a model, or a LayerSource. Where weights are not in memory layers come one at a time
    and work in float32, all windows pass through one before the next, and needs of gradients are
    refused; what they pass on is mapped from a file in `folder` where it is large.

    The loss is the mean next-token cross-entropy of one window, in float32; gradients are taken
    for each window alone, because the square of a batch mean is not the empirical Fisher.
    `batch_size` is for needs that take no gradient. `checkpointing` recomputes activations where
    the model can, without turning dropout on; by default if they would take more than half of the
    memory that is free. The model is left as it was found, also after an error. It may be spread
    over devices; offloaded weights have no gradients and are refused. The result names the weights
    it is of. float16 gradients can underflow: use bfloat16 or float32.

    Raises CalibrationError for unknown needs, unusable windows, or the first loss, activation or
    gradient that is not finite; UnsupportedModelError for a model without pairs.
    """
    source, needs = source_of(model), check_needs(needs)
    check_dense(source.model)
    if not source.in_memory:
        refuse_gradients(needs)
    check_windows(source.model, windows)
    shapes = [layer.shape for layer in attention_layers(source.model)]
    if source.in_memory:
        with values_apart(source.model):
            found = _found(source.model, windows, needs, batch_size, checkpointing, progress)
    else:
        found = _by_layer(
            source, LayerwiseRunner(source, windows, batch_size, folder), needs, progress
        )
    return Statistics(
        layers=join_statistics([found.get(index) for index in range(len(shapes))], shapes),
        num_windows=windows.shape[0],
        window=windows.shape[1],
        needs=needs,
        fingerprint=source.fingerprint,
        windows=windows[:KEPT_WINDOWS].cpu().clone() if WINDOWS in needs else None,
    )


def _found(
    model: Any,
    windows: Tensor,
    needs: frozenset[str],
    batch_size: int,
    checkpointing: bool | None,
    progress: bool,
) -> dict[int, dict[str, Tensor]]:
    """What is found of every layer by itself, by its index."""
    layers = observed_layers(model)
    watched = [(x, statistic(x)) for x in layers for statistic in statistics_of_layer(needs, x)]
    forward = [(layer, one) for layer, one in watched if isinstance(one, ForwardStatistic)]
    backward = [(layer, one) for layer, one in watched if isinstance(one, BackwardStatistic)]
    gradient = [(layer, one) for layer, one in watched if isinstance(one, GradientStatistic)]
    if backward or gradient:
        if checkpointing is None:
            checkpointing = must_recompute(model, windows, needs)
        _both_passes(model, windows, forward, backward, gradient, checkpointing, progress)
    elif forward:
        _forward_pass(model, windows, forward, batch_size, progress)

    found: dict[int, dict[str, Tensor]] = {layer.index: {} for layer in layers}
    tokens = windows.numel()
    for statistics, count in ((forward, tokens), (backward, len(windows)), (gradient, tokens)):
        for layer, statistic in statistics:
            reduced = statistic.compute(count)
            found[layer.index].update({name: x.contiguous().cpu() for name, x in reduced.items()})
    return found


@torch.no_grad()
def _by_layer(
    source: LayerSource, stream: LayerwiseRunner, needs: frozenset[str], progress: bool
) -> dict[int, dict[str, Tensor]]:
    """As `_found`, from one layer after another."""
    found, tokens = {}, stream.windows.numel()
    layers = attention_layers(source.model)
    for layer in track(layers, "calibrating layers", "layers", tokens=tokens, shown=progress):
        working = source.working(layer.index)
        watched = _watched(source.model, layer, working, needs)
        step = CalibrationStep()
        with removed(watch_activations(watched, step)):
            for rows in stream.batches():
                step.windows = range(len(stream.windows))[rows]
                stream.step(working, layer.index, rows)
        if layer.shape is not None:
            reduced = [statistic.compute(tokens) for _, statistic in watched]
            named = {name: x.contiguous().cpu() for one in reduced for name, x in one.items()}
            found[layer.index] = named
    return found


def _watched(
    model: Any, layer: AttentionLayer, working: nn.Module, needs: frozenset[str]
) -> list[tuple[ObservedLayer, ForwardStatistic]]:
    if layer.shape is None:
        return []
    attention = getattr(working, attention_spec(model.config).attention)
    seen = observed_layer(model, replace(layer, module=attention))
    made = [(seen, statistic(seen)) for statistic in statistics_of_layer(needs, seen)]
    return [(seen, one) for seen, one in made if isinstance(one, ForwardStatistic)]


def refuse_gradients(needs: Collection[str], what: str = "this", remedy: str = "") -> None:
    """Raise CalibrationError if `what` needs more of a text than one forward pass."""
    more = backward_needs(needs)
    if more:
        raise CalibrationError(
            f"{what} needs the statistics {', '.join(more)}, that is gradients of the loss, which "
            f"take the whole model in memory: {remedy or 'calibrate a loaded model'}"
        )


def check_length(model: Any, window: int) -> None:
    """Raise CalibrationError for windows of more tokens than the model was made for."""
    longest = trained_length(model.config)
    if longest is not None and window > longest:
        raise CalibrationError(
            f"windows have {window} tokens, the model was made for {longest}: use windows of at "
            f"most {longest}"
        )


def check_windows(model: Any, windows: Tensor) -> None:
    """Raise CalibrationError for windows [N, T] that this model cannot read."""
    if not isinstance(windows, Tensor):
        raise CalibrationError(
            f"windows must be a LongTensor [N, T], not a {type(windows).__name__}"
        )
    if windows.ndim != 2 or windows.dtype != torch.long or min(windows.shape) < 1:
        raise CalibrationError(
            f"windows must be a LongTensor [N, T], not {windows.dtype} {list(windows.shape)}"
        )
    if windows.shape[1] < 2:
        raise CalibrationError("windows of one token have no next token: use at least two")
    check_length(model, windows.shape[1])
    low, high = int(windows.min()), int(windows.max())
    size = model.get_input_embeddings().num_embeddings
    if low < 0 or high >= size:
        raise CalibrationError(
            f"token {low if low < 0 else high} is outside the vocabulary of {size}: tokenize with "
            "the model's own tokenizer"
        )


def _forward_pass(
    model: Any,
    windows: Tensor,
    statistics: list[tuple[ObservedLayer, ForwardStatistic]],
    batch_size: int,
    progress: bool,
) -> None:
    step = CalibrationStep()
    device = model.get_input_embeddings().weight.device
    with (
        restored(model, [], False),
        _bar("activations", windows, progress) as bar,
        torch.no_grad(),
        removed(watch_activations(statistics, step)),
    ):
        for batch in windows.split(batch_size):
            step.windows = range(step.windows.stop, step.windows.stop + len(batch))
            model.base_model(input_ids=batch.to(device), use_cache=False)
            bar.advance(batch.numel())


def _both_passes(
    model: Any,
    windows: Tensor,
    forward: list[tuple[ObservedLayer, ForwardStatistic]],
    backward: list[tuple[ObservedLayer, BackwardStatistic]],
    gradient: list[tuple[ObservedLayer, GradientStatistic]],
    checkpointing: bool,
    progress: bool,
) -> None:
    step = CalibrationStep()
    watching = _parameters(backward)

    def consume(watchers: list[_Watcher], parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        for layer, projection, rows, interested in watchers:
            taken = slice(None) if rows is None else rows.to(grad.device)
            check_gradient(layer, projection, grad[taken], step.windows.start)
            for statistic in interested:
                statistic.update(projection, parameter[taken], grad[taken])

    device = model.get_input_embeddings().weight.device
    trainable = [parameter for parameter, _ in watching]
    if not trainable:  # a graph must start somewhere: below everything that is watched
        trainable = [linear_of(gradient[0][0], projection)[0].weight for projection in "kv"]
    what = "activations and gradients" if forward else "gradients"
    with (
        restored(model, trainable, checkpointing),
        _bar(what, windows, progress) as bar,
        torch.enable_grad(),
    ):
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(consume, watchers))
            for parameter, watchers in watching
        ]
        handles += watch_gradients(gradient, step, windows.shape[1])
        handles += watch_activations(forward, step)
        with removed(handles):
            for index, ids in enumerate(windows.split(1)):
                step.windows = range(index, index + 1)
                _differentiate(model, ids.to(device), step)
                for _, statistic in backward:
                    statistic.end_window()
                bar.advance(ids.numel())


def _differentiate(model: Any, ids_BT: Tensor, step: CalibrationStep) -> None:
    """Gradients of one window's loss, to whoever watches; activations are seen on the way."""
    step.forward = True
    output = decoder_of(model)[1](input_ids=ids_BT, use_cache=False)
    step.forward = False  # what checkpointing computes again has been seen
    hidden_BTE = output.last_hidden_state
    loss, gradient_BTE = output_gradient(model, output, ids_BT)
    if not torch.isfinite(loss):
        where = _first_bad_layer(model, ids_BT)
        raise CalibrationError(
            f"window {step.windows.start}: the loss is {loss.item()}, first {where}: check the "
            "weights, or calibrate in float32 or bfloat16"
        )
    hidden_BTE.backward(gradient_BTE)


# A layer's projection, its rows of the parameter (None: all), and who wants its gradient.
_Watcher = tuple[ObservedLayer, str, Tensor | None, list[BackwardStatistic]]


def _parameters(
    statistics: list[tuple[ObservedLayer, BackwardStatistic]],
) -> list[tuple[Tensor, list[_Watcher]]]:
    """Every parameter whose gradient is wanted, and its watchers: k and v may share one."""
    wanted: dict[tuple[Tensor, str], _Watcher] = {}
    for layer, statistic in statistics:
        for projection in "kv":
            linear, rows = linear_of(layer, projection)
            for parameter in (linear.weight, linear.bias if statistic.biases else None):
                if parameter is not None:
                    watcher = wanted.setdefault(
                        (parameter, projection), (layer, projection, rows, [])
                    )
                    watcher[3].append(statistic)
    parameters = list(dict.fromkeys(parameter for parameter, _ in wanted))
    return [
        (p, [wanted[p, projection] for projection in "kv" if (p, projection) in wanted])
        for p in parameters
    ]


def _first_bad_layer(model: Any, ids_BT: Tensor) -> str:
    bad: list[int] = []

    def look(index: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if not torch.isfinite(output).all():
            bad.append(index)

    handles = [
        layer.module.register_forward_hook(partial(look, layer.index))
        for layer in attention_layers(model)
        if layer.module is not None
    ]
    with removed(handles), torch.no_grad():
        decoder_of(model)[1](input_ids=ids_BT, use_cache=False)
    return f"in the attention of layer {bad[0]}" if bad else "after the attention of the last layer"


def _bar(what: str, windows: Tensor, progress: bool) -> Progress:
    return Progress(f"calibrating {what}", windows.numel(), "tokens", tokens=1, shown=progress)
