"""Distillation of tiny models: it improves, merges, resumes, survives faults and keeps the better.

The tiny models are random, so the text is what the dense one writes: nothing predicts it better.
"""

import copy
import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap import RapError, apply, load, recover
from rap.evaluation.quantization import quantize_weights
from rap.model.fingerprint import fingerprint_model
from rap.recovery import distillation, runs, trainer
from rap.recovery.adapters import add_adapters, merge
from rap.recovery.config import RecoveryConfig, recovery_config
from rap.recovery.distillation import distill
from rap.recovery.loss import attention_outputs, matching_loss
from rap.recovery.trainer import BadSteps, DistillationTrainer

CONFIG = RecoveryConfig(
    steps=6,
    global_batch=4,
    micro_batch=2,
    evaluate_every=2,
    learning_rate=5e-3,
    schedule="cosine",
    ce_weight=0.0,
    kl_weight=1.0,
    products="float32",
)
RATES = {"lora": {}, "full": {"tune": "full", "learning_rate": 0.03}}


def pair(model_type="llama", widths=((4, 8), None), **settings):
    """A dense model, and a pruned one cut from it."""
    dense = tiny_model(model_type, **settings)
    return dense, apply(dense, random_plan(dense, widths))


def written_by(dense):
    """32 training and 16 validation windows of 24 tokens, sampled from the model."""
    torch.manual_seed(1)
    options = {"do_sample": True, "max_new_tokens": 23, "top_k": 0}
    rows = dense.generate(random_tokens(48, 1), **options)
    return rows[:32], rows[32:]


WINDOWS, VALIDATION = written_by(pair()[0])


def shared_state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.fixture(scope="module")
def models():
    return pair()


@pytest.fixture(scope="module", params=["lora", "full"])
def recovered(models, request):
    dense, small = models
    states = shared_state(dense), shared_state(small)
    config = replace(CONFIG, **RATES[request.param])
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION)
    assert equal(states[0], dense.state_dict())
    assert equal(states[1], small.state_dict())
    return found


def settings_of(recovered):
    return RecoveryConfig(**recovered.report["config"])


def test_the_result_is_better_and_plain(models, recovered):
    small, report = recovered.model, recovered.report
    assert report["kept"] == "after"
    assert report["perplexity_after"] < report["perplexity_before"]
    assert type(small) is type(models[1])
    assert [*small.state_dict()] == [*models[1].state_dict()]
    assert vars(small).keys() == vars(models[1]).keys()
    assert small.config.rap == models[1].config.rap
    assert all(p.requires_grad for p in small.parameters())
    assert not any("lora" in name for name, _ in small.named_modules())
    assert small.training == models[1].training


def test_only_attention_changes(models, recovered):
    before, after = models[1].state_dict(), recovered.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = {f"model.layers.{i}.self_attn.{r}_proj.weight" for i in (0, 1) for r in "qkvo"}
    assert changed == names


def test_the_report_says_what_was_done(models, recovered):
    report = recovered.report
    assert report["fingerprint_before"] == fingerprint_model(models[1])
    assert report["fingerprint_after"] == fingerprint_model(recovered.model)
    assert report["fingerprint_before"] != report["fingerprint_after"]
    assert (report["steps"], report["skipped_steps"]) == (6, [])
    measured = {e["step"]: e["perplexity"] for e in report["history"] if "perplexity" in e}
    assert [*measured] == [2, 4, 6]
    best = min(measured, key=measured.get)
    assert report["chosen_step"] == best
    # The same float32 sums with the adapters merged.
    assert report["perplexity_after"] == pytest.approx(measured[best], rel=1e-5)


def test_the_result_saves_and_loads(recovered, tmp_path):
    recovered.model.save_pretrained(tmp_path)
    again = load(tmp_path)
    ids = VALIDATION[:1]
    assert torch.equal(again(input_ids=ids).logits, recovered.model(input_ids=ids).logits)


