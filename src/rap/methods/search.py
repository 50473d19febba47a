"""Budget `search`: layers trade width by what the whole cut model loses, on calibration windows.

It begins with the widths of budget `error` and needs no gradient beyond theirs: two forward passes
a layer. What was measured is kept in a file, so that a killed search goes on.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.statistics import Statistics
from ..checkpoint.files import write_json
from ..checkpoint.home import home
from ..checkpoint.version import __version__
from ..model.fingerprint import fingerprint_tensors
from ..planning.local_search import local_search, most_measures
from ..planning.plan import LayerPlan, Plan
from ..runtime.progress import Progress
from .trials import Trials

Planned = Callable[[dict[int, tuple[int, ...]]], Plan]

ROUNDS = 1
# Of the windows that calibration kept. A divergence from the dense model varies far less over
# text than a loss does.
TRIED_WINDOWS = 2


@dataclass(frozen=True)
class Widths:
    """What layers keep, as numbers that can be moved: one a layer, or one for K and one for V.

    `places` are the layers in the order of `widths`, each as often as it has numbers; `offered`
    are the widths that each may have, `heads` the heads that each counts for.
    """

    places: Sequence[int]
    widths: Sequence[int]
    offered: Sequence[Sequence[int]]
    heads: Sequence[int]

    def by_layer(self, widths: Sequence[int] | None = None) -> dict[int, tuple[int, ...]]:
        """The numbers of every layer, of these widths or of others."""
        found: dict[int, tuple[int, ...]] = {}
        for place, width in zip(self.places, widths or self.widths, strict=True):
            found[place] = (*found.get(place, ()), width)
        return found


class Search:
    """A search for the widths of `method`, a Rap, for a dense model.

    What it measures is kept under `rap.checkpoint.home`, by all that decides it.
    """

    def __init__(self, method: Any, model: PreTrainedModel, statistics: Statistics):
        assert statistics.windows is not None
        tried = statistics.windows[:TRIED_WINDOWS]
        self.model = model
        self.trials = Trials(model, replace(statistics, windows=tried), method.qk_norm)
        parts = [__version__, statistics.fingerprint, method.describe(), str(model.dtype)]
        # The cuts are planned from what all of the text gave, and tried on its first windows.
        parts += [tried.tolist(), fingerprint_tensors(_named(statistics))]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        self.kept = home() / "searches" / f"{digest}.json"

    def widths(self, start: Widths, planned: Planned) -> dict[int, tuple[int, ...]]:
        """The numbers of every layer. `planned` cuts the layers that it is given numbers of."""

        @lru_cache(maxsize=4 * len(start.places))
        def cut(index: int, numbers: tuple[int, ...]) -> dict[int, LayerPlan]:
            layers = enumerate(planned({index: numbers}).layers)
            return {place: layer for place, layer in layers if layer is not None}

        def divergence(widths: Sequence[int]) -> float:
            cuts: dict[int, LayerPlan] = {}
            for index, numbers in start.by_layer(widths).items():
                cuts |= cut(index, numbers)
            return self.trials.divergence(cuts)

        most = most_measures(len(start.widths), ROUNDS)
        with Progress("searching widths", most, "cuts") as progress:
            measured = Measured(divergence, self.kept, progress)
            found = local_search(start.widths, start.offered, start.heads, measured, rounds=ROUNDS)
        return start.by_layer(found)


class Measured:
    """A measure that remembers in a file: a search that was killed begins where it was."""

    def __init__(self, measure: Any, path: Path, progress: Progress):
        self.measure, self.path, self.progress = measure, path, progress
        self.known: dict[str, float] = _read(path)

    def __call__(self, widths: Sequence[int]) -> float:
        """Nats a token at these widths, measured or remembered."""
        name = " ".join(map(str, widths))
        if name not in self.known:
            self.known[name] = self.measure(widths)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.known)
        self.progress.update(self.progress.done + 1, f"KL {min(self.known.values()):.4f}")
        return self.known[name]


def _named(statistics: Statistics) -> Iterator[tuple[str, Tensor]]:
    for index, layer in enumerate(statistics.layers):
        for name, tensor in (layer or {}).items():
            yield f"{index} {name}", tensor


def _read(path: Path) -> dict[str, float]:
    """What an earlier search measured; nothing if the file is not whole."""
    try:
        return {str(name): float(nats) for name, nats in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
