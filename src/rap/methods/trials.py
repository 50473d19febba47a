"""Trial pruning of candidates, and the budgets that try widths on the model itself.

Layers stand in for dense ones, on kept windows, for methods that divide their budget by what a cut
does to the model itself. Only the attention that is tried takes memory beside the model, which is
left as it was found.

Budget `search` lets layers trade width by what the whole cut model loses, on calibration windows.
It begins with the widths of budget `error` and needs no gradient beyond theirs: two forward passes
a layer. What was measured is kept in a file, so that a killed search goes on. Budget `retrieval`
finds the layers that copy what was read before, a forward pass a layer, and makes them wider.

Shapes: N windows, T tokens, E model dim.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..calibration.backward import next_token_loss
from ..calibration.statistics import Statistics
from ..checkpoint.files import home, write_json
from ..checkpoint.version import __version__
from ..model.errors import CalibrationError
from ..model.fingerprint import fingerprint_tensors
from ..model.kinds.base import DenseAttention, LayerPlan
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    projections,
    trained_length,
)
from ..model.modeling import build_attention
from ..planning.budgets import nearest_width, num_wide, widened
from ..planning.knapsack import (
    allocate_by_error,
    local_search,
    most_measures,
    offered_widths,
    tempered,
)
from ..planning.merging import merged_steps
from ..planning.plan import Plan
from ..runtime.logits import Head, chunk_tokens, decoder_of
from ..runtime.progress import Progress
from ..runtime.state import restored
from .base import PairPruning
from .dense import PrunableLayer

Cuts = Mapping[int, LayerPlan]


class Trials:
    """A dense `model`, and the windows that calibration kept of its text.

    `norm_mode` is how cuts of pairs stand for the norms of queries and keys (rap.model.norms).
    All measures raise CalibrationError if a cut gives what is not finite.
    """

    def __init__(self, model: PreTrainedModel, statistics: Statistics, norm_mode: str = "constant"):
        assert statistics.windows is not None
        self.model, self.windows_NT, self.norm_mode = model, statistics.windows, norm_mode
        self._dense: list[Tensor] | None = None
        # A search tries one layer again and again beside others that stay: each is built once.
        self._built: dict[int, nn.Module] = {}  # by the identity of the plan, as long as it lives

    def perplexity(self, cuts: Cuts) -> float:
        """Of the windows, with these layers' attention replaced."""
        with self._replaced(cuts):
            losses = [float(next_token_loss(self.model, ids)) for ids in self._batches()]
        return math.exp(_finite(sum(losses) / len(losses), cuts))

    def change(self, cuts: Cuts) -> float:
        """Relative L2 change of the last hidden states from the dense model's."""
        pairs = self._pairs(cuts)
        moved = sum(float((cut - dense).double().square().sum()) for cut, dense in pairs)
        whole = sum(float(dense.double().square().sum()) for _, dense in pairs)
        return math.sqrt(_finite(moved, cuts) / whole)

    def divergence(self, cuts: Cuts) -> float:
        """Mean KL(dense || pruned) of the next token, in nats/token of the windows."""
        pairs, head, step = self._pairs(cuts), Head(self.model), chunk_tokens(self.model)
        nats = 0.0
        with torch.no_grad():
            for states in pairs:
                ours, theirs = (
                    head.chunks(_output(state), state[0].to(self._device), step) for state in states
                )
                for cut, dense in zip(ours, theirs, strict=True):
                    found, expected = cut.float().log_softmax(-1), dense.float().log_softmax(-1)
                    nats += float(kl_div(found, expected, reduction="sum", log_target=True))
        return _finite(nats, cuts) / self.windows_NT.numel()

    def copying(self, cuts: Cuts) -> float:
        """Mean loss, in nats/token, of the second of two copies of every window, [N, 2T].

        Who reads back does not have to guess there. Longer than what the model was made for,
        windows are cut to half of that.
        """
        half = min(self.windows_NT.shape[1], (trained_length(self.model.config) or 2**31) // 2)
        head, step, nats = Head(self.model), chunk_tokens(self.model), 0.0
        with self._replaced(cuts):
            decoder = decoder_of(self.model)[1]
            for ids_1T in self._batches():
                twice_1T = ids_1T[:, :half].repeat(1, 2)
                states_TE = decoder(input_ids=twice_1T, use_cache=False).last_hidden_state[0]
                targets = twice_1T[0, half:].split(step)
                logits = head.chunks(_output(states_TE), states_TE[half - 1 : -1], step)
                for logits_CV, token_C in zip(logits, targets, strict=True):
                    token_C = token_C.to(logits_CV.device)
                    nats += float(cross_entropy(logits_CV.float(), token_C, reduction="sum"))
        return _finite(nats, cuts) / (len(self.windows_NT) * half)

    def _pairs(self, cuts: Cuts) -> list[tuple[Tensor, Tensor]]:
        """Last hidden states [1, T, E] of every window, of the cut and of the dense model."""
        if self._dense is None:
            self._dense = self._hidden({})
        return list(zip(self._hidden(cuts), self._dense, strict=True))

    def _hidden(self, cuts: Cuts) -> list[Tensor]:
        with self._replaced(cuts):
            decoder = decoder_of(self.model)[1]
            states = (decoder(input_ids=i, use_cache=False) for i in self._batches())
            return [state.last_hidden_state.cpu() for state in states]

    def _batches(self) -> Iterator[Tensor]:
        return (ids.to(self._device) for ids in self.windows_NT.split(1))

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.get_input_embeddings().parameters()).device
        return device

    @contextmanager
    def _replaced(self, cuts: Cuts) -> Iterator[None]:
        """The model, in evaluation mode, with the attention of some layers replaced inside."""
        layers = [layer for layer in attention_layers(self.model) if layer.index in cuts]
        for layer in layers:
            new = cuts[layer.index]
            if id(new) not in self._built:
                self._built[id(new)] = _built(self.model, layer, new, self.norm_mode)
                finalize(new, self._built.pop, id(new), None)
        with restored(self.model, [], False), torch.no_grad():
            try:
                for layer in layers:
                    _put(self.model, layer, self._built[id(cuts[layer.index])])
                yield
            finally:
                for layer in layers:
                    _put(self.model, layer, layer.module)