def test_the_best_checkpoint_is_merged_not_the_last(models, recovered, monkeypatch):
    dense, small = models
    rising = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(
        trainer, "perplexity", lambda *args, **kwargs: SimpleNamespace(value=next(rising))
    )
    found = distill(small, dense, WINDOWS, settings_of(recovered), validation=VALIDATION).report
    measured = {
        e["step"]: e.get("perplexity") for e in recovered.report["history"] if "perplexity" in e
    }
    assert found["chosen_step"] == 2
    assert found["perplexity_after"] == pytest.approx(measured[2], rel=1e-5)
    assert abs(measured[2] - measured[6]) > 1e-3 * measured[2]


def test_only_layers_multiply_in_bfloat16(models):
    """Teacher and student in training; weights, logits and what judges them stay in float32."""
    dense, small = models
    seen = []

    def watch(module, args, output):
        if output.shape[1] > 1:  # the model's own call has one token, which nobody reads
            seen.append(output.dtype)

    def adding(types):
        return lambda module, args, output: types.add(output.dtype)  # a copy would keep its own set

    hooks, taken = [model.lm_head.register_forward_hook(watch) for model in (dense, small)], []
    for model in (dense, small):
        taken.append(set())
        down = model.model.layers[0].mlp.down_proj
        hooks.append(down.register_forward_hook(adding(taken[-1])))
    config = replace(CONFIG, **RATES["full"])
    found = {}
    for products in ("float32", "bfloat16"):
        assert all(types <= {torch.float32} for types in taken)
        one = replace(config, products=products)
        found[products] = distill(small, dense, WINDOWS, one, validation=VALIDATION)
    assert all(torch.bfloat16 in types for types in taken)
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.float32}
    half, whole = found["bfloat16"], found["float32"]
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert half.report["perplexity_before"] == whole.report["perplexity_before"]
    after = half.report["perplexity_after"], whole.report["perplexity_after"]
    assert after[0] != after[1]
    assert after[0] == pytest.approx(after[1], rel=0.01)


def test_a_recovery_that_makes_it_worse_is_not_kept(models):
    dense, small = models
    config = replace(CONFIG, steps=1, learning_rate=10.0, clip=1e9)
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION)
    assert found.report["perplexity_after"] > found.report["perplexity_before"]
    assert found.report["kept"] == "before"
    assert found.model is small


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("mistral", {"dtype": torch.bfloat16}),
        ("llama", {"attention_bias": True, "dtype": torch.bfloat16, "tie_word_embeddings": True}),
    ],
)
def test_ties_biases_and_low_precision(model_type, settings, tune):
    dense, small = pair(model_type, **settings)
    # In bfloat16 fewer steps change less than the rounding of the merge, which CPUs do unlike.
    changes = RATES[tune] | {"steps": 12, "evaluate_every": 12, "gradient_checkpointing": True}
    windows, validation = written_by(dense)
    found = distill(small, dense, windows, replace(CONFIG, **changes), validation=validation)
    merged, before = found.model, found.report["perplexity_before"]
    assert found.report["perplexity_after"] < before
    assert {p.dtype for p in merged.parameters()} == {settings.get("dtype", torch.float32)}
    assert not any("original_module" in name for name, _ in merged.named_modules())
    tied = settings.get("tie_word_embeddings", False)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    assert not merged.is_gradient_checkpointing
    assert not any(module._forward_hooks for module in merged.modules())
    biases = {n: b for n, b in small.named_parameters() if n.endswith("bias")}
    assert all(torch.equal(b, merged.get_parameter(n)) for n, b in biases.items())


def test_adapters_are_float32_on_bfloat16_weights():
    _, small = pair(dtype=torch.bfloat16)
    adapted = add_adapters(copy.deepcopy(small), CONFIG)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert len(trained) == 2 * 4 * 2
    assert all("lora" in name for name in trained)


def _adapted(small):
    adapted = add_adapters(copy.deepcopy(small), CONFIG)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapted


