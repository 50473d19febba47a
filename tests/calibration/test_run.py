"""Statistics against slow references: explicit per-window gradients, explicit gates, plain sums."""

import copy
from dataclasses import replace

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer

from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration import memory
from rap.calibration import statistics as statistics_file
from rap.calibration.backward import next_token_loss, output_gradient
from rap.calibration.memory import estimate_memory
from rap.calibration.observers import ObservedLayer
from rap.calibration.registry import STATISTICS, Fisher, GateFisher
from rap.calibration.run import calibrate
from rap.calibration.statistics import Statistics
from rap.model.errors import CalibrationError, CheckpointError
from rap.model.fingerprint import fingerprint_model
from rap.model.layers import attention_layers, attention_spec, projections
from rap.model.rope import AttentionShape, HeadGeometry
from rap.planning import budgets as allocation
from rap.planning import scores as scoring
from rap.runtime import logits
from rap.runtime.memory import describe_memory

ALL = {*STATISTICS}
# Sums of float32 products in another order; the statistics are means of squares.
CLOSE = {"rtol": 2e-4, "atol": 1e-9}


@pytest.fixture(scope="module")
def windows():
    return random_tokens(3, 17)


@pytest.fixture(params=["llama", "mistral", "qwen2"], scope="module")
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def statistics(model, windows):
    return calibrate(model, windows, ALL)


def linears(model, layer):
    return projections(attention_layers(model)[layer], attention_spec(model.config))


def window_loss(model, ids):
    logits = model(input_ids=ids[None]).logits[0, :-1].float()
    return cross_entropy(logits, ids[1:])


def gradients(model, loss, layer, projection):
    return torch.autograd.grad(loss, linears(model, layer)[projection].weight)[0]


def canonical(model, layer, x):
    return x[:, attention_layers(model)[layer].shape.geometry.canonical_order()]


def assert_same(mine, theirs, **bounds):
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert layer.keys() == other.keys()
        for name in layer:
            torch.testing.assert_close(layer[name], other[name], **bounds)


@pytest.mark.parametrize("layer", [0, 1])
def test_fisher_is_the_mean_square_of_each_windows_gradient(model, windows, statistics, layer):
    for projection in "kv":
        each = [gradients(model, window_loss(model, ids), layer, projection) for ids in windows]
        fisher = torch.stack(each).double().square().mean(0)
        weight = linears(model, layer)[projection].weight.detach().double()
        expected = {
            f"root_fisher_{projection}": fisher.sqrt().sum(1).view(2, 16),
            f"weighted_fisher_{projection}": (fisher * weight.square()).sum(1).view(2, 16),
        }
        for name, value in expected.items():
            value = canonical(model, layer, value) if projection == "k" else value
            torch.testing.assert_close(statistics.layers[layer][name], value.float(), **CLOSE)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt_neox"])
