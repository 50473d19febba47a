"""Every error a user can cause: named subclasses of ValueError that say what to do."""


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