def test_merging_gives_the_adapters_logits(models):
    adapted = _adapted(models[1]).eval()
    with torch.no_grad():
        expected = adapted(input_ids=VALIDATION[:1]).logits
        merged = merge(adapted, VALIDATION[0])
        found = merged(input_ids=VALIDATION[:1]).logits
        assert float((models[1](input_ids=VALIDATION[:1]).logits - expected).abs().max()) > 0.1
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_merge_that_loses_the_adapters_is_found(models, monkeypatch):
    adapted = _adapted(models[1])
    monkeypatch.setattr(type(adapted.base_model), "merge_and_unload", _drop, raising=True)
    with pytest.raises(RapError, match="changed the logits"):
        merge(adapted, VALIDATION[0])


def test_a_run_that_diverged_says_what_to_lower(models):
    adapted = _adapted(models[1])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(float("inf"))
    with pytest.raises(RapError, match=r"diverged, .* not finite: lower learning_rate"):
        merge(adapted, VALIDATION[0])


def test_matrices_that_are_put_back_before_the_merge_are_found(models):
    adapted = add_adapters(copy.deepcopy(models[1]), replace(CONFIG, tune="full"))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 * 4
    with pytest.raises(RapError, match="never applied"):
        merge(adapted, VALIDATION[0])


def test_every_matrix_is_trained_at_a_rate_of_its_own_size(models):
    config = replace(CONFIG, **RATES["full"], steps=1, evaluate_every=1, warmup_steps=0)
    small = copy.deepcopy(models[1])
    first = small.model.layers[0].self_attn
    first.q_proj.weight.data.mul_(100)
    first.k_proj.weight.data.div_(100)
    found = distill(small, models[0], WINDOWS, replace(config, clip=1e9), validation=VALIDATION)
    moved = {}
    for name, before in small.named_parameters():
        step = (found.model.get_parameter(name) - before).detach().square().mean().sqrt()
        moved[name] = float(step / before.detach().square().mean().sqrt())
    rates = [share for name, share in moved.items() if "self_attn" in name]
    # Adam's first step is one rate long in every entry whose gradient is not next to nothing.
    assert min(rates) > 0.5 * 0.03
    assert max(rates) < 1.1 * 0.03


def _drop(self, **kwargs):
    return self.unload()


def test_adapters_that_do_nothing_are_found(models):
    adapted = add_adapters(copy.deepcopy(models[1]), CONFIG)
    with pytest.raises(RapError, match="never applied"):
        merge(adapted, VALIDATION[0])


def test_without_validation_the_last_tenth_is_held_out(models):
    dense, small = models
    config = replace(CONFIG, steps=1, evaluate_every=1)
    found = distill(small, dense, WINDOWS, config)
    # Of the 29 others 28 fill batches of 4.
    assert (found.report["windows"], found.report["validation_windows"]) == ([28, 24], [3, 24])
    same = recover(small, dense, WINDOWS, config)
    assert fingerprint_model(same) == fingerprint_model(found.model)


def test_a_preset_is_known_by_its_name(models, monkeypatch):
    asked = []
    monkeypatch.setattr(
        distillation, "distill", lambda *given, **_: asked.append(given[3]) or found
    )
    found = distillation.Distillation(models[1], {})
    assert recover(models[1], models[0], WINDOWS, "fast") is found.model
    recover(models[1], models[0], WINDOWS, "long")
    assert asked == [recovery_config("fast"), recovery_config("long")]
    with pytest.raises(RapError, match="unknown recovery preset 'quick': use one of paper, fast"):
        recover(models[1], models[0], WINDOWS, "quick")


def test_a_teacher_in_eight_bits_teaches_nearly_the_same(models, recovered):
    """Its own rounding is in what the student learns, and no more than that."""
    pytest.importorskip("torchao")  # where it is installed, importing peft prints its warnings
    dense, small = models
    teacher = quantize_weights(copy.deepcopy(dense), "int8")
    found = distill(small, teacher, WINDOWS, settings_of(recovered), validation=VALIDATION)
    before, after = (recovered.report[f"perplexity_{when}"] for when in ("before", "after"))
    assert found.report["teacher_fingerprint"] != recovered.report["teacher_fingerprint"]
    assert found.report["perplexity_after"] != after
    assert abs(found.report["perplexity_after"] - after) < 0.2 * (before - after)