def test_gradient_moments_are_those_of_explicit_gradients(name, windows):
    """Against gradients of the summed loss by each output, also where q, k and v share a linear."""
    case = next((case for case in CASES if case.name == name), None)
    model = case.model(dtype=torch.float64) if case else tiny_model(name, dtype=torch.float64)
    found = calibrate(model, windows, {"gradients"}).layers[1]
    layer = attention_layers(model)[1]
    shape, spec = layer.shape, attention_spec(model.config)
    kept = {}
    parts = projections(layer, spec)
    shared = getattr(parts["k"], "linear", parts["k"])
    handles = [
        shared.register_forward_hook(lambda m, i, output: kept.update(k=output)),
        parts["o"].register_forward_hook(lambda m, i, output: kept.update(o=i[0])),
    ]
    moments = {"k": 0.0, "o": 0.0}
    for ids in windows:
        loss = window_loss(model, ids) * (windows.shape[1] - 1)
        by = dict(zip("ko", torch.autograd.grad(loss, [kept["k"], kept["o"]]), strict=True))
        if shared is not parts["k"]:
            by["k"] = by["k"][..., parts["k"].rows]
        for projection, gradient in by.items():
            heads = gradient[0].unflatten(-1, (-1, shape.head_dim)).double()
            groups = heads.unflatten(1, (shape.num_kv_heads, -1))
            read = heads.unsqueeze(2) if projection == "o" else groups
            moments[projection] = moments[projection] + torch.einsum("tgrd,tgre->gde", read, read)
    for handle in handles:
        handle.remove()
    mean = {projection: moment / windows.numel() for projection, moment in moments.items()}
    close = {"rtol": 1e-4, "atol": 1e-5 * float(mean["o"].abs().max())}
    torch.testing.assert_close(found["value_gradient"].double(), mean["o"], **close)
    first, second = shape.geometry.pair_channels().unbind(1)
    real = mean["k"][:, first][:, :, first] + mean["k"][:, second][:, :, second]
    turned = mean["k"][:, second][:, :, first] - mean["k"][:, first][:, :, second]
    close["atol"] = 1e-5 * float(mean["k"].abs().max())
    torch.testing.assert_close(found["key_gradient"][..., 0].double(), real, **close)
    torch.testing.assert_close(found["key_gradient"][..., 1].double(), turned, **close)
    free = shape.geometry.canonical_order()[shape.geometry.rotary_dim :]
    still = mean["k"][:, free][:, :, free]
    torch.testing.assert_close(found["free_gradient"].double(), still, **close)


def test_the_square_of_the_batch_gradient_is_something_else(model, windows, statistics):
    loss = torch.stack([window_loss(model, ids) for ids in windows]).mean()
    batch = gradients(model, loss, 0, "v").abs().sum(1).view(2, 16)
    assert (statistics.layers[0]["root_fisher_v"] > 1.2 * batch).float().mean() > 0.9


class Gate(nn.Module):
    """Multiplies channels by gates that start at one: what a gate Fisher differentiates."""

    def __init__(self, channels_GN, width):
        super().__init__()
        self.z = nn.Parameter(torch.ones(len(channels_GN), channels_GN.shape[1]))
        self.channels, self.width = channels_GN, width

    def forward(self, states):
        heads = states.unflatten(-1, (-1, self.width))
        return (heads * self.z.gather(1, self.channels)).flatten(-2)


def explicit_gate_fisher(model, windows, layer, projection):
    shape = attention_layers(model)[layer].shape
    gate_of = torch.arange(shape.head_dim)
    if projection == "k":
        for pair, channels in enumerate(shape.geometry.pair_channels()):
            gate_of[channels] = pair
    gate = Gate(gate_of.expand(shape.num_kv_heads, -1).contiguous(), shape.head_dim)
    linear = linears(model, layer)[projection]
    handle = linear.register_forward_hook(lambda module, inputs, output: gate(output))
    squares = [torch.autograd.grad(window_loss(model, ids), gate.z)[0].square() for ids in windows]
    handle.remove()
    return torch.stack(squares).mean(0)


@pytest.mark.parametrize("layer", [0, 1])
def test_gate_fisher_is_the_derivative_by_an_explicit_gate(model, windows, statistics, layer):
    values = explicit_gate_fisher(model, windows, layer, "v")
    torch.testing.assert_close(statistics.layers[layer]["gate_fisher_v"], values, **CLOSE)
    keys = explicit_gate_fisher(model, windows, layer, "k")[:, :8]
    torch.testing.assert_close(statistics.layers[layer]["gate_fisher_k"], keys, **CLOSE)


@pytest.mark.parametrize("layer", [0, 1])
def test_energy_is_the_mean_square_of_the_projections(model, windows, statistics, layer):
    seen = {}
    for projection in "qkv":
        linear = linears(model, layer)[projection]

        def keep(module, inputs, output, projection=projection):
            seen[projection] = output

        handle = linear.register_forward_hook(keep)
        with torch.no_grad():
            model(input_ids=windows)
        handle.remove()
        expected = seen[projection].square().mean((0, 1)).view(-1, 16)
        expected = expected if projection == "v" else canonical(model, layer, expected)
        torch.testing.assert_close(statistics.layers[layer][f"energy_{projection}"], expected)


