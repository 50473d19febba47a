"""A quantized cache that needs no package, in the place of hqq and quanto."""

import pytest
import torch
from transformers.cache_utils import QuantizedLayer

from rap.evaluation.cache import quantized_cache as quantized


class _Backend(QuantizedLayer):
    """15 levels, one scale a group, rows packed by four."""

    def _quantize(self, tensor, axis):
        assert tensor.shape[-1] == self.q_group_size
        assert len(tensor) % (8 // self.nbits) == 0
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return {"levels": (tensor / scale).round().to(torch.int8), "scale": [scale]}

    def _dequantize(self, held):
        return held["levels"] * held["scale"][0]


class _Layer(quantized._WholeGroups, _Backend):
    pass


def rounded_kind(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of such a kind of cache, while the test runs."""
    backend = quantized._Backend("round", _Layer, "torch", (2,), 0)
    monkeypatch.setitem(quantized.CACHE_KINDS, "round2", (backend, 2))
    return "round2"
