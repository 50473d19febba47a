"""The layer-by-layer fit: what it walks through, what it aims at, and that it survives a kill."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import rap
from cases.family_cases import CASES as FAMILIES
from cases.family_cases import Case, random_case_plan
from cases.method_cases import CASES as METHODS
from cases.method_cases import MethodCase
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap import RapError
from rap.model.fingerprint import fingerprint_model
from rap.model.layers import attention_spec, text_decoder
from rap.recovery import layer_fit
from rap.recovery.fit import estimate_fit, fit_layers
from rap.recovery.layer_fit import FitConfig, LayerProblem, fit_config
from rap.recovery.streams import residual_scale
from rap.runtime.layerwise import LayerwiseRunner
from rap.runtime.products import multiplies_bfloat16
from rap.runtime.sources import LoadedLayers

CONFIG = FitConfig(
    window=16,
    num_windows=24,
    steps=25,
    batch=2,
    rate=0.03,
    scope="attention",
    products="float32",
)
HALF = replace(CONFIG, rate=0.01, products="bfloat16")
WINDOWS = random_tokens(24, 16)
# Layers that read the keys of others cannot work one by one.
SHARING = [case for case in FAMILIES if case.value_norm]
WALKED = [case for case in FAMILIES if not case.value_norm]


@pytest.fixture
def pair() -> tuple[Any, Any]:
    dense = tiny_model("llama", hidden=32, layers=3)
    return dense, rap.apply(dense, random_plan(dense, ((4, 8), (3, 6), (4, 8))))


def _last_hidden(model: Any, ids: Tensor) -> Tensor:
    """What the last decoder layer gives, by a plain forward pass."""
    seen: list[Tensor] = []
    last = text_decoder(model).layers[-1]
    handle = last.register_forward_hook(
        lambda module, args, output: seen.append(output if torch.is_tensor(output) else output[0])
    )
    with torch.no_grad():
        model.base_model(input_ids=ids, use_cache=False)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.name)
def test_layers_that_read_others_are_not_fitted(case: Case) -> None:
    dense = case.model(dtype=torch.float32)
    small = rap.apply(dense, random_case_plan(dense, case))
    before = fingerprint_model(small)
    with pytest.raises(RapError, match="hand keys and values, or inputs of each layer, past it"):
        fit_layers(small, dense, random_tokens(64, 16), CONFIG)
    assert fingerprint_model(small) == before


@pytest.mark.parametrize("case", WALKED, ids=lambda case: case.name)
def test_layers_one_by_one_are_the_whole_model_in_every_family(case: Case) -> None:
    model = case.model(dtype=torch.float32)
    windows = random_tokens(3, 16)  # the last batch is smaller
    stream = LayerwiseRunner(LoadedLayers(model), windows, batch_size=2)
    stream.walk("walking")
    expected = _last_hidden(model, windows)
    torch.testing.assert_close(stream.hidden, expected.float(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", WALKED, ids=lambda case: case.name)
def test_every_family_is_fitted(case: Case) -> None:
    dense = case.model(dtype=torch.float32)
    plan = random_case_plan(dense, case)
    small = rap.apply(dense, plan)
    # Few tokens are learned by heart: more of them, and slower.
    results = fit_layers(small, dense, random_tokens(64, 16), HALF)
    kept = [index for index, layer in enumerate(plan.layers) if layer is not None]
    assert [found.layer for found in results] == kept
    assert sum(found.after for found in results) < sum(found.before for found in results)
    assert any(found.kept for found in results)


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_every_method_is_fitted_and_kept(case: MethodCase, tmp_path: Path) -> None:
    dense = tiny_model("llama", hidden=32, layers=2)
    method = case.method(0.5)
    statistics = rap.calibrate(dense, random_tokens(4, 32), method.needs_for(dense))
    plan = method.plan(dense, statistics)
    small, again = method.apply(dense, plan), method.apply(dense, plan)
    # Two factors of a matrix learn so few tokens by heart: these are enough.
    results = fit_layers(small, dense, random_tokens(128, 16), CONFIG, work=tmp_path)
    assert len(results) == 2
    assert any(found.kept for found in results)
    assert fit_layers(again, dense, random_tokens(128, 16), CONFIG, work=tmp_path) == results
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items())


@pytest.mark.parametrize(
    ("family", "fields", "scale"),
    [
        ("llama", {}, 1.0),
        ("granite", {"residual_multiplier": 0.25}, 0.25),
        ("gpt_neox", {}, 1.0),
        ("gemma2", {"sliding_window": 4}, None),
        ("olmo2", {}, None),
    ],
)
def test_how_a_layer_adds_its_attention_is_found(
    family: str, fields: dict[str, Any], scale: float | None
) -> None:
    model = tiny_model(family, **fields)
    stream = LayerwiseRunner(LoadedLayers(model), WINDOWS, batch_size=2)
    layer = stream.source.working(0)
    attention = getattr(layer, attention_spec(model.config).attention)
    seen: list[Tensor] = []
    attention.register_forward_hook(
        lambda module, args, output: seen.append(output if torch.is_tensor(output) else output[0])
    )
    before = stream.hidden[:1]
    with torch.no_grad():
        stream.run(layer, 0, before)
    found = residual_scale(stream, layer, attention, 0, before, seen[0])
    assert found == (None if scale is None else pytest.approx(scale, rel=1e-3))


@pytest.mark.parametrize(("rate", "share"), [(0.003, 1.0), (0.3, 1 / 3), (1.0, 1 / 9)])
def test_every_layer_takes_the_first_rate_that_gains_in_a_few_steps(
    rate: float, share: float
) -> None:
    """And is then trained as if that one rate had been given."""
    dense = tiny_model("llama", hidden=32, layers=1)
    made = [rap.apply(dense, random_plan(dense, ((3, 6),))) for _ in range(2)]
    config = replace(CONFIG, rate=rate, scope="block", feed_forward_rate=rate)
    (chosen,) = fit_layers(made[0], dense, random_tokens(64, 16), config)
    assert chosen.rate == pytest.approx(share)
    alone = {"rate": rate * chosen.rate, "feed_forward_rate": rate * chosen.rate}
    given = replace(config, rate_choices=1, **alone)
    (found,) = fit_layers(made[1], dense, random_tokens(64, 16), given)
    assert (found.before, found.after) == (chosen.before, chosen.after)
    assert fingerprint_model(made[0]) == fingerprint_model(made[1])


def test_a_rate_that_no_layer_bears_is_lowered(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    other = rap.apply(dense, random_plan(dense, ((4, 8), (3, 6), (4, 8))))
    high = replace(CONFIG, rate=1.0, steps=60)
    (lost, *_), (won, *_) = (
        fit_layers(model, dense, WINDOWS, replace(high, rate_choices=choices))
        for model, choices in ((other, 1), (small, 3))
    )
    assert (lost.rate, lost.kept) == (1.0, False)
    assert won.kept
    assert won.rate < 0.2


def test_a_rate_that_is_not_finite_is_left_for_a_slower_one(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, small = pair
    go = layer_fit.Training.go

    def fails_at_once(training: layer_fit.Training, steps: int) -> None:
        if training.share == 1.0:
            raise layer_fit.NotFinite("the loss is not finite")
        go(training, steps)

    monkeypatch.setattr(layer_fit.Training, "go", fails_at_once)
    assert all(found.rate < 1 for found in fit_layers(small, dense, WINDOWS, CONFIG))


def test_a_short_run_tries_no_rates(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    short = replace(CONFIG, rate=1.0, steps=layer_fit.TRIAL_STEPS)
    assert {found.rate for found in fit_layers(small, dense, WINDOWS, short)} == {1.0}


def test_only_attention_changes_and_the_dense_model_does_not(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    mark = fingerprint_model(dense)
    results = fit_layers(small, dense, WINDOWS, CONFIG)
    changed = {n for n, tensor in small.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {
        f"model.layers.{found.layer}.self_attn.{projection}_proj.weight"
        for found in results
        if found.kept
        for projection in "qkvo"
    }
    assert changed
    assert fingerprint_model(dense) == mark
    assert all(parameter.requires_grad for parameter in small.parameters())


SPARSE = ("qwen3_moe", "gpt_oss", "mixtral")
BLOCKS = ("llama", "gemma2", "gpt_neox", "granite", *SPARSE)


@pytest.mark.parametrize(
    "case", [case for case in FAMILIES if case.name in BLOCKS], ids=lambda case: case.name
)
def test_a_whole_block_is_fitted(case: Case) -> None:
    dense = case.model(dtype=torch.float32)
    small = rap.apply(dense, random_case_plan(dense, case))
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    # Few tokens are learned by heart: more of them, and slower.
    config = replace(HALF, scope="block", feed_forward_rate=0.003)
    results = fit_layers(small, dense, random_tokens(128, 16), config)
    changed = {n for n, tensor in small.state_dict().items() if not torch.equal(tensor, before[n])}
    assert any(found.kept for found in results)
    kept = tuple(f".layers.{found.layer}." for found in results if found.kept)
    attention = f".{attention_spec(small.config).attention}."
    assert all(any(place in name for place in kept) for name in changed)
    assert any(attention in name for name in changed)
    outside = {name for name in changed if attention not in name}
    assert bool(outside) == (case.name not in SPARSE), "experts stay"
    assert all(before[name].ndim == 2 for name in outside), "norms stay"


def test_a_block_repairs_more_than_its_attention() -> None:
    """The stream after the last layer is nearer to the dense one, on text of no use to the fit."""
    dense = tiny_model("llama", hidden=32, layers=3)
    windows, others = random_tokens(128, 16), random_tokens(16, 16, seed=5)
    distances = {}
    for scope in ("attention", "block"):
        small = rap.apply(dense, random_plan(dense, ((3, 6), (3, 6), (3, 6))))
        fit_layers(small, dense, windows, replace(CONFIG, scope=scope, rate=0.01, steps=80))
        distances[scope] = (_last_hidden(small, others) - _last_hidden(dense, others)).norm()
    assert distances["block"] < distances["attention"]


def test_the_error_of_a_block_is_that_of_its_definition(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    outputs = []
    for model in (dense, small):
        with torch.no_grad():
            outputs.append(model(WINDOWS[-3:], output_hidden_states=True).hidden_states[1])
    sizes = [output.square().mean(-1, keepdim=True) for output in outputs]
    error = ((outputs[1] - outputs[0]).square() / (sizes[0] + sizes[1])).mean()
    found = fit_layers(small, dense, WINDOWS, replace(CONFIG, scope="block"))[0]
    assert found.before == pytest.approx(float(error), rel=1e-4)


def test_the_error_is_that_of_its_definition(pair: tuple[Any, Any]) -> None:
    """Of the first layer, whose inputs are the same in both models, from plain forward passes."""
    dense, small = pair
    outputs: dict[str, Tensor] = {}
    for name, model in (("dense", dense), ("small", small)):
        model.model.layers[0].self_attn.register_forward_hook(
            lambda module, args, output, name=name: outputs.__setitem__(name, output[0])
        )
        with torch.no_grad():
            hidden = model.model.embed_tokens(WINDOWS[-3:])
            model(WINDOWS[-3:])
    both = (hidden + outputs["dense"]).square() + hidden.square()
    stream_size = both.mean(-1, keepdim=True)
    error = ((outputs["small"] - outputs["dense"]).square() / stream_size).mean()
    found = fit_layers(small, dense, WINDOWS, CONFIG)[0]
    assert found.before == pytest.approx(float(error), rel=1e-4)


def test_the_drift_of_the_stream_is_made_up_for(pair: tuple[Any, Any]) -> None:
    """With a share of 1 the stream after the last layer is nearer to the dense one than with 0."""
    dense, _ = pair
    distances = {}
    for drift in (0.0, 1.0):
        small = rap.apply(dense, random_plan(dense, ((3, 6), (3, 6), (3, 6))))
        fit_layers(small, dense, WINDOWS, replace(CONFIG, drift=drift, steps=60))
        distances[drift] = (_last_hidden(small, WINDOWS) - _last_hidden(dense, WINDOWS)).norm()
    assert distances[1.0] < distances[0.0]


def test_what_it_will_hold_is_told_before(pair: tuple[Any, Any], capfd: Any) -> None:
    dense, small = pair
    estimate = estimate_fit(small, dense, WINDOWS, CONFIG)
    assert estimate["streams"] == WINDOWS.numel() * (3 * 32 + 1) * 4
    shared = 3 * 32 * 64 + 2 * 32  # the MLP's matrices, and two norms
    dense_attention = 2 * 32 * 64 + 2 * 32 * 32
    small_attention = 32 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8)
    layers = 2 * shared + dense_attention + 4 * small_attention
    assert estimate["layers"] == 4 * layers
    blocks = estimate_fit(small, dense, WINDOWS, replace(CONFIG, scope="block"))
    assert blocks["layers"] == 4 * (layers + 3 * 3 * 32 * 64)
    twice = estimate_fit(small, dense, WINDOWS, replace(CONFIG, batch=2 * CONFIG.batch))
    assert twice["activations"] == 2 * estimate["activations"] > 0
    long = torch.empty(len(WINDOWS), 10**6, dtype=torch.long, device="meta")
    longest = dense.config.max_position_embeddings
    assert estimate_fit(small, dense, long, CONFIG)["streams"] == len(WINDOWS) * longest * 97 * 4
    fit_layers(small, dense, WINDOWS, replace(CONFIG, steps=1), progress=True)
    assert "layer-wise distillation needs about 0." in capfd.readouterr().err


@pytest.mark.parametrize("scope", get_args(layer_fit.Scope))
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    pair: tuple[Any, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    dense, _ = pair
    config = replace(CONFIG, scope=scope)
    cut = [rap.apply(dense, random_plan(dense, ((4, 8), (3, 6), (4, 8)))) for _ in range(2)]
    whole = fit_layers(cut[0], dense, WINDOWS, config)
    solve, solved = LayerProblem.solve, []

    def solve_some(problem: LayerProblem) -> layer_fit.LayerFit:
        solved.append(problem.index)
        if solved == [0, 1]:
            raise KeyboardInterrupt
        return solve(problem)

    monkeypatch.setattr(LayerProblem, "solve", solve_some)
    with pytest.raises(KeyboardInterrupt):
        fit_layers(cut[1], dense, WINDOWS, config, work=tmp_path)
    again = rap.apply(dense, random_plan(dense, ((4, 8), (3, 6), (4, 8))))
    assert fit_layers(again, dense, WINDOWS, config, work=tmp_path) == whole
    assert solved == [0, 1, 1, 2]
    assert fingerprint_model(again) == fingerprint_model(cut[0])
    other = rap.apply(dense, random_plan(dense, ((4, 8), (3, 6), (4, 8))))
    with pytest.raises(RapError, match="another config"):
        fit_layers(other, dense, WINDOWS, replace(config, steps=3), work=tmp_path)


@pytest.mark.parametrize("scope", ["block", "attention"])
def test_products_alone_are_in_bfloat16(
    pair: tuple[Any, Any], scope: Any, monkeypatch: Any
) -> None:
    """Weights keep their type, and a layer is judged as it will be used."""
    dense, _ = pair
    seen: list[tuple[str, torch.dtype]] = []
    judging = [False]

    def judge(problem: LayerProblem) -> float:
        judging[0] = True
        found = judged(problem)
        judging[0] = False
        return found

    def watch(module: Any, args: Any, output: Tensor) -> None:
        done = "trained" if torch.is_grad_enabled() else "judged" if judging[0] else "handed on"
        seen.append((done, output.dtype))

    judged = LayerProblem.judge
    monkeypatch.setattr(LayerProblem, "judge", judge)
    plan = random_plan(dense, ((4, 8), (3, 6), (4, 8)))
    fitted, types = {}, {}
    for products in ("float32", "bfloat16"):
        small = rap.apply(dense, plan)
        found = [model.model.layers[0].self_attn.v_proj for model in (small, dense)]
        watched = [module.register_forward_hook(watch) for module in found]
        config = replace(HALF, products=products, scope=scope)
        fitted[products] = fit_layers(small, dense, WINDOWS, config)[0]
        for handle in watched:
            handle.remove()
        assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
        types[products] = {*seen}
        seen.clear()
    stages = ("trained", "judged", "handed on")
    assert types["float32"] == {(stage, torch.float32) for stage in stages}
    handed = torch.bfloat16 if scope == "block" else torch.float32
    halves = (torch.bfloat16, torch.float32, handed)
    assert types["bfloat16"] == {*zip(stages, halves, strict=True)}
    assert fitted["bfloat16"].before == pytest.approx(fitted["float32"].before, rel=0.02)
    assert fitted["bfloat16"].after == pytest.approx(fitted["float32"].after, rel=0.02)
    assert fitted["bfloat16"].after != fitted["float32"].after


@pytest.mark.parametrize(("able", "half"), [("avx512_bf16", True), ("avx512_f", False)])
def test_products_are_in_bfloat16_where_the_device_has_them(
    able: str, half: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {able: True})
    cpu = torch.device("cpu")
    assert multiplies_bfloat16(cpu, "auto") is half
    assert multiplies_bfloat16(cpu, "bfloat16")
    assert not multiplies_bfloat16(cpu, "float32")
    assert not multiplies_bfloat16(torch.device("mps"), "auto")


def test_a_low_precision_model_is_fitted_in_float32(pair: tuple[Any, Any]) -> None:
    dense, small = (model.bfloat16() for model in pair)
    results = fit_layers(small, dense, WINDOWS, CONFIG)
    assert any(found.kept for found in results)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}


def test_what_cannot_be_fitted_is_refused(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    with pytest.raises(RapError, match="fewer than a batch"):
        fit_layers(small, dense, WINDOWS[:2], CONFIG)
    unfit: dict[str, Any] = {"not a list": WINDOWS.tolist(), r"not \[\d+\] in": WINDOWS[0]}
    unfit |= {"in torch.float32": WINDOWS.float(), "token id 100127 is outside": WINDOWS + 100_000}
    for said, windows in unfit.items():
        with pytest.raises(RapError, match=said):
            fit_layers(small, dense, windows, CONFIG)
    with pytest.raises(RapError, match="give the dense model of this student"):
        fit_layers(small, tiny_model(vocab_size=64), WINDOWS, CONFIG)
    with torch.device("meta"):
        empty = type(dense)(dense.config)
    with pytest.raises(RapError, match="all weights in memory"):
        fit_layers(small, empty, WINDOWS, CONFIG)
    with torch.no_grad():
        small.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    with pytest.raises(RapError, match="layer 1"):
        fit_layers(small, dense, WINDOWS, CONFIG)
    wrong: dict[str, Any] = {"steps": 0, "rate": 0.0, "drift": 2.0, "held_out": 1.0}
    wrong |= {"scope": "all", "products": "float16"}
    for name, value in wrong.items():
        with pytest.raises(RapError, match=f"fit {name}"):
            FitConfig(**{name: value})
    with pytest.raises(RapError, match="fit would not read feed_forward_rate"):
        fit_config(scope="attention", feed_forward_rate=0.02)
    assert fit_config(scope="block", feed_forward_rate=0.02).feed_forward_rate == 0.02


@torch.no_grad()
def test_gradients_may_be_off_around_it(pair: tuple[Any, Any]) -> None:
    dense, small = pair
    found = fit_layers(small, dense, WINDOWS, CONFIG)
    assert any(layer.after < layer.before for layer in found)
