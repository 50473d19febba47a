"""Quality through a compressed cache: exact without compression, against references with.

The packages that compress are optional. What this package does around them is tested with stand-ins
for them; the tests at the end need the packages themselves.
"""

import copy
import importlib.util
import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rap
from cases.command import error_violations, run
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan, zeroed
from cases.rounded_cache import rounded_kind
from rap.evaluation.cache import quantized_cache as quantized
from rap.evaluation.cache.compressed import (
    CacheCompression,
    compressed_perplexity,
    compressed_recall,
    held_bytes,
    question_start,
)
from rap.evaluation.cache.presses import Press, future_queries, last_weights, parse_press, pressed
from rap.evaluation.cost.footprint import footprint
from rap.evaluation.retrieval.documents import FactWriter
from rap.evaluation.retrieval.recall import recall_documents, recall_grid
from rap.model.errors import RapError
from rap.runtime.state import removed

WINDOW, PREFIX, PIECE = 40, 23, 7
SIZES = {"window": WINDOW, "prefix": PREFIX, "piece": PIECE}
NOTHING = CacheCompression()


def needs(package):
    """Skip without the package; it is not imported, for kvpress patches transformers at that."""
    found = importlib.util.find_spec(package.split(".")[0]) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


def pruned():
    """A cut tiny model: keys and values of every layer have widths of their own."""
    model = tiny_model()
    return rap.apply(model, random_plan(model, [(5, 9), (3, 12)]))


def cut_by(name):
    """A tiny model cut by a method at half of its cache."""
    model = tiny_model()
    method = rap.METHODS[name](retain=0.5)
    statistics = rap.calibrate(model, random_tokens(4, 64), method.needs)
    return method.apply(model, method.plan(model, statistics))


@torch.no_grad()
def tail_nats(logits_BTV, ids_BT):
    """Mean loss of the tokens that the measure scores, from the logits of whole windows."""
    predicted = logits_BTV[:, PREFIX:-1].transpose(1, 2)
    return float(F.cross_entropy(predicted.double().detach(), ids_BT[:, PREFIX + 1 :]))


@pytest.fixture
def ids():
    return random_tokens(3, WINDOW)


@pytest.fixture
def rounding(monkeypatch):
    return rounded_kind(monkeypatch)


@pytest.fixture
def first_token_press(monkeypatch):
    """A stand-in for kvpress whose knorm keeps, in every head, other tokens: score_BGT."""

    class KnormPress:
        def __init__(self, compression_ratio):
            self.compression_ratio = compression_ratio

        def score(self, module, hidden, keys, values, attentions, kwargs):
            batch, groups, length, _ = keys.shape
            order = (torch.arange(length)[None] * torch.tensor([[5], [7]])[:groups]) % length
            return order[None].expand(batch, -1, -1).float()

    package = types.ModuleType("kvpress")
    package.KnormPress = KnormPress
    base = types.ModuleType("kvpress.presses.base_press")
    base.SUPPORTED_MODELS = ()
    for name, module in (("kvpress", package), ("kvpress.presses.base_press", base)):
        monkeypatch.setitem(sys.modules, name, module)
    return Press("knorm", 0.5)


@pytest.mark.parametrize("make", [tiny_model, pruned])
@pytest.mark.parametrize("piece", [1, 7, 100])
def test_without_compression_it_is_plain_perplexity_of_the_continuations(make, piece, ids):
    model = make()
    found = compressed_perplexity(
        model, ids.flatten(), NOTHING, **(SIZES | {"piece": piece}), batch_size=2
    )
    # Batches of two and of one, attention over a cache or a whole window: float32 rounding apart.
    expected = tail_nats(model(ids).logits, ids)
    assert found.nats_per_token == pytest.approx(expected, rel=1e-6)
    assert found.perplexity == math.exp(found.nats_per_token)
    assert (found.num_windows, found.num_tokens) == (3, 3 * (WINDOW - 1 - PREFIX))


@pytest.mark.parametrize("make", [tiny_model, pruned])
def test_bytes_are_those_of_the_footprint(make, ids):
    model = make()
    found = compressed_perplexity(model, ids.flatten(), NOTHING, **SIZES)
    expected = footprint(model).kv_bytes_per_token
    assert (found.prefix_bytes_per_token, found.kv_bytes_per_token) == (expected, expected)


@pytest.mark.parametrize("make", [tiny_model, pruned])
def test_evicted_tokens_are_unseen_by_the_continuation_alone(make, ids, first_token_press):
    model = make()
    model.set_attn_implementation("eager")
    compression = CacheCompression(press=first_token_press)
    found = compressed_perplexity(model, ids.flatten(), compression, **SIZES)
    # The same by a mask over whole windows: continuations see what the press kept, each query
    # head what its KV head kept, at the positions where the tokens stood.
    groups, heads = model.config.num_key_value_heads, model.config.num_attention_heads
    order = (torch.arange(PREFIX)[None] * torch.tensor([[5], [7]])) % PREFIX
    seen = torch.ones(heads, WINDOW, WINDOW, dtype=torch.bool).tril()
    kept = order >= PREFIX - PREFIX // 2
    assert kept.sum(1).tolist() == [PREFIX // 2] * groups
    seen[:, PREFIX:, :PREFIX] &= kept.repeat_interleave(heads // groups, 0)[:, None]
    mask = torch.zeros(1, heads, WINDOW, WINDOW).masked_fill(~seen, float("-inf"))
    expected = tail_nats(model(ids, attention_mask=mask.expand(3, -1, -1, -1)).logits, ids)
    assert found.nats_per_token == pytest.approx(expected, rel=1e-6)
    plain = compressed_perplexity(model, ids.flatten(), NOTHING, **SIZES)
    assert abs(found.nats_per_token - plain.nats_per_token) > 1e-3
    # Half of the tokens of the prefix are gone from the tensors, the rest of the window is not.
    whole, dropped = plain.kv_bytes_per_token, PREFIX - PREFIX // 2
    assert found.prefix_bytes_per_token == pytest.approx(whole * (PREFIX // 2) / PREFIX)
    assert found.kv_bytes_per_token == pytest.approx(whole * (WINDOW - 1 - dropped) / (WINDOW - 1))


@pytest.mark.parametrize("make", [tiny_model, pruned])
def test_a_lossy_cache_changes_the_loss_as_rounded_keys_and_values_do(make, ids, rounding):
    model = make()
    found = compressed_perplexity(model, ids.flatten(), CacheCompression(rounding), **SIZES)
    # By hand: a plain cache whose keys and values are rounded, a head of a token at a time.
    cache = DynamicCache(config=model.config)
    model(ids[:, :PREFIX], past_key_values=cache)
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            scale = states.abs().amax(-1, keepdim=True) / 7
            setattr(layer, name, (states / scale).round() * scale)
    logits = model(ids[:, PREFIX:], past_key_values=cache).logits
    padded = torch.cat([torch.zeros(3, PREFIX, logits.shape[-1]), logits], 1)
    assert found.nats_per_token == pytest.approx(tail_nats(padded, ids), rel=1e-6)
    plain = compressed_perplexity(model, ids.flatten(), NOTHING, **SIZES)
    assert abs(found.nats_per_token - plain.nats_per_token) > 1e-3
    # A byte a value and a float32 scale a group, of two heads of three windows: 138 rows, which
    # two more fill up to what is packed.
    widths = [
        (2 * one["pairs"] + one["free"], one["values"])
        for one in getattr(model.config, "rap", {"layers": []})["layers"]
    ] or [(16, 16), (16, 16)]
    rows = [width for pair in widths for width in pair]
    assert len(set(rows)) > (1 if make is pruned else 0)
    assert found.prefix_bytes_per_token == sum(140 * (width + 4) for width in rows) / 3 / PREFIX


def test_tokens_can_be_evicted_from_a_quantized_cache(ids, rounding, first_token_press):
    model = pruned()
    both = CacheCompression(rounding, first_token_press)
    found = compressed_perplexity(model, ids.flatten(), both, **SIZES)
    bits = compressed_perplexity(model, ids.flatten(), replace(both, press=None), **SIZES)
    # 66 rows are left of 138, and two more each time fill up what is packed.
    assert found.prefix_bytes_per_token == pytest.approx(bits.prefix_bytes_per_token * 68 / 140)
    press = compressed_perplexity(model, ids.flatten(), replace(both, bits=None), **SIZES)
    assert len({one.nats_per_token for one in (found, bits, press)}) == 3


@pytest.mark.parametrize(
    ("width", "size"), [(64, 64), (128, 64), (46, 46), (74, 37), (80, 40), (2, 2), (67, 1)]
)
def test_groups_divide_the_width(width, size):
    assert quantized.group_size(width) == size


def test_held_bytes_counts_each_storage_once():
    cache = DynamicCache()
    states = torch.zeros(1, 2, 6, 4)
    cache.update(states, states, 0)
    layer = cache.layers[0]
    layer.keys = torch.zeros(1, 2, 100, 4)[:, :, :6]  # a view into room for more
    layer.scales = {"of": [layer.keys.float(), (torch.zeros(3, dtype=torch.int8),)]}
    assert held_bytes(cache) == 4 * (2 * 100 * 4) + 4 * (2 * 6 * 4) + 3


def test_hooks_and_attributes_go(ids, first_token_press):
    model = tiny_model()
    before = [set(vars(module)) for module in model.modules()]
    names = list(model.state_dict())
    with pressed(model, first_token_press):
        assert list(model.state_dict()) == names
    assert [set(vars(module)) for module in model.modules()] == before
    assert not any(module._forward_hooks for module in model.modules())


def test_the_question_is_asked_after_the_compression(tokenizer):
    text = np.arange(600) % 300 + 5
    writer = FactWriter(tokenizer)
    for document in recall_documents(writer, text, 64, 4, num_documents=20, seed=0):
        asked = question_start(document, writer)
        words = tokenizer.decode(document.ids[asked:])
        assert words.startswith(" What is the number of ")
        assert words.count("number") == 1
        assert words[-4:].isdigit()


def test_recall_without_compression_is_recall(reference_model, tokenizer):
    text = np.asarray(tokenizer(rap.assets.reference_text("test")[:20000]).input_ids)
    # Weights with noise, so that some tokens are right and some are not.
    noisy = copy.deepcopy(reference_model)
    generator = torch.Generator().manual_seed(0)
    for weight in noisy.parameters():
        weight.data += 0.65 * weight.std() * torch.randn(weight.shape, generator=generator)
    for model in (reference_model, noisy):
        sizes = {"distances": [64, 128], "facts": [4], "num_documents": 6}
        found = compressed_recall(model, tokenizer, text, NOTHING, **sizes)
        assert found == recall_grid(model, tokenizer, text, **sizes)
        share = sum(cell.token_accuracy for cell in found) / 2
        assert share == 1 if model is reference_model else 0.2 < share < 0.8


def test_a_press_that_drops_the_facts_loses_the_recall(
    reference_model, tokenizer, first_token_press
):
    text = np.asarray(tokenizer(rap.assets.reference_text("test")[:20000]).input_ids)
    drop = CacheCompression(press=replace(first_token_press, ratio=0.9))
    sizes = {"distances": [64], "facts": [4], "num_documents": 6}
    (found,) = compressed_recall(reference_model, tokenizer, text, drop, **sizes)
    assert found.accuracy < 0.5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_documents": -1}, "at least one"),
        ({"distances": [4000]}, "longer text"),
        ({"distances": [20], "wording": "natural"}, "or more"),
    ],
)
def test_recall_that_cannot_be_asked_is_refused(reference_model, tokenizer, sizes, message):
    text = np.asarray(tokenizer(rap.assets.reference_text("test")[:2000]).input_ids)
    with pytest.raises(RapError, match=message):
        compressed_recall(reference_model, tokenizer, text, NOTHING, **sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knorm", "write NAME:RATIO"),
        ("knorm:half", "write NAME:RATIO"),
        ("h2o:0.5", "unknown press 'h2o': use one of knorm"),
        ("knorm:1", "cannot take 1: give a share from 0 up to 1"),
    ],
)
def test_what_is_no_press_is_refused(text, message):
    with pytest.raises(RapError, match=message):
        parse_press(text)


@pytest.mark.parametrize("sizes", [(40, 39, 1), (40, 0, 1), (40, 20, 0)])
def test_sizes_that_score_nothing_are_refused(sizes, ids):
    window, prefix, piece = sizes
    with pytest.raises(RapError, match="batch_size must be at least 1"):
        compressed_perplexity(tiny_model(), ids.flatten(), NOTHING, batch_size=0)
    with pytest.raises(RapError, match="cannot score windows of 40"):
        compressed_perplexity(
            tiny_model(), ids.flatten(), NOTHING, window=window, prefix=prefix, piece=piece
        )


def attend(model):
    """A layer, what its forward was given, the keys that it cached and its eager weights."""
    module, seen = model.model.layers[1].self_attn, {}

    def keep(module, args, kwargs, output):
        keys = kwargs["past_key_values"].layers[1].keys
        seen.update(kwargs=kwargs, keys=keys, weights=output[1])

    with removed([module.register_forward_hook(keep, with_kwargs=True)]), torch.no_grad():
        model(random_tokens(2, 20), use_cache=True)
    module.rotary_emb = model.model.rotary_emb
    return module, seen


@pytest.fixture
def attended():
    model = pruned()
    model.set_attn_implementation("eager")
    return attend(model)


def test_weights_of_the_last_queries_are_those_of_attention(attended):
    module, seen = attended
    hidden = seen["kwargs"]["hidden_states"]
    found = last_weights(module, hidden, seen["keys"], seen["kwargs"], 6)
    assert torch.allclose(found, seen["weights"][:, :, -6:], atol=1e-6)


def test_future_queries_are_turned_by_the_average_rotation(attended):
    module, seen = attended
    hidden = seen["kwargs"]["hidden_states"]
    mean, covariance = future_queries(module, hidden, skip=3, ahead=5)
    # Every query at every one of the five positions, by the module's own forward path.
    q, k, _, _ = module.project(hidden[:, 3:])
    turned = [
        module.position(q, k, module.rotary_emb(hidden, torch.full((1, 17), position)))[0]
        for position in range(20, 25)
    ]
    average = torch.stack(turned).mean(0)
    scale = module.scaling * module.key_width**0.5
    assert torch.allclose(mean, average.mean(2) * scale, atol=1e-5)
    centred = average - average.mean(2, keepdim=True)
    expected = centred.transpose(2, 3) @ centred / 17 * scale**2
    assert torch.allclose(covariance, expected, atol=1e-4)


def test_queries_under_a_norm_are_not_averaged(ids, first_token_press):
    model = tiny_model("qwen3")
    plan = random_plan(model, [(5, 9), None])
    compression = CacheCompression(press=replace(first_token_press, name="expected"))
    with pytest.raises(RapError, match="averages queries before their rotation"):
        compressed_perplexity(rap.apply(model, plan), ids.flatten(), compression, **SIZES)


def test_a_dense_family_that_kvpress_does_not_know_is_refused(ids, first_token_press):
    compression = CacheCompression(press=replace(first_token_press, name="tova"))
    with pytest.raises(RapError, match="does not know the queries of LlamaForCausalLM"):
        compressed_perplexity(tiny_model(), ids.flatten(), compression, **SIZES)


def test_sliding_windows_are_refused(ids, rounding, first_token_press):
    model = tiny_model("mistral", sliding_window=16)
    for compression, message in (
        (CacheCompression(rounding), "full attention only"),
        (CacheCompression(press=first_token_press), "already evicts tokens"),
    ):
        with pytest.raises(RapError, match=message):
            compressed_perplexity(model, ids.flatten(), compression, **SIZES)


@pytest.mark.parametrize("name", ["palu", "svdllm", "elitekv", "kvpruner"])
def test_places_in_the_cache_can_be_quantized_but_not_evicted(
    name, ids, rounding, first_token_press
):
    small = cut_by(name)
    plain = compressed_perplexity(small, ids.flatten(), NOTHING, **SIZES)
    with torch.no_grad():
        assert plain.nats_per_token == pytest.approx(tail_nats(small(ids).logits, ids), rel=1e-5)
    bits = compressed_perplexity(small, ids.flatten(), CacheCompression(rounding), **SIZES)
    assert 0 < abs(bits.nats_per_token - plain.nats_per_token) < 0.5
    with pytest.raises(RapError, match="takes positions from places in the cache"):
        compressed_perplexity(
            small, ids.flatten(), CacheCompression(press=first_token_press), **SIZES
        )


@pytest.mark.parametrize("name", ["matryoshka", "kvpruner-indexed"])
def test_other_layers_give_their_own_queries(name):
    model = cut_by(name)
    model.set_attn_implementation("eager")
    module, seen = attend(model)
    hidden = seen["kwargs"]["hidden_states"]
    found = last_weights(module, hidden, seen["keys"], seen["kwargs"], 6)
    assert torch.allclose(found, seen["weights"][:, :, -6:], atol=1e-6)


def test_coordinates_taken_after_the_rotation_are_not_averaged(ids, first_token_press):
    compression = CacheCompression(press=replace(first_token_press, name="expected"))
    with pytest.raises(RapError, match="more than that follows"):
        compressed_perplexity(cut_by("matryoshka"), ids.flatten(), compression, **SIZES)


def test_without_the_packages_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setattr(quantized, "installed_version", lambda package: None)
    result = run("evaluate", "cache", "bundled", "--bits", "hqq4")
    assert error_violations(result) == []
    assert "needs hqq, which is not installed: pip install hqq" in result.err
    result = run("evaluate", "cache", "bundled", "--press", "knorm:0.5")
    assert error_violations(result) == []
    assert "pip install --no-deps kvpress" in result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no cache compression is given"),
        (("--bits", "hqq5"), "unknown cache 'hqq5'"),
        (("--press", "knorm"), "write NAME:RATIO"),
    ],
)
def test_command_refuses_bad_input(flags, message):
    result = run("evaluate", "cache", "bundled", *flags)
    assert error_violations(result) == []
    assert message in result.err


