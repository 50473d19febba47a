"""The whole story: every stage in order, on a model in memory or layer by layer from its files.

In: a checkpoint, or a live model, and a ratio.
Out: a smaller checkpoint, and a report of what was cut and what it costs.
"""

from ..calibration.protocol import EVALUATION_WINDOWS
from .loaded import Compression, compress
from .report import measure, measure_against, save
from .streamed import WITHOUT_GRADIENTS, compress_streamed

__all__ = [
    "EVALUATION_WINDOWS",
    "WITHOUT_GRADIENTS",
    "Compression",
    "compress",
    "compress_streamed",
    "measure",
    "measure_against",
    "save",
]
