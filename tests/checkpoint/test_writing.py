"""Models that transformers loads and would not save as they are."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import rap
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.checkpoint.files import write_model
from rap.pipeline import save
from rap.serving.stock import export_stock

from ..serving.test_stock import stock_profile

SAMPLED = {"temperature": 0.9, "top_p": 0.6}  # and no do_sample: greedy, with a warning


@pytest.fixture
def sampling(tmp_path):
    """A checkpoint with sampling values for greedy decoding, as some published ones have."""
    folder = tmp_path / "dense"
    tiny_model(head_dim=64).save_pretrained(folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | SAMPLED))
    return folder


def test_a_generation_config_goes_as_it_is(sampling, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sampling)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "refused")
    write_model(model, tmp_path / "small")
    found = GenerationConfig.from_pretrained(tmp_path / "small")
    assert (found.temperature, found.top_p) == (0.9, 0.6)
    assert model.generation_config.temperature == 0.9
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    ids = random_tokens(1, 8)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_such_a_model_is_compressed_and_exported(sampling, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sampling)
    plan = random_plan(model, [(16, 32), (16, 32)])
    save(rap.apply(model, plan), plan, tmp_path / "small")
    small = stock_profile(model, [0, 2, 3, 5, 7])
    export_stock(small, tmp_path / "plain")
    for name in ("small", "plain"):
        found = GenerationConfig.from_pretrained(tmp_path / name)
        assert (found.temperature, found.top_p) == (0.9, 0.6)