def test_the_teacher_goes_back_to_where_it_was(models, monkeypatch):
    dense, small = models
    places = []
    monkeypatch.setattr(dense, "to", lambda device: places.append(device) or dense)
    distill(small, dense, WINDOWS, replace(CONFIG, steps=1), validation=VALIDATION)
    assert len(places) == 2, "to the trainer's device, and back"
    assert places[1] == dense.device


def test_a_teacher_of_another_vocabulary_is_refused(models):
    other = tiny_model(vocab_size=160)
    with pytest.raises(RapError, match="vocabulary of 128 and the teacher one of 160"):
        distill(models[1], other, WINDOWS, CONFIG)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (WINDOWS[0], "token ids"),
        (WINDOWS.tolist(), "windows must be a LongTensor .* not a list"),
        (WINDOWS.float(), "token ids"),
        (WINDOWS[:, :1], "two tokens"),
        (WINDOWS + 120, "outside the vocabulary"),
        (WINDOWS[:1], "two windows or more"),
    ],
)
def test_windows_that_do_not_fit_are_refused(models, windows, message):
    with pytest.raises(RapError, match=message):
        distill(models[1], models[0], windows, CONFIG)


def test_of_several_devices_one_process_takes_one(monkeypatch, tmp_path):
    """Trainer would run the student on all of them, as copies that share what hooks keep."""

    class Two(TrainingArguments):
        @property
        def n_gpu(self):
            return 2

    monkeypatch.setattr(distillation, "TrainingArguments", Two)
    assert distillation._arguments(CONFIG, 8, tmp_path, torch.device("cpu"))._n_gpu == 1


def test_a_logger_that_is_not_installed_is_refused(models, monkeypatch):
    monkeypatch.setattr(distillation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RapError, match="'trackio' is not installed"):
        distill(models[1], models[0], WINDOWS, replace(CONFIG, report_to="trackio"))


def test_the_trainer_computes_the_papers_loss(models, monkeypatch):
    dense, small = models
    seen = []
    original = DistillationTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        seen.append((inputs["input_ids"], original(self, model, inputs, *args, **kwargs)))
        return seen[-1][1]

    monkeypatch.setattr(DistillationTrainer, "compute_loss", compute_loss)
    # The first step: the adapters, without dropout, do nothing yet.
    config = replace(CONFIG, ce_weight=1.0, dropout=0.0, steps=1, evaluate_every=1)
    distill(small, dense, WINDOWS, config, validation=VALIDATION)
    assert len(seen) == 2
    for ids, loss in seen:
        with torch.no_grad():
            student, teacher = small(input_ids=ids).logits, dense(input_ids=ids).logits
            log_s, log_t = ((x[:, :-1] / 2).log_softmax(-1) for x in (student, teacher))
            divergence = (log_s.exp() * (log_s - log_t)).sum(-1).mean()
            expected = small(input_ids=ids, labels=ids).loss + 4 * divergence
        assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_the_micro_batch_changes_nothing(models):
    dense, small = models
    config = replace(CONFIG, dropout=0.0, steps=3)
    found = [
        distill(small, dense, WINDOWS, replace(config, micro_batch=size), validation=VALIDATION)
        for size in (1, 4)
    ]
    assert [e["step"] for e in found[0].report["history"] if "perplexity" in e] == [2, 3]
    curves = [[e["loss"] for e in f.report["history"] if "loss" in e] for f in found]
    # Gradients are the same float32 sums in another order; Adam divides small ones by themselves.
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    states = [f.model.state_dict() for f in found]
    for name, tensor in states[0].items():
        assert (tensor.float() - states[1][name].float()).abs().max() < 2e-4


