"""Merged heads as plain checkpoints: the same logits, fewer KV heads, no package to load them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import rap
from cases.command import run
from cases.models import random_tokens, tiny_model
from cases.plans import plan_of
from rap.cli.groups import PruningOptions
from rap.model.errors import RapError, UnsupportedModelError
from rap.model.families import FAMILIES
from rap.planning.plan import PairPlan
from rap.serving.plain_forms import check_stock, plain_form
from rap.serving.stock import export_stock, stock_model

SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 32, "hidden": 48, "layers": 4}
# The scale of W_q is rounded once, and the frequencies come from factors of float32.
ALIKE = {"rtol": 0, "atol": 2e-4}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SOLAR = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Every family with a plain form, with the fields that matter there switched on.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "arcee": {},
    "cwm": WINDOWS | {"bos_token_id": 0},
    "gemma": {},
    "gemma2": WINDOWS | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "hyperclovax": {"attention_multiplier": 0.2},
    "jais2": {"attention_bias": True},
    "ministral": WINDOWS,
    "mixtral": EXPERTS | {"sliding_window": 8},
    "olmo": {},
    "phi3": {"sliding_window": None},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True},
    "solar_open": SOLAR,
    "starcoder2": {"use_bias": True, "sliding_window": 8},
    "vaultgemma": WINDOWS | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
}


# Loads checkpoints, argv, in a process in which this package cannot be imported.
_LOGITS = """
import sys
sys.modules["rap"] = None
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    ids = torch.load(path + ".ids", weights_only=True)
    with torch.no_grad():
        torch.save((type(model).__module__, model(ids).logits), path + ".logits")
"""


def made(family: str, retain: float, fields: dict[str, Any], **settings: Any) -> Any:
    model = tiny_model(family, **{**SIZES, **fields})
    model.config._experts_implementation = "eager"
    method = rap.Rap(retain=retain, profile="stock", **settings)
    plan = method.plan(model, rap.calibrate(model, random_tokens(6, 48), method.needs))
    return rap.apply(model, plan)


def test_every_plain_family_is_tested() -> None:
    assert {*PLAIN} == {family for family in FAMILIES if plain_form(family)}


def test_every_other_family_says_why_it_has_no_plain_form() -> None:
    for family in {*FAMILIES} - {*PLAIN}:
        config = SimpleNamespace(model_type=family)
        sentence = rf"^{family} has no plain form \([a-zA-Z].+\); remove"
        with pytest.raises(UnsupportedModelError, match=sentence):
            check_stock(config)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> dict[str, Any]:
    """Every family's merged model, and what its plain checkpoint is and computes without `rap`."""
    folder, found, ids = tmp_path_factory.mktemp("plain"), {}, random_tokens(2, 24)
    for family, fields in PLAIN.items():
        small = made(family, 0.75, fields, merge=2)
        export_stock(small, folder / family)
        torch.save(ids, folder / f"{family}.ids")
        with torch.no_grad():
            found[family] = small, small(ids).logits
    paths = [str(folder / family) for family in PLAIN]
    subprocess.run([sys.executable, "-c", _LOGITS, *paths], check=True)
    return {
        family: (*one, folder / family, torch.load(folder / f"{family}.logits", weights_only=True))
        for family, one in found.items()
    }


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_computes_the_same_without_the_package(loaded: Any, family: str) -> None:
    small, expected, path, (module, logits) = loaded[family]
    written = {"qwen2": "llama", "phi3": "llama"}.get(family, family)
    # As ALIKE, of logits of 10: float32 sums of two modules in orders of their own, by up to 2.4e-5
    # where embeddings are scaled (gemma); a wrong frequency costs a hundred times as much.
    bound = 5e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    assert module == f"transformers.models.{written}.modeling_{written}"
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == (written, 2)
    assert config["head_dim"] == 48 != small.config.head_dim
    assert {"rap", "auto_map"}.isdisjoint(config)
    assert len(config["rope_parameters"]["short_factor"]) == 24


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_in_float64(family: str) -> None:
    """Frequencies agree to the last place of float32; with the same ones, nothing else differs."""
    small = made(family, 0.5, PLAIN[family] | {"dtype": torch.float64}, merge=4)
    plain = stock_model(small)
    plain.config._experts_implementation = "eager"
    slots = small.model.layers[0].self_attn.frequency_index[0].long()
    theta, rotary = small.model.rotary_emb.inv_freq, plain.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, theta[slots], rtol=2**-23, atol=0)
    rotary.inv_freq = rotary.original_inv_freq = theta[slots]
    ids = random_tokens(2, 24)
    with torch.no_grad():
        found, wanted = plain(ids).logits, small(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_phi3_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    small = made("phi3", 0.5, {"sliding_window": 8}, merge=2)
    export_stock(small, tmp_path / "plain")
    plain, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), random_tokens(2, 24)
    assert (plain.config.model_type, plain.config.sliding_window) == ("mistral", 8)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, small(ids).logits, **ALIKE)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("retain", "merge"), [(0.5, 2), (0.5, 4), (0.25, 4), (0.75, 2)])
