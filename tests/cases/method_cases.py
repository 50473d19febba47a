"""One table of method cases, crossed with what every method must do."""

from dataclasses import dataclass, field
from typing import Any

from rap.methods import METHODS, Method


@dataclass(frozen=True)
class MethodCase:
    """A method with settings; `full` are those at which retain 1 must be the dense model.

    `exact`: kept weights are dense ones, so the same numbers come out to the last bit. `step`: what
    the kept share may be off by, in channels of a head. `trained`: linears of a layer that LoRA
    trains beside q, k, v and o. `stock`: the result is of the family's own class.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    step: float = 2.0
    trained: tuple[str, ...] = ()
    stock: bool = False

    @property
    def id(self) -> str:
        """The method's name and its settings."""
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.settings.items())])

    def method(self, retain: float, **more: Any) -> Method:
        """The method at a retain ratio."""
        return METHODS[self.name](retain=retain, **(self.settings | more))


_TWO_FACTORS = ("k_up.0", "v_up.0")

CASES = [
    MethodCase("rap", {"keys": "pairs", "values": "channels", "budget": "uniform"}, exact=True),
    MethodCase("rap", {"merge": 2}),
    MethodCase("rap", {"merge": 2, "queries": "factored"}),
    MethodCase("random", exact=True),
    MethodCase("magnitude", exact=True),
    MethodCase("a3"),
    MethodCase("kvpruner", exact=True),
    MethodCase("kvpruner", {"rotation": "first", "budget": "adaptive"}, exact=True),
    MethodCase("kvpruner-indexed", exact=True),
    MethodCase("kvpruner-indexed", {"budget": "sensitivity"}, exact=True),
    MethodCase("palu", {"group_size": 1}, step=1.0, trained=("k_up.0", "k_up.1")),
    MethodCase("palu", {"ranks": "uniform"}, step=1.0, trained=("k_up.0",)),
    MethodCase("svdllm", step=1.0, trained=_TWO_FACTORS),
    MethodCase("svdllm2", step=1.0, trained=_TWO_FACTORS),
    MethodCase("starkv", step=1.0, trained=_TWO_FACTORS),
    MethodCase("starkv", {"whiten": True, "gap": 0.0}, step=1.0, trained=_TWO_FACTORS),
    MethodCase("elitekv", {"pairs": 3}, {"pairs": 8}, step=1.0, trained=("k_up", "v_up")),
    MethodCase(
        "elitekv",
        {"whiten": True, "pairs": "sweep"},
        {"pairs": 8},
        step=1.0,
        trained=("k_up", "v_up"),
    ),
    MethodCase(
        "transmla",
        {"rotated": 8},
        {"rotated": 64, "freqfold": 1},
        step=1.0,
        trained=("k_up", "v_up"),
    ),
    MethodCase(
        "transmla",
        {"freqfold": 2},
        {"rotated": 64, "freqfold": 1},
        step=1.0,
        trained=("k_up", "v_up"),
    ),
    MethodCase("matryoshka", step=1.0),
    MethodCase("matryoshka", {"widths": "adaptive"}, step=1.0),
    MethodCase("heads", exact=True, step=16.0, stock=True),
]
