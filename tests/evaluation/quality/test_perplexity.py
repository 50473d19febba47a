"""Perplexity against a window-by-window reference, hand-computable models, and wrong inputs."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model

from cases.models import MAX_POSITIONS, VOCABULARY, random_tokens, tiny_model
from rap import assets
from rap.evaluation.quality import perplexity as module
from rap.evaluation.quality.perplexity import perplexity
from rap.model.errors import RapError
from rap.model.modeling import config_class, model_class
from rap.runtime import logits

WINDOW = 20


@torch.no_grad()
def reference(model, ids, window):
    """Mean of Hugging Face's own per-window loss: every whole window predicts window - 1 tokens."""
    losses = [
        float(
            model(
                input_ids=ids[None, start : start + window],
                labels=ids[None, start : start + window],
            ).loss
        )
        for start in range(0, len(ids) - window + 1, window)
    ]
    return math.exp(sum(losses) / len(losses))


def pruned_tiny():
    """A small pruned model with random weights, one layer dense."""
    dense = tiny_model().config.to_dict()
    dense.pop("model_type")
    config = config_class("llama")(
        **dense, rap={"version": 1, "layers": [{"pairs": 3, "free": 0, "values": 5}, None]}
    )
    return model_class("llama")(config).eval()


def adapted_tiny(config):
    """A model as peft wraps it, with adapters that do something."""
    torch.manual_seed(3)
    return get_peft_model(tiny_model(), config).eval()


MODELS = {
    **{name: (lambda name=name: tiny_model(name)) for name in ("llama", "mistral", "qwen2")},
    "softcapped": lambda: tiny_model("gemma2", final_logit_softcapping=2.0),
    "scaled": lambda: tiny_model("cohere", logit_scale=0.3),
    "pruned": pruned_tiny,
    "adapted": lambda: adapted_tiny(LoraConfig(r=2, init_lora_weights=False)),
}


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_window_by_window_loss(name, batch_size, monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 7 * VOCABULARY)  # chunks straddle the windows
    model, ids = MODELS[name](), random_tokens(1, 3 * WINDOW + 9)[0]
    found = perplexity(model, ids, window=WINDOW, batch_size=batch_size)
    # float32 losses near 5: rounding of each is 2e-7, their means differ by no more.
    assert found.value == pytest.approx(reference(model, ids, WINDOW), rel=3e-6)
    assert found.value == math.exp(found.nats_per_token) == float(found)
    assert (found.num_windows, found.num_tokens, found.window) == (3, 3 * (WINDOW - 1), WINDOW)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_every_window_has_its_loss(batch_size, monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 7 * VOCABULARY)
    model, ids = tiny_model(), random_tokens(1, 5 * WINDOW + 9)[0]
    found = perplexity(model, ids, window=WINDOW, batch_size=batch_size)
    alone = [
        perplexity(model, ids[start : start + WINDOW], window=WINDOW).nats_per_token
        for start in range(0, 5 * WINDOW, WINDOW)
    ]
    assert len(set(alone)) == 5
    # float32 losses near 5: see above.
    assert found.window_nats == pytest.approx(alone, rel=3e-6)
    # Windows are of one length, so that the mean of their means is the mean.
    assert sum(found.window_nats) / 5 == pytest.approx(found.nats_per_token, rel=1e-14)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 5e-7)])
def test_a_uniform_model_has_the_vocabulary_for_perplexity(dtype, bound):
    model = tiny_model(dtype=dtype)
    model.lm_head.weight.data.zero_()
    found = perplexity(model, random_tokens(1, 100), window=WINDOW, dtype=dtype)
    # float32: log(128) is rounded by up to 2.4e-7
    assert found.value == pytest.approx(VOCABULARY, rel=bound)


def test_a_model_that_always_expects_the_next_id_is_scored_on_the_right_token():
    # Layers that add nothing, one-hot embeddings, and a head that shifts them: token t predicts
    # t + 1 with a margin of 60 nats, and a score aligned with any other token would be near 60.
    model = tiny_model(hidden=VOCABULARY)
    model.model.embed_tokens.weight.data = torch.eye(VOCABULARY)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.norm.weight.data.fill_(1)
    model.lm_head.weight.data = torch.eye(VOCABULARY).roll(1, 0) * 60 / math.sqrt(VOCABULARY)
    ids = torch.arange(200) % VOCABULARY
    assert perplexity(model, ids, window=WINDOW).value == pytest.approx(1, abs=1e-6)


def test_positions_are_means_over_windows():
    """Ranges of a window weigh up to its loss, and each is the mean of its own positions."""
    model, ids = tiny_model(), random_tokens(1, 3 * 48)[0]
    found = perplexity(model, ids, window=48)
    assert [(part.start, part.stop) for part in found.positions] == [(0, 47)]
    assert found.positions[0].nats_per_token == pytest.approx(found.nats_per_token, rel=1e-12)
    with torch.no_grad():
        logits = model(ids.view(3, 48)).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids.view(3, 48)[:, 1:], reduction="none"
    )
    assert module.position_ranges(700) == [(0, 128), (128, 256), (256, 512), (512, 700)]
    assert module.position_ranges(256) == [(0, 128), (128, 256)]
    total = module.Losses()
    for row in losses:
        total.add([row[:30], row[30:]])
    module_ranges = [(0, 10), (10, 47)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "position_ranges", lambda length: module_ranges)
        parts = total.perplexity(48, 0, None).positions
    for part, (start, stop) in zip(parts, module_ranges, strict=True):
        expected = float(losses[:, start:stop].double().mean())
        assert part.nats_per_token == pytest.approx(expected, rel=1e-12)


