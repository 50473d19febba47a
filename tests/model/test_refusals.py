"""Every causal language model of the installed transformers has a row, or a reason why not."""

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from cases.models import tiny_model
from rap.model.errors import UnsupportedModelError
from rap.model.families import FAMILIES, WRAPPERS
from rap.model.layers import attention_layers, attention_spec
from rap.model.refusals import REASONS, refusal

UNKNOWN = "no row for it"


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """What a user is told of every causal language model that is not taken."""
    messages = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if CONFIG_MAPPING[name].has_no_defaults_at_init and name in REASONS:
            continue
        try:
            attention_spec(CONFIG_MAPPING[name]())
        except UnsupportedModelError as error:
            messages[name] = str(error)
    return messages


def test_every_model_type_is_taken_or_has_a_reason(refused):
    """Fails where a newer transformers has a model that nobody here has looked at."""
    taken = {*FAMILIES, *WRAPPERS}
    assert not taken & refused.keys()
    assert [name for name, message in refused.items() if UNKNOWN in message] == []


def test_the_user_is_told_the_reason_of_the_list(refused):
    for name in REASONS.keys() & refused.keys():
        assert refused[name] == f"model type {name!r} is not supported: {REASONS[name]}"


def test_reasons_are_for_models_that_exist_and_are_not_taken():
    assert not {*REASONS} & {*FAMILIES, *WRAPPERS}
    assert {*REASONS} - {*CONFIG_MAPPING.keys()} == set()


def test_wholes_are_models_that_read_images():
    assert {*WRAPPERS} <= {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek_v3", "one latent for all heads (MLA)"),
        ("bart", "encoder-decoder"),
        ("mamba2", "no rope_parameters"),
        ("bert", "no rope_parameters"),
        ("emu3", "multimodal model around emu3_text_model"),
        ("falcon_mamba", "no rope_parameters"),
    ],
)
def test_a_property_of_the_config_gives_the_reason(refused, name, words):
    assert words in refused[name]


def test_a_model_type_that_nobody_knows_has_no_reason():
    config = AutoConfig.for_model("llama")
    assert UNKNOWN in refusal(config, config, "llama_of_next_year")


def test_a_hybrid_without_rotation_is_refused():
    """Of the same family, but a setting leaves the positions to the other layers."""
    layers = {
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": None,
    }
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 1}
    model = tiny_model("granitemoehybrid", **layers, **mamba)
    with pytest.raises(UnsupportedModelError, match="no rotary_emb module: it has no RoPE"):
        attention_layers(model)