def test_partial_statistics_equal_those_collected_together(model, windows, statistics):
    for need in sorted(ALL - {"logits"}):  # a random sample, other with other batches
        alone = calibrate(model, windows, {need}, batch_size=2)
        assert alone.needs == {need}
        for mine, theirs in zip(alone.layers, statistics.layers, strict=True):
            for name, tensor in mine.items():
                # Sums over tokens in another order: float32 rounding of the largest entry.
                rounding = 1e-6 * max(theirs[name].abs().flatten().tolist(), default=0)
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=rounding)


def test_checkpointing_changes_nothing(model, windows, statistics):
    """What is computed again is not counted again."""
    for again in (False, True):
        mine = calibrate(model, windows, ALL, checkpointing=again)
        assert_same(mine, statistics, rtol=0, atol=0)


def test_the_text_is_read_once(windows):
    """Activations and gradients come from the same pass, whatever is asked for."""
    model, seen = tiny_model("llama"), []
    model.model.layers[0].register_forward_pre_hook(lambda _, ids: seen.append(len(ids[0])))
    calibrate(model, windows, ALL, checkpointing=False)
    assert seen == [1] * len(windows)


@pytest.mark.parametrize(("share", "again"), [(1.9, True), (2.1, False)])
def test_layers_are_recomputed_if_they_would_take_half_of_what_is_free(
    windows, monkeypatch, share, again
):
    model, seen = tiny_model("llama"), []
    needed = estimate_memory(model, windows, {"gradients"}, checkpointing=False)["total"]
    monkeypatch.setattr(memory, "free_memory", lambda device: int(share * needed))
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(1))
    calibrate(model, windows, {"gradients"})
    assert len(seen) == (2 if again else 1) * len(windows)


def test_free_memory_is_a_part_of_what_there_is():
    total = psutil.virtual_memory().total
    assert 0 < memory.free_memory(torch.device("cpu")) < total


@pytest.mark.parametrize("name", ["llama", "cohere", "granite", "gemma2"])
def test_the_output_layer_in_chunks_is_the_whole_one(name, windows, monkeypatch):
    """Also where a family scales or caps its logits."""
    case = next((case for case in CASES if case.name == name), None)
    model = case.model(dtype=torch.float64) if case else tiny_model(name, dtype=torch.float64)
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 5 * logits.vocabulary(model))
    ids = windows[:1]
    output = logits.decoder_of(model)[1](input_ids=ids, use_cache=False)
    states = output.last_hidden_state.detach().clone()
    loss, gradient = output_gradient(model, output, ids)
    assert float(loss) == pytest.approx(float(next_token_loss(model, ids).detach()), rel=1e-6)
    whole = states.clone().requires_grad_()
    output.last_hidden_state = whole
    made = next(logits.Head(model).chunks(output, whole[0], len(ids[0])))[:-1].float()
    cross_entropy(made, ids[0, 1:]).backward()
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-4, atol=1e-7)
    assert gradient[0, -1].abs().max() == 0  # nothing is known of what follows


@pytest.mark.parametrize("need", ["logits", "rotated"])
def test_the_batch_decides_nothing(model, windows, need):
    one, three = (calibrate(model, windows, {need}, batch_size=size) for size in (1, 3))
    assert_same(one, three, rtol=1e-5, atol=1e-6)


def test_checkpointing_does_recompute_and_leaves_dropout_off(windows):
    model = tiny_model("llama", attention_dropout=0.5)
    modes = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    calibrate(model.train(), windows, {"fisher"}, checkpointing=True)
    assert len(modes) == 2 * len(windows)
    assert not any(modes)
    assert model.model.layers[0].self_attn.training


