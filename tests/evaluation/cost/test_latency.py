"""Timing of decode steps, stand-ins of a shape, and `rap bench`."""

import json
import re
import time
import weakref

import pytest
import torch

from cases.command import run
from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.calibration.run import calibrate
from rap.checkpoint.load import load
from rap.cli import bench
from rap.cli.bench import conclusion
from rap.evaluation.cost import latency
from rap.evaluation.cost.footprint import footprint
from rap.evaluation.cost.latency import (
    CPU_VARIANTS,
    DecodeStep,
    LatencyPoint,
    Variant,
    if_it_fits,
    interleaved,
    measure_point,
    weight_bytes,
)
from rap.evaluation.cost.random_models import dense_config, random_model, uniform_config
from rap.methods import Rap
from rap.model.cache_layout import PairEntry
from rap.model.errors import RapError
from rap.model.fingerprint import fingerprint_model
from rap.model.layers import attention_layers
from rap.model.modeling import CONFIG_VERSION
from rap.surgery.apply import apply
from rap.surgery.weights import config_with

SHAPE = {"heads": 6, "kv_heads": 2, "hidden": 36, "layers": 3}


def test_tasks_take_turns_and_warm_up_is_not_counted():
    order = []
    now = iter(range(1000))
    found = interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"}, 3, clock=lambda: next(now)
    )
    assert order == ["a", "b"] * 5
    assert found == {"a": [1, 1, 1], "b": [1, 1, 1]}


def _point(dense, pruned):
    seconds = {"dense": dense, "pruned": pruned}
    read = {"dense": 300, "pruned": 200}
    return LatencyPoint(1, 8, seconds, {}, {"dense": 0, "pruned": 0}, read)


def test_each_side_is_judged_by_its_best():
    point = _point(
        {"x": [4.0, 4.0, 40.0], "y": [3.0, 6.0, 90.0]}, {"x": [2.0, 2.0, 20.0], "y": None}
    )
    assert point.best("dense") == "x"
    assert point.best("pruned") == "x"
    assert point.ratio("pruned") == 2.0
    assert point.ratio("pruned", variant="y") is None
    assert point.roofline("pruned") == 1.5
    assert _point({"x": [1.0]}, {"x": None}).median("pruned") is None


@pytest.mark.parametrize("variant", [*CPU_VARIANTS, Variant("static", "sdpa", "static")], ids=str)
def test_a_step_decodes_over_a_cache_of_that_many_tokens(variant):
    model = tiny_model(**SHAPE)
    small = apply(model, random_plan(model, [(3, 5), None, (5, 9)]))
    step = DecodeStep(small, variant, batch=2, context=30, steps=2)
    # The constructor decodes one token to see what it allocates.
    assert int(step.cache.get_seq_length()) == 31
    step()
    assert int(step.cache.get_seq_length()) == 32
    assert step.kv_bytes == 2 * 30 * footprint(small).kv_bytes_per_token
    step()
    with pytest.raises(AssertionError, match="no room"):
        step()


def test_read_bytes_leave_out_the_embedding_unless_it_is_the_head():
    model = tiny_model(**SHAPE)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model) == whole - model.get_input_embeddings().weight.nbytes
    tied = tiny_model(**SHAPE, tie_word_embeddings=True)
    assert weight_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters())


def test_a_window_bounds_the_bytes_of_its_cache():
    model = tiny_model("mistral", sliding_window=8)
    step = DecodeStep(model, CPU_VARIANTS[0], batch=1, context=20, steps=1)
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert step.kv_bytes == 8 * per_token


def test_every_timed_step_runs_the_attention_of_its_variant(monkeypatch):
    ran, call = [], DecodeStep.__call__

    def seen(step):
        ran.append((step.variant.attention, step.model.config._attn_implementation))
        call(step)

    monkeypatch.setattr(DecodeStep, "__call__", seen)
    models = {"dense": tiny_model(**SHAPE)}
    measure_point(models, batch=1, context=9, rounds=2, variants=CPU_VARIANTS)
    assert {asked for asked, _ in ran} == {variant.attention for variant in CPU_VARIANTS}
    assert [asked for asked, _ in ran] == [used for _, used in ran]


