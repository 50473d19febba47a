"""Recall and copying, on stub models whose score is known beforehand."""

import copy
import dataclasses
import hashlib
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rap
from cases.characters import Characters
from rap.data.protocol import evaluation_rng
from rap.evaluation.cache.compressed import CacheCompression, compressed_recall
from rap.evaluation.retrieval import documents, needle, recall
from rap.model.errors import RapError

VOCAB = 128


class Stub(torch.nn.Module):
    """A causal model: `guess(prefix)` names the next token; None is a uniform guess."""

    def __init__(self, guess):
        super().__init__()
        self.guess = guess
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCAB)
        for row, ids in enumerate(input_ids):
            text = "".join(map(chr, ids))
            for position in range(len(text)):
                token = self.guess(text[: position + 1])
                if token is not None:
                    logits[row, position, token] = 20.0
        return SimpleNamespace(logits=logits)


def look_up(prefix: str) -> int | None:
    asked = re.search(r"What is the number of (\w+)\?( \d*)?$", prefix)
    if asked is None:
        return None
    stated = re.search(rf"The number of {asked[1]} is( \d+\.)", prefix)
    return ord(stated[1][len(asked[2] or "")]) if stated else None


def look_up_special(prefix: str) -> int | None:
    asked = re.search(r"Answer: The special number of (\w+) is( \d*)?$", prefix)
    if asked is None:
        return None
    stated = re.search(rf"The special number of {asked[1]} is( \d+\.)", prefix)
    return ord(stated[1][len(asked[2] or "")]) if stated else None


def induce(prefix: str) -> int | None:
    earlier = prefix.rfind(prefix[-6:], 0, -1)
    return ord(prefix[earlier + 6]) if len(prefix) > 6 and earlier >= 0 else None


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(97, 123, 4000)


GRID = {"distances": (60, 150), "facts": (1, 3), "num_documents": 8, "batch_size": 3}


def test_perfect_recall_scores_one(text):
    cells = recall.recall_grid(Stub(look_up), Characters(), text, **GRID)
    assert [(cell.distance, cell.num_facts) for cell in cells] == [
        (60, 1),
        (60, 3),
        (150, 1),
        (150, 3),
    ]
    assert all(cell.accuracy == cell.token_accuracy == 1.0 for cell in cells)
    json.dumps([dataclasses.asdict(cell) for cell in cells])


def test_guessing_scores_chance(text):
    rng = np.random.default_rng(1)
    digits = Stub(lambda prefix: int(rng.integers(48, 58)))
    cells = recall.recall_grid(digits, Characters(), text, **GRID | {"num_documents": 60})
    assert all(cell.accuracy <= 1 / 60 for cell in cells)
    # The blank is never right, four digits are at 1/10: 0.08, with five standard errors of 0.017.
    assert all(abs(cell.token_accuracy - 0.08) < 0.085 for cell in cells)


def test_a_part_of_the_answer_is_not_the_answer(text):
    """Of the blank and four digits only the first is right, which the question mark announces."""
    blank = Stub(lambda prefix: ord(" ") if prefix.endswith("?") else None)
    cells = recall.recall_grid(blank, Characters(), text, **GRID)
    assert {(cell.accuracy, cell.token_accuracy) for cell in cells} == {(0.0, 0.2)}


@pytest.mark.parametrize("distance", [45, 63, 100, 257])
@pytest.mark.parametrize("num_facts", [1, 2, 7])
def test_recall_document_keeps_its_distance(text, distance, num_facts):
    writer = documents.FactWriter(Characters())
    rng = evaluation_rng(3, distance, num_facts)
    document = documents.recall_document(writer, text, rng, distance, num_facts)
    words = "".join(map(chr, document.ids))
    name, answer = re.search(r"What is the number of (\w+)\?( \d{4})$", words).groups()
    stated = re.search(rf"The number of {name} is({answer})\.", words)
    assert len(words) - len(answer) - stated.start(1) == distance
    assert len(set(re.findall(r"The number of (\w+) is \d{4}\.", words))) == num_facts
    asked = "".join(chr(i) for i in document.ids[document.kinds == documents.ANSWER])
    assert asked == answer


