"""What a config rules out is refused before anything is measured, and what works is not."""

from typing import Any

import pytest
import torch

from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration import dense_context
from rap.calibration.dense_context import DenseContext
from rap.calibration.run import calibrate
from rap.methods import parse_method
from rap.methods.trials import Trials
from rap.model.errors import RapError

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 8.0}


def family(name: str, **fields: Any) -> Any:
    """A tiny model of a family, in float32."""
    return next(case for case in CASES if case.name == name).model(dtype=torch.float32, **fields)


@pytest.mark.parametrize(
    ("method", "name", "said"),
    [
        ("elitekv", "qwen3", "not made for attention with norms of queries and keys"),
        ("palu", "gemma3n_text", "not made for attention with norms of values"),
        ("palu:group_size=3", "granite:heads", "group_size 3 does not divide the 4 KV heads"),
        ("heads", "granitemoehybrid", "whole heads need attention in every layer"),
        ("heads", "olmo2", "norms of queries and keys differ from head to head"),
        ("heads", "stablelm:norm", "norms of queries and keys differ from head to head"),
        ("heads", "helium", "makes its heads of the hidden size"),
        ("heads", "stablelm", "makes its heads of the hidden size"),
        ("rap", "stablelm:norms", "plan with qk_norm='exact'"),
        ("rap:context=100:merge=1", "qwen3", "which this model cannot have: remove both"),
        ("rap:profile=stock", "smollm3", "frequenc"),
        ("elitekv", "smollm3", "does not rotate its keys"),
        ("kvpruner", "phi", "where only some rotate, use kvpruner-indexed"),
        ("kvpruner", "smollm3", "where only some rotate, use kvpruner-indexed"),
        ("elitekv:pairs=8", "granite", "8 elite pairs leave nothing of retain 0.5"),
        ("transmla:rotated=32", "granite", "32 rotated channels leave nothing of retain 0.5"),
        ("palu:multiple=64", "granite", "below the floor of 64 in every layer"),
        ("svdllm:multiple=64", "granite", "multiple 64 is more than the 32"),
    ],
)
def test_what_a_config_rules_out_is_refused_first(monkeypatch, tokenizer, method, name, said):
    def measured(*_: Any, **__: Any) -> None:
        pytest.fail("it was calibrated")

    if name == "granite:heads":
        model = tiny_model("llama", heads=8, kv_heads=4)
    elif name == "stablelm:norms":
        model = tiny_model("stablelm", qk_layernorm=True, hidden=64, head_dim=16)
    else:
        model = family(name)
    monkeypatch.setattr(dense_context, "calibrate", measured)
    context = DenseContext.open(model, tokenizer)
    with pytest.raises(RapError, match=said):
        context.plan(parse_method(method, 0.5))


def test_a_model_without_attention_is_refused():
    with pytest.raises(RapError, match="no layer of this model has attention to prune"):
        parse_method("rap", 0.5).check_model(family("lfm2", layer_types=["conv"] * 3))


def test_budgets_that_no_merged_head_may_have_are_refused_first():
    model = tiny_model("llama", heads=8, kv_heads=4, head_dim=128, layers=1)
    with pytest.raises(RapError, match=r"more than the 0\.5 that layers may keep"):
        parse_method("rap:budget=error:merge=4", 0.9).check_model(model)
    model = tiny_model("llama", heads=4, kv_heads=2, head_dim=16, layers=2)
    with pytest.raises(RapError, match=r"retain 0\.5 leaves less than one step of 4"):
        parse_method("rap:budget=retrieval:merge=1:align=8", 0.5).check_model(model)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("svdllm:multiple=0", "multiple cannot be 0: it should be greater than or equal to 1"),
        ("svdllm2:multiple=-2", "multiple cannot be -2: it should be greater than or equal to 1"),
        ("rap:score=magnitude", "read no score: remove it"),
        ("rap:paper:norm_rows=3", "norm_rows is of qk_norm 'rows' alone"),
    ],
)
def test_settings_that_nothing_reads_are_refused(wrong, said):
    with pytest.raises(RapError, match=said):
        parse_method(wrong, 0.5)


def test_a_score_is_taken_where_it_ranks():
    for text in (
        "rap:paper:score=magnitude",
        "rap:score=energy",
        "rap:values=channels:score=random",
    ):
        parse_method(text, 0.5)


def test_ranks_in_steps_wider_than_the_matrix_are_refused():
    model = tiny_model()
    method = parse_method("svdllm:multiple=128", 0.5)
    statistics = calibrate(model, random_tokens(2, 16), method.needs_for(model))
    with pytest.raises(RapError, match="multiple 128 is more than the 32 that there are"):
        method.plan(model, statistics)


@pytest.mark.parametrize("text", ["svdllm", "svdllm2", "palu:ranks=uniform"])
def test_all_is_kept_where_steps_do_not_divide_it(text):
    model = tiny_model(heads=4, kv_heads=4)  # 64 rows
    method = parse_method(f"{text}:multiple=48", 1.0)
    statistics = calibrate(model, random_tokens(2, 16), method.needs_for(model))
    assert method.plan(model, statistics).kept_fraction == 1


@pytest.mark.parametrize("name", ["llava", "mistral3", "qwen2_vl"])
@pytest.mark.parametrize("text", ["heads", "kvpruner"])
def test_baselines_cut_the_text_model_of_a_multimodal_one(name, text):
    model = family(name)
    method = parse_method(text, 0.5)
    try:
        method.check_model(model)
    except RapError:
        assert name == "qwen2_vl"  # by axis, which neither is made for
        return
    statistics = calibrate(model, random_tokens(2, 16), method.needs_for(model))
    small = method.apply(model, method.plan(model, statistics))
    assert small(random_tokens(1, 8)).logits.isfinite().all()


def test_frequencies_by_pair_have_none_for_a_narrower_head():
    model = tiny_model(rope_parameters=dict(LONG))
    method = parse_method("kvpruner", 0.5)
    statistics = calibrate(model, random_tokens(2, 16), method.needs_for(model))
    with pytest.raises(RapError, match="use kvpruner with rotation=first, or kvpruner-indexed"):
        method.plan(model, statistics)
    first = parse_method("kvpruner:rotation=first", 0.5)
    small = first.apply(model, first.plan(model, statistics))
    assert small(random_tokens(1, 8)).logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama4_text", "falcon_h1", "mixtral"])
def test_cuts_are_tried_on_any_family(name):
    model = family(name)
    statistics = calibrate(model, random_tokens(2, 16), {"windows", "inputs"})
    assert Trials(model, statistics).divergence({}) == 0
