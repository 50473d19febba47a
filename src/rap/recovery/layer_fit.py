"""One attention, or one whole layer, trained to give wanted outputs: problem, loss, and Adam.

The error of a token is taken relative to the size of its residual stream, as the next norm reads
it: a few tokens, the first of a window above all, carry a stream a thousand times larger than the
others, and would else be all that is fitted.

Shapes: N windows, B windows of a batch, T tokens of a window, E model dim.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..model.errors import RapError
from ..runtime.layerwise import LayerwiseRunner
from ..runtime.products import Products, multiplying
from ..runtime.settings import Count, Positive, Seed, check_fields
from .streams import call_of

Scope = Literal["attention", "block"]
WARMUP_STEPS = 5
TRIAL_STEPS = 10  # after which a rate that a layer does not bear shows
SLOWER = 3.0
BETAS = (0.9, 0.95)  # in a few hundred steps the second moment must not remember the first ones


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of layer-wise distillation: how long and how fast every layer is trained.

    Text: `num_windows` windows of `window` tokens, of which the last `held_out` share judges
    whether a layer became better; `validation_windows` judge the whole, those of a source without a
    validation split being one in ten of its windows, and so fewer. Each of `steps` steps of Adam
    reads `batch` windows; `rate` is the first rate of a matrix in units of its root mean square,
    and falls to zero by a cosine. Where a layer's error on the held-out windows is no lower after
    TRIAL_STEPS, it begins again with a third of it: `rate_choices` rates at most.
    `drift` is the share of what the stream has lost that a layer is to make up for (by scope
    "attention" not where a norm reads the attention's output before it is added: there all of it is
    left to the layers behind). `scope` says what of a layer is trained, and what is wanted to come
    out right: its attention, or "block", all of it, where the matrices of a dense feed-forward
    begin at `feed_forward_rate`, and experts and their routers stay. `products` is the type in
    which layers multiply matrices, when they are trained and, by scope "block", hand windows on:
    "auto" is bfloat16 where the device does so itself, which takes two thirds of the time, else
    float32. Weights, their updates and what judges them are float32 in any case.
    """

    window: Annotated[int, Field(ge=2)] = 2048  # a shorter one forgets how to look far back
    num_windows: Annotated[int, Field(ge=2)] = 48
    validation_windows: Count = 8
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.125
    steps: Count = 80
    batch: Count = 1
    rate: Positive = 0.01
    rate_choices: Count = 3
    drift: Annotated[float, Field(ge=0, le=1)] = 1.0
    scope: Scope = "block"
    feed_forward_rate: Positive = 0.01
    products: Products = "auto"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self, "fit")


