"""The public names of the package, and what importing it registers with transformers."""

from .calibration.run import calibrate
from .calibration.statistics import Statistics
from .checkpoint.load import load, load_tokenizer
from .checkpoint.version import __version__
from .data.text import load_windows
from .evaluation.cost.footprint import footprint
from .evaluation.quality.fidelity import fidelity
from .evaluation.quality.perplexity import perplexity
from .methods import METHODS, Method, Rap, parse_method
from .model.errors import RapError
from .model.fingerprint import fingerprint_model
from .model.kernels.growing_cache import GrowingCache
from .model.kernels.interface import register_attention
from .model.kinds import register_kinds
from .model.modeling import register
from .pipeline import compress
from .planning.plan import LayerPlan, PairPlan, Plan
from .recovery.config import RecoveryConfig
from .recovery.stages import recover
from .studies.compare.run import compare
from .surgery.apply import apply

register()
register_kinds()
register_attention()

__all__ = [
    "METHODS",
    "GrowingCache",
    "LayerPlan",
    "Method",
    "PairPlan",
    "Plan",
    "Rap",
    "RapError",
    "RecoveryConfig",
    "Statistics",
    "__version__",
    "apply",
    "calibrate",
    "compare",
    "compress",
    "fidelity",
    "fingerprint_model",
    "footprint",
    "load",
    "load_tokenizer",
    "load_windows",
    "parse_method",
    "perplexity",
    "recover",
]
