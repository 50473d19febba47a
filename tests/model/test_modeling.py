"""Generated classes as models: saved, loaded, copied, trained, and refused when incomplete."""

import copy
import io
import itertools
import json
import pickle

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan, zeroed
from rap.checkpoint.load import load, load_config
from rap.model import modeling
from rap.model.errors import CheckpointError, UnsupportedModelError
from rap.surgery.apply import apply

FAMILIES = ["llama", "mistral", "qwen2"]
WIDTHS = [(3, 5), None, (5, 9)]
TOKENS = random_tokens(2, 9)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    modeling.register()


def _small(model_type: str = "llama", **fields):
    model = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, layers=3, **fields)
    return apply(model, random_plan(model, WIDTHS))


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_experts_run_as_in_the_family_loaded_before_or_not(model_type, monkeypatch):
    """transformers looks into the source of a class's module, and keeps what it found there."""
    small, family = _small(model_type), type(tiny_model(model_type))
    for known in (family, type(small)):
        monkeypatch.delattr(known, "_can_set_experts_implementation_cached_value", raising=False)
    assert type(small)._can_set_experts_implementation() == (model_type == "mixtral")
    assert family._can_set_experts_implementation() == (model_type == "mixtral")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_and_loaded_model_is_bit_identical(tmp_path, model_type, tied, dtype):
    small = _small(model_type, tie_word_embeddings=tied, dtype=dtype)
    small.save_pretrained(tmp_path)
    for loader in (AutoModelForCausalLM, type(small)):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is type(small)
        assert again.dtype == dtype
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert torch.equal(_logits(again), _logits(small))
        assert again.model.layers[0].self_attn.frequency_index.dtype == torch.int32


def test_a_buffer_outside_the_checkpoint_would_not_survive(tmp_path):
    """Why the index is persistent: without it in the file, loading must not go unnoticed."""
    small = _small()
    small.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.self_attn.frequency_index"
    assert torch.equal(stored[name], small.get_buffer(name))
    attention = small.model.layers[2].self_attn
    attention.register_buffer("frequency_index", attention.frequency_index, persistent=False)
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(again.get_buffer(name), stored[name])


def test_loading_in_bfloat16_casts_weights_and_keeps_the_index(tmp_path):
    small = _small()
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    for name, tensor in small.state_dict().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(again.state_dict()[name], expected)
    assert torch.isfinite(_logits(again)).all()


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_map(tmp_path, device_map):
    small = _small()
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    if again.device.type == "cpu":
        assert torch.equal(_logits(again), _logits(small))


def test_layers_offloaded_to_disk_give_the_same(tmp_path):
    small = _small()
    small.save_pretrained(tmp_path / "model")
    device_map = {"model": "cpu", "model.layers.2": "disk", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "cpu" for i in range(2)}
    device_map |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    del device_map["model"]
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert again.model.layers[2].self_attn.q_proj.weight.device.type == "meta"
    assert torch.equal(_logits(again), _logits(small))
    # Weights on the disk are the base class's to read: nothing hashes them.
    again.save_pretrained(tmp_path / "saved")
    assert load_config(tmp_path / "saved").rap["fingerprint"] is None
    assert torch.equal(_logits(load(tmp_path / "saved")), _logits(small))


def test_continuous_batching_is_refused_in_a_sentence():
    """Its cache has heads of one size: every answer would be empty, and nothing would say why."""
    small = _small("llama")
    with pytest.raises(UnsupportedModelError, match="use generate, or vLLM"):
        small.generate_batch(inputs=[[1, 2, 3]])