def fit_config(**changes: Any) -> FitConfig:
    """The settings of layer-wise distillation with some changed.

    RapError for an unknown name, a wrong value, or a setting that the others leave unread.
    """
    known = {field.name for field in fields(FitConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise RapError(
            f"fit has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known))}"
        )
    config = FitConfig(**changes)
    if "feed_forward_rate" in changes and config.scope == "attention":
        raise RapError("fit would not read feed_forward_rate: by scope attention it trains none")
    return config


@dataclass(frozen=True)
class LayerFit:
    """A layer's mean squared error on held-out windows, relative to the hidden states.

    `rate` is the share of the config's rates that it was trained with.
    """

    layer: int
    before: float
    after: float
    rate: float = 1.0

    @property
    def kept(self) -> bool:
        """Whether the distilled layer was better and is in the model."""
        return self.after < self.before


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """The attention of layer `index` of a stream, inside its working layer, and what it is to give.

    `target` [N, T, E] is wanted of it, or of the layer by scope "block"; `weight` [N, T, 1]
    multiplies the error. The last `num_judging` windows judge and the others fit.
    """

    stream: LayerwiseRunner
    layer: nn.Module
    attention: nn.Module
    index: int
    target: Tensor
    weight: Tensor
    num_judging: int
    config: FitConfig

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names in the layer."""
        return trained_parameters(self.layer, self.attention, self.config.scope)

    def solve(self) -> LayerFit:
        """Train what is to be trained in place, or leave it if that is no better."""
        start = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        before = self.judge()
        training = self._chosen(start, before)
        training.go(self.config.steps)
        self.layer.requires_grad_(False)
        after = self.judge()
        if not after < before:
            self._reset(start)
        return LayerFit(self.index, before, after, training.share)

    def _chosen(self, start: Mapping[str, Tensor], before: float) -> "Training":
        """Training under way at the first rate that lowers the error in TRIAL_STEPS, or the last.

        Not at the one that is best by then, which is too slow in the end.
        """
        choices = self.config.rate_choices if self.config.steps > TRIAL_STEPS else 1
        for times in range(choices):
            self._reset(start)
            training = Training(self, SLOWER**-times)
            if times == choices - 1 or self._tried(training) < before:
                break
        return training

    def _tried(self, training: "Training") -> float:
        """The error after TRIAL_STEPS, infinite where training broke off."""
        try:
            training.go(TRIAL_STEPS)
        except NotFinite:
            return math.inf
        return self.judge()

    @torch.no_grad()
    def _reset(self, start: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(start[name])

    @torch.no_grad()
    def judge(self) -> float:
        """The loss on the held-out windows."""
        count = len(self.target)
        batches = torch.arange(count - self.num_judging, count).split(self.config.batch)
        losses = [float(self.loss(rows)) * len(rows) for rows in batches]
        return sum(losses) / self.num_judging

    def loss(self, rows: Tensor) -> Tensor:
        """Mean squared error for some windows [B], each token's relative to its stream."""
        output = self._output(rows)
        error = output - self.target[rows].to(output.device)
        return (error * self.weight[rows].to(output.device)).square().mean()

    def _output(self, rows: Tensor) -> Tensor:
        if self.config.scope == "block":
            return self.stream.run(self.layer, self.index, self.stream.hidden[rows])
        args, kwargs = call_of(self.attention, self.stream, self.layer, self.index, rows)
        output = self.attention(*args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]


class NotFinite(RapError):
    """The loss of a layer is not finite."""


class Training:
    """Adam on a layer's problem at a share of its rates: steps that may be interrupted."""

    def __init__(self, problem: LayerProblem, share: float):
        self.problem, self.share = problem, share
        config, attention = problem.config, set(problem.attention.parameters())
        groups = []
        for parameter in problem.trained.values():
            rate = config.rate if parameter in attention else config.feed_forward_rate
            size = parameter.detach().square().mean().sqrt().item()
            groups.append({"params": [parameter.requires_grad_(True)], "lr": share * rate * size})
        self.optimizer = torch.optim.Adam(groups, betas=BETAS)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._of_first)
        self.batches = self._batches()

    @torch.enable_grad()
    def go(self, steps: int) -> None:
        """That many steps more, or those that are left; NotFinite for such a loss."""
        problem = self.problem
        for rows in itertools.islice(self.batches, steps):
            with multiplying(problem.layer, problem.config.products):
                loss = problem.loss(rows)
            if not torch.isfinite(loss):
                raise NotFinite(
                    f"layer {problem.index}: the loss of layer-wise distillation is not finite; "
                    "lower the rate, or check the weights of this layer"
                )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()

    def _of_first(self, step: int) -> float:
        """Of the first rate, at a step."""
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        return warm * 0.5 * (1 + math.cos(math.pi * step / self.problem.config.steps))

    def _batches(self) -> Iterator[Tensor]:
        """The windows [B] of every step: all of them in another order, again and again."""
        problem, config = self.problem, self.problem.config
        generator = torch.Generator().manual_seed(config.seed + problem.index)
        count, left = len(problem.target) - problem.num_judging, torch.empty(0, dtype=torch.long)
        for _ in range(config.steps):
            while len(left) < config.batch:
                left = torch.cat([left, torch.randperm(count, generator=generator)])
            yield left[: config.batch]
            left = left[config.batch :]


def trained_parameters(
    layer: nn.Module, attention: nn.Module, scope: str
) -> dict[str, nn.Parameter]:
    """All of the attention, and by scope "block" the matrices of a dense feed-forward, by name."""
    inside, experts = set(attention.parameters()), set(_of_experts(layer))
    return {
        name: parameter
        for name, parameter in layer.named_parameters()
        if parameter in inside
        or (scope == "block" and parameter.ndim == 2 and parameter not in experts)
    }


def _of_experts(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of sparse feed-forwards, their routers included.

    An expert sees few tokens of a short text, and would learn them by heart.
    """
    for name, module in layer.named_modules():
        if any(parameter.ndim > 2 for parameter in module.parameters(recurse=False)):
            yield from layer.get_submodule(name.rpartition(".")[0] or name).parameters()
