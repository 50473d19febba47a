"""Multimodal models: the text model is pruned, what looks at images passes through unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPast

from cases.family_cases import CASES, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from cases.published import PUBLISHED
from rap.calibration.run import calibrate
from rap.checkpoint.load import load
from rap.cli.inspect import describe_config
from rap.evaluation.cost.footprint import footprint
from rap.evaluation.quality.perplexity import perplexity
from rap.methods import Rap
from rap.pipeline import save
from rap.runtime.logits import Head, decoder_of
from rap.surgery.apply import apply

IMAGE_TOKEN = 127
MULTIMODAL = [case for case in CASES if case.around]
every_case = pytest.mark.parametrize("case", MULTIMODAL, ids=lambda case: case.name)


# Cut into tiles: one of the whole image and one of its only part, with the ends of two lines.
TILED = ("llava_next", "llava_onevision")


def _picture(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """One image, which the cases turn into four tokens, or in tiles into ten."""
    pixels = torch.randn(1, 3, 16, 16, dtype=dtype, generator=torch.Generator().manual_seed(3))
    if case.name.startswith("qwen"):
        frames = pixels[:, :, None].expand(-1, -1, 2, -1, -1)
        grid = torch.tensor([[1, 4, 4]])
        return {"pixel_values": frames.reshape(16, -1), "image_grid_thw": grid}
    if case.name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        patches = pixels.unflatten(-1, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 3, 5, 1)
        return {"pixel_values": patches.reshape(1, 16, -1), "image_position_ids": places[None]}
    sized = (*TILED, "mistral3")
    sizes = {"image_sizes": torch.tensor([[16, 16]])} if case.name in sized else {}
    if case.name in TILED:
        pixels = torch.stack([pixels, pixels.flip(-1)], dim=1)
    return {"pixel_values": pixels, **sizes}


def _prompt(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    tokens = random_tokens(1, 18).clamp(max=100)
    tokens[:, 3 : 13 if case.name in TILED else 7] = IMAGE_TOKEN
    kinds = (tokens == IMAGE_TOKEN).long()
    by_kind = case.name.startswith("qwen") or case.name == "gemma4"
    named = {"mm_token_type_ids": kinds} if by_kind else {}
    if case.name == "gemma3":
        named = {"token_type_ids": kinds}
    return {"input_ids": tokens, **named, **_picture(case, dtype)}


@every_case
@torch.no_grad()
def test_pruned_model_reads_images_as_the_masked_dense_model(case: Case):
    model = case.model()
    plan = random_case_plan(model, case)
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    prompt = _prompt(case, torch.float64)
    found, expected = small(**prompt).logits, dense(**prompt).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    without = dense(prompt["input_ids"]).logits
    assert (without - expected).abs().max() > 1e-2 * expected.abs().max(), "the image has no effect"
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(small.generate(**prompt, **options), dense.generate(**prompt, **options))


@every_case
@torch.no_grad()
def test_everything_beside_the_text_model_is_unchanged(case: Case, tmp_path):
    model = case.model(dtype=torch.float32)
    apply(model, random_case_plan(model, case)).save_pretrained(tmp_path)
    for loaded in (
        load(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForImageTextToText.from_pretrained(tmp_path),
    ):
        assert type(loaded).__name__ == f"Rap{type(model).__name__}"
        state = loaded.state_dict()
        kept = {n: t for n, t in model.state_dict().items() if ".self_attn." not in n}
        beside = ("vision", "audio")
        kept |= {n: t for n, t in model.state_dict().items() if any(part in n for part in beside)}
        assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())
        assert loaded.config.vision_config.to_dict() == model.config.vision_config.to_dict()


@every_case
def test_the_whole_way_from_text_to_a_smaller_cache(case: Case):
    """Calibration, planning and measuring ask the config of the text model, not of the whole."""
    model = case.model(dtype=torch.float32)
    method = Rap(retain=0.5, budget="uniform")
    statistics = calibrate(model, random_tokens(3, 16), {*method.needs_for(model), "fisher"})
    small = method.apply(model, method.plan(model, statistics))
    before, after = footprint(model), footprint(small)
    assert after.kv_bytes_per_token == 0.5 * before.kv_bytes_per_token
    assert perplexity(small, random_tokens(1, 64).flatten(), window=32).value > 1


@pytest.mark.parametrize("name", [case.name for case in CASES])
@torch.no_grad()
def test_logits_of_hidden_states_alone_are_those_of_the_model(name: str):
    """Recovery hands a head hidden states and nothing else; some pass on more than they get."""
    model = next(case for case in CASES if case.name == name).model(dtype=torch.float32)
    tokens = random_tokens(1, 9)
    hidden = decoder_of(model)[1](input_ids=tokens, use_cache=False)[0]
    found = Head(model)(hidden[0])
    torch.testing.assert_close(found, model(tokens).logits[0])
    (chunked,) = Head(model).chunks(BaseModelOutputWithPast(), hidden[0], 9)
    torch.testing.assert_close(chunked, found)


@pytest.mark.parametrize("name", ["Gemma-3", "Mistral-Small-3.2", "Llama-4-Scout"])
def test_inspect_is_that_of_the_text_model_inside(name: str):
    model_type, fields = PUBLISHED[name]
    alone = describe_config(AutoConfig.for_model(model_type, **fields), name)
    outer = {"gemma3_text": "gemma3", "mistral": "mistral3", "llama4_text": "llama4"}[model_type]
    text = {"model_type": model_type, **fields}
    whole = describe_config(AutoConfig.for_model(outer, text_config=text), name)
    differing = {"title", "model_type"}
    assert {k: v for k, v in whole.items() if k not in differing} == {
        k: v for k, v in alone.items() if k not in differing
    }
    assert whole["model_type"] == outer


def test_a_model_made_in_memory_is_saved_without_a_processor(tmp_path):
    case = next(case for case in MULTIMODAL if case.name == "llava")
    model = case.model(dtype=torch.float32)
    assert model.name_or_path == ""
    plan = random_case_plan(model, case)
    save(apply(model, plan), plan, tmp_path / "small")
    assert load(tmp_path / "small").config.model_type == "rap_llava"


def test_the_processor_of_images_is_carried_along(tmp_path):
    """Its files decide how pixels become patches, and belong to the part that is unchanged."""
    case = MULTIMODAL[0]
    model = case.model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "dense")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "dense" / name).write_text(f'{{"from": "{name}"}}')
    dense = load(tmp_path / "dense")
    plan = random_case_plan(dense, case)
    save(apply(dense, plan), plan, tmp_path / "small")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "small" / name).read_text() == f'{{"from": "{name}"}}'
    assert not (tmp_path / "small" / "video_preprocessor_config.json").exists()
