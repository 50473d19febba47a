"""Streamed application writes the bytes that the in-memory one would, or nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.assets import reference_path
from rap.checkpoint.files import PLAN_FILE, REPORT_FILE
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.shards import INDEX_FILE, write_index
from rap.model import modeling
from rap.model.errors import CheckpointError, PlanError, UnsupportedModelError
from rap.planning.plan import Plan
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

WIDTHS = [(3, 5), None, (5, 9)]
# The hidden size is odd where a head count allows it: tensors then end at odd addresses.
FIELDS = {"heads": 3, "kv_heads": 1, "hidden": 33, "layers": 3, "head_dim": 16}


def _tensors(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def dense(tmp_path):
    """A saved dense model (directory) and a plan for it."""
    model = tiny_model(**FIELDS)
    model.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense", random_plan(model, WIDTHS)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_same_bytes_as_in_memory(tmp_path, model_type, shard, dtype, tied):
    model = tiny_model(model_type, dtype=dtype, tie_word_embeddings=tied, **FIELDS)
    dense, streamed, memory = (tmp_path / name for name in ("dense", "streamed", "memory"))
    model.save_pretrained(dense, max_shard_size=shard)
    assert (len(list(dense.glob("*.safetensors"))) > 2) == (shard == "20KB")
    plan = random_plan(model, WIDTHS)

    apply_streamed(dense, plan, streamed)
    apply(AutoModelForCausalLM.from_pretrained(dense), plan).save_pretrained(memory)

    found, expected = _tensors(streamed), _tensors(memory)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bytes(found[name]) == _bytes(tensor), name
    assert _config(streamed) == _config(memory)
    assert Plan.load(streamed / PLAN_FILE) == plan
    if shard == "1GB":
        files = [folder / "model.safetensors" for folder in (streamed, memory)]
        assert files[0].read_bytes() == files[1].read_bytes()
    else:
        index = json.loads((streamed / INDEX_FILE).read_text())
        assert index["weight_map"].keys() == found.keys()
        total = sum(len(_bytes(tensor)) for tensor in found.values())
        assert index["metadata"]["total_size"] == total
        sources = json.loads((dense / INDEX_FILE).read_text())["weight_map"]
        assert set(index["weight_map"].values()) == set(sources.values())


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
def test_output_loads_like_any_checkpoint(tmp_path, shard):
    model = tiny_model("qwen2", **FIELDS)
    model.save_pretrained(tmp_path / "dense", max_shard_size=shard)
    plan = random_plan(model, WIDTHS)
    apply_streamed(tmp_path / "dense", plan, tmp_path / "small")
    modeling.register()
    tokens = random_tokens(2, 9)
    expected = apply(model, plan)(tokens).logits
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "small"),
        load(tmp_path / "small"),
    ):
        assert torch.equal(loaded(tokens).logits, expected)


def test_weights_that_are_stored_coarser_are_converted_as_they_load(tmp_path):
    dense, streamed, whole = (tmp_path / name for name in ("dense", "streamed", "whole"))
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(dense)
    (dense / "config.json").write_text(json.dumps(_config(dense) | {"dtype": "float32"}))
    loaded = load(dense)
    plan = random_plan(loaded, WIDTHS[:2])
    apply_streamed(dense, plan, streamed)
    apply(loaded, plan).save_pretrained(whole)
    found, expected = _tensors(streamed), _tensors(whole)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in expected.items()}
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("said", ["bfloat16", None], ids=["said", "unsaid"])
@pytest.mark.parametrize(
    ("model_type", "finer"),
    [
        ("llama", ""),  # all of it, beside a config that says otherwise
        ("llama", "norm"),
        ("llama", "layers.1.self_attn"),
        ("mixtral", "experts.1."),  # one of several tensors that the model joins
        ("glm4_moe", "e_score_correction_bias"),  # which transformers leaves in float32
    ],
)
def test_weights_of_several_types_are_taken_as_loading_takes_them(
    tmp_path, model_type, finer, said
):
    dense, streamed = tmp_path / "dense", tmp_path / "streamed"
    tiny_model(model_type, layers=3).save_pretrained(dense)
    stored = load_file(dense / "model.safetensors")
    stored |= {name: torch.randn_like(x) for name, x in stored.items() if "e_score" in name}
    coarse = torch.float32 if finer == "" and said is None else torch.bfloat16
    types = {name: torch.float32 if finer in name else coarse for name in stored}
    assert torch.float32 in types.values()
    save_file({name: x.to(types[name]) for name, x in stored.items()}, dense / "model.safetensors")
    (dense / "config.json").write_text(json.dumps(_config(dense) | {"dtype": said}))
    loaded = load(dense)
    plan = random_plan(loaded, WIDTHS)

    apply_streamed(dense, plan, streamed)
    expected = apply(loaded, plan).state_dict()
    found = load(streamed).state_dict()
    assert {name: x.dtype for name, x in found.items()} == {
        name: x.dtype for name, x in expected.items()
    }
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    kept = [name for name, x in _tensors(streamed).items() if x.dtype == torch.float32]
    assert all(coarse == torch.float32 or "e_score" in name for name in kept)


def _says_tied(model, folder, **kwargs) -> None:
    """Save an untied model with a config that says it is tied."""
    model.save_pretrained(folder, **kwargs)
    (folder / "config.json").write_text(json.dumps(_config(folder) | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("how", ["in memory", "saved", "streamed"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
def test_a_head_that_differs_is_kept_though_the_config_says_tied(tmp_path, shard, how):
    """As transformers does, which loads both weights."""
    _says_tied(tiny_model(**FIELDS), tmp_path / "dense", max_shard_size=shard)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    plan = random_plan(model, [(8, 16)] * 3)
    small = apply(model, plan)
    if how == "saved":
        small.save_pretrained(tmp_path / "small")
    elif how == "streamed":
        apply_streamed(tmp_path / "dense", plan, tmp_path / "small")
    small = small if how == "in memory" else load(tmp_path / "small")
    # Also after it is tied by its config, as trainers and engines do.
    small.tie_weights()
    tokens = random_tokens(2, 9)
    assert float((small(tokens).logits - model(tokens).logits).abs().max()) == 0


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
def test_a_head_stored_beside_equal_embeddings_is_tied(tmp_path, shard):
    model = tiny_model(**FIELDS)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    _says_tied(model, tmp_path / "dense", max_shard_size=shard)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plan = random_plan(model, WIDTHS)
    apply_streamed(tmp_path / "dense", plan, tmp_path / "small")
    apply(model, plan).save_pretrained(tmp_path / "memory")
    assert _config(tmp_path / "small") == _config(tmp_path / "memory")
    assert _tensors(tmp_path / "small").keys() == _tensors(tmp_path / "memory").keys()


def test_a_head_untied_by_hand_is_kept(tmp_path):
    model = tiny_model(**FIELDS, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    small, tokens = apply(model, random_plan(model, [(8, 16)] * 3)), random_tokens(2, 9)
    small.save_pretrained(tmp_path)
    for made in (small, load(tmp_path)):
        assert float((made(tokens).logits - model(tokens).logits).abs().max()) == 0


def test_other_files_travel_and_other_weights_do_not(dense, tmp_path):
    source, plan = dense
    carried = ["tokenizer.json", "LICENSE", "additional_chat_templates/tool_use.jinja"]
    carried += ["assets/pictures/loss.png"]
    left = ["pytorch_model.bin", "consolidated.safetensors", "tf_model.h5", "onnx/model.onnx"]
    left += ["onnx/config.json", "original/params.json", "original/consolidated.00.pth"]
    left += [".cache/huggingface/tokenizer.json.metadata", INDEX_FILE]
    for name in carried + left[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    apply_streamed(source, plan, tmp_path / "small")
    for name in carried:
        assert (tmp_path / "small" / name).read_text() == name
    assert (tmp_path / "small" / "generation_config.json").is_file()
    assert not [name for name in left if (tmp_path / "small" / name).exists()]
    assert {path.name for path in (tmp_path / "small").iterdir() if path.is_dir()} == {
        "additional_chat_templates",
        "assets",
    }


def test_a_lone_shard_that_is_called_a_part_is_found(dense, tmp_path):
    """Some repositories have one file under the name of a part, and an index."""
    source, plan = dense
    part = "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / part)
    write_index(source, dict.fromkeys(_tensors(source), part), 1)
    apply_streamed(source, plan, tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").glob("model*.safetensors*")] == [
        "model.safetensors"
    ]
    load(tmp_path / "small")


def test_a_tokenizer_is_of_the_class_that_the_dense_model_has(dense, tmp_path):
    """For qwen2 and others, transformers takes another one than the files name, by model type."""
    model = tiny_model("qwen2", vocab_size=4096, **FIELDS)
    source, small = tmp_path / "qwen2", tmp_path / "small"
    model.save_pretrained(source)
    shutil.copyfile(Path(reference_path()) / "tokenizer.json", source / "tokenizer.json")
    named = json.dumps({"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|endoftext|>"})
    (source / "tokenizer_config.json").write_text(named)
    apply_streamed(source, random_plan(model, WIDTHS), small)
    text = "Once upon a time,  in 1998"
    expected, found = (load_tokenizer(folder)(text).input_ids for folder in (source, small))
    assert len(expected) > 5
    assert found == expected


def test_tensors_the_model_does_not_have_are_left_out(dense, tmp_path):
    """As from_pretrained ignores them: checkpoints of 2023 store the RoPE frequencies."""
    source, plan = dense
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    apply_streamed(source, plan, tmp_path / "small")
    assert not any("inv_freq" in name for name in _tensors(tmp_path / "small"))


def _refused(source, plan, output, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        apply_streamed(source, plan, output)
    assert "\n" not in str(caught.value)
    assert not output.exists()
    assert not [path for path in output.parent.iterdir() if "partial" in path.name]


def test_other_weights_are_refused_and_nothing_is_written(dense, tmp_path):
    _, plan = dense
    tiny_model(**FIELDS, seed=1).save_pretrained(tmp_path / "other")
    message = "made from other weights .* make a new plan for this checkpoint"
    _refused(tmp_path / "other", plan, tmp_path / "small", PlanError, message)


def test_other_shapes_are_refused_before_any_weight_is_read(dense, tmp_path):
    source, plan = dense
    other = tiny_model(**(FIELDS | {"head_dim": 8}))
    other.config.save_pretrained(tmp_path / "other")
    _refused(tmp_path / "other", plan, tmp_path / "small", PlanError, "layer 0 differs")
    shutil.copy(source / "model.safetensors", tmp_path / "other")
    other.config.model_type = "gpt2"
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt2"}')
    _refused(tmp_path / "other", plan, tmp_path / "small", UnsupportedModelError, "learned")


def test_another_number_of_layers_is_refused_before_they_are_built(dense, tmp_path, monkeypatch):
    source, plan = dense
    config = _config(source) | {"num_hidden_layers": 1000}
    (source / "config.json").write_text(json.dumps(config))
    monkeypatch.delattr("rap.surgery.weights.without_weights")
    _refused(source, plan, tmp_path / "small", PlanError, "plan has 3 layers, the model 1000")


def test_missing_shard_is_refused(tmp_path):
    model = tiny_model(**FIELDS)
    model.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    plan = random_plan(model, WIDTHS)
    last = sorted((tmp_path / "dense").glob("*.safetensors"))[-1]
    last.unlink()
    _refused(tmp_path / "dense", plan, tmp_path / "small", CheckpointError, "is missing: download")


def test_truncated_shard_is_refused(dense, tmp_path):
    source, plan = dense
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    _refused(source, plan, tmp_path / "small", CheckpointError, "is truncated or damaged")


def test_checkpoint_without_some_tensors_is_refused(dense, tmp_path):
    source, plan = dense
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    message = r"lacks 1 tensors \(model.layers.1.mlp.up_proj.weight"
    _refused(source, plan, tmp_path / "small", CheckpointError, message)


def test_weights_in_another_format_are_refused(dense, tmp_path):
    source, plan = dense
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    _refused(source, plan, tmp_path / "small", CheckpointError, "convert the checkpoint first")


def test_stored_type_that_is_no_plain_float_is_refused(dense, tmp_path):
    source, plan = dense
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    _refused(source, plan, tmp_path / "small", CheckpointError, "lm_head.weight is stored as F8_E4")


def test_existing_output_is_kept_without_force_and_replaced_with_it(dense, tmp_path):
    source, plan = dense
    output = tmp_path / "small"
    output.mkdir()
    (output / "config.json").write_text('{"model_type": "llama"}')
    (output / "old").write_text("old")
    with pytest.raises(CheckpointError, match="exists: pass --force"):
        apply_streamed(source, plan, output)
    assert (output / "old").read_text() == "old"
    apply_streamed(source, plan, output, force=True)
    assert not (output / "old").exists()
    assert (output / "model.safetensors").is_file()


def test_the_report_of_another_model_stays_where_it_is(dense, tmp_path):
    """A plain checkpoint has one, of what was pruned to make it."""
    source, plan = dense
    (source / REPORT_FILE).write_text("{}")
    apply_streamed(source, plan, tmp_path / "small")
    assert not (tmp_path / "small" / REPORT_FILE).exists()