def test_the_plain_checkpoint_computes_the_same(
    family: str, retain: float, merge: int, tmp_path: Path
) -> None:
    small = made(family, retain, {}, merge=merge)
    export_stock(small, tmp_path / "plain")
    plain, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), random_tokens(2, 24)
    # In float32 a token of these random weights can be off by 3e-4, in either form.
    with torch.no_grad():
        found, wanted = plain.double()(ids).logits, small.double()(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
    config = plain.config
    assert (config.num_key_value_heads, config.head_dim) == (4 // merge, int(32 * merge * retain))


def _every_frequency_once(heads: int) -> PairPlan:
    """Pairs of `heads` heads of 32 channels merged two by two: each pair with its likes alone."""
    pairs, generator = 16, torch.Generator().manual_seed(0)
    unit = torch.eye(pairs, dtype=torch.float64)[None, :, :, None]
    drawn = torch.randn(2, heads, pairs, 1, 2, generator=generator, dtype=torch.float64)
    return PairPlan(
        frequency_GM=torch.arange(pairs, dtype=torch.int32).expand(heads // 2, -1).contiguous(),
        free_GN=torch.zeros(heads // 2, 0, dtype=torch.int32),
        key_mix_GMP2=unit * drawn[0],
        query_mix_GMP2=unit * drawn[1],
        value_down_GCD=torch.randn(heads, 32, 32, generator=generator, dtype=torch.float64) / 4,
        value_up_GDC=torch.randn(heads, 32, 32, generator=generator, dtype=torch.float64) / 4,
    )


@pytest.mark.parametrize(
    ("family", "rope"),
    [(family, "default") for family in PLAIN] + [("llama", "llama3"), ("gemma2", "yarn")],
)
def test_with_every_frequency_once_only_the_number_of_heads_differs(
    family: str, rope: str, tmp_path: Path
) -> None:
    """g x retain = 1: the dense rope as it is, without a list, and W_q without another scale."""
    fields = {**SIZES, "hidden": 256, "layers": 2, "rope": rope} | PLAIN[family]
    fields |= {"layer_types": WINDOWS["layer_types"][:2]} if "layer_types" in fields else {}
    model = tiny_model(family, **fields)
    small = rap.apply(model, plan_of(model, [_every_frequency_once(4)] * 2))
    export_stock(small, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    found, dense = plain.config.to_dict(), model.config.to_dict()
    assert plain.config.num_key_value_heads == 2
    assert plain.config.rope_parameters == model.config.rope_parameters
    if plain.config.model_type == family:
        differ = {name for name in dense if found.get(name) != dense[name]}
        changing = {"dtype", "transformers_version", "architectures", "_name_or_path"}
        assert differ - changing == {"num_key_value_heads"}
    for name, weight in small.named_parameters():
        if ".q_proj." in name:
            assert torch.equal(plain.get_parameter(name), weight)
    ids = random_tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, small(ids).logits, rtol=0, atol=2e-5)


def test_one_command_writes_what_loads_without_the_package(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("compress", "bundled", "--retain", 0.5, "--target", "plain", "--evaluate", "none")
    result = run(*given, "--windows", 4, "--window", 128, "-o", out)
    assert result.code == 0, result.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", 1)
    report = json.loads((out / "rap_report.json").read_text())
    assert report["kept_fraction"] == 0.5
    assert "import rap" not in (out / "README.md").read_text()
    code = (
        "import sys; sys.modules['rap'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('It was', return_tensors='pt').input_ids\n"
        "print(model.generate(ids, max_new_tokens=4).shape[1] - ids.shape[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
    again = run(*given, "--windows", 4, "--window", 128, "-o", out)
    assert "already exists" in again.err or "--force" in again.err


def test_a_plain_checkpoint_that_is_recovered_stays_plain(tmp_path: Path) -> None:
    out, better = tmp_path / "out", tmp_path / "better"
    given = ("compress", "bundled", "--retain", 0.5, "--target", "plain", "--evaluate", "none")
    short = ("--windows", 4, "--window", 128, "--recover", "none")
    assert run(*given, *short, "-o", out).code == 0
    fit = ("num_windows=4", "window=64", "steps=2", "validation_windows=2")
    settings = [word for setting in fit for word in ("--set", setting)]
    asked = ("recover", out, "--teacher", "bundled", "--evaluate", "none", "-o", better)
    result = run(*asked, "--text", "only:bundled", *settings)
    assert result.code == 0, result.err
    for folder in (out, better):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"]
        card = (folder / "README.md").read_text()
        assert "import rap" not in card
        assert "section `rap`" not in card
        report = json.loads((folder / "rap_report.json").read_text())
        assert report["traits"]["ships"] == "stock"


def test_methods_without_merging_are_refused_for_the_target(tmp_path: Path) -> None:
    given = ("compress", "bundled", "--retain", 0.5, "--target", "plain", "-o", tmp_path / "out")
    assert "needs a method with" in run(*given, "--method", "palu").err
    assert "merge cannot be 'most'" in run(*given, "--method", "rap:merge=most").err


@pytest.mark.parametrize(
    ("method", "merge"),
    [("rap", "auto"), ("rap:merge=2", 2), ("rap:merge=all", "all"), ("rap:merge=1", 1)],
)
def test_how_many_heads_are_merged_may_be_asked_for(
    tmp_path: Path, method: str, merge: Any
) -> None:
    """The target decides if nothing is asked, but for the width and the list of frequencies."""
    LlamaConfig(num_attention_heads=8, head_dim=64, hidden_size=64).save_pretrained(tmp_path)
    cut = PruningOptions(retain=0.5, method=method, target="plain").build(str(tmp_path), seed=0)
    assert (cut.merge, cut.profile, cut.align) == (merge, "stock", 32)
    # 80 % of a head of 64 channels is no smaller multiple of 32, of two or more heads it is.
    low = PruningOptions(retain=0.8, method=method, target="plain")
    if merge == 1:
        with pytest.raises(RapError, match="heads of 64 channels rounds to 64"):
            low.build(str(tmp_path), seed=0)
    else:
        assert low.build(str(tmp_path), seed=0).merge == merge