def test_offloaded_dense_model_is_refused(tmp_path):
    model = tiny_model()
    plan = random_plan(model, [(3, 5), None])
    accelerate.disk_offload(model, tmp_path)
    with pytest.raises(CheckpointError, match="is offloaded: load the model whole, or use"):
        apply(model, plan)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_copies_and_pickles_are_bit_identical(model_type):
    small = _small(model_type)
    buffer = io.BytesIO()
    torch.save(small, buffer)
    buffer.seek(0)
    for again in (
        copy.deepcopy(small),
        pickle.loads(pickle.dumps(small)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(_logits(again), _logits(small))
        assert type(again.model.layers[0].self_attn) is type(small.model.layers[0].self_attn)


def test_classes_are_the_family_s_own():
    small = _small()
    assert type(small).__name__ == "RapLlamaForCausalLM"
    assert isinstance(small, LlamaForCausalLM)
    attentions = [layer.self_attn for layer in small.model.layers]
    assert all(isinstance(attention, LlamaAttention) for attention in attentions)
    assert [isinstance(item, modeling.RapAttention) for item in attentions] == [True, False, True]
    assert modeling.RapLlamaForCausalLM is type(small)
    with pytest.raises(AttributeError, match="RapGPT2Attention"):
        modeling.RapGPT2Attention  # noqa: B018


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_keeps_every_field_of_the_base(model_type):
    model = tiny_model(model_type, layers=3)
    dense = model.config.to_dict()
    small = apply(model, random_plan(model, WIDTHS)).config.to_dict()
    assert small.pop("rap")["layers"] == [
        {"pairs": 3, "free": 0, "values": 5},
        None,
        {"pairs": 5, "free": 0, "values": 9},
    ]
    assert small.pop("model_type") == f"rap_{dense.pop('model_type')}"
    assert small.pop("architectures") == [f"Rap{type(model).__name__}"]
    dense.pop("architectures")
    assert small == dense
    assert small["head_dim"] == 16


def test_from_config_builds_the_pruned_sizes():
    small = _small("qwen2")
    fresh = AutoModelForCausalLM.from_config(small.config, dtype=torch.float32)
    sizes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == sizes
    assert fresh.model.layers[2].self_attn.frequency_index.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert all(torch.isfinite(tensor).all() for tensor in fresh.state_dict().values())
    spread = fresh.model.layers[0].self_attn.q_proj.weight.std()
    # initializer_range is 0.02; the estimate from 1296 weights is within a tenth of it.
    assert 0.018 < spread < 0.022


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_reaches_every_weight_and_nothing_else(checkpointing):
    model = tiny_model("qwen2", heads=6, kv_heads=2, hidden=36, layers=3)
    before = copy.deepcopy(model.state_dict())
    small = apply(model, random_plan(model, WIDTHS)).train()
    index = small.model.layers[0].self_attn.frequency_index.clone()
    if checkpointing:
        small.gradient_checkpointing_enable()
    small(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for name, parameter in small.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    torch.optim.SGD(small.parameters(), lr=1.0).step()
    assert torch.equal(small.model.layers[0].self_attn.frequency_index, index)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(small.model.norm.weight, before["model.norm.weight"])


def test_gradient_checkpointing_gives_the_same_gradients():
    small = _small().train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            small.gradient_checkpointing_enable()
        small.zero_grad()
        small(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in small.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_is_shared_with_the_dense_model():
    model = tiny_model(layers=3)
    small = apply(model, random_plan(model, WIDTHS))
    dense = itertools.chain(model.parameters(), model.buffers())
    pointers = {tensor.untyped_storage().data_ptr() for tensor in dense}
    for tensor in itertools.chain(small.parameters(), small.buffers()):
        assert tensor.untyped_storage().data_ptr() not in pointers
    assert small.generation_config is not model.generation_config
    assert small.config is not model.config
    assert model.config.model_type == "llama"


def test_mode_and_attention_implementation_follow_the_dense_model():
    model = tiny_model(layers=3).train()
    model.set_attn_implementation("eager")
    small = apply(model, random_plan(model, WIDTHS))
    assert small.training
    assert small.model.layers[0].self_attn.training
    assert small.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize(
    ("asked", "taken"), [(None, "rap"), ("sdpa", "sdpa"), ("eager", "eager"), ("rap", "rap")]
)
def test_a_loaded_checkpoint_decodes_by_rap_unless_another_is_asked_for(tmp_path, asked, taken):
    """And prefill is SDPA: to the last bit what SDPA gives."""
    _small(dtype=torch.float32).save_pretrained(tmp_path)
    given = {} if asked is None else {"attn_implementation": asked}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert {m.config._attn_implementation for m in (loaded, loaded.model)} == {taken}
    assert "_attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    if asked is None:
        sdpa = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
        ids = random_tokens(2, 12)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, sdpa(ids).logits)
        tokens = [
            m.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            for m in (loaded, sdpa)
        ]
        assert torch.equal(*tokens)


def test_a_family_without_sdpa_keeps_its_attention(tmp_path, monkeypatch):
    """What falls back to eager does so for a reason."""
    small = _small(dtype=torch.float32)
    small.save_pretrained(tmp_path)
    monkeypatch.setattr(type(small), "_supports_sdpa", False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("widths", [[(2, 14)] * 3, [(7, 4)] * 3], ids=["values", "keys"])
def test_flash_attention_takes_keys_and_values_of_different_widths(widths, monkeypatch):
    """transformers pads values to the width of keys, and so cuts those that are wider."""
    model = tiny_model(heads=6, kv_heads=2, hidden=36, layers=3)
    small = apply(model, random_plan(model, widths))
    expected, seen = _logits(small), []

    def flash(module, q, k, v, mask, **kwargs):
        seen.append((k.shape[-1], v.shape[-1]))
        width = v.shape[-1]
        v = torch.nn.functional.pad(v, (0, k.shape[-1] - width))
        output, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return output[..., :width], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_like", flash)
    small.config._attn_implementation_internal = "flash_like"
    cache = DynamicCache(config=small.config)
    torch.testing.assert_close(_logits(small), expected, rtol=0, atol=1e-5)
    small(TOKENS, past_key_values=cache)
    assert cache.layers[0].keys.shape[-1] == 2 * widths[0][0]
    assert all(keys >= values for keys, values in seen)


def test_attention_weights_are_the_zeroed_dense_ones_and_eager_equals_sdpa():
    model = tiny_model(heads=6, kv_heads=2, hidden=36, layers=3)
    plan = random_plan(model, WIDTHS)
    small, dense = apply(model, plan), zeroed(model, plan)
    by_sdpa = _logits(small)
    for each in (small, dense):
        each.set_attn_implementation("eager")
    found, expected = (each(TOKENS, output_attentions=True) for each in (small, dense))
    assert len(found.attentions) == 3
    for mine, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert mine.shape == (2, 6, 9, 9)
        # Probabilities of float32 logits of some 10: 1e-5 is ten of their roundings.
        assert (mine - theirs).abs().max() < 1e-5
    assert (found.logits - by_sdpa).abs().max() < 1e-5 * by_sdpa.abs().max()


def _edit(section) -> dict:
    small = _small()
    config = small.config.to_dict()
    config["rap"] = section(config["rap"])
    return config


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (lambda rap: None, "no `rap` section with layer widths"),
        (lambda rap: {}, "no `rap` section with layer widths"),
        (lambda rap: rap | {"layers": rap["layers"][:2]}, "widths for 2 layers, the model has 3"),
        (lambda rap: rap | {"version": 3}, "format version 3, this release reads up to 2: upgrade"),
        (
            lambda rap: rap | {"layers": [{"pairs": 0, "free": 0, "values": 4}, None, None]},
            "layer 0 has impossible widths",
        ),
        (
            lambda rap: rap | {"layers": [None, {"pairs": 2, "free": 0, "values": 0}, None]},
            "layer 1 has impossible widths",
        ),
        (lambda rap: rap | {"layers": [{"pairs": 2}, None, None]}, "layer 0 has impossible widths"),
        (
            lambda rap: rap | {"layers": [{"pairs": 9, "free": 0, "values": 4}, None, None]},
            "layer 0 has impossible widths",
        ),
        (
            lambda rap: rap | {"layers": [{"pairs": 2, "free": 1, "values": 4}, None, None]},
            "layer 0 has impossible widths",
        ),
    ],
    ids=["none", "empty", "short", "newer", "no keys", "no values", "partial", "pairs", "free"],
)
def test_incomplete_or_impossible_config_is_refused(tmp_path, section, message):
    (tmp_path / "config.json").write_text(json.dumps(_edit(section)))
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_config(config)


def test_weights_of_other_widths_are_not_loaded(tmp_path):
    _small().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rap"]["layers"][0]["pairs"] = 4
    path.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
