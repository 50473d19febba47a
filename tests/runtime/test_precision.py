"""Models in another precision: what loading in it gives, and what a CPU calibrates."""

import pytest
import torch

from cases.models import random_tokens, tiny_model
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.calibration.run import calibrate
from rap.evaluation.quality.perplexity import perplexity
from rap.runtime import memory
from rap.runtime.memory import in_fast_precision, in_precision

WINDOW = 20
LOW = {
    "llama": {},
    "llama:yarn": {"rope": "yarn"},
    "gemma3_text": {},
    # One has a buffer that loading keeps in float32, the others have some that it rounds.
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
def test_a_copy_in_low_precision_is_what_loading_in_it_gives(name, dtype, tmp_path):
    model = tiny_model(name.partition(":")[0], **LOW[name])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    copied = in_precision(model, dtype)
    assert_same_tensors(copied.state_dict(), loaded.state_dict())
    # Only RoPE's frequencies decide something: other buffers are cast where they are used.
    assert_same_tensors(frequencies(copied), frequencies(loaded))
    ids = random_tokens(1, 3 * WINDOW)
    found = perplexity(model, ids, window=WINDOW, dtype=dtype)
    assert found == perplexity(loaded, ids, window=WINDOW, dtype=None)


def frequencies(model):
    return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}


def assert_same_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_calibrated_in_float32_on_a_cpu(dtype, monkeypatch, tokenizer, tmp_path):
    """The statistics are those of the same weights in float32; the model itself stays as it is."""
    model = tiny_model(vocab_size=tokenizer.vocab_size, dtype=dtype)
    text = tmp_path / "text.txt"
    text.write_text("It was a dark evening, and the old man walked on. " * 40)
    context = DenseContext(model, tokenizer, "tiny", CalibrationText(str(text), 2, 24))
    found = context.statistics({"energy", "gradients"})
    assert model.dtype == dtype
    expected = calibrate(in_precision(model, torch.float32), context.windows, found.needs)
    assert found.fingerprint == expected.fingerprint == context.fingerprint
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert all(torch.equal(layer[name], other[name]) for name in other)


def test_precision_is_left_alone_where_there_is_no_room_or_no_need(monkeypatch):
    low, exact = tiny_model(dtype=torch.bfloat16), tiny_model()
    assert in_fast_precision(exact) is exact
    finer = tiny_model(dtype=torch.float64)
    assert in_fast_precision(finer) is finer
    assert in_fast_precision(low).dtype == torch.float32
    size = sum(4 * parameter.numel() for parameter in low.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * size - 1)
    assert in_fast_precision(low) is low
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * size)
    assert in_fast_precision(low) is not low
