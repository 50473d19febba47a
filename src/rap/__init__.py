"""RAP: a smaller KV cache for RoPE language models, by cutting whole RoPE pairs of the weights.

Importing the package registers the rap_<family> model types with transformers' Auto classes, so
that a pruned checkpoint loads with `AutoModelForCausalLM.from_pretrained`, and the opt-in attention
implementation "rap". Nothing is patched.
"""

from ._version import __version__
from .cache import GrowingCache
from .calibration import calibrate
from .checkpoint import load
from .comparison.run import compare
from .construction import apply
from .corpus import load_windows
from .errors import RapError
from .evaluation.footprint import footprint
from .evaluation.perplexity import perplexity
from .fingerprint import fingerprint_model
from .kernels.interface import register_attention
from .methods import METHODS, Method, Rap
from .modeling import register
from .pipeline import compress
from .plan import LayerPlan, Plan
from .recovery.config import RecoveryConfig
from .recovery.stages import recover
from .statistics import Statistics

register()
register_attention()

__all__ = [
    "METHODS",
    "GrowingCache",
    "LayerPlan",
    "Method",
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
    "fingerprint_model",
    "footprint",
    "load",
    "load_windows",
    "perplexity",
    "recover",
]
