"""The stock profile: a pruned model as a plain checkpoint, without this package."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases.models import random_tokens, tiny_model
from cases.plans import plan_of, random_plan
from rap.model.errors import CheckpointError, RapError, UnsupportedModelError
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan
from rap.planning.shared import shared_pairs
from rap.serving.stock import export_stock, longrope_factors, slots_of_all_heads, stock_model
from rap.surgery.apply import apply

# A fixed list of pairs, 5 of 8: sqrt(10 / 16) is no power of two.
PAIRS = [0, 2, 3, 5, 7]
FAMILIES = {
    "llama": {},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
}


def stock_profile(model, pairs=PAIRS, values=None):
    """Every head of every layer keeps the same pairs, and value channels of its own."""
    channels = torch.Generator().manual_seed(3)
    width = values or 2 * len(pairs)
    layers = [
        PairPlan.of_indices(
            [pairs] * layer.shape.num_kv_heads,
            [
                sorted(torch.randperm(layer.shape.head_dim, generator=channels)[:width].tolist())
                for _ in range(layer.shape.num_kv_heads)
            ],
        )
        for layer in attention_layers(model)
    ]
    return apply(model, plan_of(model, layers))


def family_model(name, **fields):
    settings = {"model_type": name, **FAMILIES[name], **fields}
    return tiny_model(settings.pop("model_type"), **settings)


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_logits_are_the_pruned_model_s(family, rope):
    small = stock_profile(family_model(family, rope=rope))
    stock = stock_model(small)
    assert type(stock).__name__ in ("LlamaForCausalLM", "MistralForCausalLM")
    ids = random_tokens(2, 100)
    with torch.no_grad():
        # float32: the scale goes through W_q instead of the scores. Logits are of the order of 10.
        torch.testing.assert_close(stock(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)


def test_folded_slots_repeat_a_frequency():
    """Every head fills one shared list of slots with directions of its own, values a subspace."""
    model, slots = family_model("llama"), torch.tensor([[0, 1, 4, 6, 6]] * 2, dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    layers = [
        PairPlan(
            frequency_GM=slots,
            free_GN=torch.empty(2, 0, dtype=torch.int32),
            query_mix_GMP2=random(2, 5, 8, 2) / 3,
            key_mix_GMP2=random(2, 5, 8, 2) / 3,
            value_down_GCD=random(2, 10, 16) / 4,
            value_up_GDC=random(2, 16, 10) / 4,
        )
        for _ in attention_layers(model)
    ]
    small = apply(model, plan_of(model, layers))
    ids = random_tokens(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(
            stock_model(small)(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_stock_logits_in_float64():
    small = stock_profile(family_model("llama", dtype=torch.float64))
    small.model.rotary_emb.double()
    stock = stock_model(small)
    stock.model.rotary_emb.double()
    ids = random_tokens(1, 60)
    with torch.no_grad():
        # What is left is cos and sin of frequencies that agree to float32.
        torch.testing.assert_close(stock(ids).logits, small(ids).logits, rtol=0, atol=2e-5)


# Run in a process in which this package cannot be imported: argv is paths of checkpoints.
_STOCK_LOGITS = """
import sys
sys.modules["rap"] = None
import torch
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.load(path + ".ids", weights_only=True)
    torch.save(model(ids).logits.detach(), path + ".logits")