def _finite(value: float, cuts: Cuts) -> float:
    if not math.isfinite(value):
        raise CalibrationError(
            f"trial pruning of layers {', '.join(map(str, sorted(cuts)))} gives {value}; calibrate "
            "in float32 or bfloat16"
        )
    return value


def _output(hidden_BTE: Any) -> BaseModelOutputWithPast:
    return BaseModelOutputWithPast(last_hidden_state=hidden_BTE)


def _put(model: PreTrainedModel, layer: AttentionLayer, module: Any) -> None:
    parent, _, name = layer.path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _built(
    model: PreTrainedModel, layer: AttentionLayer, new: LayerPlan, norm_mode: str
) -> nn.Module:
    """The attention of a layer's plan, on the device and in the dtype of the dense one."""
    spec, dense = attention_spec(model.config), cast(nn.Module, layer.module)
    tensors = new.convert(DenseAttention(layer, spec, dense.state_dict(), norm_mode))
    device = projections(layer, spec)["q"].weight.device
    # Linears are made with random weights, which come from no one's seed.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        entry = new.entry(norm_mode)
        built: nn.Module = build_attention(model, layer, spec, entry, layer.norm, norm_mode)
    # Hooks that move inputs between devices hang on the dense module as a `forward` of its own.
    vars(built).pop("forward", None)
    built.load_state_dict(tensors, assign=True)
    return built.eval()


Planned = Callable[[dict[int, tuple[int, ...]]], Plan]

ROUNDS = 1
# Of the windows that calibration kept. A divergence from the dense model varies far less over
# text than a loss does.
TRIED_WINDOWS = 2
COPIED_WINDOWS = 1  # layers that copy stand out: without them a copy is nearly read anew


