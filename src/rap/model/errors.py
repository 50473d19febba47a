"""Every error a user can cause: named subclasses of ValueError with an action."""


class RapError(ValueError):
    """A wrong input. The message names the value and the remedy, and fits on one line."""


class UnsupportedModelError(RapError):
    """The architecture has no RoPE pairs to prune, or its attention is not handled."""


class PlanError(RapError):
    """A plan that is malformed, of another version, or made for another model."""


class CalibrationError(RapError):
    """Calibration text, windows or gradients that cannot give a score."""


class CheckpointError(RapError):
    """A checkpoint directory that is missing, broken, occupied, or of the wrong kind."""


NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that memory did not suffice, on an accelerator or on a CPU."""
    if isinstance(error, RuntimeError):
        # The CPU's allocator has no class of its own; that of CUDA is one of these as well.
        return any(words in str(error).lower() for words in NO_MEMORY)
    return isinstance(error, MemoryError)
