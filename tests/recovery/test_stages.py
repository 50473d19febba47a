"""The stage after the cut: its texts, the best of its results, and the command that runs it."""

import copy
import json
import re
import sys
from dataclasses import replace

import pytest
import torch

import rap
from cases.command import run
from cases.family_cases import CASES
from cases.fits import ShortFit
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap import RapError, assets
from rap.checkpoint.load import load, load_config, load_dense
from rap.cli import recover as recover_command
from rap.data.held_out import evaluation_tokens
from rap.evaluation.quality.fidelity import fidelity
from rap.methods import METHODS
from rap.model.fingerprint import fingerprint_model
from rap.pipeline import compress, save
from rap.recovery import stages
from rap.recovery.config import PRESETS, RecoveryConfig
from rap.recovery.data import SHARED_RUN, apart, hold_out, recovery_windows
from rap.recovery.fit import fit_layers
from rap.recovery.layer_fit import FitConfig
from rap.recovery.runs import clear_work
from rap.recovery.stages import RECOVERIES, recover_stage, work_folder

VOCABULARY = 4096
CONFIG = RecoveryConfig(
    refit=True,
    window=32,
    num_windows=40,
    validation_windows=4,
    steps=2,
    global_batch=4,
    micro_batch=4,
    evaluate_every=2,
    learning_rate=3e-3,
    schedule="cosine",
)


@pytest.fixture(scope="module")
def models():
    dense = tiny_model(vocab_size=VOCABULARY)
    return dense, rap.apply(dense, random_plan(dense, ((4, 8), (3, 6))))


def test_bundled_windows_come_from_the_right_splits(tokenizer, monkeypatch):
    read = []
    original = assets.reference_text
    monkeypatch.setattr(assets, "reference_text", lambda s: read.append(s) or original(s))
    train, validation = recovery_windows(["bundled"], tokenizer, CONFIG)
    assert sorted(read) == ["calibration", "validation"]
    assert (train.shape, validation.shape) == ((40, 32), (4, 32))
    for rows, split in ((train, "calibration"), (validation, "validation")):
        text = original(split)
        assert all(tokenizer.decode(row[2:-2]) in text for row in rows)
    again, _ = recovery_windows(["bundled"], tokenizer, CONFIG)
    other, _ = recovery_windows(["bundled"], tokenizer, replace(CONFIG, seed=1))
    assert torch.equal(again, train)
    assert not torch.equal(other, train)


def test_a_file_is_split_and_texts_are_mixed(tokenizer, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"number {n} of many." for n in range(400)))
    rows, held = recovery_windows([str(path)], tokenizer, replace(CONFIG, num_windows=None))
    assert len(held) == 4
    assert len(rows) > 40
    text = path.read_text()
    both = torch.cat([rows, held]).flatten()
    # Nothing is lost but a last part of a window, and nothing is in both.
    assert text.startswith(tokenizer.decode(both))
    mixed, held = recovery_windows(["bundled", str(path)], tokenizer, CONFIG)
    assert len(mixed) == 20 + 18
    own = ["number" in tokenizer.decode(row) for row in mixed]
    assert sum(own) == 18
    # Whatever part of the windows a fit takes to judge on, both texts are in it.
    assert all(any(own[n : n + 3]) and not all(own[n : n + 3]) for n in range(len(own) - 2))
    assert len(held) == 4
    listed = recovery_windows([f"bundled,{path}"], tokenizer, CONFIG)
    assert all(torch.equal(*pair) for pair in zip(listed, (mixed, held), strict=True))


