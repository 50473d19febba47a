"""Bootstrap intervals over windows."""

import math

import pytest
import torch

from rap.evaluation.quality import intervals
from rap.evaluation.quality.intervals import mean_interval, perplexity_ratio_interval


def test_interval_of_equal_windows_has_no_width():
    found = mean_interval([2.5] * 8)
    assert (found.value, found.low, found.high) == (2.5, 2.5, 2.5)


def test_interval_covers_the_mean_as_often_as_it_says():
    # 200 samples of 16 windows with mean 0: binomial(200, 0.95) lies below 170 once in 10^6; the
    # percentile bootstrap of 16 values is a little narrow, about 92 %, which 170 leaves room for.
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(200, 16, generator=generator, dtype=torch.float64)
    covered = sum(
        found.low <= 0 <= found.high for found in (mean_interval(row.tolist()) for row in samples)
    )
    assert 170 <= covered < 200


def test_pairing_removes_what_is_hard_for_both():
    hard = torch.linspace(1, 5, 12, dtype=torch.float64)
    ours = hard + 0.1 + 0.01 * torch.cos(torch.arange(12.0, dtype=torch.float64))
    paired = perplexity_ratio_interval(ours.tolist(), hard.tolist())
    alone = mean_interval(ours.tolist())
    assert paired.value == pytest.approx(math.exp(float((ours - hard).mean())))
    assert paired.high - paired.low < 0.1 * (alone.high - alone.low)


def test_windows_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="3 and 2 windows are not pairs"):
        perplexity_ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_loss_that_is_too_large_for_exp_is_infinite():
    found = perplexity_ratio_interval([2000.0, 2001.0], [1.0, 2.0])
    assert (found.value, found.low, found.high) == (math.inf, math.inf, math.inf)
    assert perplexity_ratio_interval([1.0, 2.0], [2000.0, 2001.0]).value == 0


def test_the_draws_do_not_depend_on_how_many_are_held_at_once(monkeypatch):
    values = torch.randn(50, generator=torch.Generator().manual_seed(3)).tolist()
    at_once = mean_interval(values)
    monkeypatch.setattr(intervals, "DRAWN_AT_ONCE", 777)
    assert mean_interval(values) == at_once
