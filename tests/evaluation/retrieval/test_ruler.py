"""Tasks after RULER: documents that tell their answers and nothing else does, and their scores."""

import collections
import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cases.characters import Characters
from cases.command import error_violations, run
from rap.data.protocol import evaluation_rng
from rap.evaluation.quality.intervals import Interval
from rap.evaluation.retrieval import ruler
from rap.evaluation.retrieval.documents import (
    ANSWER,
    STATED,
    TEXT,
    answer_runs,
    encoder,
)
from rap.evaluation.retrieval.ruler import TASKS, WORDS
from rap.model.errors import RapError

VOCABULARY = 128
WRONG = ord("~")


ENCODE = encoder(Characters())


def words_of(document) -> str:
    return "".join(map(chr, document.ids))


def answers_of(document) -> list[str]:
    return [words_of(document)[run[0] : run[-1] + 1] for run in answer_runs(document)]


def _of(words: str, key: str, pattern: str) -> list[str]:
    return re.findall(pattern.format(key=key), words)


def _needle(text: str, question: str) -> list[str]:
    (name,) = re.findall(r"What is the special number of (\w+)\?", question)
    return _of(text, name, r" The special number of {key} is (\d{{4}})\.")


def _values(text: str, question: str) -> list[str]:
    (name,) = re.findall(r"What are the special numbers of (\w+),", question)
    return _of(text, name, r" One of the special numbers of {key} is (\d{{4}})\.")


def _variables(text: str, question: str) -> list[str]:
    (value,) = re.findall(r"Which are the variables that hold the value (\d{4}),", question)
    held = {}
    for name, direct, other in re.findall(r" VAR X(\d+) = (?:(\d{4})|VAR X(\d+))\.", text):
        held[name] = direct or held[other]
    return [name for name in held if held[name] == value]


def _word(text: str, question: str) -> list[str]:
    (listed,) = re.findall(r" Here is a list of words:((?: \"\w+\",)+)", text)
    return [collections.Counter(re.findall(r"\w+", listed)).most_common(1)[0][0]]


def _box(text: str, question: str) -> list[str]:
    (name,) = re.findall(r"The box of (\w+) holds which number\?", question)
    (color,) = _of(text, name, r" The special number of {key} is in the (\w+) box\.")
    return _of(text, color, r" The number in the {key} box is (\d{{4}})\.")


ORACLES = {
    "single-needle": _needle,
    "multi-key": _needle,
    "multi-value": _values,
    "variable-tracking": _variables,
    "common-words": _word,
    "two-hop": _box,
}
NUM_ANSWERS = {"multi-value": 4, "variable-tracking": 4}
NUM_STATED = {"multi-key": 4, "multi-value": 4, "variable-tracking": 8, "two-hop": 8}


class Oracle(torch.nn.Module):
    """Reads the document as a person would, and knows `right` of the answers in their order."""

    def __init__(self, task: str, right: int = 99):
        super().__init__()
        self.task, self.right = task, right
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        logits[:, :, WRONG] = 10.0
        for row, ids in enumerate(input_ids):
            words = "".join(map(chr, ids))
            text, _, question = words.partition(" Question:")
            # Where answers begin, the stem of words that always stands before them included.
            at = len(words) - len(question) + max(question.rfind(x) for x in (" is", " are"))
            for number, answer in enumerate(ORACLES[self.task](text, question)):
                at = words.index(answer, at)
                for place, character in enumerate(answer if number < self.right else ""):
                    logits[row, at + place - 1, ord(character)] = 20.0
                at += len(answer)
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(97, 123, 6000)


def _documents(text, task, length=1024, **changes):
    asked = {"num_documents": 3, "seed": 0, **changes}
    return ruler.ruler_documents(ENCODE, text, task, length, **asked)


def test_every_task_has_an_oracle():
    assert list(ORACLES) == list(TASKS)


