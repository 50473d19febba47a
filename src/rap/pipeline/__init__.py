"""The whole story: every stage in order, over a model in memory or one whose weights are in files.

In: a checkpoint, or a live model, and a ratio.
Out: a smaller checkpoint, and a report of what was pruned and what it costs.
"""

from ..data.protocol import EVALUATION_WINDOWS
from .defaults import DEFAULT, PRETRAINED, Defaults
from .objective import forward_only
from .report import held_out, measure, measure_against, save
from .run import Compression, check_placing, compress

__all__ = [
    "DEFAULT",
    "EVALUATION_WINDOWS",
    "PRETRAINED",
    "Compression",
    "Defaults",
    "check_placing",
    "compress",
    "forward_only",
    "held_out",
    "measure",
    "measure_against",
    "save",
]
