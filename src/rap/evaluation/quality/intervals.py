"""Intervals for means over windows, single and paired, and for shares of questions.

A figure without one cannot be compared.

Shapes: W windows, S resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

RESAMPLES = 10_000
CONFIDENCE = 0.95
DRAWN_AT_ONCE = 1 << 22  # of all that is resampled, for 40,000 windows would take gigabytes


@dataclass(frozen=True)
class Interval:
    """`value` with the ends of its 95% interval."""

    value: float
    low: float
    high: float


def mean_interval(values_W: Sequence[float], seed: int = 0) -> Interval:
    """The mean over windows and its percentile bootstrap interval (Efron and Tibshirani, ch. 13).

    Windows are the units that are drawn again: tokens of one text are not independent. One window
    gives an interval of no width, which says nothing; ask for more.
    """
    values = torch.as_tensor(values_W, dtype=torch.float64)
    means_S = _resampled_means(values, seed)
    return _interval(float(values.mean()), means_S)


def perplexity_ratio_interval(
    nats_W: Sequence[float], dense_nats_W: Sequence[float], seed: int = 0
) -> Interval:
    """exp of the mean difference of losses a token on the same windows, a ratio of perplexities.

    Paired: the same windows are drawn for both, so what makes a text hard for both cancels.
    Raises ValueError if the two do not have the same number of windows.
    """
    if len(nats_W) != len(dense_nats_W):
        raise ValueError(
            f"{len(nats_W)} and {len(dense_nats_W)} windows are not pairs: measure both models on "
            "the same windows"
        )
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (nats_W, dense_nats_W))
    found = mean_interval((ours - theirs).tolist(), seed)
    return Interval(*(exponential(end) for end in (found.value, found.low, found.high)))


def exponential(nats: float) -> float:
    """exp, and infinity where a loss is too large for it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def share_interval(share: float, count: int) -> Interval:
    """A share of `count` independent questions with Wilson's score interval.

    Unlike the bootstrap it has a width also where all or none were right
    (https://doi.org/10.1080/01621459.1927.10502953).
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    half = z / (1 + z**2 / count) * spread
    return Interval(share, max(0.0, center - half), min(1.0, center + half))


def _resampled_means(values_W: Tensor, seed: int) -> Tensor:
    generator, count = torch.Generator().manual_seed(seed), len(values_W)
    means, rows = [], max(1, DRAWN_AT_ONCE // count)
    for begin in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - begin), count
        means.append(values_W[torch.randint(count, size, generator=generator)].mean(1))
    return torch.cat(means)


def _interval(value: float, means_S: Tensor) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    ends = torch.quantile(means_S, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(value, float(ends[0]), float(ends[1]))