@dataclass(frozen=True)
class Widths:
    """What layers keep, as movable numbers: one per layer, or one for K and one for V.

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


@dataclass(frozen=True)
class Positions:
    """Where widths are spent, in steps of two channels: what `Widths` has without them.

    `sizes` is the most that each may keep, and `whole` what a retain ratio is a share of.
    """

    places: Sequence[int]
    sizes: Sequence[int]
    whole: Sequence[int]
    heads: Sequence[int]
    unit: int

    @classmethod
    def of(cls, layers: Sequence[PrunableLayer], align: int) -> "Positions":
        """Those of these layers; with K and V apart a layer is there twice."""
        return cls(
            [layer.index for layer in layers],
            [merged_steps(layer.shape.head_dim, layer.merge) for layer in layers],
            [layer.merge * layer.shape.head_dim // 2 for layer in layers],
            [layer.shape.num_kv_heads // layer.merge for layer in layers],
            max(1, align // 2),
        )

    def by_errors(
        self, retain: float, errors: Sequence[Sequence[float]], *, half: bool = False
    ) -> Widths:
        """The widths of least error, of which `errors` has a curve for each position.

        Or `half` of the way from equal widths to those, by tempered errors.
        """
        sizes = [len(curve) - 1 for curve in errors]
        if half:
            asked = (round(retain * whole) for whole in self.whole)
            alike = [min(n, size) for n, size in zip(asked, sizes, strict=True)]
            errors = [tempered(curve, n) for curve, n in zip(errors, alike, strict=True)]
        spent = allocate_by_error(
            errors, retain, sizes, heads=self.heads, unit=self.unit, dense=self.whole
        )
        return self._spent(spent, sizes)

    def alike(self, retain: float) -> Widths:
        """As much of every layer."""
        sizes = zip(self.whole, self.sizes, strict=True)
        spent = [nearest_width(retain * whole, size, self.unit) for whole, size in sizes]
        return self._spent(spent, self.sizes)

    def widened(self, retain: float, layers: Collection[int]) -> Widths:
        """More of some layers, and the others alike (`budgets.widened`)."""
        spent = widened(
            retain,
            [position for position, index in enumerate(self.places) if index in layers],
            self.sizes,
            heads=self.heads,
            whole=self.whole,
            unit=self.unit,
        )
        return self._spent(spent, self.sizes)

    def _spent(self, spent: Sequence[int], sizes: Sequence[int]) -> Widths:
        return Widths(self.places, spent, offered_widths(sizes, self.unit), self.heads)


class Search:
    """A search for the widths of `method` for a dense model.

    What it measures is kept under `rap.checkpoint.files`, by all that decides it.
    """

    def __init__(self, method: PairPruning, model: PreTrainedModel, statistics: Statistics):
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
        """The numbers of every layer. `planned` prunes the layers that it is given numbers of."""

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


class Retrieval:
    """The layers of a dense `model` that copy, and widths of `method` that favour them."""

    def __init__(self, method: PairPruning, model: PreTrainedModel, statistics: Statistics):
        assert statistics.windows is not None
        tried = replace(statistics, windows=statistics.windows[:COPIED_WINDOWS])
        self.retain, self.trials = method.retain, Trials(model, tried, method.qk_norm)

    def widths(self, positions: Positions, planned: Planned) -> dict[int, tuple[int, ...]]:
        """The numbers of every layer, with those wide that copy."""
        alike = planned(positions.alike(self.retain).by_layer())
        chosen = self.chosen(alike, num_wide(len(positions.places)))
        return positions.widened(self.retain, chosen).by_layer()

    def chosen(self, plan: Plan, count: int) -> list[int]:
        """So many layers, each of which alone, dense in the pruned model, makes it copy best."""
        cuts = {i: layer for i, layer in enumerate(plan.layers) if layer is not None}
        source = {i: shape.source for i in cuts if (shape := plan.shapes[i]) is not None}
        owners, losses = [i for i in cuts if source[i] is None], dict[int, float]()
        with Progress("layers that copy", len(owners), "layers") as progress:
            for index in owners:
                # A layer whose cache others read is dense with them.
                others = {i: cut for i, cut in cuts.items() if index not in (i, source[i])}
                losses[index] = self.trials.copying(others)
                progress.update(progress.done + 1, f"loss {min(losses.values()):.3f}")
        return sorted(sorted(losses, key=lambda i: (losses[i], i))[:count])


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