def state_of(model):
    flags = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
    return (
        [{flag: vars(m).get(flag, "absent") for flag in flags} for m in model.modules()],
        [len(m._forward_hooks) for m in model.modules()],
        [(p.requires_grad, p.grad, p._post_accumulate_grad_hooks) for p in model.parameters()],
        model.config.use_cache,
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was_found(windows, fails, training):
    model = tiny_model("qwen2").train(training)
    model.gradient_checkpointing_enable()
    model.lm_head.weight.requires_grad_(False)
    mine = torch.zeros_like(linears(model, 0)["k"].weight)
    linears(model, 0)["k"].weight.grad = mine
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    if fails:
        handle = linears(model, 0)["v"].register_forward_hook(poison_gradient)
        with pytest.raises(CalibrationError):
            calibrate(model, windows, ALL)
        handle.remove()
    else:
        calibrate(model, windows, ALL)
    after = state_of(model)
    assert before[0] == after[0]
    assert before[1] == after[1]
    assert before[3] == after[3]
    for old, new in zip(before[2], after[2], strict=True):
        assert old[0] == new[0]
        assert old[1] is new[1]
        assert not new[2]
    assert linears(model, 0)["k"].weight.grad is mine
    assert not mine.any()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def poison_gradient(module, inputs, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("nan"))
    return output


def test_a_gradient_that_is_not_finite_stops_with_layer_and_window(windows):
    model = tiny_model()
    seen = []

    def poison_second(module, inputs, output):
        seen.append(1)
        return poison_gradient(module, inputs, output) if len(seen) == 2 else output

    linears(model, 1)["v"].register_forward_hook(poison_second)
    with pytest.raises(CalibrationError, match="layer 1, window 1: the gradient of v_proj"):
        calibrate(model, windows, {"fisher"}, checkpointing=False)


@pytest.mark.parametrize(
    ("projection", "needs", "message"),
    [
        ("o", {"fisher"}, "window 0: the loss is nan, first in the attention of layer 1"),
        ("k", {"energy"}, "layer 1: k_proj gives values that are not finite in windows 0 to 1"),
    ],
)
def test_a_planted_nan_is_traced_to_its_layer(windows, projection, needs, message):
    model = tiny_model()
    with torch.no_grad():
        linears(model, 1)[projection].weight[3, 5] = float("nan")
    with pytest.raises(CalibrationError, match=message):
        calibrate(model, windows, needs, batch_size=2)


def test_a_nan_behind_the_attention_is_not_blamed_on_it(windows):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="after the attention of the last layer"):
        calibrate(model, windows, {"gate"})


def test_a_bfloat16_model_is_squared_and_summed_in_float32(windows):
    model = tiny_model(dtype=torch.bfloat16)
    found = calibrate(model, windows, ALL).layers[0]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    # The same bfloat16 gradients, so only the order of float32 sums may differ.
    each = [gradients(model, window_loss(model, ids), 0, "v").double() for ids in windows]
    root = torch.stack(each).square().mean(0).sqrt().sum(1).view(2, 16)
    torch.testing.assert_close(found["root_fisher_v"], root.float(), rtol=1e-5, atol=0)


