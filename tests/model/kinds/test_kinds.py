"""Kinds of attention are registered explicitly, and a layer of an unknown one is refused."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cases.models import tiny_model
from cases.plans import random_plan
from rap.model.errors import CheckpointError
from rap.model.kinds import register_kinds
from rap.model.kinds.base import Kind
from rap.model.modeling import KINDS
from rap.surgery.apply import apply

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