@pytest.mark.parametrize("window", [20, 48, 100])
def test_windows_that_share_text_with_what_is_held_out_go(window):
    text = torch.arange(4000)
    held = text[1000:1200].view(2, 100)
    rows = text[: 4000 // window * window].view(-1, window)
    kept = apart(rows, held)
    shared = [len({*row.tolist()} & {*range(1000, 1200)}) for row in rows]
    enough = min(SHARED_RUN, window)
    # Two held-out windows one after another: a run over their seam is in neither.
    sure = [row for row, count in zip(rows, shared, strict=True) if count < enough]
    assert all(any(torch.equal(row, one) for one in kept) for row in sure)
    assert len(kept) < len(rows)
    longest = [
        max(len({*row.tolist()} & {*range(s, s + 100)}) for s in (1000, 1100)) for row in kept
    ]
    assert max(longest) < enough
    with pytest.raises(RapError, match="give a longer text"):
        apart(held, held)


def test_what_many_windows_share_is_no_text_of_one_of_them():
    """The system prompt of chats; a passage that three windows have is shared all the same."""
    opening, others = torch.arange(30), 100 + torch.arange(12 * 40).view(12, 40)
    chats = torch.cat([opening.expand(12, 30), others], 1)
    train, held = chats[:8], chats[8:]
    assert torch.equal(apart(train, held), train)
    repeated = torch.cat([train, held[:1], held[:1].roll(5, 1)])
    assert torch.equal(apart(repeated, held), train)
    few = chats[:4], chats[4:6]  # a short run of four sources has no more of one
    assert torch.equal(apart(*few), few[0])
    with pytest.raises(RapError, match="give a longer text"):
        apart(chats[:2], chats[2:4])


def test_first_words_behind_what_many_share_are_no_text_of_one():
    """Two chats that begin alike, as many do, share the prompt and a few words."""
    opening, others = torch.arange(30), 100 + torch.arange(12 * 40).view(12, 40)
    chats = torch.cat([opening.expand(12, 30), others], 1)
    chats[:3, 30 : 30 + SHARED_RUN // 2] = chats[8, 30 : 30 + SHARED_RUN // 2]
    alike = chats[:6], chats[8:]
    assert torch.equal(apart(*alike), alike[0])
    more = chats.clone()
    more[0, 30 : 30 + SHARED_RUN] = more[8, 30 : 30 + SHARED_RUN]
    assert torch.equal(apart(more[:6], more[8:]), more[1:6])


def test_what_the_fit_holds_out_no_later_stage_trains_on(models, tokenizer, tmp_path, monkeypatch):
    dense, small = models
    path = tmp_path / "own.txt"
    path.write_text(assets.reference_text("calibration")[:9_000], encoding="utf-8")
    monkeypatch.setattr(stages, "FitConfig", ShortFit)
    fitting, trained = ShortFit(), []
    original = stages._Run.windows

    def watched(run, config):
        trained.append(original(run, config))
        return trained[-1]

    monkeypatch.setattr(stages._Run, "windows", watched)
    distilling = replace(CONFIG, num_windows=None, validation_windows=1)
    asked = {"texts": [str(path)], "config": distilling}
    both, report = recover_stage(small, dense, tokenizer, "fit+fast", **asked)
    _, held = recovery_windows([str(path)], tokenizer, fitting)
    everything, _ = recovery_windows([str(path)], tokenizer, distilling)
    assert len(apart(everything, held)) < len(everything), "nothing was shared to begin with"
    assert torch.equal(trained[-1], apart(everything, held))
    # Gone on from the fit's own result, it ends in the same place.
    monkeypatch.undo()
    fitted, first = recover_stage(
        small, dense, tokenizer, "fit", texts=asked["texts"], config=fitting
    )
    assert first["perplexity_fitted"] == report["perplexity_fitted"]
    again, second = recover_stage(fitted, dense, tokenizer, "fit+fast", fitted=first, **asked)
    assert second["distillation"].pop("seconds", 0) != report["distillation"].pop("seconds", 1)
    assert fingerprint_model(again) == fingerprint_model(both)
    assert {**second, "distillation": 0} == {**report, "distillation": 0}
    # A checkpoint that says it was fitted is not refitted either.
    told = recover_command._fitted({"recovery": first}, "fast", asked["texts"])
    third, said = recover_stage(fitted, dense, tokenizer, "fast", fitted=told, **asked)
    assert "perplexity_refitted" not in said
    assert fingerprint_model(third) == fingerprint_model(both)


def test_data_that_are_short_say_so(models, tokenizer, tmp_path, capsys):
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"number {n} of many." for n in range(400)))
    small, dense = models[::-1]
    asked = {"texts": [str(path)], "config": replace(ShortFit(), num_windows=1000)}
    _, report = recover_stage(small, dense, tokenizer, "fit", **asked, progress=True)
    rows, held = recovery_windows([str(path)], tokenizer, asked["config"])
    found = report["fit"]
    assert (found["num_windows"], found["num_held_out"]) == (len(rows), len(held))
    said = f"the training data have {len(rows)} of 1000 windows of"
    assert said in " ".join(capsys.readouterr().err.split())
    # What is held out is of those that were asked for: of long data nothing is missing.
    asked["config"] = replace(ShortFit(), num_windows=20)
    _, report = recover_stage(small, dense, tokenizer, "fit", **asked, progress=True)
    found = report["fit"]
    assert found["num_windows"] < found["num_windows"] + found["num_held_out"] == 20
    assert "the training data have" not in capsys.readouterr().err


