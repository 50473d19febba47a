"""Progress in a log: plain lines now and then, and a bar on a terminal only."""

import re
from contextlib import suppress

import pytest

import rap
from cases.command import run
from cases.models import random_tokens, tiny_model
from rap.evaluation.quality.perplexity import perplexity
from rap.recovery.closed_form import refit_outputs
from rap.recovery.config import RecoveryConfig
from rap.recovery.distillation import distill
from rap.runtime import progress
from rap.runtime.progress import INTERVAL, Progress, Stopwatch, track

SMALL = ("--windows", "2", "--window", "128", "--evaluate", "none")


class Clock:
    """A stand-in for `time` that stands still unless told."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The time that progress reads."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_stage_begins_where_the_one_before_ends(clock):
    watch = Stopwatch()
    clock.now += 60
    watch.end("calibrate")
    clock.now += 0.25
    watch.end("prune")
    clock.now += 600.5
    watch.end("recover")
    assert watch.seconds == {"calibrate": 60.0, "prune": 0.2, "recover": 600.5}


def test_a_log_gets_a_line_every_fifteen_seconds_and_one_at_the_end(clock, capsys):
    with Progress("calibrating", 4000, "tokens", tokens=1) as bar:
        for _ in range(40):
            clock.now += 1
            bar.advance(100)
    out, err = capsys.readouterr()
    assert (out, INTERVAL) == ("", 15)
    assert err.splitlines() == [
        "calibrating: 1,500 of 4,000 tokens (38%), 100 tokens/s, 0:00:25 left",
        "calibrating: 3,000 of 4,000 tokens (75%), 100 tokens/s, 0:00:10 left",
        "calibrating: 4,000 tokens in 0:00:40, 100 tokens/s",
    ]


def test_work_that_goes_on_counts_its_speed_from_where_it_went_on(clock, capsys):
    with Progress("recover", 40, "steps", tokens=50, done=20) as bar:
        clock.now += 20
        bar.update(30, figures="loss 1.5")
    assert capsys.readouterr().err.splitlines() == [
        "recover: 30 of 40 steps (75%), 25 tokens/s, 0:00:20 left, loss 1.5",
        "recover: 30 steps in 0:00:20, 25 tokens/s, loss 1.5",
    ]


def test_work_that_fails_says_how_far_it_came(clock, capsys):
    with suppress(ValueError), Progress("rewriting", 10, "MB") as bar:
        bar.advance(2.5)
        raise ValueError
    assert capsys.readouterr().err == "rewriting: stopped at 2 of 10 MB after 0:00:00\n"


def test_nothing_is_shown_unless_it_is_asked_for(clock, capsys):
    with Progress("calibrating", 10, "tokens", tokens=1, shown=False) as bar:
        clock.now += 100
        bar.advance(10)
    assert list(track([1, 2], "timing", "contexts", shown=False)) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_steps_are_counted_when_they_are_done(clock, capsys):
    for _ in track("abcd", "refitting", "layers"):
        clock.now += 20
    assert capsys.readouterr().err.splitlines()[:2] == [
        "refitting: 1 of 4 layers (25%), 0:01:00 left",
        "refitting: 2 of 4 layers (50%), 0:00:40 left",
    ]


def test_a_terminal_gets_a_bar_and_no_lines(clock, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress("calibrating", 10, "tokens", tokens=1) as bar:
        clock.now += 100
        bar.advance(10)
    err = capsys.readouterr().err
    assert "calibrating" in err
    assert "\x1b[" in err
    assert "of 10 tokens" not in err


def test_a_command_writes_its_progress_into_a_log(tmp_path):
    plan = tmp_path / "plan.rap"
    found = run("plan", "bundled", "-o", plan, *SMALL[:4])
    line = r"calibrating activations and gradients: 256 tokens in 0:\d\d:\d\d, [\d,]+ tokens/s\n"
    assert re.search(line, found.err), found.err
    found = run("apply", "bundled", plan, "-o", tmp_path / "out", "--stream")
    assert re.search(r"rewriting: 9 MB in 0:\d\d:\d\d\n", found.err), found.err


def test_all_long_work_tells_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    model, windows = tiny_model(), random_tokens(12, 16)
    method = rap.Rap(retain=0.5, align=2)
    statistics = rap.calibrate(model, windows, method.needs, progress=True)
    rap.calibrate(model, windows, {"energy"}, progress=True)
    small = method.apply(model, method.plan(model, statistics))
    perplexity(small, windows.flatten(), window=16, progress=True)
    refit_outputs(small, model, windows, progress=True)
    config = RecoveryConfig(steps=2, global_batch=2, micro_batch=2, learning_rate=1e-3)
    distill(small, model, windows, config, progress=True)
    lines = capsys.readouterr().err.splitlines()
    for start in (
        "calibrating activations: 128 of 192 tokens (67%), ",
        "calibrating activations and gradients: 16 of 192 tokens (8%), ",
        "perplexity: 16 of 192 tokens (8%), ",
        "refitting outputs: 1 of 2 layers (50%), ",
        "recover: 1 of 2 steps (50%), ",
    ):
        line = next((line for line in lines if line.startswith(start)), "")
        assert line.endswith(" left") or "left, loss" in line, (start, lines)
        assert "tokens/s" in line or start.startswith("refitting")
