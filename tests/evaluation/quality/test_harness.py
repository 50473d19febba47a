"""Tasks of lm-eval on the live model, offline: a small local task scored by hand as well."""

import json
import math
import sys

import pytest
import torch

from cases.command import error_violations, run
from rap.checkpoint.load import fingerprint_tokenizer
from rap.evaluation.quality import harness
from rap.evaluation.quality.harness import (
    GROUPS,
    TaskScore,
    mean_score,
    mean_stderr,
    run_tasks,
)
from rap.model.errors import RapError
from rap.model.fingerprint import fingerprint_model

QUESTIONS = [
    ("It was a dark evening, and the old", [" man", " zebra crossing"], 0),
    ("She looked at him with her", [" eyes", " ox"], 0),
    ("He went out of the", [" the of of the", " room"], 1),
    ("I do not know what you", [" mean", " of"], 1),  # the answer is wrong on purpose
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a multiple-choice task of four questions."""
    pytest.importorskip("lm_eval")
    made = tmp_path_factory.mktemp("tasks")
    data = made / "questions.jsonl"
    rows = [{"question": q, "choices": c, "label": label} for q, c, label in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "four_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm")
        ],
        "metadata": {"version": 3.0},
    }
    (made / "four_questions.yaml").write_text(json.dumps(task))  # JSON is YAML
    return made


@torch.no_grad()
def log_likelihood(model, tokenizer, question: str, choice: str) -> float:
    ids = tokenizer(question + choice, return_tensors="pt", add_special_tokens=False).input_ids
    start = len(tokenizer(question, add_special_tokens=False).input_ids)
    logits = model(ids).logits.log_softmax(-1)[0]
    return sum(float(logits[i - 1, ids[0, i]]) for i in range(start, ids.shape[1]))


def by_hand(model, tokenizer, normalized: bool) -> float:
    """acc is by log-likelihood; acc_norm by log-likelihood per character of the choice."""
    right = 0
    for question, choices, label in QUESTIONS:
        scores = [
            log_likelihood(model, tokenizer, question, choice) / (len(choice) if normalized else 1)
            for choice in choices
        ]
        right += scores.index(max(scores)) == label
    return right / len(QUESTIONS)


def test_score_is_the_one_computed_by_hand(folder, reference_model, tokenizer):
    modes = [module.training for module in reference_model.modules()]
    (score,) = run_tasks(reference_model, tokenizer, ["four_questions"], folder=folder)
    assert score.metric == "acc_norm"
    assert score.value == by_hand(reference_model, tokenizer, normalized=True) < 1
    assert (score.task, score.num_examples, score.version) == ("four_questions", 4, "3.0")
    assert [module.training for module in reference_model.modules()] == modes


def test_the_tokenizer_is_left_as_it_is(folder, reference_model, tokenizer):
    """lm-eval makes the token that ends a text one that pads, which would make it another one."""
    before = fingerprint_tokenizer(tokenizer)
    run_tasks(reference_model, tokenizer, ["four_questions"], limit=1, folder=folder)
    assert fingerprint_tokenizer(tokenizer) == before


def test_command_twice_the_same_digits_with_fingerprint_and_versions(
    folder, reference_model, tmp_path
):
    out = tmp_path / "result.json"
    arguments = ("evaluate", "zero-shot", "bundled", "--tasks", "four_questions")
    local = ("--task-folder", folder, "--limit", 3, "--dtype", "float32", "--json")
    results = [run(*arguments, *local, *extra) for extra in (("-o", out), ())]
    assert results[0].code == 0, results[0].err
    first, second = (result.json for result in results)
    assert json.loads(out.read_text()) == first
    assert first["tasks"] == second["tasks"]
    assert first["tasks"][0]["num_examples"] == 3
    assert first["tasks"][0]["value"] == 1
    assert first["mean_stderr"] == first["tasks"][0]["stderr"] == 0
    last = first["table"]["rows"][-1]
    assert (last[0], last[3]) == ("mean", f"{first['mean']:.4f}")
    assert first["fingerprint"] == fingerprint_model(reference_model)
    assert first["lm_eval"] == harness.harness_version() is not None
    assert first["provenance"]["settings"]["limit"] == 3


@pytest.mark.parametrize(
    ("tasks", "limit", "message"),
    [
        (["four_questions"], 0, "limit 0"),
        ([], None, "no task is named"),
        (["paper-zero-shot", "paper-longbench"], None, "run them one by one"),
    ],
)
def test_wrong_requests(folder, reference_model, tokenizer, tasks, limit, message):
    with pytest.raises(RapError, match=message):
        run_tasks(reference_model, tokenizer, tasks, limit=limit, folder=folder)


def test_an_unknown_task_is_one_line():
    pytest.importorskip("lm_eval")
    result = run("evaluate", "zero-shot", "bundled", "--tasks", "no_such_task")
    assert error_violations(result) == []
    assert "no task no_such_task" in result.err


def test_data_that_cannot_be_had_is_one_line():
    pytest.importorskip("lm_eval")
    result = run("evaluate", "zero-shot", "bundled", "--tasks", "piqa", "--limit", 1)
    assert error_violations(result) == []
    assert "could not run piqa" in result.err


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("doc_to_text", "{{prompt}}", "'prompt' is undefined"),
        ("test_split", "tests", "KeyError: 'tests'"),
        ("dataset_path", "text_of_no_builder", "four_questions"),
    ],
)
def test_a_mistake_in_a_task_is_one_line(folder, tmp_path, field, value, said):
    task = json.loads((folder / "four_questions.yaml").read_text())
    (tmp_path / "four_questions.yaml").write_text(json.dumps(task | {field: value}))
    asked = ("--tasks", "four_questions", "--task-folder", tmp_path)
    result = run("evaluate", "zero-shot", "bundled", *asked)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert said in result.err.splitlines()[-1]


def test_a_folder_of_tasks_that_is_not_there_is_named(tmp_path):
    result = run("evaluate", "zero-shot", "bundled", "--task-folder", tmp_path / "none")
    assert error_violations(result) == []
    assert "there is no directory" in result.err


def test_without_lm_eval_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    result = run("evaluate", "zero-shot", "bundled")
    assert error_violations(result) == []
    assert "pip install lm-eval" in result.err


def test_groups_are_the_paper_s():
    zero_shot, longbench = GROUPS["paper-zero-shot"], GROUPS["paper-longbench"]
    assert len(zero_shot.metrics) == 6
    assert {task for task, metric in zero_shot.metrics.items() if metric == "acc"} == {"winogrande"}
    assert (len(longbench.metrics), longbench.limit) == (5, 50)


def test_every_task_of_a_group_exists_with_its_metric():
    pytest.importorskip("lm_eval")
    known = harness._index(None, True).task_index
    for group in GROUPS.values():
        for task, metric in group.metrics.items():
            assert metric in {one["metric"] for one in known[task].cfg["metric_list"]}, task


def test_a_metric_the_group_wants_must_be_there():
    found = {
        "results": {"piqa": {"alias": "piqa", "acc,none": 0.5, "acc_stderr,none": 0.1}},
        "versions": {"piqa": 1.0},
        "n-samples": {"piqa": {"original": 9, "effective": 4}},
    }
    score = TaskScore("piqa", "acc", 0.5, 4, "1.0", math.sqrt(1 / 12))
    assert harness._score("piqa", {"piqa": None}, found) == score
    with pytest.raises(RapError, match="no metric acc_norm, but acc"):
        harness._score("piqa", {"piqa": "acc_norm"}, found)


def test_the_first_way_of_looking_for_an_answer_is_named():
    ways = {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
    found = {
        "results": {"gsm8k": {"alias": "gsm8k", **ways, "exact_match_stderr,strict-match": "N/A"}},
        "versions": {"gsm8k": 3.0},
        "n-samples": {"gsm8k": {"original": 9, "effective": 4}},
    }
    score = TaskScore("gsm8k", "exact_match, strict-match", 0.25, 4, "3.0", 0.25)
    assert harness._score("gsm8k", {"gsm8k": None}, found) == score


def test_groups_of_different_limits_need_one_that_is_given(monkeypatch):
    monkeypatch.setattr(harness, "_lm_eval", lambda: None)
    asked = ["paper-longbench", "piqa"]
    with pytest.raises(RapError, match="read different numbers of examples: give a limit"):
        harness.run_tasks(None, None, asked)
    monkeypatch.setattr(harness, "_manager", lambda tasks, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it came as far as that
        harness.run_tasks(None, None, asked, limit=2)


def test_mean_is_over_tasks():
    scores = [TaskScore(str(n), "acc", value, n, "1") for n, value in ((1, 0.5), (100, 0.7))]
    assert mean_score(scores) == pytest.approx(0.6)


def test_errors_of_shares_are_those_of_lm_eval():
    own = pytest.importorskip("lm_eval.api.metrics").mean_stderr
    for right, count in ((1, 2), (3, 7), (0, 5), (500, 500)):
        items = [1.0] * right + [0.0] * (count - right)
        assert harness._stderr("acc", right / count, count) == pytest.approx(own(items))
    assert harness._stderr("acc", 1.0, 1) is None
    assert harness._stderr("word_perplexity", 12.0, 9) is None
    # truthfulqa_mc2 calls a mean of probabilities acc.
    assert harness._stderr("acc", 0.43, 9) is None


def test_the_error_of_a_mean_is_of_independent_tasks():
    scores = [TaskScore(str(n), "acc", 0.5, 9, "1", error) for n, error in ((1, 0.3), (2, 0.4))]
    assert mean_stderr(scores) == pytest.approx(0.25)
    assert mean_stderr([*scores, TaskScore("3", "f1", 0.5, 9, "1")]) is None


def test_the_printed_table_has_errors(folder):
    local = ("--tasks", "four_questions", "--task-folder", folder, "--dtype", "float32")
    result = run("evaluate", "zero-shot", "bundled", *local)
    (score,) = [line for line in result.out.splitlines() if "four_questions" in line]
    assert "standard error" in result.out
    assert score.split()[-2].startswith("0.")