def _case(name):
    return next(case for case in CASES if case.name == name).model(dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "unread"),
    [("gemma3", ("vision", "projector")), ("gemma3n_text", ("embed_tokens_per_layer",))],
)
def test_read_bytes_leave_out_what_looks_at_images_and_rows_by_layer(name, unread):
    model = _case(name)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    read = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if not any(part in name for part in unread)
    )
    assert weight_bytes(model) == read - (0 if head.weight is embedding else embedding.nbytes)


def test_a_family_without_sdpa_is_timed_with_its_own_attention():
    dense = _case("gpt_oss")
    small = apply(dense, random_plan(dense, [(8, 16)] * dense.config.num_hidden_layers))
    models = {"dense": dense, "pruned": small}
    point = measure_point(models, batch=1, context=9, rounds=1, variants=CPU_VARIANTS)
    assert all(point.median(name, "sdpa") for name in models)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm"])
def test_random_models_have_the_shape_they_stand_for(model_type):
    """A pruned model's dense stand-in is as its dense model; a uniform one keeps that much."""
    dense = tiny_model(model_type, **SHAPE)
    config = uniform_config(dense.config, 0.5, align=2)
    small = random_model(config, dtype=torch.float32)
    again = random_model(dense_config(config), dtype=torch.float32)
    assert type(again) is type(dense)
    assert {n: p.shape for n, p in again.named_parameters()} == {
        n: p.shape for n, p in dense.named_parameters()
    }
    kept = footprint(small).kv_bytes_per_token / footprint(dense).kv_bytes_per_token
    assert kept == pytest.approx(0.5, abs=2 / 16)
    rows = {tuple(row.tolist()) for n, b in small.named_buffers() if "frequency" in n for row in b}
    assert len(rows) > 1, "heads should keep pairs of their own"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm", "gemma3_text", "olmo2"])
@pytest.mark.parametrize("merge", [1, 2, "auto", "all"])
@pytest.mark.parametrize("hidden", [8, 64])
def test_a_stand_in_has_the_entries_of_a_real_plan(model_type, merge, hidden):
    """Families without a norm, with one that maps stand behind, and with one that they do not.

    Maps are larger than what is absorbed where the model is narrow, and smaller where it is wide.
    """
    dense = tiny_model(model_type, heads=8, kv_heads=4, hidden=hidden)
    method = Rap(retain=0.5, align=2, merge=merge, budget="uniform")
    found = calibrate(dense, random_tokens(2, 8), method.needs_for(dense))
    plan = method.plan(dense, found)
    config = uniform_config(dense.config, 0.5, align=2, merge=merge)
    assert config.rap["layers"] == [layer.entry().fields() for layer in plan.layers]


def test_merged_heads_with_more_slots_than_pairs_have_a_random_model():
    """What `rap bench` runs for a merged checkpoint: slots may repeat the frequency of a pair."""
    dense = tiny_model(**SHAPE)
    shape = attention_layers(dense)[0].shape
    num_slots = shape.geometry.num_pairs + 1
    entry = PairEntry(num_slots, 0, 2 * num_slots, heads=1).fields()
    section = {"version": CONFIG_VERSION, "layers": [entry] * len(attention_layers(dense))}
    model = random_model(config_with(dense.config, section), dtype=torch.float32)
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
    rows = [row for n, b in model.named_buffers() if "frequency" in n for row in b.tolist()]
    assert all(len(row) == num_slots and row == sorted(row) for row in rows)
    assert all(set(row) <= set(range(shape.geometry.num_pairs)) for row in rows)
    assert rows


def test_a_retain_outside_its_range_is_refused():
    with pytest.raises(RapError, match=r"retain 1.5 is outside \(0, 1\]: give the fraction"):
        uniform_config(tiny_model().config, 1.5)


def test_a_point_holds_every_model_in_every_variant():
    dense = tiny_model(**SHAPE)
    small = random_model(uniform_config(dense.config, 0.5, align=2), dtype=torch.float32)
    point = measure_point(
        {"dense": dense, "pruned": small}, batch=2, context=9, rounds=2, variants=CPU_VARIANTS
    )
    assert {name: set(found) for name, found in point.seconds.items()} == {
        name: {"sdpa", "rap"} for name in ("dense", "pruned")
    }
    assert all(len(rounds) == 2 for found in point.seconds.values() for rounds in found.values())
    assert point.kv_bytes["pruned"] == point.kv_bytes["dense"] / 2
    assert point.roofline("pruned") > 1


