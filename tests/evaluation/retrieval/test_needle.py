"""Needles in haystacks: documents of exact length and depth, readers of known sight, the map."""

import contextlib
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
from rap.evaluation.retrieval.documents import ANSWER, FactWriter
from rap.evaluation.retrieval.needle import (
    NeedleCell,
    heat_map,
    heat_maps,
    needle_document,
    needle_grid,
    needle_table,
)
from rap.model.errors import RapError
from rap.studies.report.page import html_report

VOCABULARY = 128
WORDS = "The rain fell on the old house all night, and nobody came to the door. "
GRID = {"lengths": (100, 163), "depths": (0.0, 0.5, 1.0), "num_documents": 5, "batch_size": 2}


class Reader(torch.nn.Module):
    """Answers from the last `sight` characters before the question, and guesses x otherwise."""

    def __init__(self, sight: int):
        super().__init__()
        self.sight, self.read = sight, []
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids):
            text = "".join(map(chr, ids))
            self.read.append(text)
            for position in range(len(text)):
                logits[row, position, self._next(text[: position + 1])] = 9.0
        return SimpleNamespace(logits=logits)

    def _next(self, prefix: str) -> int:
        asked = re.search(r" What is the number of (\w+)\?( \d*)?$", prefix)
        if asked is None:
            return ord("x")
        seen = prefix[max(0, asked.start() - self.sight) : asked.start()]
        stated = re.search(rf"The number of {asked[1]} is( \d+\.)", seen)
        return ord(stated[1][len(asked[2] or "")]) if stated else ord("x")


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(97, 123, 2000)


@pytest.mark.parametrize("length", [100, 163, 1001])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_facts", [1, 2])
def test_document_has_its_length_and_its_depth(text, length, depth, num_facts):
    rng = evaluation_rng(1, length)
    # The second fact takes 28 to 33 characters of a hundred.
    document = needle_document(FactWriter(Characters()), text, rng, length, depth, num_facts)
    words = "".join(map(chr, document.ids))
    name, answer = re.search(r" What is the number of (\w+)\?( \d{4})$", words).groups()
    facts = re.findall(r" The number of (\w+) is( \d{4})\.", words)
    assert len(words) == length
    assert (name, answer) in facts
    assert len(facts) == num_facts
    assert "".join(chr(i) for i in document.ids[document.kinds == ANSWER]) == answer
    before, _, after = words.partition(f" The number of {name} is{answer}.")
    before, after = (re.sub(r" The number of \w+ is \d{4}\.", "", part) for part in (before, after))
    haystack = len(before) + after.index(" What is")
    assert len(before) == round(depth * haystack)


def test_perfect_and_blind_readers(text):
    everything = needle_grid(Reader(10_000), Characters(), text, **GRID, num_facts=2)
    assert [(cell.length, cell.depth) for cell in everything] == [
        (length, depth) for length in GRID["lengths"] for depth in GRID["depths"]
    ]
    assert all(cell.accuracy == cell.token_accuracy == 1.0 for cell in everything)
    nothing = needle_grid(Reader(0), Characters(), text, **GRID)
    assert all(cell.accuracy == cell.token_accuracy == 0.0 for cell in nothing)


def test_a_part_of_the_number_is_not_the_number(text):
    """Of the blank and four digits only the first is right, which the question mark announces."""

    class Blank(Reader):
        def _next(self, prefix: str) -> int:
            return ord(" ") if prefix.endswith("?") else ord("x")

    cells = needle_grid(Blank(0), Characters(), text, **GRID)
    assert {(cell.accuracy, cell.token_accuracy) for cell in cells} == {(0.0, 0.2)}


def test_a_short_sighted_reader_finds_what_is_near(text):
    # Fact and question take 60 to 70 characters: at depth 0 the fact is over 80 before the end.
    cells = needle_grid(Reader(70), Characters(), text, **GRID | {"lengths": (200,)})
    assert [cell.accuracy for cell in cells] == [0.0, 0.0, 1.0]


def test_same_call_same_cells_and_the_seed_counts(text):
    readers = [Reader(60) for _ in range(3)]
    calls = [
        needle_grid(reader, Characters(), text, **GRID, seed=seed)
        for reader, seed in zip(readers, (3, 3, 4), strict=True)
    ]
    assert calls[0] == calls[1]
    assert readers[0].read == readers[1].read
    assert not set(readers[0].read) & set(readers[2].read)
    # Every document is another one, at every length and depth.
    assert len(set(readers[0].read)) == len(readers[0].read) == 5 * 2 * 3


def test_other_depths_change_no_documents_of_a_depth(text):
    alone, among, default = (Reader(60) for _ in range(3))
    needle_grid(alone, Characters(), text, **GRID | {"depths": (0.1,)})
    needle_grid(among, Characters(), text, **GRID | {"depths": (1, 0.35, 0.1)})
    needle_grid(default, Characters(), text, **GRID | {"depths": (0.0, 0.25, 0.5, 0.75, 1.0)})
    assert set(alone.read) < set(among.read)
    assert len(set(among.read) & set(default.read)) == len(alone.read)  # those of depth 1
    assert len(set(among.read)) == 3 * len(alone.read)