def test_windows_that_fill_no_batch_change_nothing_with_the_micro_batch(models):
    """30 windows in batches of 8: the last 6 would make a smaller step, or none."""
    dense, small = models
    config = replace(CONFIG, dropout=0.0, steps=None, epochs=2, global_batch=8)
    found = [
        distill(
            small, dense, WINDOWS[:30], replace(config, micro_batch=size), validation=VALIDATION
        )
        for size in (1, 2, 8)
    ]
    assert [one.report["steps"] for one in found] == [6, 6, 6]
    assert [one.report["windows"] for one in found] == [[24, 24]] * 3
    after = [one.report["perplexity_after"] for one in found]
    assert after == pytest.approx([after[0]] * 3, rel=1e-5)
    few = distill(small, dense, WINDOWS[:6], replace(config, epochs=1), validation=VALIDATION)
    assert (few.report["steps"], few.report["windows"]) == (1, [6, 24])


def test_a_run_of_one_step_trains(models):
    dense, small = models
    config = replace(CONFIG, steps=1, warmup_steps=4, learning_rate=1e-3)
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION)
    assert found.report["perplexity_after"] != found.report["perplexity_before"]


def test_matching_that_leaves_nothing_to_distil_is_said():
    with pytest.raises(RapError, match="match_steps cannot be 41: all steps are 40"):
        recovery_config("fast", match_steps=41)
    with pytest.raises(RapError, match="would not read temperature: all steps match"):
        recovery_config("fast", match_steps=40, temperature=1.0)
    assert recovery_config("fast", match_steps=40).match_steps == 40


@pytest.mark.parametrize("checkpointing", [False, True])
def test_matching_brings_attention_outputs_closer(models, checkpointing):
    dense, small = models
    changes = {"steps": 10, "match_steps": 10, "learning_rate": 2e-2, "global_batch": 16}
    config = replace(CONFIG, **changes, gradient_checkpointing=checkpointing)
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION)
    losses = [entry["loss"] for entry in found.report["history"] if "loss" in entry]
    outputs = []
    for model in (dense, small):
        with torch.no_grad(), attention_outputs(model) as layers:
            model(input_ids=WINDOWS)
        outputs.append(layers)
    error = float(matching_loss(outputs[1], outputs[0]))
    # The first step sees half of the windows, before any change.
    assert losses[0] == pytest.approx(error, rel=0.2)
    assert losses[-1] < 0.9 * losses[0]
    by_hand = [((a - b).norm() / b.norm()) ** 2 for a, b in zip(*outputs[::-1], strict=True)]
    assert error == pytest.approx(float(sum(by_hand)) / len(by_hand), rel=1e-5)


class Poisoned(DistillationTrainer):
    """Gives a loss of NaN in the steps that a test names."""

    steps = frozenset()

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * float("nan") if self.state.global_step + 1 in self.steps else loss


@pytest.fixture
def poison(monkeypatch):
    def set_steps(*steps):
        monkeypatch.setattr(distillation, "DistillationTrainer", Poisoned)
        monkeypatch.setattr(Poisoned, "steps", frozenset(steps))

    return set_steps


def test_a_bad_step_is_skipped_and_halves_the_rate(models, recovered, poison):
    poison(3)
    dense, small = models
    found = distill(small, dense, WINDOWS, settings_of(recovered), validation=VALIDATION)
    assert found.report["skipped_steps"] == [3]
    assert found.report["kept"] == "after"
    rates = {e["step"]: e["rate"] for e in found.report["history"] if "rate" in e}
    whole = {e["step"]: e["rate"] for e in recovered.report["history"] if "rate" in e}
    assert rates[2] == whole[2]
    assert rates[5] == pytest.approx(whole[5] / 2, rel=1e-12)


def test_three_bad_steps_end_with_the_last_good_weights(models, poison, tmp_path):
    poison(3, 4, 5)
    dense, small = models
    config = replace(CONFIG, steps=20)
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    assert found.report["skipped_steps"] == [3, 4, 5]
    assert found.report["steps"] == 5
    measured = {e["step"]: e["perplexity"] for e in found.report["history"] if "perplexity" in e}
    assert [*measured] == [2, 4, 5]
    assert measured[2] == measured[4] == measured[5]
    assert found.report["kept"] == "after"
    assert all(torch.isfinite(p).all() for p in found.model.parameters())
    # Nothing is left to train where only saving the result was: it is given up.
    again = distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    assert equal(again.model.state_dict(), found.model.state_dict())
    assert {**again.report, "seconds": 0} == {**found.report, "seconds": 0}