def test_plain_documents_are_those_that_the_bundled_model_was_judged_by(text):
    writer = documents.FactWriter(Characters())
    made = recall.recall_documents(writer, text, 150, 5, num_documents=4, seed=2)
    made.append(needle.needle_document(writer, text, evaluation_rng(2), 300, 0.5, 3))
    content = b"".join(document.ids.tobytes() + document.kinds.tobytes() for document in made)
    # Taken when there was no other wording.
    assert hashlib.sha256(content).hexdigest()[:16] == "02212376b001861b"


def test_a_score_is_as_long_as_its_document(text):
    """Shorter ones are padded, and nothing is said of what was padded."""
    writer, rng = documents.FactWriter(Characters()), evaluation_rng(2)
    made = [needle.needle_document(writer, text, rng, size, 0.5, 3) for size in (300, 200)]
    scored = list(documents.score_documents(Stub(look_up), made, 2))
    assert [len(part) for _, *both in scored for part in both] == [299, 299, 199, 199]


class Pairs(Characters):
    """A tokenizer that joins a blank with the letter or digit behind it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text, add_special_tokens)
        joined = []
        for before, token in zip([None, *ids], ids, strict=False):
            if before == 32:
                joined[-1] = VOCAB + token
            else:
                joined.append(token)
        return joined


WORDS = {
    "fact": " The special number of Lucy is",
    "question": " Question: What is the special number of Lucy? "
    "Answer: The special number of Lucy is",
}


@pytest.mark.parametrize("tokenizer", [Characters(), Pairs()])
@pytest.mark.parametrize("write", WORDS)
def test_natural_marks_exactly_the_digits(tokenizer, write):
    """Whether the blank is a token of its own or one with the first digit."""
    writer = documents.FactWriter(tokenizer, wording="natural")
    ids, kinds = getattr(writer, write)("Lucy", 4821)
    stem, number = (
        tokenizer.encode(words, add_special_tokens=False) for words in (WORDS[write], " 4821")
    )
    assert ids == [*stem, *number, ord(".")]
    kind = documents.ANSWER if write == "question" else documents.STATED
    marked = [(at, token) for at, token in enumerate(ids) if kinds[at] == kind]
    assert [at for at, _ in marked] == list(range(len(ids) - 5, len(ids) - 1))
    assert [chr(token % VOCAB) for _, token in marked] == list("4821")
    assert set(kinds) == {documents.TEXT, kind}


def test_the_blank_does_not_count_in_natural_wording(text):
    asked = GRID | {"wording": "natural", "distances": (150, 257)}
    cells = recall.recall_grid(Stub(look_up_special), Characters(), text, **asked)
    assert {(cell.accuracy, cell.token_accuracy) for cell in cells} == {(1.0, 1.0)}
    blank = Stub(lambda prefix: ord(" "))
    cells = recall.recall_grid(blank, Characters(), text, **asked)
    assert {(cell.accuracy, cell.token_accuracy) for cell in cells} == {(0.0, 0.0)}
    places = {"lengths": (200,), "depths": (0.0, 1.0), "num_facts": 2, "num_documents": 3}
    found = needle.needle_grid(
        Stub(look_up_special), Characters(), text, **places, wording="natural"
    )
    assert [cell.accuracy for cell in found] == [1.0, 1.0]
    plain = needle.needle_grid(Stub(look_up_special), Characters(), text, **places)
    assert [cell.accuracy for cell in plain] == [0.0, 0.0]


def test_grid_is_deterministic_and_seeded(text):
    guess = Stub(lambda prefix: 48 + len(prefix) % 10)
    runs = [recall.recall_grid(guess, Characters(), text, **GRID, seed=s) for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(("passage", "distance"), [(20, 20), (33, 100)])
def test_copy_loss_of_a_copier(text, passage, distance):
    options = {"passage": passage, "distance": distance, "num_documents": 5, "batch_size": 2}
    uniform = recall.copy_loss(Stub(lambda prefix: None), text, **options)
    assert uniform.first == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert uniform.gain == pytest.approx(0.0, abs=1e-6)
    copier = recall.copy_loss(Stub(induce), text, **options)
    # Six characters are needed to recognise the passage, the rest cost nothing (logit 20).
    assert copier.second <= 6 / passage * math.log(VOCAB) + 1e-3
    assert copier.gain > 3.0


def test_copy_loss_leaves_out_what_nothing_announces(text):
    """Token by token: which predictions the two readings of 20 in 20 + 13 + 20 are made of."""
    options = {"passage": 20, "distance": 33, "num_documents": 2}
    uniform = math.log(VOCAB)
    # By the length of the prefix: the first tokens of filler and second reading, then both ends.
    for wrong, first, second in (
        (20, 0, 0),
        (33, 0, 0),
        (1, 1, 0),
        (19, 1, 0),
        (34, 0, 1),
        (52, 0, 1),
    ):
        stub = Stub(lambda prefix, wrong=wrong: 0 if len(prefix) == wrong else None)
        found = recall.copy_loss(stub, text, **options)
        assert (found.first > uniform + 0.1, found.second > uniform + 0.1) == (first, second)


def test_copy_loss_follows_its_seed(text):
    stub = Stub(lambda prefix: ord(prefix[-1]))
    runs = [recall.copy_loss(stub, text, passage=20, distance=33, seed=s) for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


def test_a_text_of_just_the_length_will_do(text):
    found = recall.copy_loss(Stub(lambda prefix: None), text[:40], passage=20, distance=40)
    assert found.num_documents == 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda text: recall.recall_grid(None, Characters(), text, distances=(9,)), "or more"),
        (lambda text: recall.recall_grid(None, Characters(), text[:50]), "longer text"),
        (lambda text: recall.recall_grid(None, Characters(), text, facts=(99,)), "1 to"),
        (lambda text: recall.recall_grid(None, Characters(), text, facts=(0,)), "1 to"),
        (lambda text: recall.recall_grid(None, Characters(), text, num_documents=0), "at least"),
        (lambda text: recall.copy_loss(None, text, num_documents=0), "at least one"),
        (
            lambda text: recall.recall_grid(None, Characters(), text, wording="odd"),
            "use plain, nat",
        ),
        (lambda text: recall.copy_loss(None, text, passage=9, distance=3), "or more"),
        (lambda text: recall.copy_loss(None, text, passage=1), "predicts nothing"),
        (lambda text: recall.copy_loss(None, text, batch_size=0), "batch_size must be at least 1"),
    ],
)
def test_wrong_input_is_refused(text, call, message):
    with pytest.raises(RapError, match=message):
        call(text)


def test_a_model_that_computes_nan_is_no_poor_one(tokenizer):
    model = copy.deepcopy(rap.assets.reference_model())
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    text = np.asarray(tokenizer(rap.assets.reference_text("test")[:20000]).input_ids)
    sizes = {"distances": [64], "facts": [1], "num_documents": 1}
    with pytest.raises(RapError, match="the loss of an answer is NaN"):
        recall.recall_grid(model, tokenizer, text, **sizes)
    with pytest.raises(RapError, match="the loss of an answer is NaN"):
        compressed_recall(model, tokenizer, text, CacheCompression(), **sizes)
    with pytest.raises(RapError, match="batch_size must be at least 1"):
        recall.recall_grid(model, tokenizer, text, batch_size=0, **sizes)


def test_a_model_in_training_mode_is_judged_without_dropout():
    class Dropping(Stub):
        def forward(self, input_ids, use_cache):
            assert not self.training
            return super().forward(input_ids, use_cache)

    model = Dropping(induce).train()
    text = np.arange(1000) % 90 + 32
    found = recall.copy_loss(model, text, distance=64, passage=32, num_documents=2)
    assert found.num_documents == 2
    assert model.training


def test_logits_of_a_large_vocabulary_are_made_for_fewer_documents(reference_model, monkeypatch):
    """Eight documents of 640 tokens have 5 GiB of them at 262,144 tokens."""
    text = np.arange(1000) % 90 + 32
    options = {"passage": 16, "distance": 32, "num_documents": 5, "bos": "never"}
    whole = recall.copy_loss(reference_model, text, **options)
    size, rows = reference_model.config.vocab_size, []
    handle = reference_model.register_forward_hook(
        lambda module, args, output: rows.append(len(output.logits))
    )
    monkeypatch.setattr(recall, "MOST_LOGITS", 2 * 48 * size)
    parted = recall.copy_loss(reference_model, text, **options)
    handle.remove()
    assert rows == [2, 2, 1]
    assert parted.second == pytest.approx(whole.second, rel=1e-5)  # sums in another order