@pytest.mark.parametrize("length", [800, 1024, 2047])
@pytest.mark.parametrize("task", TASKS)
def test_documents_have_their_length_and_tell_their_answers(text, task, length):
    for document in _documents(text, task, length):
        words, answers = words_of(document), answers_of(document)
        assert len(words) == length
        stated, _, question = words.partition(" Question:")
        assert ORACLES[task](stated, question) == answers
        assert len(answers) == NUM_ANSWERS.get(task, 1)
        # Nothing stands behind the last answer, and the question does not give any away.
        assert question.endswith(answers[-1])
        end = int(np.flatnonzero(document.kinds == ANSWER)[0])
        assert not any(answer in words[len(stated) : end] for answer in answers)
        # Without what is stated the answers are nowhere.
        kept = "".join(map(chr, document.ids[document.kinds == TEXT]))
        assert not any(answer in kept for answer in answers)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_not_asked_for_is_no_answer(text, task):
    for document in _documents(text, task, num_documents=20):
        answers = answers_of(document)
        stated = "".join(map(chr, document.ids[document.kinds == STATED]))
        assert len(set(answers)) == len(answers)
        if task == "common-words":
            counted = collections.Counter(re.findall(r"\"(\w+)\",", stated))
            assert counted.pop(answers[0]) == 10 * max(counted.values())
            assert len(counted) == 30
            continue
        values = re.findall(r"\b\d{4}\b", stated)
        assert len(set(values)) == len(values)
        assert stated.count(".") == NUM_STATED.get(task, 1)
        if task == "variable-tracking":
            names = re.findall(r" VAR X(\d+) =", stated)
            assert len(set(names)) == len(names) == 8


def test_statements_stand_anywhere(text):
    places = [
        np.flatnonzero(document.kinds == STATED)[0] / 1024
        for document in _documents(text, "single-needle", num_documents=60)
    ]
    assert min(places) < 0.15
    assert max(places) > 0.75
    assert 0.3 < np.mean(places) < 0.6


def test_the_words_are_different_words():
    assert len(set(WORDS)) == len(WORDS)
    assert not any(one != other and other.startswith(one) for one in WORDS for other in WORDS)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_documents_and_all_else_differs(text, task):
    first, again, other = (
        [words_of(document) for document in _documents(text, task, seed=seed)] for seed in (3, 3, 4)
    )
    assert first == again
    assert len({*first, *other}) == 6
    longer = [answers_of(document) for document in _documents(text, task, 1025, num_documents=8)]
    assert longer != [answers_of(document) for document in _documents(text, task, num_documents=8)]


