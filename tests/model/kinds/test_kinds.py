"""Kinds of attention are registered explicitly, and a layer of an unknown one is refused."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cases.models import tiny_model
from cases.plans import plan_of, random_plan
from rap.model.errors import CheckpointError, UnsupportedModelError
from rap.model.kinds import register_kinds
from rap.model.kinds.base import Kind
from rap.model.kinds.heads import HeadsPlan
from rap.model.modeling import KINDS
from rap.surgery.apply import apply
from rap.surgery.weights import pruned_config

LATENT = {"kind": "latent", "groups": 1, "keys": 2, "values": 2, "fold": True}


def _build(folder, layer: dict):
    model = tiny_model(layers=2)
    config = apply(model, random_plan(model, [None, None])).config.to_dict()
    config["rap"]["layers"] = [None, layer]
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_the_package_registers_its_kinds(tmp_path):
    added = ["elite", "factored", "heads", "indexed", "latent", "mla", "pairs", "projected"]
    assert sorted(KINDS) == [*added, "reindexed"]
    assert all(isinstance(kind, Kind) for kind in KINDS.values())
    latent = KINDS["latent"].attention
    assert type(_build(tmp_path, LATENT).model.layers[1].self_attn).__bases__[0] is latent


def test_a_kind_that_is_not_registered_is_refused_in_one_line(tmp_path, monkeypatch):
    for name in list(KINDS):
        monkeypatch.delitem(KINDS, name)
    with pytest.raises(CheckpointError, match="layer 1 has attention of kind 'latent'") as refusal:
        _build(tmp_path, LATENT)
    assert "\n" not in str(refusal.value)
    register_kinds()
    _build(tmp_path, LATENT)


def test_a_config_of_the_family_describes_all_layers_or_none():
    """Whole heads, as many in every layer, need no `rap` section; beside pairs they cannot be."""
    model = tiny_model(layers=2)
    pairs = random_plan(model, [(4, 8), (4, 8)]).layers[0]
    one, two = HeadsPlan((1,)), HeadsPlan((0, 1))
    config = pruned_config(model.config, plan_of(model, [one, one]))
    assert (config.model_type, config.num_key_value_heads) == ("llama", 1)
    assert pruned_config(model.config, plan_of(model, [pairs, pairs])).model_type == "rap_llama"
    for layers, reason in (
        ([one, two], "as many"),
        ([pairs, one], "every"),
        ([one, None], "every"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            pruned_config(model.config, plan_of(model, layers))
