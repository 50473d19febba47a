"""The methods there are, by name: one line each."""

from ..planning.plan import Plan
from .a3 import A3
from .base import Method, traits
from .baselines import Magnitude, Random
from .elitekv import EliteKv
from .heads import Heads
from .kvpruner import IndexedKvPruner, KvPruner
from .matryoshka import Matryoshka
from .palu import Palu
from .rap import Rap
from .starkv import StarKv
from .svdllm import SvdLlm
from .svdllm2 import SvdLlm2
from .transmla import TransMla

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
        TransMla,
        Matryoshka,
        Heads,
        A3,
        Random,
        Magnitude,
    )
}


def traits_of(plan: Plan) -> dict[str, str]:
    """The entries of a plan's method about itself; empty for a method unknown to this release."""
    method = METHODS.get(plan.method.get("name", ""))
    return traits(method) if method is not None else {}
