"""Tensors of a checkpoint with a row per head, checked when vLLM loads them."""

from torch import Tensor

from ...model.errors import CheckpointError


def check_stored(
    name: str, loaded: Tensor, shape: tuple[int, ...], bound: tuple[str, int] | None = None
) -> None:
    """Raise CheckpointError for a stored tensor of another shape, or with an index out of range.

    `bound` says of an index what it counts, and how many of it a head has.
    """
    if tuple(loaded.shape) != shape:
        raise CheckpointError(
            f"{name} has shape {tuple(loaded.shape)}, config.json says {shape}: the checkpoint is "
            "damaged"
        )
    if bound is None or not loaded.numel():
        return
    what, count = bound
    low, high = int(loaded.min()), int(loaded.max())
    if not 0 <= low <= high < count:
        raise CheckpointError(
            f"{name} names {what} {low} to {high}, a head has {what} 0 to {count - 1}: the "
            "checkpoint is damaged"
        )