def test_documents_begin_anywhere_in_the_text(text):
    """Also where but one token can be left out; at depth 1 a document begins with its text."""
    reader = Reader(0)
    grid = {"lengths": (100,), "depths": (1.0,), "num_documents": 16}
    needle_grid(reader, Characters(), text[:101], **grid)
    first, second = ("".join(map(chr, text[start : start + 20])) for start in (0, 1))
    assert {words[:20] for words in reader.read} == {first, second}


def test_the_shortest_document_has_a_token_of_text(text):
    writer, made = FactWriter(Characters()), []
    for length in range(40, 100):
        with contextlib.suppress(RapError):
            document = needle_document(writer, text, evaluation_rng(2), length, 0.0)
            made.append("".join(map(chr, document.ids)))
    shortest = re.sub(r" The number of \w+ is \d{4}\.| What is .*", "", made[0])
    assert (len(shortest), len(made)) == (1, 100 - len(made[0]))


def test_heat_map_shows_every_cell(text, tmp_path):
    cells = needle_grid(Reader(70), Characters(), text, **GRID)
    figure = heat_map(cells[::-1], "a title")  # in any order
    axes = figure.axes[0]
    shown = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in axes.texts}
    image = np.asarray(axes.images[0].get_array())
    for cell in cells:
        row, column = GRID["depths"].index(cell.depth), GRID["lengths"].index(cell.length)
        assert shown[row, column] == f"{cell.accuracy:.0%}"
        assert image[row, column] == cell.accuracy
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "50%", "100%"]
    assert len(set(image.flatten())) > 1


def test_models_side_by_side_share_one_scale():
    cells = [NeedleCell(length, d, 4, d, d) for length in (64, 128) for d in (0.0, 0.5)]
    worse = [dataclasses.replace(cell, accuracy=cell.accuracy / 2) for cell in cells]
    figure = heat_maps({"a": cells, "b": worse, "c": cells[::-1]})
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["a", "b", "c"]
    shown = [[text.get_text() for text in axes.texts] for axes in panels]
    assert shown == [["0%", "0%", "50%", "50%"], ["0%", "0%", "25%", "25%"], shown[0]]
    assert {axes.images[0].get_clim() for axes in panels} == {(0, 1)}
    # Two beside each other: the third stands below, and nothing beside it.
    assert [axes.axison for axes in figure.axes[:4]] == [True, True, True, False]


def test_a_table_of_needles_has_a_row_a_depth():
    cells = [NeedleCell(n, d, 4, d, d) for n in (2048, 64) for d in (0.75, 0.0)]
    table = needle_table("T", cells)
    assert table == {
        "title": "T",
        "header": ["depth", "64 tokens", "2,048 tokens"],
        "rows": [["0%", "0%", "0%"], ["75%", "75%", "75%"]],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1.5,)}, "depth 1.5 is outside"),
        ({"lengths": (40,)}, "no room for more than 1 facts.*longer documents or fewer"),
        ({"num_facts": 99}, "1 to"),
        ({"num_documents": 0}, "at least one"),
        ({"lengths": (5000,)}, "the text has 2000 tokens.*longer text"),
    ],
)
def test_wrong_input_is_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        needle_grid(Reader(9), Characters(), text, **GRID | options)
    assert issubclass(RapError, ValueError)


def test_the_bundled_model_finds_needles_twice_alike(tmp_path):
    place = ("--length", 128, "--length", 256, "--depth", 0, "--depth", 1, "--documents", 2)
    text = tmp_path / "text.txt"  # the bundled novels take seconds to tokenize
    text.write_text(WORDS * 40)
    figure, kept = tmp_path / "map.svg", tmp_path / "map.json"
    results = [
        run(
            "evaluate",
            "retrieval",
            "bundled",
            "--task",
            "needle",
            "--text",
            text,
            *place,
            "--json",
            *extra,
        )
        for extra in (("--figure", figure, "-o", kept), ())
    ]
    assert results[0].code == 0, results[0].err
    first, second = (result.json for result in results)
    assert first["needle"] == second["needle"]
    assert first["fingerprint"] == second["fingerprint"]
    assert len(first["fingerprint"]) == 64
    # It was trained to answer just such questions.
    assert [cell["accuracy"] for cell in first["needle"]] == [1.0] * 4
    assert figure.read_text().startswith("<?xml")
    assert json.loads(kept.read_text()) == first
    # The report shows its table, and the picture beside it.
    page = html_report([tmp_path])
    assert "<h2>Needles found by bundled, one of 4 facts</h2>" in page
    assert ">256 tokens</th>" in page
    assert 'src="data:image/svg+xml;base64,' in page


def test_command_refuses_a_figure_it_cannot_draw(tmp_path):
    result = run(
        "evaluate", "retrieval", "bundled", "--task", "needle", "--figure", tmp_path / "map.gif"
    )
    assert error_violations(result) == []
    assert "ends in .png or .svg" in result.err


def test_cells_are_plain_data(text):
    cell = needle_grid(Reader(9), Characters(), text, **GRID)[0]
    assert json.loads(json.dumps(dataclasses.asdict(cell))) == dataclasses.asdict(cell)