def test_no_good_step_at_all_is_an_error(models, poison):
    poison(1, 2, 3)
    with pytest.raises(RapError, match="not finite in the first 3 steps"):
        distill(models[1], models[0], WINDOWS, CONFIG, validation=VALIDATION)


def test_bad_steps_are_counted_across_a_resume():
    state = BadSteps([3, 7]).state()
    assert BadSteps(**state["args"]).steps == [3, 7]


class Killed(Exception):
    """Stands for SIGKILL inside one process; the real signal is in test_recovery_runs.py."""


def _run_until(step, models, config, work, monkeypatch):
    original = DistillationTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == step:
            raise Killed
        return original(self, *args, **kwargs)

    dense, small = models
    with monkeypatch.context() as patch:
        patch.setattr(DistillationTrainer, "compute_loss", compute_loss)
        with pytest.raises(Killed):
            distill(small, dense, WINDOWS, config, validation=VALIDATION, work=work)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_stopped_run_continues_to_the_same_weights(
    models, recovered, tmp_path, monkeypatch, step
):
    dense, small = models
    config = settings_of(recovered)
    _run_until(step, models, config, tmp_path, monkeypatch)
    assert (runs.last_checkpoint(tmp_path) is None) == (step < 2)
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    assert equal(found.model.state_dict(), recovered.model.state_dict())
    assert found.report["history"] == recovered.report["history"]
    # Also when nothing but the saving of the result was left to do.
    again = distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    assert equal(again.model.state_dict(), recovered.model.state_dict())
    runs.clear_work(tmp_path)
    assert not tmp_path.exists()


def test_a_checkpoint_cut_short_is_not_resumed_from(models, recovered, tmp_path, monkeypatch):
    dense, small = models
    config = settings_of(recovered)
    _run_until(5, models, config, tmp_path, monkeypatch)
    (tmp_path / "checkpoint-4" / runs.COMPLETE).unlink()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"half of it")
    found = distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    assert equal(found.model.state_dict(), recovered.model.state_dict())


def test_the_folder_of_another_run_is_refused(models, tmp_path):
    dense, small = models
    config = replace(CONFIG, steps=1, evaluate_every=1)
    distill(small, dense, WINDOWS, config, validation=VALIDATION, work=tmp_path)
    for changes in ({"config": replace(config, rank=4)}, {"windows": WINDOWS.flip(0)}):
        given = {"windows": WINDOWS, "config": config} | changes
        with pytest.raises(RapError, match="unfinished recovery with another"):
            distill(small, dense, **given, validation=VALIDATION, work=tmp_path)


@pytest.mark.parametrize("how", ["torch", "os"])
def test_a_full_disk_is_one_line(models, tmp_path, monkeypatch, how):
    save = torch.save

    def full(data, path, *args, **kwargs):
        if how == "torch":
            save(data, "/dev/full")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RapError, match=r"no space left in .* continues") as caught:
        distill(models[1], models[0], WINDOWS, CONFIG, validation=VALIDATION, work=tmp_path)
    assert "\n" not in str(caught.value)
    assert runs.last_checkpoint(tmp_path) is None


def test_a_disk_is_full_before_there_is_a_folder(tmp_path):
    said = r"no space left in .*work \(.* MiB free\)"
    with pytest.raises(RapError, match=said), runs.explained(tmp_path / "no" / "work"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_other_errors_are_not_called_a_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"), runs.explained(tmp_path):
        raise RuntimeError("out of memory")


def test_the_result_uses_a_cache_as_its_model_did(models, recovered):
    """The trainer turns that off in the config, where a decode loop by hand reads it."""
    assert recovered.model.config.use_cache is models[1].config.use_cache is True
    assert recovered.model(WINDOWS[:1]).past_key_values is not None


@torch.no_grad()
def test_gradients_may_be_off_around_it(models):
    dense, small = models
    with_gradients = distill(small, dense, WINDOWS, CONFIG, validation=VALIDATION)
    assert with_gradients.report["steps"] == CONFIG.steps
