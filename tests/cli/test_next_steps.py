"""The printed next commands: they repeat the data of the run, and each of them runs."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.command import run
from cases.fits import ShortFit
from rap import assets
from rap.checkpoint.files import read_json
from rap.checkpoint.load import load_config
from rap.cli import compress as compress_command
from rap.cli import recover
from rap.cli.compress import CompressionRun, say_report
from rap.cli.groups import PruningOptions, ReadingOptions
from rap.data.held_out import dataset_name, split
from rap.pipeline import Defaults
from rap.recovery import stages
from rap.recovery.config import recovery_config
from rap.recovery.layer_fit import FitConfig
from rap.serving.capacity import EngineCapacity
from rap.serving.targets import TARGETS

SERVED = [EngineCapacity("vLLM on a CPU", "unpadded", 1.4, "")]
PRUNED = SimpleNamespace(model_type="rap_llama")
LABELS = ("evaluate", "recover", "serve")


def printed(stderr):
    """Label to the words of the command that was printed behind it."""
    found = re.findall(rf"^({'|'.join(LABELS)}): +(.*)$", stderr, flags=re.MULTILINE)
    return {label: shlex.split(command, comments=True) for label, command in found}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with two files of text, whose names a shell would take apart."""
    text = assets.reference_text("calibration")
    for number, name in enumerate(("my text.txt", "other's.txt")):
        (tmp_path / name).write_text(text[number * 40_000 :][:40_000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "FitConfig", ShortFit)
    monkeypatch.setattr("rap.cli.recover.fit_config", lambda **given: ShortFit(**given))


@pytest.mark.parametrize("target", [None, *TARGETS])
def test_every_printed_command_runs(data, target):
    retain = 0.5 if target in ("llamacpp", "mlx") else 0.7
    words = ["compress", "bundled", "--calibration", "my text.txt,other's.txt", "--windows", 2]
    words += ["--window", 64, "--bos", "never", "--seed", 3, "--device", "cpu", "-o", "an out"]
    words += ["--retain", retain, *(["--target", target] if target else [])]
    made = run(*words)
    assert made.code == 0, made.err
    commands = printed(made.err)
    assert tuple(commands) == LABELS
    _, *evaluate = commands["evaluate"]
    again = run(*evaluate, "--json")
    assert again.code == 0, again.err
    report = read_json(Path("an out/rap_report.json"), "")
    # A plain export rounds what it scales to the stored type.
    close = pytest.approx(report["pruned"]["perplexity"], rel=1e-3 if target == "plain" else 1e-6)
    assert again.json["perplexity"]["value"] == close
    _, *recover = commands["recover"]
    recovered = run(*recover, "--json")
    assert recovered.code == 0, recovered.err
    settings = recovered.json["provenance"]["settings"]
    assert settings["seed"] == recovered.json["recovery"]["fit"]["config"]["seed"] == 3
    assert recovered.json["recovery"]["texts"] == ["train:my text.txt,train:other's.txt"]
    same = ("text", "dataset", "num_windows", "window", "bos")
    scored = recovered.json["pruned"]["evaluation"]
    assert {n: scored[n] for n in same} == {n: report["pruned"]["evaluation"][n] for n in same}
    _served(commands["serve"], target)


def _served(command, target):
    """What needs an engine that is not installed is read, and ends before it starts."""
    program, *words = command
    if target == "plain":  # another program's command, and that is not installed
        assert command == ["vllm", "serve", "an out"]
        return
    assert program == "rap"
    if words[0] == "export":
        result = run(*words)
        assert result.code == 0, result.err
        assert Path(words[words.index("-o") + 1]).exists()
        follow = re.search("`rap (verify .*)`", result.err)
        assert (follow is not None) == (target == "llamacpp")
        if follow:
            assert Path(shlex.split(follow[1])[1]).is_file()
    else:
        assert words == ["serve", "an out"]
        assert run(*words, "--port", "x").code == 2, "its arguments are read"
        assert "vLLM is not installed" in run(*words).err


def test_what_is_no_default_is_repeated_and_nothing_else():
    plain = CompressionRun(model="m", output=Path("o"), read=ReadingOptions()).next_steps(
        PRUNED, SERVED
    )
    assert plain == [
        "evaluate: rap evaluate fidelity o --dense m --text bundled --max-windows 8",
        "recover:  rap recover o --teacher m --preset fit --text bundled -o o-recovered",
        "serve:    rap serve o",
    ]
    read = ReadingOptions(
        calibration="paper", dtype="bfloat16", device_map="auto", bos="always", seed=7
    )
    about = {"model": "m", "output": Path("o"), "read": read, "window": 512}
    evaluate, recover, _ = CompressionRun(**about, recover="fit", evaluate="a b").next_steps(
        PRUNED, SERVED
    )
    assert evaluate.endswith(
        "--text 'a b' --max-windows 8 --window 512 --bos always --device-map auto"
    )
    assert recover.endswith(
        "--preset full --text paper --evaluate 'a b' --seed 7 --teacher-dtype bfloat16 "
        "--bos always --device-map auto -o o-recovered"
    )
    none = CompressionRun(**about, evaluate="none").next_steps(PRUNED, SERVED)
    assert "--text wikitext2 " in none[0]
    assert "--evaluate none " in none[1]


@pytest.mark.parametrize(
    ("pretrained", "writes", "named"),
    [
        (True, False, "bundled,repeated:bundled,python"),
        (True, True, "auto"),
        (False, False, "auto"),
    ],
)
def test_recovery_reads_what_was_read_from_files(pretrained, writes, named):
    """By default it adds what the model writes, which `--stream` cannot have."""
    defaults = Defaults(pretrained=pretrained, writes=writes)
    read = compress_command._as_read(ReadingOptions(calibration="auto"), defaults)
    assert read.calibration == named
    about = {"model": "m", "output": Path("o"), "recover": "none"}
    _, recover, _ = CompressionRun(read=read, **about).next_steps(PRUNED, SERVED)
    assert ("--text" in recover) is (named != "auto")


def test_what_was_fitted_is_not_refitted_on_another_text():
    """The report of a fit on the same text says so to the stage itself."""
    chosen = recovery_config("full")
    assert chosen.refit
    fitted = {"recovery": {"fit": {}, "texts": ["mine.txt"]}}
    assert recover._unless_fitted(chosen, fitted) == replace(chosen, refit=False)
    assert recover._unless_fitted(chosen, {}) == chosen
    assert recover._unless_fitted(FitConfig(), fitted) == FitConfig()


def test_data_without_a_held_out_part_is_evaluated_on_other():
    """The work is done by then, and nothing was evaluated that could have said so before."""
    read = ReadingOptions(calibration="own")
    made = CompressionRun(model="m", output=Path("o"), read=read, evaluate="none")
    evaluate, recover, _ = made.next_steps(PRUNED, SERVED)
    assert "--text bundled " in evaluate
    assert "--text own --evaluate none " in recover


def test_a_checkpoint_that_no_engine_or_every_engine_loads():
    made = CompressionRun(model="m", output=Path("an o"), read=ReadingOptions())
    assert "no engine" in made.next_steps(PRUNED, [])[2]
    plain = made.next_steps(SimpleNamespace(model_type="llama"), [])[2]
    assert shlex.split(plain, comments=True)[1:] == ["vllm", "serve", "an o"]


def test_an_export_has_the_tokenizer_that_llamacpp_does_not_know():
    about = {"output": Path("o"), "read": ReadingOptions(), "target": "llamacpp"}
    ends = {"bundled": "--pre smollm", "m.gguf": "--tokenizer-from m.gguf", "m": "-o o.gguf"}
    for model, end in ends.items():
        assert CompressionRun(model=model, **about).next_steps(PRUNED, [])[2].endswith(end)


def test_the_split_is_by_the_data():
    assert split("bundled", "held-out") == ("bundled", "bundled")
    assert split("paper", "held-out") == ("paper", "wikitext2")
    assert dataset_name("wikitext2") == "WikiText-2 test"


@pytest.mark.parametrize(("before", "after", "told"), [(12.5, 12.5, True), (12.5, 11.0, False)])
def test_a_pruned_model_that_no_recovery_was_better_than_is_called_so(capsys, before, after, told):
    scored = {"kv_bytes_per_token": 8, "attention_parameters": 4, "parameters": 9}
    report = {"dense": scored, "pruned": scored, "attention": []}
    report["recovery"] = {"perplexity_before": before, "perplexity_after": after}
    report["provenance"] = {"seconds": {"calibrate": 61.4, "recover": 3600.0}}
    made = CompressionRun(model="m", output=Path("o"), read=ReadingOptions(), recover="fit")
    say_report(report, made, PruningOptions(), SimpleNamespace(model_type="llama"), as_json=False)
    shown = capsys.readouterr()
    assert ("the pruned model is kept" in shown.err) is told
    assert ("recovered" in shown.out.splitlines()[2]) is not told
    assert "time: 1:01:01 (calibrate 0:01:01, recover 1:00:00)" in shown.err


def test_what_was_pruned_is_kept_where_its_plain_form_cannot_be_written(tmp_path, monkeypatch):
    """It took the time: calibration and recovery."""

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compress_command, "export_stock", full)
    sizes = ["--windows", "4", "--window", "64", "--evaluate", "none"]
    out = tmp_path / "out"
    result = run("compress", "bundled", "--retain", "0.5", "--target", "plain", *sizes, "-o", out)
    assert result.code == 2
    rest = f"rap export stock {tmp_path / '.out.pruned'} -o {out}"
    assert f"No space left on device; the model is in {tmp_path}" in result.err
    assert rest in result.err
    monkeypatch.undo()
    assert run(*rest.split()[1:]).code == 0
    assert load_config(out).num_key_value_heads == 1
