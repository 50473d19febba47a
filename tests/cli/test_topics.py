"""The command line as people expect it: topics, completion, dry runs, Ctrl-C, plain pipes."""

import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import typer
from transformers import AutoConfig

from cases.command import error_violations, run
from cases.models import tiny_model
from rap.cli import EXIT_CODES, TOPICS, app, compress, dry_run, stopped
from rap.cli.setup import command_tree, completion_script
from rap.model.errors import RapError
from rap.pipeline.defaults import num_parameters

ROOT = typer.main.get_command(app)
SMALL = ("--windows", "2", "--window", "64")


def test_every_command_has_a_topic_and_an_example():
    listed = {name: entry for entries in TOPICS.values() for name, entry in entries.items()}
    assert sum(len(entries) for entries in TOPICS.values()) == len(listed)
    assert listed.keys() == ROOT.commands.keys()
    for name, entry in listed.items():
        assert entry.example.split()[:2] == ["rap", name]


def test_help_is_grouped_and_plain():
    shown = run("--help").out
    for topic, entries in TOPICS.items():
        assert f"{topic}:" in shown
        for entry in entries.values():
            assert f"$ {entry.example}\n" in shown, "an example stays on one line"
    assert all(f"  {code} " in shown for code in EXIT_CODES)
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("words", "code", "heavy"),
    [
        (["--help"], 0, False),
        (["--version"], 0, False),
        (["compres"], 2, False),
        (["completion", "--help"], 0, True),  # a command brings along what it may need
    ],
)
def test_help_does_not_wait_for_torch(words, code, heavy):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rap", *words], capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == code
    assert ("torch" in imported, "transformers" in imported) == (heavy, heavy)
    assert "rap.cli" in imported


def test_a_name_is_there_for_the_command_too():
    """Nothing but the command has its process, and that may still use the package."""
    code = "import sys; sys.argv[0] = 'rap'; import rap; before = 'torch' in sys.modules; "
    code += "print(before, 'rap' in rap.METHODS, hasattr(rap, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True False\n"


def test_nothing_is_coloured_in_a_pipe():
    for result in (run("inspect", "bundled"), run("compress", "nowhere", "-o", "x")):
        assert "\x1b" not in result.out + result.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["rap", ""], {"compress", "evaluate", "--version"}, {"perplexity"}),
        (["rap", "comp"], {"compress", "compare", "completion"}, {"evaluate"}),
        (["rap", "evaluate", "f"], {"fidelity"}, {"perplexity", "fetch"}),
        (["rap", "compress", "bundled", "--re"], {"--retain", "--recover"}, {"--teacher"}),
        (["rap", "evaluate", "cache", "out", "--b"], {"--bits", "--bos"}, {"--dense"}),
    ],
)
def test_completion_offers_what_exists(words, some, none):
    script = completion_script(ROOT, "bash")
    assert completion_script(ROOT, "zsh").endswith(script)
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _rap; echo ${{COMPREPLY[@]}}"
    answer = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True
    )
    offered = set(answer.stdout.split())
    assert some <= offered
    assert not none & offered


def test_completion_for_fish_names_every_command():
    script = completion_script(ROOT, "fish")
    for place, _ in command_tree(ROOT):
        for word in place.split():
            assert f" {word} " in script or f" {word}'" in script
    assert "-l retain" in script
    with pytest.raises(RapError, match="unknown shell 'tcsh'"):
        completion_script(ROOT, "tcsh")


def test_dry_run_of_compress_reads_and_writes_nothing(tmp_path):
    output = tmp_path / "out"
    settings = ("bundled", *SMALL, "--recover", "fit+fast", "-o", output, "--dry-run")
    with (
        mock.patch.object(compress, "compress", side_effect=AssertionError("it compressed")),
        mock.patch("rap.checkpoint.load._load", side_effect=AssertionError("weights were read")),
    ):
        report = run("compress", *settings, "--json").json
        printed = run("compress", *settings).out
    assert list(tmp_path.iterdir()) == []
    steps = {step["step"]: step for step in report["steps"]}
    assert list(steps) == ["calibrate", "fit", "distil", "evaluate"]
    assert steps["calibrate"]["tokens"] == 2 * 64
    assert steps["distil"]["tokens"] == 40 * 16 * 256
    assert report["dry_run"] is True
    assert report["method"]["name"] == "rap"
    assert all(size > 0 for size in report["memory_bytes"].values())
    assert "Dry run: no weights or text were read" in printed


def test_dry_run_refuses_what_the_run_would(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    assert error_violations(run("compress", "bundled", "-o", taken, "--dry-run")) == []
    unknown = run("compress", "bundled", "-o", tmp_path / "out", "--recover", "x", "--dry-run")
    assert error_violations(unknown) == []
    short = tmp_path / "short"
    tiny_model(max_position_embeddings=64).save_pretrained(short)
    asked = ("compress", short, "-o", tmp_path / "out", "--window", 128, "--dry-run")
    longer = run(*asked, "--method", "rap:merge=1", "--calibration", "only:bundled")
    assert error_violations(longer) == []
    assert "windows have 128 tokens, the model was made for 64" in longer.err


def test_dry_run_counts_the_weights_once():
    from rap import assets

    config = AutoConfig.from_pretrained(assets.reference_path())
    for name, copied in (("cpu", torch.float32.itemsize), ("cuda", 0)):
        device = torch.device(name)
        model = dry_run.unloaded(config, device)
        assert num_parameters(model) == assets.reference_model().num_parameters()
        expected = num_parameters(model) * (torch.bfloat16.itemsize + copied)
        assert dry_run.weight_bytes(config, model, "auto", device) == expected


def test_dry_run_is_of_the_device_that_does_the_work(tmp_path, monkeypatch):
    """The GPU where there is one, unless --device names another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    asked = []
    monkeypatch.setattr(dry_run, "free_memory", lambda device: asked.append(device.type) or 1)
    words = ("compress", "bundled", "--dry-run", "--json", "-o", tmp_path / "out")
    assert run(*words, "--device", "cpu").json["device"].startswith("cpu (")
    assert run(*words, "--device-map", "auto").json["device"] == "GPU"
    assert run(*words).json["device"] == "GPU"
    assert asked == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compress", "m", "-o", "out"], "go on from what is finished"),
        (["compress", "bundled", "-o", "out"], "start anew"),
        (["compress", "m", "--recover=none", "-o", "out"], "start anew"),
        (["compress", "m", "--recover", "none", "-o", "out"], "start anew"),
        (["compress", "bundled", "--recover", "fit"], "go on from what is finished"),
        (["compress", "m", "--recover=fit", "-o", "out"], "go on from what is finished"),
        (["compress", "m", "--stream", "-o", "out"], "go on from what is finished"),
        (["compress", "m", "--stream", "--recover", "fit"], "go on from what is finished"),
        (["recover", "out"], "go on from what is finished"),
        (["compare", "m"], "go on from what is finished"),
    ],
)
def test_ctrl_c_says_how_to_go_on(arguments, said):
    assert said in stopped(arguments)


def test_ctrl_c_leaves_nothing_half_written(tmp_path):
    with mock.patch("rap.pipeline.report.save", side_effect=KeyboardInterrupt):
        result = run("compress", "bundled", *SMALL, "--evaluate", "none", "-o", tmp_path / "out")
    assert result.code == 130
    assert result.err.splitlines()[-1].startswith("stopped; no output is left half-written")
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []
