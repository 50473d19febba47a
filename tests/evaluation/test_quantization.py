"""The paper's rounding against its definition, torchao's kinds, and what must stay as it was."""

import copy

import pytest
import torch

import rap
from cases.command import error_violations, run
from cases.models import random_tokens, tiny_model
from rap.evaluation.quantization import quantize_weights, round_to_nearest
from rap.model.errors import RapError
from rap.model.fingerprint import fingerprint_model

# The levels of NF4: the quantiles of a normal distribution, from -1 to 1 with an exact zero.
# fmt: off
NF4 = torch.tensor([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])
# fmt: on
TORCHAO = ["int8", "int4"]


def pruned(align: int = 2, retain: float = 0.7):
    """A cut tiny model; its widths are no multiple of a power of two."""
    model = tiny_model()
    method = rap.Rap.paper(retain=retain, align=align)
    statistics = rap.calibrate(model, random_tokens(1, 16), method.needs)
    return method.apply(model, method.plan(model, statistics))


def linears(model):
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def test_rounding_by_hand():
    weight = torch.tensor([[0.7, -0.7, 0.14, -0.06], [0.26, 0.24, 0.0, 0.049]])
    # One scale for all of it: 0.7 / 7, so tenths.
    expected = torch.tensor([[0.7, -0.7, 0.1, -0.1], [0.3, 0.2, 0.0, 0.0]])
    assert torch.allclose(round_to_nearest(weight, 4), expected, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_has_its_levels_and_its_error(bits):
    # Uniform, so that every level is met.
    weight = torch.rand(50, 90, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rounded = round_to_nearest(weight, bits)
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    assert len(rounded.unique()) == 2**bits - 1
    assert (rounded - weight).abs().max() <= scale / 2 * (1 + 1e-6)
    # Symmetric, and exact where it has been rounded before.
    assert torch.equal(round_to_nearest(-weight, bits), -rounded)
    assert torch.allclose(round_to_nearest(rounded, bits), rounded, rtol=1e-6)


def test_zeros_stay_zero():
    assert torch.equal(round_to_nearest(torch.zeros(3, 4), 4), torch.zeros(3, 4))


@pytest.mark.parametrize("make", [tiny_model, pruned])
def test_every_linear_below_the_head_and_nothing_else(make):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert quantize_weights(model, "rtn4-tensor") is model
    changed = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {f"{name}.weight" for name in linears(model)}
    for linear in linears(model).values():
        assert len(linear.weight.unique()) <= 15


def test_a_tied_head_keeps_its_weights():
    model = tiny_model(tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    quantize_weights(model, "rtn4-tensor")
    assert torch.equal(model.get_output_embeddings().weight, before)


@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao_stays_near_and_keeps_the_head(kind):
    pytest.importorskip("torchao")
    model, ids = pruned(), random_tokens(2, 20)
    exact = model(ids).logits
    plain = copy.deepcopy(model)
    quantize_weights(model, kind)
    assert torch.equal(model.get_output_embeddings().weight, plain.get_output_embeddings().weight)
    levels = {"int8": 127, "int4": 7}[kind]
    for name, linear in linears(model).items():
        weight = linears(plain)[name].weight
        error = (linear.weight.dequantize() - weight).abs().max()
        # Half a step of the largest scale there can be; a half more where zero is not a level.
        assert 0 < error <= weight.abs().max() / levels
    assert 0 < (model(ids).logits - exact).abs().max() < exact.abs().max()
    with pytest.raises(RapError, match="quantized already"):
        quantize_weights(model, kind)


@pytest.mark.parametrize("make", [tiny_model, pruned])
def test_nf4_holds_the_nearest_of_sixteen_levels(make):
    pytest.importorskip("bitsandbytes")
    model, ids = make(), random_tokens(2, 20)
    plain = copy.deepcopy(model)
    quantize_weights(model, "nf4")
    packed = linears(model)
    assert packed.keys() == linears(plain).keys()
    for name, linear in linears(plain).items():
        assert packed[name].weight.nbytes == -(-linear.weight.numel() // 2)
        # The levels of NF4 (arXiv 2305.14314, appendix E), scaled by the largest of 64 weights.
        weights = linear.weight.detach().flatten()
        blocks = torch.nn.functional.pad(weights, (0, -len(weights) % 64)).view(-1, 64)
        scale = blocks.abs().amax(-1, keepdim=True)
        nearest = (blocks[..., None] - scale[..., None] * NF4).abs().argmin(-1)
        rounded = (NF4[nearest] * scale).flatten()[: len(weights)].view_as(linear.weight)
        linear.weight.data = rounded
    expected, found = plain(ids).logits, model(ids).logits
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(model.get_output_embeddings().weight, plain.get_output_embeddings().weight)
    with pytest.raises(RapError, match="quantized already"):
        quantize_weights(model, "nf4")


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [("int8", "torchao.quantization", "torchao"), ("nf4", "bitsandbytes", "bitsandbytes")],
)
def test_without_its_library_the_remedy_is_named(monkeypatch, kind, module, package):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(RapError, match=rf"needs {package}: pip install {package}"):
        quantize_weights(tiny_model(), kind)


def test_wrong_input_is_refused():
    with pytest.raises(RapError, match="unknown quantization 'int3': use one of rtn4-tensor"):
        quantize_weights(tiny_model(), "int3")
    model = tiny_model()
    model.is_quantized = True
    with pytest.raises(RapError, match="quantized already"):
        quantize_weights(model, "rtn4-tensor")


def test_command_measures_the_quantized_model(reference_model, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The rain fell on the old house all night. " * 20)
    small = ("--text", text, "--window", 64, "--max-windows", 2, "--json")
    result = run("evaluate", "perplexity", "bundled", *small, "--quantize", "rtn4-tensor")
    assert result.code == 0, result.err
    ids = tokenizer(text.read_text()).input_ids[:128]
    by_hand = quantize_weights(copy.deepcopy(reference_model), "rtn4-tensor")
    expected = rap.perplexity(by_hand, ids, window=64).value
    assert result.json["value"] == expected
    assert expected != rap.perplexity(reference_model, ids, window=64).value
    # The fingerprint is that of the checkpoint, so that the two results are seen to be of one.
    assert result.json["fingerprint"] == fingerprint_model(reference_model)
    assert result.json["quantize"] == "rtn4-tensor"


def test_command_refuses_an_unknown_kind():
    result = run("evaluate", "perplexity", "bundled", "--quantize", "int3")
    assert error_violations(result) == []
    assert "unknown quantization 'int3'" in result.err
