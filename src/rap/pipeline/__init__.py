"""The whole story: every stage in order, on a model in memory or layer by layer from its files.

In: a checkpoint, or a live model, and a ratio.
Out: a smaller checkpoint, and a report of what was cut and what it costs.
"""

from .loaded import Compression, compress
from .objective import forward_only
from .report import EVALUATION_WINDOWS, measure, measure_against, save
from .streamed import compress_streamed

__all__ = [
    "EVALUATION_WINDOWS",
    "Compression",
    "compress",
    "compress_streamed",
    "forward_only",
    "measure",
    "measure_against",
    "save",
]
