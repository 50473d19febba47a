"""The methods there are, by name: one line each."""

from typing import Any

from transformers import PreTrainedModel

from ..model.errors import PlanError
from ..planning.plan import Plan
from ..surgery.apply import apply
from ..surgery.replace import Replacement
from .a3 import A3
from .base import Method, traits
from .elitekv import EliteKv
from .heads import Heads
from .kvpruner import IndexedKvPruner, KvPruner
from .magnitude import Magnitude
from .matryoshka import Matryoshka
from .palu import Palu
from .random import Random
from .rap import Rap
from .starkv import StarKv
from .svdllm import SvdLlm
from .svdllm2 import SvdLlm2

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Rap,
        KvPruner,
        IndexedKvPruner,
        Palu,
        SvdLlm,
        SvdLlm2,
        StarKv,
        EliteKv,
        Matryoshka,
        Heads,
        A3,
        Random,
        Magnitude,
    )
}


def traits_of(plan: Plan | Replacement) -> dict[str, str]:
    """What the method of a plan says of itself; empty for a method this release does not know."""
    method = METHODS.get(plan.method.get("name", ""))
    return traits(method) if method is not None else {}


def apply_plan(model: PreTrainedModel, plan: Plan | Replacement) -> Any:
    """The smaller model that a plan of any method makes of the dense one, which stays untouched.

    It holds its own copy of every weight, on the devices of the dense ones. Raises PlanError if the
    plan was made for another model or by a method that this release does not know, CheckpointError
    if the model is pruned already or has weights offloaded to the meta device.
    """
    if isinstance(plan, Plan):
        return apply(model, plan)
    settings = dict(plan.method)
    try:
        method = METHODS[settings.pop("name")](**settings)
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"the plan is of a method that this release does not know ({plan.method}): use the "
            "release that made it"
        ) from error
    return method.apply(model, plan)
