"""What every statistic says of itself is so: the names it leaves, and the bytes it holds."""

from typing import Any

import pytest
import torch

from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration.memory import estimate_memory
from rap.calibration.observers import (
    BackwardStatistic,
    ForwardStatistic,
    GradientStatistic,
    Statistic,
)
from rap.calibration.registry import STATISTICS, WINDOWS, observed_layers
from rap.calibration.run import calibrate
from rap.calibration.statistics import Statistics

# Separate and shared projections, all and some channels rotating, a norm of heads and of all rows,
# layers without attention.
FAMILIES = ("llama", "phi3", "gpt_neox", "glm", "qwen3", "olmo2", "qwen3_next")
NUM_WINDOWS = 3


def model_of(name: str) -> Any:
    case = next((case for case in CASES if case.name == name), None)
    return case.model(dtype=torch.float32) if case else tiny_model(name)


def held(thing: Any) -> int:
    """Bytes of the tensors that a statistic keeps: its own, in lists, and of other statistics."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if isinstance(thing, Statistic):
        thing = vars(thing)
    parts = thing.values() if isinstance(thing, dict) else thing
    return sum(map(held, parts)) if isinstance(thing, dict | list) else 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_statistic_holds_and_leaves_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, windows = model_of(name), random_tokens(NUM_WINDOWS, 17)
    seen: dict[tuple[str, int], tuple[int, set[str]]] = {}

    def watched(need: str, kind: Any) -> Any:
        class Watched(kind):
            def __init__(self, layer: Any) -> None:
                super().__init__(layer)
                self.index = layer.index

            def compute(self, count: int) -> dict[str, torch.Tensor]:
                size = held(vars(self))
                found = super().compute(count)
                seen[need, self.index] = size, {*found}
                return found

        return Watched

    layers = observed_layers(model)
    estimates = {
        need: estimate_memory(model, windows, {need})["accumulators"] for need in STATISTICS
    }
    for need, kind in list(STATISTICS.items()):
        monkeypatch.setitem(STATISTICS, need, watched(need, kind))
    calibrate(model, windows, STATISTICS, batch_size=2)
    monkeypatch.undo()
    for need, kind in STATISTICS.items():
        for layer in layers:
            size, names = seen[need, layer.index]
            assert kind.num_bytes(layer, NUM_WINDOWS) == size, need
            assert names == {*kind.names, *(kind.norm_names if layer.norm else ())}, need
        assert estimates[need] == sum(seen[need, layer.index][0] for layer in layers)
    assert len(seen) == len(layers) * len(STATISTICS)


def test_names_and_needs_are_each_of_one_statistic() -> None:
    names = [name for kind in STATISTICS.values() for name in (*kind.names, *kind.norm_names)]
    assert len({*names}) == len(names)
    assert all(need == kind.need for need, kind in STATISTICS.items())
    assert WINDOWS not in STATISTICS


def test_the_table_of_statistics_is_whole() -> None:
    table = Statistics.__doc__ or ""
    for need, kind in STATISTICS.items():
        assert f"    {need} " in table, need
        for name in (*kind.names, *kind.norm_names):
            assert name in table, name


def test_every_statistic_is_of_one_kind() -> None:
    kinds = (ForwardStatistic, BackwardStatistic, GradientStatistic)
    for statistic in STATISTICS.values():
        assert sum(issubclass(statistic, kind) for kind in kinds) == 1


def test_windows_themselves_hold_nothing_of_a_layer() -> None:
    model = tiny_model()
    assert estimate_memory(model, random_tokens(2, 9), {WINDOWS})["total"] == 0
