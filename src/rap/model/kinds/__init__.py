"""Attention of the baselines, whose checkpoints need the package: latents, bases, single channels.

In: a dense attention module and a layer's widths with their `kind`.
Out: a subclass of RapAttention, which `register_kinds` makes known to modeling.
"""

from ..modeling import KINDS
from .elite import EliteAttention
from .latent import LatentAttention
from .projected import ProjectedAttention
from .single_channels import IndexedAttention, ReindexedAttention

_KINDS = (
    LatentAttention,
    EliteAttention,
    ProjectedAttention,
    ReindexedAttention,
    IndexedAttention,
)


def register_kinds() -> None:
    """Let models be built whose layers have these kinds of attention."""
    KINDS.update((kind.kind, kind) for kind in _KINDS)