def test_layers_are_recomputed_only_where_the_model_can(windows, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr("rap.runtime.state.GradientCheckpointingLayer", nn.Bilinear)
    plain = calibrate(model, windows, {"fisher"})
    monkeypatch.undo()
    assert isinstance(model.model.layers[0], GradientCheckpointingLayer)
    assert_same(plain, calibrate(model, windows, {"fisher"}), rtol=0, atol=0)


def test_a_dispatched_model_gives_the_same(model, windows, statistics):
    accelerate = pytest.importorskip("accelerate")
    device_map = {"model": "cpu", "lm_head": "cpu"}
    dispatched = accelerate.dispatch_model(
        copy.deepcopy(model), device_map, main_device="cpu", force_hooks=True
    )
    assert_same(calibrate(dispatched, windows, ALL), statistics, rtol=0, atol=0)


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.up_proj"])
def test_weights_that_are_not_in_memory_are_refused(windows, part):
    model = tiny_model("llama")
    model.model.layers[1].get_submodule(part).to("meta")
    with pytest.raises(CalibrationError, match=rf"layers\.1\.{part}\S* has no weights in memory"):
        calibrate(model, windows, {"fisher"})


def test_a_pruned_model_is_refused(windows):
    model = tiny_model()
    model.config.model_type = "rap_llama"
    with pytest.raises(CheckpointError, match="already pruned"):
        calibrate(model, windows, {"fisher"})


def test_a_model_with_adapters_is_refused_until_they_are_merged(windows):
    wrapped = get_peft_model(tiny_model(), LoraConfig(r=2, init_lora_weights=False))
    inside = tiny_model()
    inside.add_adapter(LoraConfig(r=2, target_modules=["v_proj"]))
    for model in (wrapped, wrapped.get_base_model(), inside):
        with pytest.raises(CheckpointError, match=r"has adapters; merge them"):
            calibrate(model, windows, {"energy"})
    merged = wrapped.merge_and_unload()
    assert calibrate(merged, windows, {"energy"}).fingerprint == fingerprint_model(merged)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (random_tokens(2, 9).tolist(), "LongTensor .* not a list"),
        (random_tokens(2, 9).float(), "LongTensor"),
        (random_tokens(2, 9)[0], "LongTensor"),
        (random_tokens(2, 9)[:0], "LongTensor"),
        (random_tokens(2, 1), "no next token"),
        (random_tokens(1, 513), "513 tokens, the model was made for 512"),
        (random_tokens(2, 9) + 100, "outside the vocabulary of 128"),
        (random_tokens(2, 9) - 100, "outside the vocabulary of 128"),
    ],
)
def test_unusable_windows_are_refused(bad, message):
    with pytest.raises(CalibrationError, match=message):
        calibrate(tiny_model(), bad, {"fisher"})


def test_unknown_needs_are_refused(model, windows):
    with pytest.raises(
        CalibrationError, match=r"unknown statistics hessian: use any of averages, energy, f"
    ):
        calibrate(model, windows, {"fisher", "hessian"})


def test_no_needs_collect_nothing(model, windows):
    assert calibrate(model, windows, ()).layers == ({}, {})


def test_statistics_are_saved_and_loaded_exactly(model, statistics, tmp_path):
    statistics.save(tmp_path / "stats")
    loaded = Statistics.load(tmp_path / "stats")
    assert_same(loaded, statistics, rtol=0, atol=0)
    for field in ("num_windows", "window", "needs", "fingerprint"):
        assert getattr(loaded, field) == getattr(statistics, field)
    assert (loaded.num_windows, loaded.window) == (3, 17)
    assert loaded.fingerprint == fingerprint_model(model)


def test_layers_without_attention_survive_a_round_trip(tmp_path):
    sparse = Statistics((None, {}, {"x": torch.ones(2)}), 1, 2, frozenset({"energy"}))
    sparse.save(tmp_path / "stats")
    loaded = Statistics.load(tmp_path / "stats")
    assert loaded.layers[:2] == (None, {})
    assert torch.equal(loaded.layers[2]["x"], torch.ones(2))


def test_other_files_are_refused(statistics, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    with pytest.raises(CalibrationError, match="cannot read calibration statistics"):
        Statistics.load(tmp_path / "absent")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CalibrationError, match="cannot read calibration statistics"):
        Statistics.load(tmp_path / "text")
    save_file({"x": torch.ones(1)}, tmp_path / "tensors")
    with pytest.raises(CalibrationError, match="does not hold calibration statistics"):
        Statistics.load(tmp_path / "tensors")
    newer = replace(statistics_file.FILE, version=3)
    monkeypatch.setattr(statistics_file, "FILE", newer)
    statistics.save(tmp_path / "newer")
    monkeypatch.undo()
    with pytest.raises(CalibrationError, match="statistics version 3, this release reads up to 2"):
        Statistics.load(tmp_path / "newer")


@pytest.mark.parametrize("need", ["values", "gradients", "energy"])
def test_sums_over_query_heads_of_the_first_version_are_refused(need, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics_file, "FILE", replace(statistics_file.FILE, version=1))
    Statistics(({"x": torch.ones(2)},), 1, 2, frozenset({need})).save(tmp_path / "old")
    monkeypatch.undo()
    if need == "energy":
        assert torch.equal(Statistics.load(tmp_path / "old").layers[0]["x"], torch.ones(2))
        return
    with pytest.raises(CalibrationError, match=f"version 1 of {need} .* calibrate again"):
        Statistics.load(tmp_path / "old")