def test_models_keep_the_attention_they_came_with():
    """Gemma 2 under SDPA has no soft cap: what is measured afterwards would be another model."""
    models = {"dense": tiny_model(**SHAPE), "other": tiny_model(**SHAPE)}
    models["other"].set_attn_implementation("eager")
    measure_point(models, batch=1, context=9, rounds=1, variants=CPU_VARIANTS)
    found = [model.config._attn_implementation for model in models.values()]
    assert found == ["sdpa", "eager"]


@pytest.mark.parametrize(("room", "measured"), [(1, True), (0, False)])
def test_models_take_turns_one_by_one_where_memory_is_short(monkeypatch, room, measured):
    """With room for one cache, each is measured alone; where not even that fits, it has no time."""
    alive = weakref.WeakSet()

    class Step(DecodeStep):
        def __init__(self, *args, **kwargs):
            if len(alive) >= room:
                raise torch.OutOfMemoryError
            alive.add(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(latency, "DecodeStep", Step)
    dense = tiny_model(**SHAPE)
    point = measure_point({"dense": dense}, batch=1, context=9, rounds=1, variants=CPU_VARIANTS)
    assert [rounds is not None for rounds in point.seconds["dense"].values()] == 2 * [measured]
    assert (point.median("dense") is not None) == measured
    assert point.roofline("dense") == (1 if measured else None)
    assert point.roofline("pruned") is None


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (torch.OutOfMemoryError("CUDA"), None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), None),
        (RuntimeError("shapes differ"), "raised"),
    ],
)
def test_memory_that_does_not_suffice_is_no_error(error, fits):
    def fail():
        raise error

    if fits is None:
        assert if_it_fits(fail) is None
        return
    with pytest.raises(RuntimeError, match="shapes differ"):
        if_it_fits(fail)


def test_bench_shows_contexts_that_fit_beside_those_that_do_not(monkeypatch, tmp_path):
    """Far contexts are what it is asked for, and memory ends somewhere."""
    whole, small = DecodeStep.__init__, bench.time_prefill

    def build(self, *given, context, **named):
        if context > 100:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        whole(self, *given, context=context, **named)

    def read(models, *, tokens, **named):
        if tokens > 100:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return small(models, tokens=tokens, **named)

    monkeypatch.setattr(DecodeStep, "__init__", build)
    monkeypatch.setattr(bench, "time_prefill", read)
    asked = ["--retain", 0.5, "--rounds", 1, "--device", "cpu", "--context", 64, "--context", 128]
    shown = run("bench", "bundled", *asked, "--prefill", "-o", tmp_path / "bench.json")
    assert shown.code == 0
    assert shown.out.count("-  ") or shown.out.count("- ")
    near, far = json.loads((tmp_path / "bench.json").read_text())["points"]
    assert near["ratio"] > 0
    assert near["prefill"]["ratio"] > 0
    assert (far["ratio"], far["roofline"], far["prefill"]) == (None, None, None)


