"""Kinds of attention: pairs, and those of the baselines, whose checkpoints need the package.

In: a dense attention layer, and what a plan says of it.
Out: the tensors of the pruned layer, its entry in config.json, and its module.
"""

from ..modeling import KINDS
from . import elite, factored, heads, latent, mla, pairs, projected, single_channels
from .base import Kind, LayerPlan

_ROWS: tuple[Kind, ...] = (
    pairs.KIND,
    factored.KIND,
    heads.KIND,
    latent.KIND,
    elite.KIND,
    mla.KIND,
    projected.KIND,
    single_channels.REINDEXED,
    single_channels.INDEXED,
)


def register_kinds() -> None:
    """Let models be built, and plans be read, whose layers have these kinds of attention."""
    KINDS.update((kind.entry.kind, kind) for kind in _ROWS)


def plan_forms() -> dict[str, type[LayerPlan]]:
    """The kinds of layers in plan files, by form."""
    return {kind.plan.form: kind.plan for kind in KINDS.values() if isinstance(kind, Kind)}