def test_a_statistic_that_was_not_collected_is_named(model, windows):
    energy = calibrate(model, windows, {"energy"})
    energy.require({"energy"}, "this")
    with pytest.raises(
        CalibrationError, match="score fisher needs the statistics fisher, but only"
    ):
        energy.require({"fisher", "energy"}, "score fisher")


def test_the_memory_estimate_counts_what_is_held(model, windows):
    found = estimate_memory(model, windows, {"fisher"})
    # Two layers of W_k and W_v, [2 * 16, 32] each, float32.
    assert found["accumulators"] == 2 * 2 * 32 * 32 * 4
    assert found["gradients"] == 32 * 32 * 4
    # Of 17 tokens and 128 words: three numbers in float32, and two as the model has them.
    assert found["logits"] == 17 * 128 * (12 + 2 * 4)
    assert found["total"] == sum(size for name, size in found.items() if name != "total")
    dense = estimate_memory(model, windows, {"fisher"}, checkpointing=False)
    assert dense["activations"] > found["activations"]
    forward = estimate_memory(model, windows, {"values", "pairs"})
    heads, width, pairs = 2, model.config.head_dim, model.config.head_dim // 2
    # Of values by query head, of which there are four.
    moments = 4 * (2 * heads * width**2 + 2 * 2 * heads * pairs**2)
    assert forward["accumulators"] == model.config.num_hidden_layers * moments
    assert forward["gradients"] == forward["logits"] == 0
    assert forward["activations"] > 0
    line = describe_memory(found)
    assert line.startswith("calibration needs about 0.")
    assert "\n" not in line


def test_progress_goes_to_stderr(model, windows, capfd):
    calibrate(model, windows, ALL, progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "tokens/s" in captured.err


def test_a_trained_model_has_finite_scores_of_every_kind(reference_model, test_tokens):
    windows = test_tokens[: 4 * 256].view(4, 256)
    found = calibrate(reference_model, windows, ALL)
    layers = attention_layers(reference_model)
    spec = attention_spec(reference_model.config)
    weights = [
        {projection: linear.weight for projection, linear in projections(layer, spec).items()}
        for layer in layers
    ]
    shapes = [layer.shape for layer in layers]
    for name in scoring.SCORES:
        scores = scoring.score_layers(name, found.layers, weights, shapes)
        budgets = allocation.kv_budgets(scores, 0.5, align=8)
        assert sum(kept.pairs for kept in budgets) == 6 * 16


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_gates_and_canonical_order_of_partial_rotary_heads(pairing):
    shape = AttentionShape(4, 2, 6, HeadGeometry(8, 4, pairing))
    layer = ObservedLayer(0, shape, {projection: nn.Linear(6, 16) for projection in "kv"})
    fisher, gate = Fisher(layer), GateFisher(layer)
    weight, bias = layer.linears["k"].weight, layer.linears["k"].bias
    slopes = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(0))
    for slope in slopes:
        for statistic in (fisher, gate):
            statistic.update("k", weight, slope)
            statistic.update("k", bias, slope[:, 0])
            statistic.end_window()
    derivative = (weight * slopes).sum(2) + bias * slopes[:, :, 0]
    heads = derivative.detach().view(2, 2, 8)
    pairs = [heads[:, :, channels].sum(2) for channels in shape.geometry.pair_channels()]
    expected = torch.stack([*pairs, *heads[:, :, 4:].unbind(2)], dim=2).square().mean(0)
    torch.testing.assert_close(gate.compute(2)["gate_fisher_k"], expected)
    root = slopes.square().mean(0).sqrt().sum(1).view(2, 8)[:, shape.geometry.canonical_order()]
    torch.testing.assert_close(fisher.compute(2)["root_fisher_k"], root)