def test_experts_that_no_token_chose_are_not_read():
    model = tiny_model("qwen3_moe", num_experts=8, num_experts_per_tok=2)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert experts > 0
    assert weight_bytes(model) == weight_bytes(model, batch=4) - experts * 3 // 4
    assert weight_bytes(model, batch=9) == weight_bytes(model, batch=4)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([(512, 1.1), (4096, 1.2)], "faster from 512 tokens"),
        ([(512, 0.9), (4096, 1.2)], "faster from 4,096 tokens"),
        ([(512, 1.1), (4096, 0.9)], "not faster"),
        ([(512, 1.1), (4096, None)], "faster from 512 tokens"),
        ([(512, None)], "memory did not suffice"),
    ],
)
def test_the_conclusion_is_about_all_longer_contexts(ratios, said):
    assert said in conclusion(ratios)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A tiny dense checkpoint and a pruned one, without tokenizers."""
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_model(**SHAPE)
    model.save_pretrained(folder / "dense")
    apply(model, random_plan(model, [(3, 6), None, (5, 10)])).save_pretrained(folder / "small")
    return folder


FAST = ("--context", 8, "--context", 16, "--rounds", 2, "--device", "cpu")


@pytest.mark.parametrize(
    "arguments",
    [("small",), ("small", "--dense", "{}/dense"), ("dense", "--retain", 0.5)],
    ids=["pruned", "with its dense model", "dense"],
)
def test_bench_times_both_and_says_from_where_on(checkpoints, tmp_path, arguments):
    model, *rest = (str(item).format(checkpoints) for item in arguments)
    output = tmp_path / "bench.json"
    result = run("bench", checkpoints / model, *rest, *FAST, "-o", output, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert found == json.loads(output.read_text())
    assert [point["context"] for point in found["points"]] == [8, 16]
    for point in found["points"]:
        assert point["dense"] > 0
        assert point["pruned"] > 0
        assert point["kv_bytes"]["pruned"] < point["kv_bytes"]["dense"]
        assert point["roofline"] > 1
    ratios = [(point["context"], point["ratio"]) for point in found["points"]]
    assert found["verdict"] == conclusion(ratios)


@pytest.mark.parametrize(("asked", "merged"), [((), 2), (("--merge", 1), 1), (("--merge", 2), 2)])
def test_bench_stands_in_for_what_compress_would_make(checkpoints, monkeypatch, asked, merged):
    """By default heads are merged, as `rap compress` merges them."""
    timed = []

    def seen(models, **how):
        timed.append(models["pruned"].config.rap["layers"])
        return measure_point(models, **how)

    monkeypatch.setattr(bench, "measure_point", seen)
    result = run("bench", checkpoints / "dense", "--retain", 0.5, *asked, *FAST, "--json")
    assert result.code == 0, result.err
    assert {2 // entry.get("heads", 2) for entry in timed[0]} == {merged}
    (said,) = asked[1:] or ("auto",)
    assert result.json["provenance"]["settings"]["merge"] == str(said)


def test_bench_times_what_it_is_asked_for(checkpoints, monkeypatch):
    asked = []

    def seen(models, **how):
        known = fingerprint_model(models["dense"])
        asked.append((known, how["context"], how["batch"], how["clock"]))
        return measure_point(models, **how)

    monkeypatch.setattr(bench, "measure_point", seen)
    dense = checkpoints / "dense"
    words = ("--context", 16, "--context", 8, "--rounds", 1, "--batch", 3, "--device", "cpu")
    result = run("bench", checkpoints / "small", "--dense", dense, *words, "--cpu-time")
    assert result.code == 0, result.err
    known = fingerprint_model(load(dense))
    assert asked == [(known, context, 3, time.process_time) for context in (8, 16)]


def test_bench_prints_a_table_and_the_verdict(checkpoints, monkeypatch):
    point = _point({"sdpa": [2e-3, 4e-3, 6e-3]}, {"sdpa": [1e-3, 2e-3, 3e-3]})
    monkeypatch.setattr(bench, "measure_point", lambda *_, **__: point)
    result = run("bench", checkpoints / "small", "--context", 8, "--device", "cpu")
    assert result.code == 0, result.err
    assert "dense / pruned" in result.out
    (row,) = [line for line in result.out.splitlines() if "4.00" in line]
    assert re.findall(r"[\d.]+x?", row) == ["8", "4.00", "2.00", "2.00x", "1.50x"]
    assert result.err.splitlines()[-1] == conclusion([(8, 2.0)])


def test_bench_times_prompts_too(checkpoints):
    arguments = ("bench", checkpoints / "small", *FAST, "--prefill")
    result = run(*arguments, "--json")
    assert result.code == 0, result.err
    for point in result.json["points"]:
        assert point["prefill"]["dense"] > 0
        assert point["prefill"]["ratio"] > 0
    assert run(*arguments).out.count("dense / pruned") == 2
    assert "prefill" not in run("bench", checkpoints / "small", *FAST).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dense",), "give --retain"),
        (("dense", "--retain", 0.5, "--dense", "x"), "remove --dense"),
        (("small", "--retain", 0.5), "pruned already"),
        (
            ("dense", "--retain", 0.5, "--merge", 3),
            "2 KV heads cannot be merged by 3: use one of 1, 2",
        ),
        (("dense", "--retain", 0.5, "--merge", "most"), "merge cannot be 'most'"),
        (("small", "--merge", 2), "is pruned already: remove --merge"),
        (("small", "--rounds", 0), "at least 1"),
        (("small", "--dtype", "bf17"), "unknown dtype"),
    ],
)
def test_bench_refuses_in_one_line(checkpoints, arguments, said):
    result = run("bench", checkpoints / arguments[0], *FAST, *arguments[1:])
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_multimodal_model_has_a_stand_in():
    (case,) = [case for case in CASES if case.name == "qwen2_vl"]
    narrow = uniform_config(case.model().config, 0.5)
    assert random_model(narrow, dtype=torch.float32).config.model_type == narrow.model_type
