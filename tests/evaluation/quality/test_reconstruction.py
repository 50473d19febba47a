"""Reconstruction is seen in the products of a decode step, wherever a method hides it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import rap
from rap.evaluation.cost.footprint import reconstructs


class _Rebuilding(DynamicCache):
    """Gives back all cached keys multiplied with a weight, as a low-rank method does."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, *args, **kwargs)
        return keys @ self.weight, values


def test_neither_the_dense_nor_the_cut_model_rebuilds(reference_model):
    assert not reconstructs(reference_model)
    implementation = reference_model.config._attn_implementation
    windows = rap.load_windows("bundled", rap.assets.reference_tokenizer(), num_windows=2)
    method = rap.Rap(retain=0.5)
    statistics = rap.calibrate(reference_model, windows[:, :64], method.needs)
    small = rap.apply(reference_model, method.plan(reference_model, statistics))
    assert not reconstructs(small)
    assert reference_model.config._attn_implementation == implementation


@pytest.mark.parametrize("derived", [False, True])
def test_a_cache_that_multiplies_with_a_weight_is_found(derived, reference_model):
    weight = nn.Parameter(torch.eye(64))
    model = rap.assets.reference_model(torch.float32)
    model.model.extra = nn.Module()
    model.model.extra.weight = weight

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("past_key_values") is None and kwargs.get("use_cache"):
            # A factor computed from weights alone is a weight too.
            factor = 2 * weight.T.contiguous() if derived else weight
            kwargs |= {"past_key_values": _Rebuilding(factor)}
        elif derived and kwargs.get("past_key_values") is not None:
            kwargs["past_key_values"].weight = 2 * weight.T.contiguous()
        return args, kwargs

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    assert reconstructs(model)
