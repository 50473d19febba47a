"""Timing of prompts that are read."""

import torch

from cases.models import tiny_model
from rap.evaluation.cost.latency import WARM_UP, time_prefill

SHAPE = {"heads": 6, "kv_heads": 2, "hidden": 36, "layers": 3}


def test_models_read_whole_prompts_in_turns():
    models = {name: tiny_model(**SHAPE) for name in ("dense", "pruned")}
    read = []
    for name, model in models.items():
        model.train()

        def seen(_, given, output, name=name, model=model):
            assert not model.training
            assert not torch.is_grad_enabled()
            cached = output.past_key_values.layers[0].keys.shape
            read.append((name, tuple(output.logits.shape[:2]), cached[0], cached[2]))

        model.register_forward_hook(seen)
    now = iter(range(1000))
    found = time_prefill(models, tokens=7, rounds=3, batch=2, clock=lambda: next(now))
    each = [(name, (2, 1), 2, 7) for name in ("dense", "pruned")]
    assert read == each * (WARM_UP + 3)
    assert found == {"dense": [1, 1, 1], "pruned": [1, 1, 1]}
    assert all(model.training for model in models.values())