def test_command_measures_both_rows(reference_model, tokenizer, tmp_path, rounding):
    text = tmp_path / "text.txt"
    text.write_text("The rain fell on the old house all night. " * 200)
    small = ("--text", text, "--window", 64, "--prefix", 40, "--max-windows", 2, "--json")
    recall = ("--documents", 2, "--distance", 64)
    result = run("evaluate", "cache", "bundled", "--bits", rounding, *small, *recall)
    assert result.code == 0, result.err
    ids = tokenizer(text.read_text()).input_ids[:128]
    sizes = {"window": 64, "prefix": 40}
    for name, compression in (("exact", NOTHING), ("compressed", CacheCompression(rounding))):
        expected = compressed_perplexity(reference_model, ids, compression, **sizes)
        assert result.json[name]["perplexity"] == expected.perplexity
        assert result.json[name]["kv_bytes_per_token"] == expected.kv_bytes_per_token
        assert [cell["distance"] for cell in result.json[name]["recall"]] == [64]
    assert result.json["compressed"]["perplexity"] != result.json["exact"]["perplexity"]
    rows = result.json["table"]["rows"]
    assert [row[0] for row in rows] == ["nothing", f"cache {rounding}"]
    held = [result.json[name]["kv_bytes_per_token"] for name in ("exact", "compressed")]
    assert [row[-1] for row in rows] == ["100%", f"{held[1] / held[0]:.0%}"]
    assert result.json["command"] == result.json["provenance"]["command"]
    assert result.json["fingerprint"] == rap.fingerprint_model(reference_model)