def test_what_one_source_holds_out_no_other_trains_on(tokenizer, tmp_path):
    text = assets.reference_text("calibration")
    files = [tmp_path / name for name in ("all.txt", "some.txt")]
    for file, size in zip(files, (80_000, 40_000), strict=True):
        file.write_text(text[:size])
    config = replace(CONFIG, num_windows=10_000, validation_windows=8)
    rows, held = recovery_windows([str(file) for file in files], tokenizer, config)
    assert len(rows) > 100
    assert len(held) == 8
    assert not (rows[:, None] == held).all(-1).any()


def test_a_refit_is_kept_where_a_killed_run_goes_on(models, tokenizer, tmp_path, monkeypatch):
    """Another CPU or GPU would not refit to the same bytes."""
    dense, small = models
    asked = {"config": CONFIG, "output": tmp_path / "out"}
    whole, _ = recover_stage(small, dense, tokenizer, "fast", config=CONFIG)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as before:
        before.setattr("rap.recovery.distillation.distill", killed)
        with pytest.raises(KeyboardInterrupt):
            recover_stage(small, dense, tokenizer, "fast", **asked)
    monkeypatch.setattr(stages, "refit_outputs", killed)
    found, report = recover_stage(small, dense, tokenizer, "fast", **asked)
    assert "perplexity_refitted" in report
    assert fingerprint_model(found) == fingerprint_model(whole)
    other = tiny_model(vocab_size=VOCABULARY, seed=5)
    with pytest.raises(RapError, match=r"refit holds an unfinished recovery with another dense"):
        recover_stage(small, other, tokenizer, "fast", **asked)
    clear_work(work_folder(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_refit_of_several_texts_reads_all_of_them(models, tokenizer, monkeypatch):
    """They come in turns, of which every second or fourth is one text alone."""
    dense, small = models
    run = stages._Run(small, dense, tokenizer, ["a", "b"], 0, None, None, False, {})
    turns = torch.arange(600).remainder(2)[:, None].expand(600, 256)
    read = []
    monkeypatch.setattr(run, "windows", lambda config: turns)
    monkeypatch.setattr(run, "offer", lambda model, done: None)
    monkeypatch.setattr(stages, "refit_outputs", lambda *given, **_: read.append(given[2]))
    run.refit(CONFIG)
    assert len(read[0]) == stages.REFIT_TOKENS // 256
    assert 0.3 < read[0].float().mean() < 0.7


def test_a_fit_to_windows_that_began_otherwise_is_not_gone_on_from(models, tokenizer):
    fitted = {"bos": 7, "fit": {"config": {}}, "perplexity_before": 2.0, "perplexity_fitted": 1.0}
    with pytest.raises(
        RapError, match=r"BOS \(token 7\), but these are without BOS; keep the same bos"
    ):
        recover_stage(*models[::-1], tokenizer, "fit+fast", fitted=fitted, bos="never")


def test_a_known_dense_figure_is_taken_of_the_same_text_alone(models, tokenizer, monkeypatch):
    """A teacher of rounded weights cannot be measured in place of the dense model."""
    monkeypatch.setattr(recover_command, "measure", lambda *given, **_: {"measured": given[2]})
    known = {"perplexity": 9.0, "evaluation": {"text": "a.txt", "bos": None}}

    def dense(text, known):
        given = {"small": models[1]}, models[0], "int8", {"dense": known}, tokenizer, text
        return recover_command._figures(*given, {"bos": "never"})["dense"]

    assert dense("a.txt", known) is known
    assert dense("b.txt", known) == {"measured": "b.txt"}
    assert dense(None, known) == {"measured": None}
    assert dense("a.txt", {"parameters": 3}) == {"measured": "a.txt"}


def test_a_fit_is_gone_on_from_where_it_read_the_same_texts(models):
    fit = {"recovery": {"texts": ["a"], "fit": {}}}
    assert recover_command._fitted(fit, "full", ["a"]) == fit["recovery"]
    assert recover_command._fitted(fit, "full", ["a", "b"]) is None
    assert recover_command._fitted(fit, "fit", ["a"]) is None
    assert recover_command._fitted({"recovery": {"texts": ["a"]}}, "full", ["a"]) is None
    assert recover_command._fitted({}, "full", ["a"]) is None
    fit["recovery"]["distillation"] = {}
    assert recover_command._fitted(fit, "full", ["a"]) is None


def test_windows_end_where_the_positions_of_the_model_do(tokenizer):
    train, _ = recovery_windows(["bundled"], tokenizer, CONFIG, longest=16)
    assert train.shape[1] == 16


def test_too_little_text_is_refused(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Too short a text.")
    with pytest.raises(RapError, match="one window needs 32"):
        recovery_windows([str(path)], tokenizer, CONFIG)
    for sources in ([], [","]):
        with pytest.raises(RapError, match="at least one source"):
            recovery_windows(sources, tokenizer, CONFIG)
    with pytest.raises(RapError, match="two windows or more"):
        hold_out(torch.zeros(1, 8, dtype=torch.long), 4)


def test_none_does_nothing_and_other_names_are_refused(models, tokenizer):
    dense, small = models
    assert recover_stage(small, dense, tokenizer, "none") == (small, {})
    with pytest.raises(RapError, match=re.escape(", ".join(RECOVERIES))):
        recover_stage(small, dense, tokenizer, "some")
    for name, settings in (
        ("fit", {"config": CONFIG}),
        ("fast", {"config": ShortFit()}),
        ("fast", {"fit": ShortFit()}),
        ("closed-form", {"fit": ShortFit()}),
        ("none", {"config": CONFIG}),
    ):
        with pytest.raises(RapError, match=f"recovery '{name}'"):
            recover_stage(small, dense, tokenizer, name, **settings)
    # Before any work: there is no such source.
    with pytest.raises(RapError, match="unknown recovery"):
        compress("/nowhere", recover="some")


def test_every_step_is_reported_and_the_best_is_returned(models, tokenizer):
    dense, small = models
    state = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    found, report = recover_stage(small, dense, tokenizer, "fast", config=CONFIG)
    steps = [report[f"perplexity_{step}"] for step in ("before", "refitted", "distilled")]
    assert report["perplexity_after"] == min(steps)
    assert len(set(steps)) == 3
    _, validation = recovery_windows(["bundled"], tokenizer, CONFIG)
    measured = rap.perplexity(found, validation.flatten(), window=32).value
    assert measured == pytest.approx(report["perplexity_after"], rel=1e-12)
    assert all(torch.equal(tensor, small.state_dict()[name]) for name, tensor in state.items())


def test_the_paper_refits_nothing(models, tokenizer):
    assert [name for name, config in PRESETS.items() if not config.refit] == ["paper"]
    _, report = recover_stage(
        *models[::-1], tokenizer, "paper", config=replace(CONFIG, refit=False)
    )
    assert "perplexity_refitted" not in report
    assert report["distillation"]


@pytest.mark.parametrize("better", [True, False])
def test_a_refit_is_kept_only_if_it_is_better(models, tokenizer, monkeypatch, better):
    dense, small = models

    def refit(model, *args, **kwargs):
        with torch.no_grad():
            # Uniform logits are what a random model cannot beat on text it never saw.
            model.lm_head.weight.mul_(0.0 if better else 3.0)

    monkeypatch.setattr(stages, "refit_outputs", refit)
    found, report = recover_stage(small, dense, tokenizer, "closed-form", config=CONFIG)
    assert (report["perplexity_refitted"] < report["perplexity_before"]) == better
    assert (found is small) == (not better)
    assert "distillation" not in report


@pytest.fixture(scope="module")
def checkpoints(models, tokenizer, tmp_path_factory):
    """A dense and a pruned checkpoint, the latter as `rap apply` leaves it: without a report."""
    dense, small = models
    folder = tmp_path_factory.mktemp("checkpoints")
    dense.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    save(small, random_plan(dense, ((4, 8), (3, 6))), folder / "pruned", tokenizer)
    return folder


SETTINGS = [f"{name}={getattr(CONFIG, name)}" for name in ("window", "num_windows", "steps")]
SETTINGS += ["global-batch=4", "micro_batch=4", "evaluate_every=1", "learning_rate=3e-3"]
FLAGS = ["--preset", "fast", *(word for setting in SETTINGS for word in ("--set", setting))]
FLAGS += ["--evaluate", "none"]


def test_the_command_writes_a_checkpoint_like_the_one_it_read(checkpoints, tmp_path):
    out, pruned = tmp_path / "out", checkpoints / "pruned"
    given = ("recover", pruned, "--teacher", checkpoints / "dense", "-o", out, *FLAGS)
    result = run(*given, "--json")
    assert result.code == 0, result.err
    report = result.json
    assert report["recovery"]["distillation"]["config"]["learning_rate"] == 3e-3
    assert report["recovery"]["distillation"]["config"]["global_batch"] == 4
    # A report beside the checkpoint is the one printed; remote code and card are there too.
    assert json.loads((out / "rap_report.json").read_text()) == report
    assert {p.name for p in pruned.iterdir()} <= {p.name for p in out.iterdir()}
    section = load_config(out).rap
    assert section["fingerprint"] != load_config(pruned).rap["fingerprint"]
    assert {**section, "fingerprint": 0} == {**load_config(pruned).rap, "fingerprint": 0}
    assert fingerprint_model(load(out)) == section["fingerprint"]
    assert not work_folder(out).exists()
    again = run(*given)
    assert again.code == 2
    assert "--force" in again.err


def test_the_command_tells_how_near_the_dense_model_is(checkpoints, tokenizer, tmp_path):
    text, out = tmp_path / "held-out.txt", tmp_path / "out"
    text.write_text(assets.reference_text("test")[:12_000])
    given = ("recover", checkpoints / "pruned", "--teacher", checkpoints / "dense", "-o", out)
    result = run(*given, *FLAGS[:-1], str(text))
    assert result.code == 0, result.err
    assert "Compared with the dense model on held-out.txt" in result.out
    report = json.loads((out / "rap_report.json").read_text())
    dense, tokens = load_dense(checkpoints / "dense"), evaluation_tokens(str(text), tokenizer)
    for name, folder in (("before_recovery", checkpoints / "pruned"), ("pruned", out)):
        expected = fidelity(load(folder), dense, tokens)
        assert report[name]["kl"]["value"] == pytest.approx(expected.kl.value, rel=1e-5)
        assert report[name]["perplexity"] == pytest.approx(expected.perplexity.value, rel=1e-5)
    assert report["dense"]["perplexity"] == pytest.approx(expected.dense_perplexity.value, rel=1e-5)
    assert report["pruned"]["kl"] != report["before_recovery"]["kl"]


def test_layer_wise_distillation_is_what_recovers_by_default(checkpoints, models, tmp_path):
    """The command and `rap.recover` alike; the documents recommend it first."""
    out, short = tmp_path / "out", ("num_windows=8", "window=32", "steps=2")
    given = ("recover", checkpoints / "pruned", "--teacher", checkpoints / "dense", "-o", out)
    result = run(*given, *(w for s in short for w in ("--set", s)), "--evaluate", "none", "--json")
    assert result.code == 0, result.err
    assert result.json["recovery"]["name"] == "fit"
    assert "distillation" not in result.json["recovery"]
    dense, small = models
    windows = torch.randint(VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(0))
    before, expected = fingerprint_model(small), copy.deepcopy(small)
    fit_layers(expected, dense, windows, FitConfig())
    found = rap.recover(small, dense, windows)
    assert fingerprint_model(found) == fingerprint_model(expected)
    assert fingerprint_model(small) == before != fingerprint_model(found)
    other = rap.recover(small, dense, windows, FitConfig(steps=1))
    assert fingerprint_model(other) != fingerprint_model(found)


def test_wrong_commands_end_in_one_line(checkpoints, tmp_path):
    dense, pruned = checkpoints / "dense", checkpoints / "pruned"
    common = ("--teacher", dense, "-o", tmp_path / "out", "--evaluate", "none")
    cases = {
        "not a pruned checkpoint": (dense, *common),
        "unknown recovery preset": (pruned, *common, "--preset", "slow"),
        "fit seed cannot be -1": (pruned, *common, "--set", "seed=-1"),
        "fit has no setting stepz": (pruned, *common, "--set", "stepz=3"),
        "no setting 'stepz'": (pruned, *common, *FLAGS[:2], "--set", "stepz=3"),
        "recovery steps cannot be 'many'": (pruned, *common, *FLAGS[:2], "--set", "steps=many"),
        "closed-form has no setting": (pruned, *common, *FLAGS, "--preset", "closed-form"),
        "already pruned": (pruned, "--teacher", pruned, "-o", tmp_path / "out"),
        "would be replaced by what is made of it": (
            *(pruned, "--teacher", dense, "-o", pruned, "--force"),
        ),
    }
    for message, arguments in cases.items():
        result = run("recover", *arguments)
        assert (result.code, len(result.err.splitlines())) == (2, 1), (message, result.err)
        assert message in result.err
    assert not (tmp_path / "out").exists()


def test_several_texts_are_read_as_each_alone(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "c,d.txt"
    for file in (first, second):
        file.write_text("Some words. " * 2000)
    train = recover_command.Training(text=[str(first), "only:bundled"])
    texts, shown = train.split("none", "bundled")
    assert (texts, shown) == ([f"train:{first}", "bundled"], None)
    texts, shown = train.split("held-out", "bundled")
    assert (texts, shown) == ([f"train:{first}", "bundled"], f"held-out:{first},bundled")
    with pytest.raises(RapError, match=r"c,d.txt has a comma in its name: give it alone"):
        recover_command.Training(text=[str(first), str(second)]).split("none", "bundled")


def test_compress_recovers_and_leaves_nothing_behind(models, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "fast", CONFIG)
    found = compress(
        tiny_model(vocab_size=VOCABULARY),
        retain=0.5,
        output=tmp_path / "out",
        tokenizer=tokenizer,
        num_windows=2,
        window=64,
        evaluate=None,
        recover="fast",
    )
    recovery = found.report["recovery"]
    assert recovery["perplexity_after"] <= recovery["perplexity_before"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert fingerprint_model(load(tmp_path / "out")) == fingerprint_model(found.model)


def test_a_fit_to_text_that_has_changed_is_not_gone_on_from(models, tokenizer, tmp_path):
    """What was trained on would be held out."""
    dense, small = models
    text = tmp_path / "mine.txt"
    text.write_text(" ".join(f"word {n}" for n in range(4000)))
    config = FitConfig(num_windows=8, window=32, steps=1, validation_windows=2)
    asked = {"texts": [str(text)], "progress": False}
    fitted, report = recover_stage(small, dense, tokenizer, "fit", fit=config, **asked)
    text.write_text(" ".join(f"word {n}" for n in range(7, 3000)))
    with pytest.raises(RapError, match="the training text has changed since"):
        recover_stage(fitted, dense, tokenizer, "fit+fast", fitted=report, **asked)


def test_a_dataset_without_an_end_needs_a_number_of_windows(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RapError, match="c4 is read as a stream, without an end; set num_windows"):
        recovery_windows(["c4"], tokenizer, PRESETS["paper"])


def test_layers_that_hand_values_on_are_distilled_without_a_refit(tokenizer):
    """Their layers cannot be worked on one by one, which a refit does."""
    size = len(tokenizer)
    case = next(case for case in CASES if case.name == "gemma4_text")
    dense = case.model(dtype=torch.float32, vocab_size=size, vocab_size_per_layer_input=size)
    method = METHODS["rap"](retain=0.5)
    statistics = rap.calibrate(dense, random_tokens(2, 16), method.needs_for(dense))
    small = method.apply(dense, method.plan(dense, statistics))
    config = replace(CONFIG, window=16, num_windows=16, steps=2, global_batch=4, evaluate_every=2)
    _, report = recover_stage(small, dense, tokenizer, "fast", texts=["bundled"], config=config)
    assert report["distillation"]["steps"] == 2