def test_tasks_have_different_documents(text):
    """Also those that draw alike: they begin at other places of the text."""
    begun = {words_of(_documents(text, task)[0])[:20] for task in TASKS}
    assert len(begun) == len(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_an_oracle_has_all_and_a_guesser_nothing(text, task):
    asked = {"tasks": [task], "lengths": (800, 1024), "num_documents": 4, "batch_size": 3}
    for right, score in ((99, 1.0), (0, 0.0)):
        cells = ruler.ruler_grid(Oracle(task, right), Characters(), text, **asked)
        assert [(cell.task, cell.length) for cell in cells] == [(task, 800), (task, 1024)]
        assert {cell.accuracy for cell in cells} == {Interval(score, score, score)}
        assert {cell.token_accuracy for cell in cells} == {score}
    json.dumps([dataclasses.asdict(cell) for cell in cells])


@pytest.mark.parametrize("task", NUM_ANSWERS)
def test_each_answer_counts_for_itself(text, task):
    asked = {"tasks": [task], "lengths": (1024,), "num_documents": 3}
    (cell,) = ruler.ruler_grid(Oracle(task, 1), Characters(), text, **asked)
    assert (cell.accuracy.value, cell.token_accuracy) == (0.25, 0.25)


def test_an_answer_is_right_if_all_of_it_is(text):
    class Half(Oracle):
        def forward(self, input_ids, use_cache):
            logits = super().forward(input_ids, use_cache).logits
            logits[:, -2, WRONG] = 30.0  # the last token of the last answer
            return SimpleNamespace(logits=logits)

    for task, accuracy, tokens in (("single-needle", 0.0, 3 / 4), ("multi-value", 3 / 4, 15 / 16)):
        asked = {"tasks": [task], "lengths": (900,), "num_documents": 3}
        (cell,) = ruler.ruler_grid(Half(task), Characters(), text, **asked)
        assert (cell.accuracy.value, cell.token_accuracy) == (accuracy, tokens)


def test_bos_counts_as_a_token(text):
    (document,) = _documents(text, "multi-key", 900, num_documents=1, bos=1)
    assert (len(document.ids), document.ids[0], document.kinds[0]) == (900, 1, TEXT)


def test_the_shortest_document_has_no_other_text(text):
    made = []
    for length in range(60, 200):
        try:
            rng = evaluation_rng(2)
            made.append(ruler.ruler_document(ENCODE, text, rng, "single-needle", length))
        except RapError as error:
            assert "use longer documents" in str(error)  # noqa: PT017 - either way is right
    assert len(made[0].ids) == 200 - len(made)
    assert words_of(made[0]).startswith(" The special number of")
    assert words_of(made[1])[0].islower()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("odd",)}, "unknown task 'odd': use single-needle"),
        ({"num_documents": 0}, "at least one"),
        ({"lengths": (40,)}, "no room for the task single-needle, which takes 1.*longer documents"),
        ({"lengths": (1024, 200)}, "no room for the task multi-key"),
        ({"lengths": (9000,)}, "the text has 6000 tokens.*longer text"),
    ],
)
def test_wrong_input_is_refused(text, options, message):
    asked = {"lengths": (1024,), "num_documents": 1} | options
    with pytest.raises(RapError, match=message):
        ruler.ruler_grid(Oracle("single-needle"), Characters(), text, **asked)


def test_a_table_has_a_row_a_task():
    cells = [
        ruler.RulerCell(task, length, 4, Interval(0.5, low, 0.75), 0.6)
        for task, low in (("two-hop", 0.25), ("multi-key", 0.75))
        for length in (2048, 512)
    ]
    assert ruler.ruler_table("T", cells) == {
        "title": "T",
        "header": ["task", "512 tokens", "2,048 tokens"],
        "rows": [["two-hop", *["50% (25% to 75%)"] * 2], ["multi-key", "50%", "50%"]],
    }


def test_the_command_measures_and_writes(tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "new" / "ruler.json"
    text.write_text("The rain fell on the old house all night, and nobody came to the door. " * 40)
    asked = ("--text", text, "--length", 256, "--task", "two-hop", "--task", "multi-key")
    call = ("evaluate", "retrieval", "bundled", *asked, "--documents", 2)
    found = run(*call, "--json", "-o", output)
    assert found.code == 0, found.err
    assert json.loads(output.read_text()) == found.json
    assert [cell["task"] for cell in found.json["ruler"]] == ["two-hop", "multi-key"]
    assert {cell["length"] for cell in found.json["ruler"]} == {256}
    printed = run(*call)
    assert "accuracy (95% interval)" in printed.out
    assert "retrieval: 4 documents in" in printed.err
    assert "retrieval: " not in run(*call, "--json").err
    for row in found.json["table"]["rows"]:
        assert row[0] in printed.out


def test_the_command_refuses_an_unknown_task():
    result = run("evaluate", "retrieval", "bundled", "--task", "odd")
    assert error_violations(result) == []
    assert "unknown task 'odd'" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--depth 0.5", "--depth is of --task needle alone"),
        ("--task recall --length 64", "--length is of the default tasks or --task needle alone"),
        ("--task needle --task two-hop", "--task needle has a separate grid"),
        ("--task needle --facts 1 --facts 4", "one number of --facts"),
        ("--task odd", "two-hop, needle, recall"),
    ],
)
def test_a_setting_of_another_task_is_refused(arguments, message):
    result = run("evaluate", "retrieval", "bundled", *arguments.split())
    assert error_violations(result) == []
    assert message in result.err
