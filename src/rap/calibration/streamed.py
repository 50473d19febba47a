"""Windows of tokens to statistics, with one decoder layer in memory.

Of gradients nothing can be said this way: they need the whole model, which a bench reads for them.

Shapes: N windows, T tokens of a window.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.load import load_dense
from ..model.errors import CalibrationError
from ..model.layers import AttentionLayer, attention_layers, attention_spec, check_dense
from .forward import watch_activations
from .memory import FORWARD_BATCH, must_recompute
from .observers import ForwardStatistic, Reading, WatchedLayer
from .precision import in_precision
from .progress import track
from .registry import STATISTICS, backward_needs, check_needs, watched_layer
from .run import calibrate, check_windows
from .sources import LayerSource, StoredLayers
from .state import removed
from .statistics import Statistics
from .streams import Stream
from .workbench import Workbench

Watched = list[tuple[WatchedLayer, ForwardStatistic]]


@torch.no_grad()
def calibrate_layers(
    source: LayerSource,
    windows: Tensor,
    needs: Collection[str],
    *,
    batch_size: int = FORWARD_BATCH,
    folder: Path | None = None,
    progress: bool = False,
) -> Statistics:
    """The statistics of `run.calibrate` in float32, for `needs` that take no gradient.

    Layers come from the source one at a time, and all windows [N, T] pass through one before the
    next; a stream that is large in host memory is mapped from a file in `folder`. Raises
    CalibrationError as `run.calibrate`, and for needs of gradients.
    """
    check_dense(source.model.config)
    refuse_gradients(needs)
    check_windows(source.model, windows)
    stream = Stream(source, windows, batch_size, folder)
    found: list[dict[str, Tensor] | None] = []
    layers = attention_layers(source.model)
    tokens = windows.numel()
    for layer in track(layers, "calibrating layers", "layers", tokens=tokens, shown=progress):
        working = source.working(layer.index)
        watched = _watched(source.model, layer, working, check_needs(needs))
        _advance(stream, working, layer.index, watched)
        reduced = [statistic.result(tokens) for _, statistic in watched]
        named = {name: x.contiguous().cpu() for one in reduced for name, x in one.items()}
        found.append(named if layer.shape is not None else None)
    return Statistics(
        layers=tuple(found),
        num_windows=windows.shape[0],
        window=windows.shape[1],
        needs=check_needs(needs),
        fingerprint=source.fingerprint,
    )


def refuse_gradients(needs: Collection[str], what: str = "this", remedy: str = "") -> None:
    """Raise CalibrationError if `what` needs more of a text than one forward pass."""
    more = backward_needs(needs)
    if more:
        raise CalibrationError(
            f"{what} needs the statistics {', '.join(more)}, that is gradients of the loss, which "
            f"take the whole model in memory: {remedy or 'calibrate a loaded model'}"
        )


def _watched(
    model: Any, layer: AttentionLayer, working: nn.Module, needs: frozenset[str]
) -> Watched:
    if layer.shape is None:
        return []
    attention = getattr(working, attention_spec(model.config).attention)
    seen = watched_layer(model, replace(layer, module=attention))
    made = [(seen, STATISTICS[need](seen)) for need in sorted(needs)]
    return [(seen, one) for seen, one in made if isinstance(one, ForwardStatistic)]


def _advance(stream: Stream, working: nn.Module, index: int, watched: Watched) -> None:
    reading = Reading()
    with removed(watch_activations(watched, reading)):
        for rows in stream.batches():
            reading.windows = range(len(stream.windows))[rows]
            stream.step(working, index, rows)


@dataclass(eq=False)
class StreamedBench(Workbench):
    """A bench whose model has no weights in memory: `layers` reads those of files in `folder`.

    `given` are statistics from elsewhere, which are taken as they are.
    """

    layers: StoredLayers = field(kw_only=True)
    folder: Path = field(kw_only=True)
    given: Statistics | None = field(default=None, kw_only=True)

    @property
    def source(self) -> LayerSource:
        """As of every bench."""
        return self.layers

    def statistics(self, needs: Collection[str]) -> Statistics:
        """As of every bench, or those that were given."""
        return super().statistics(needs) if self.given is None else self.given

    @cached_property
    def fingerprint(self) -> str:
        """Of the dense weights."""
        return self.layers.fingerprint

    def _read(self, needs: frozenset[str]) -> Statistics:
        """Layer by layer; gradients of the loss with the whole model, which must fit in memory."""
        if backward_needs(needs):
            device = self.layers.device
            placement = {} if device.type == "cpu" else {"device_map": str(device)}
            model = in_precision(load_dense(self.folder, **placement), torch.float32)
            again = must_recompute(model, self.windows, needs)
            return calibrate(
                model, self.windows, needs, checkpointing=again, progress=self.progress
            )
        return calibrate_layers(
            self.layers, self.windows, needs, folder=self.kept_in, progress=self.progress
        )
