"""A model measured with one decoder layer in memory: its layers first, then all that reads logits.

Shapes: N windows, T tokens of a window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ...calibration.sources import LayerSource
from ...calibration.streams import Stream
from .fidelity import DenseStates, Fidelity
from .perplexity import evaluation_window, perplexity, whole_windows


@contextmanager
def walked(
    source: LayerSource,
    windows: Tensor,
    what: str,
    *,
    folder: Path | None = None,
    progress: bool = False,
) -> Iterator[Any]:
    """A model that can be asked for the windows [N, T], each by itself and in order, and no others.

    All its layers have seen them already, in float32; `what` names that work.
    """
    stream = Stream(source, windows, 1, folder)
    stream.walk(what, progress=progress)
    with stream.finished() as model:
        yield model


def streamed_perplexity(
    source: LayerSource,
    windows: Tensor,
    what: str,
    *,
    folder: Path | None = None,
    progress: bool = False,
) -> float:
    """`perplexity` of whole windows [N, T], taken as they are; the rest as `walked` has it."""
    with walked(source, windows, what, folder=folder, progress=progress) as model:
        return perplexity(model, windows.flatten(), window=windows.shape[1], bos=None).value


def streamed_fidelity(
    small: LayerSource,
    dense: LayerSource,
    token_ids: Tensor,
    *,
    window: int | None = None,
    max_windows: int | None = None,
    bos: int | None = None,
    folder: Path | None = None,
    progress: bool = False,
) -> Fidelity:
    """`fidelity` of two models whose weights are not in memory; the rest as `walked` has it."""
    window = evaluation_window(dense.model, window)
    windows, _ = whole_windows(dense.model, token_ids, window, max_windows, bos)
    with walked(dense, windows, "dense model", folder=folder, progress=progress) as model:
        states = DenseStates(model, token_ids, window=window, max_windows=max_windows, bos=bos)
    with walked(small, windows, "pruned model", folder=folder, progress=progress) as model:
        return states.compare(model)