@needs("hqq")
@pytest.mark.parametrize("kind", ["hqq8", "hqq4", "hqq3", "hqq2", "quanto4", "quanto2"])
def test_the_real_backends_take_every_width(kind, ids):
    if kind.startswith("quanto") and importlib.util.find_spec("optimum") is None:
        pytest.skip("optimum-quanto is not installed")
    model, compression = pruned(), CacheCompression(kind)
    plain = compressed_perplexity(model, ids.flatten(), NOTHING, **SIZES)
    found = compressed_perplexity(model, ids.flatten(), compression, **SIZES)
    assert 0 < abs(found.nats_per_token - plain.nats_per_token) < 0.5
    # Packed values of a float32 cache, and float32 scales and zero points of groups of ten or so.
    bits = int(kind[-1])
    packed = plain.prefix_bytes_per_token * bits / 32
    assert packed < found.prefix_bytes_per_token < packed * 1.2 + plain.prefix_bytes_per_token / 3


@needs("kvpress")
@pytest.mark.parametrize("fields", [{}, {"model_type": "qwen2", "rope": "yarn", "heads": 6}])
@pytest.mark.parametrize("name", ["knorm", "streaming", "keydiff", "tova", "snapkv", "expected"])
def test_a_press_keeps_what_it_keeps_of_the_dense_model_with_zeros(name, fields):
    # The pruned model is the dense one with zeros for what it drops, and kvpress scores that by its
    # own projection, rotation and head size: an independent reference for the module's queries.
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    model = tiny_model(**fields)
    plan = random_plan(model, [(5, 9), (3, 12)])
    dense, small = zeroed(model, plan).double(), rap.apply(model, plan).double()
    ids = random_tokens(2, 160)
    compression = CacheCompression(press=Press(name, 0.5))
    sizes = {"window": 160, "prefix": 120, "piece": 9, "dtype": None}
    expected, found = (
        compressed_perplexity(one, ids.flatten(), compression, **sizes).nats_per_token
        for one in (dense, small)
    )
    # Norms round to float32 inside, as in test_identity.
    assert found == pytest.approx(expected, rel=1e-6)
    plain = compressed_perplexity(dense, ids.flatten(), NOTHING, **sizes).nats_per_token
    assert abs(expected - plain) > 1e-4
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


@needs("kvpress")
def test_think_zeroes_channels_and_saves_nothing(ids):
    model, sizes = tiny_model(), SIZES | {"window": 120, "prefix": 80}
    compression = CacheCompression(press=Press("think", 0.5))
    plain = compressed_perplexity(model, ids.flatten(), NOTHING, **sizes)
    found = compressed_perplexity(model, ids.flatten(), compression, **sizes)
    assert found.nats_per_token != plain.nats_per_token
    assert found.kv_bytes_per_token == plain.kv_bytes_per_token
    with pytest.raises(RapError, match="press the dense model"):
        compressed_perplexity(pruned(), ids.flatten(), compression, **sizes)
    with pytest.raises(RapError, match="looks at 32 tokens, and 23 were read"):
        compressed_perplexity(model, ids.flatten(), compression, **SIZES)