def test_low_precision_is_evaluated_as_a_float32_copy():
    low, ids = tiny_model(dtype=torch.bfloat16), random_tokens(1, 3 * WINDOW)
    before = {name: tensor.clone() for name, tensor in low.state_dict().items()}
    found = perplexity(low, ids, window=WINDOW)
    as_is = perplexity(low, ids, window=WINDOW, dtype=None)
    # bfloat16 logits, and their loss in float32, as transformers takes it.
    assert as_is.value == pytest.approx(reference(low, ids[0], WINDOW), rel=3e-6)
    after = low.state_dict()
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert found.value == perplexity(low.float(), ids, window=WINDOW).value
    assert as_is.value != found.value
    assert as_is.value == pytest.approx(found.value, rel=0.1)  # bfloat16 has 8 bits


def test_losses_of_low_logits_are_float32():
    logits, targets = torch.randn(5, 7).bfloat16(), torch.arange(5)
    assert torch.equal(
        module.token_losses(logits, targets), module.token_losses(logits.float(), targets)
    )


def test_the_bundled_model_in_low_precision(reference_model, test_tokens):
    loaded = assets.reference_model(torch.bfloat16)
    wanted = perplexity(loaded, test_tokens, window=512, max_windows=4, dtype=None)
    cast = {"dtype": torch.bfloat16}
    assert perplexity(reference_model, test_tokens, window=512, max_windows=4, **cast) == wanted


def test_two_runs_agree_to_the_last_digit():
    model, ids = tiny_model(), random_tokens(1, 30 * WINDOW)
    runs = [perplexity(model, ids, window=WINDOW, batch_size=4) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_what_is_left_over_is_not_read():
    model, ids = tiny_model(), random_tokens(1, 3 * WINDOW + 9)[0]
    found = perplexity(model, ids, window=WINDOW)
    assert found.num_left_out == 9
    ids[-9:] = 0
    assert perplexity(model, ids, window=WINDOW) == found
    assert perplexity(model, ids.tolist(), window=WINDOW) == found
    two = perplexity(model, ids, window=WINDOW, max_windows=2)
    assert (two.num_windows, two.num_left_out) == (2, WINDOW + 9)
    assert two.value == perplexity(model, ids[: 2 * WINDOW], window=WINDOW).value


@pytest.mark.parametrize(("longest", "window"), [(MAX_POSITIONS, MAX_POSITIONS), (4096, 2048)])
def test_default_window_is_2048_or_the_longest_position(longest, window):
    model = tiny_model(layers=1, max_position_embeddings=longest)
    assert perplexity(model, random_tokens(1, 2048)).window == window


def test_no_chunk_of_logits_is_larger_than_allowed(monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 11 * VOCABULARY + 5)
    model, sizes = tiny_model(), []
    model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.numel()))
    perplexity(model, random_tokens(1, 8 * WINDOW), window=WINDOW, batch_size=4)
    assert max(sizes) == 11 * VOCABULARY
    assert sum(sizes) == 8 * (WINDOW - 1) * VOCABULARY


def test_training_modes_and_gradients_are_left_alone():
    model = tiny_model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [each.training for each in model.modules()]
    ids = random_tokens(1, 3 * WINDOW)
    found = perplexity(model, ids, window=WINDOW)
    assert [each.training for each in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found == perplexity(model.eval(), ids, window=WINDOW)
    assert torch.is_grad_enabled()


WRONG = {
    "empty": ([], {}, "the text has 0 tokens, less than one window of 20"),
    "short": (list(range(19)), {}, "has 19 tokens.*longer text or a smaller window"),
    "window": ([1] * 50, {"window": 1}, "a window of 1 tokens"),
    "windows": ([1] * 50, {"max_windows": 0}, "max_windows"),
    "batch": ([1] * 50, {"batch_size": 0}, "batch_size"),
    "id": ([1, VOCABULARY] * 50, {}, f"token id {VOCABULARY} is outside.*tokenizer"),
    "negative id": ([1, -100] * 50, {}, "token id -100 is outside"),
    "text": ("It was a dark evening", {}, "not as str: take tokenizer"),
    "encoding": ({"input_ids": [1] * 50}, {}, "not as dict: take tokenizer"),
    "parts": ([1.5] * 50, {}, "whole numbers, not as torch.float32: take tokenizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_that_says_what_to_do(case):
    ids, options, message = WRONG[case]
    with pytest.raises(RapError, match=message) as caught:
        perplexity(tiny_model(), ids, **({"window": WINDOW} | options))
    assert "\n" not in str(caught.value)


def test_learned_prompts_are_refused():
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(RapError, match="learned prompts cannot be read"):
        perplexity(adapted_tiny(prompts), random_tokens(1, 3 * WINDOW), window=WINDOW)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(poison):
    model = tiny_model()
    model.lm_head.weight.data[3, 3] = poison
    with pytest.raises(RapError, match="windows 0 to 1"):
        perplexity(model, random_tokens(1, 3 * WINDOW), window=WINDOW, batch_size=2)


def test_the_bundled_model_reads_its_own_language(reference_model, test_tokens):
    ids = test_tokens[: 2 * 128]
    found = perplexity(reference_model, ids, window=128)
    assert found.value == pytest.approx(reference(reference_model, ids, 128), rel=3e-6)
    backwards = perplexity(reference_model, ids.flip(0), window=128)
    assert found.value < 150 < 1000 < backwards.value