"""


def test_export_loads_in_transformers_without_this_package(tmp_path):
    ids, expected, paths = random_tokens(1, 80), {}, {}
    for number, family in enumerate(FAMILIES):
        small = stock_profile(family_model(family))
        small.save_pretrained(tmp_path / f"pruned-{number}")
        paths[family] = tmp_path / f"plain-{number}"
        export_stock(tmp_path / f"pruned-{number}", paths[family])
        torch.save(ids, f"{paths[family]}.ids")
        config = json.loads((paths[family] / "config.json").read_text("utf-8"))
        assert {"rap", "auto_map"}.isdisjoint(config)
        assert config["head_dim"] == 10
        legacy = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
        assert legacy == config["rope_parameters"]
        with torch.no_grad():
            expected[family] = small(ids).logits
    subprocess.run([sys.executable, "-c", _STOCK_LOGITS, *map(str, paths.values())], check=True)
    for family, path in paths.items():
        found = torch.load(f"{path}.logits", weights_only=True)
        torch.testing.assert_close(found, expected[family], rtol=1e-4, atol=1e-4)


def test_exported_model_generates_the_same_tokens(tmp_path):
    small = stock_profile(family_model("qwen2"))
    export_stock(small, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ids = random_tokens(1, 8)
    assert torch.equal(plain.generate(ids, **settings), small.generate(ids, **settings))


def test_half_precision_rounds_the_query_weights_once():
    small = stock_profile(family_model("llama", dtype=torch.bfloat16))
    stock = stock_model(small)
    query = small.model.layers[0].self_attn.q_proj.weight.double() * (10 / 16) ** 0.5
    found = stock.model.layers[0].self_attn.q_proj.weight
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, query.to(torch.bfloat16))


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_factors_give_the_frequencies_to_the_last_place(base):
    dense = 1.0 / base ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    theta = dense[[0, 1, 5, 9, 20, 20, 31]]
    factors = torch.tensor(longrope_factors(theta, base))
    found = 1.0 / (factors * base ** (torch.arange(0, 14, 2, dtype=torch.float32) / 14))
    assert ((found - theta).abs() / theta).max() <= 2**-23


def test_model_of_another_profile_is_refused():
    model = family_model("llama")
    with pytest.raises(CheckpointError, match=r"KV head \d of layer \d keeps other pairs.*--prof"):
        stock_model(apply(model, random_plan(model, [(5, 10), (5, 10)])))
    with pytest.raises(CheckpointError, match=r"layer 1 was left dense.*--profile stock"):
        stock_model(apply(model, random_plan(model, [(5, 10), None])))
    with pytest.raises(CheckpointError, match="layer 1 keeps 4 pairs and 8 value channels, layer"):
        stock_model(apply(model, random_plan(model, [(5, 10), (4, 8)])))
    with pytest.raises(CheckpointError, match="keys as wide as values"):
        stock_model(stock_profile(model, values=12))
    with pytest.raises(CheckpointError, match=r"is dense; prune it first: .*--profile stock"):
        slots_of_all_heads(model)


def test_rope_without_fixed_frequencies_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    small = stock_profile(family_model("llama", rope_parameters=rope))
    with pytest.raises(UnsupportedModelError, match="'dynamic' has frequencies that depend"):
        stock_model(small)


def test_output_is_not_replaced_by_accident(tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(CheckpointError, match="--force"):
        export_stock(stock_profile(family_model("llama")), tmp_path)


def test_shared_pairs_give_every_layer_one_vote():
    loud = 1000 * torch.tensor([[0.0, 0.0, 0.6, 0.4], [0.0, 0.0, 0.6, 0.4]])
    quiet = torch.tensor([[1.0, 0.0, 0.2, 0.0], [0.8, 0.0, 0.0, 0.0]])
    assert shared_pairs([loud, quiet], 2) == [0, 2]
    assert shared_pairs([loud, quiet], 3) == [0, 2, 3]
    assert shared_pairs([torch.ones(2, 4)], 2) == [0, 1]
    assert shared_pairs([torch.tensor([[1.0, 2.0, 3.0, 4.0]])], 2) == [2, 3]


def test_shared_pairs_refuse_what_has_no_answer():
    with pytest.raises(RapError, match="cannot keep 5 of 4 pairs"):
        shared_pairs([torch.ones(2, 4)], 5)
    with pytest.raises(RapError, match=r"layers have \[3, 4\] pairs"):
        shared_pairs([torch.ones(2, 4), torch.ones(2, 3)], 2)
    with pytest.raises(RapError, match="every score is zero"):
        shared_pairs([torch.zeros(2, 4)], 2)
