"""What every method must do, whatever it keeps: dense at retain 1, cache, decode, save, recover."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

import rap
from cases.family_cases import CASES as FAMILIES
from cases.method_cases import CASES, MethodCase
from cases.models import random_tokens, tiny_model
from rap.calibration.registry import STATISTICS, WINDOWS
from rap.checkpoint.card import model_card
from rap.cli.inspect import describe_plan
from rap.evaluation.cost.footprint import reconstructs
from rap.methods import METHODS
from rap.methods.base import traits
from rap.model.errors import PlanError, UnsupportedModelError
from rap.model.kinds.base import WeightsPlan
from rap.model.modeling import KINDS, model_class
from rap.planning.plan import Plan
from rap.recovery.adapters import add_adapters, merge
from rap.recovery.closed_form import refit_outputs

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 80, "layers": 2}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, rap.Statistics]:
    """A tiny biased model in float64 and every statistic there is."""
    model = tiny_model("qwen2", dtype=torch.float64, **SIZES)
    return model, rap.calibrate(model, random_tokens(4, 48), {*STATISTICS, WINDOWS})


def small(case: MethodCase, calibrated: tuple, retain: float = 0.6, **more: Any) -> tuple[Any, Any]:
    """The plan of a case, and the model made of it."""
    model, statistics = calibrated
    method = case.method(retain, **more)
    plan = method.plan(model, statistics)
    return plan, method.apply(model, plan)


def test_every_method_has_a_case() -> None:
    assert {case.name for case in CASES} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_it_is(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert method.family
    assert "\n" not in method.summary
    assert 0 < len(method.summary) < 150
    assert method.reconstructs in ("", "keys", "keys and values")


@every_case
def test_a_checkpoint_ships_what_its_method_says(case: MethodCase, calibrated: tuple) -> None:
    model, _ = calibrated
    plan, pruned = small(case, calibrated)
    ships = METHODS[case.name].ships
    assert (ships == "stock") == (type(pruned) is type(model)) == case.stock
    kinds = {layer.entry().kind for layer in plan.layers}
    if case.settings.get("rotation") == "first":  # kvpruner's one way to a plain checkpoint
        assert kinds == {"pairs"}
    else:
        expected = {("pairs",): "code", ("factored",): "code", ("heads",): "stock"}
        assert expected.get((*kinds,), "package") == ships


@every_case
def test_retain_one_is_dense(case: MethodCase, calibrated: tuple) -> None:
    """To the last bit where nothing is multiplied; else to rounding, seen before any norm."""
    model, _ = calibrated
    plan, full = small(case, calibrated, 1.0, **case.full)
    assert plan.kept_fraction == 1
    ids = random_tokens(2, 40, seed=3)
    with torch.no_grad():
        if case.exact:
            assert torch.equal(full(ids).logits, model(ids).logits)
            return
        found, wanted = (_first_attention(m, ids) for m in (full, model))
    # A hundred products of float64 numbers of size 100.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def _first_attention(model: Any, ids: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.model.layers[0].self_attn.register_forward_hook(
        lambda module, inputs, output: seen.append(output[0])
    )
    model(ids)
    handle.remove()
    return seen[0]


def test_the_whole_basis_is_the_dense_model_biases_and_all() -> None:
    """The mean of the values joins the bias of the output."""
    model, ids = tiny_model(dtype=torch.float64, attention_bias=True), random_tokens(1, 20)
    method = METHODS["matryoshka"](retain=1.0)
    statistics = rap.calibrate(model, random_tokens(4, 16), method.needs)
    small = method.apply(model, method.plan(model, statistics))
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@every_case
@pytest.mark.parametrize("retain", [0.7, 0.5])
def test_cache_holds_what_is_claimed(case: MethodCase, retain: float, calibrated: tuple) -> None:
    model, _ = calibrated
    plan, pruned = small(case, calibrated, retain)
    # Per head and layer: K and V each have 16 channels; half a step of each may be rounded away.
    assert plan.kept_fraction == pytest.approx(retain, abs=case.step / 2 / 16 + 1e-9)
    dense, found = rap.footprint(model), rap.footprint(pruned)
    assert found.kv_bytes_per_token == plan.kept_fraction * dense.kv_bytes_per_token
    with torch.no_grad():
        cache = pruned(random_tokens(3, 7), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 7 * found.kv_bytes_per_token
    assert reconstructs(pruned) == bool(METHODS[case.name].reconstructs)


@every_case
def test_decoding_one_by_one_is_the_whole_pass(case: MethodCase, calibrated: tuple) -> None:
    """Also where the row beside it is shorter and padded on the left, and in a static cache."""
    _, pruned = small(case, calibrated)
    ids = random_tokens(2, 12, seed=4)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    alone = pruned.generate(ids[:1, 5:], max_new_tokens=6, do_sample=False)
    together = pruned.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    static = pruned.generate(
        ids[:1, 5:], max_new_tokens=6, do_sample=False, cache_implementation="static"
    )
    assert torch.equal(together[0, 12:], alone[0, 7:])
    assert torch.equal(static, alone)
    with torch.no_grad():
        whole = pruned(ids).logits
        cache = pruned(ids[:, :5], use_cache=True).past_key_values
        steps = [
            pruned(ids[:, [t]], past_key_values=cache, use_cache=True).logits for t in range(5, 12)
        ]
    # Norms round to float32, so a last digit of float64 may become one of float32.
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 5:], rtol=0, atol=1e-5)


@every_case
def test_saved_and_loaded_is_the_same(case: MethodCase, calibrated: tuple, tmp_path: Path) -> None:
    model, _ = calibrated
    plan, pruned = small(case, calibrated)
    own = type(model) if case.stock else model_class("qwen2")
    assert type(pruned) is own
    assert isinstance(pruned.model.layers[0].self_attn, type(model.model.layers[0].self_attn))
    pruned.save_pretrained(tmp_path / "model")
    loaded = rap.load(tmp_path / "model")
    assert type(loaded) is own
    ids = random_tokens(1, 20, seed=5)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, pruned(ids).logits)
    plan.save(tmp_path / "plan")
    again = rap.Plan.load(tmp_path / "plan")
    assert again.kept_fraction == plan.kept_fraction
    assert rap.fingerprint_model(rap.apply(model, again)) == rap.fingerprint_model(pruned)
    assert len(describe_plan(again)["layers"]) == SIZES["layers"]


@every_case
def test_recovery_trains_every_factor(case: MethodCase, calibrated: tuple) -> None:
    _, pruned = small(case, calibrated)
    linears = sorted(["q_proj", "k_proj", "v_proj", "o_proj", *case.trained])
    before = copy.deepcopy(pruned)
    adapted = add_adapters(copy.deepcopy(pruned), rap.RecoveryConfig(rank=2))
    attention = adapted.get_base_model().model.layers[1].self_attn
    layers = {name: m for name, m in attention.named_modules() if isinstance(m, LoraLayer)}
    assert sorted(layers) == linears
    for layer in layers.values():
        torch.nn.init.constant_(layer.lora_B["default"].weight, 0.01)
    merged = merge(adapted, random_tokens(1, 16)[0])
    changed, kept = dict(merged.named_parameters()), dict(before.named_parameters())
    assert changed.keys() == kept.keys()
    for name in linears:
        weight = f"model.layers.1.self_attn.{name}.weight"
        assert not torch.equal(changed[weight].float(), kept[weight].float()), name


@pytest.mark.parametrize("name", ["palu", "kvpruner", "matryoshka", "heads"])
def test_the_output_can_be_refitted(name: str, calibrated: tuple) -> None:
    model, _ = calibrated
    _, pruned = small(next(case for case in CASES if case.name == name), calibrated)
    # One text to fit and to judge, so a solved layer must come out better.
    windows = random_tokens(1, 48, seed=6).expand(8, -1)
    found = refit_outputs(pruned, model, windows)
    assert [layer.layer for layer in found] == [0, 1]
    assert all(layer.kept for layer in found)


@pytest.mark.parametrize(
    ("name", "says", "not_so"),
    [
        ("rap", "Nothing is reconstructed from the cache", "are reconstructed"),
        ("rap", "import rap # or pass trust_remote_code=True", "are reconstructed"),
        ("palu", "Keys are reconstructed from the cache", "trust_remote_code"),
        ("svdllm", "Keys and values are reconstructed from the cache", "trust_remote_code"),
        ("heads", "made by method `heads`", "RoPE-Aligned"),
        ("heads", "It keeps whole KV heads", "import rap"),
    ],
)
def test_the_card_says_what_the_method_did(name: str, says: str, not_so: str) -> None:
    card = card_of(name, traits=traits(METHODS[name]))
    assert says in card
    assert not_so not in card


@pytest.mark.parametrize("name", ["rap", "palu", "taken-out-since"])
def test_the_card_of_a_report_without_traits_says_no_more_than_it_knows(name: str) -> None:
    card = card_of(name)
    assert f"made by method `{name}` of the rap package. |" in card
    assert "import rap from" in card


def card_of(name: str, **more: Any) -> str:
    """The card of a report, on one line."""
    figures = {"kv_bytes_per_token": 4, "attention_parameters": 2, "parameters": 3}
    report = {"source": "a/b", "model_type": "llama", "kept_fraction": 0.5, "calibration": "text"}
    report |= {"method": {"name": name}, "dense": figures, "pruned": figures}
    return " ".join(model_card(report | more, "title").split())


def test_a_plan_of_another_model_is_refused(calibrated: tuple, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "svdllm")
    plan, _ = small(case, calibrated)
    other = tiny_model("qwen2", dtype=torch.float64, seed=1, **SIZES)
    with pytest.raises(PlanError, match="other weights"):
        case.method(0.6).apply(other, plan)


@pytest.mark.parametrize("gone", ["kind", "form"])
def test_a_plan_of_an_unknown_kind_is_refused(
    calibrated: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    plan, _ = small(next(case for case in CASES if case.name == "svdllm"), calibrated)
    if gone == "kind":
        plan.save(tmp_path / "plan")
        monkeypatch.delitem(KINDS, "latent")
    else:
        monkeypatch.setattr(WeightsPlan, "form", "later")
        plan.save(tmp_path / "plan")
        monkeypatch.undo()
    with pytest.raises(PlanError, match="which this release does not know"):
        Plan.load(tmp_path / "plan")


def test_a_plan_needs_no_method_that_this_release_knows(calibrated: tuple) -> None:
    plan, pruned = small(next(case for case in CASES if case.name == "svdllm"), calibrated)
    again = rap.apply(calibrated[0], dataclasses.replace(plan, method={"name": "later"}))
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in pruned.state_dict().items())


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3", "norms"), ("phi3", "one linear"), ("gemma3_text", "sets of rotary frequencies")],
)
def test_attention_of_another_make_is_refused(family: str, reason: str) -> None:
    model = next(case for case in FAMILIES if case.name == family).model(dtype=torch.float32)
    method = METHODS["elitekv"](retain=0.5)
    statistics = rap.calibrate(model, random_tokens(2, 16), method.needs)
    with pytest.raises(UnsupportedModelError, match=reason):
        method.plan(model, statistics)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("palu", {"group_size": 0}, "group_size cannot be 0: it should be greater"),
        ("palu", {"ranks": "best"}, "ranks cannot be"),
        ("kvpruner", {"rotation": "none"}, "rotation cannot be"),
        ("elitekv", {"pairs": 0}, "pairs cannot be 0: it should be greater than"),
        ("starkv", {"gap": 1.0}, "gap cannot be 1.0: it should be less than 1"),
        ("elitekv", {"pairs": "all"}, "it should be a valid integer or 'sweep'"),
        ("matryoshka", {"widths": "best"}, "widths cannot be"),
        ("kvpruner", {"budget": "error"}, "budget cannot be"),
        ("kvpruner", {"budget": "sensitivity", "key_share": "pooled"}, "no scores of K and V"),
        ("kvpruner", {"align": 3}, "align cannot be 3"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(rap.RapError, match=message):
        METHODS[name](**settings)


@every_case
def test_models_are_pickled(case: MethodCase, calibrated: tuple) -> None:
    _, model = small(case, calibrated)
    again = pickle.loads(pickle.dumps(model))
    ids = random_tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_default_type_of_a_process_changes_no_statistic() -> None:
    model, windows = tiny_model(dtype=torch.float32), random_tokens(2, 16)
    expected = rap.calibrate(model, windows, {"energy", "values"}).layers
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = rap.calibrate(model, windows, {"energy", "values"}).layers
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            assert ours[name].dtype == torch.float32
            torch.testing.assert_close(ours[name], tensor)
