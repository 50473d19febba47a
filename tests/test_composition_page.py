"""What to pick, and the figure of it: fronts and picks by hand, and the committed page."""

import itertools
import json
from pathlib import Path
from types import ModuleType

import matplotlib
import pytest

from cases.scripts import load_script

REPOSITORY = Path(__file__).parents[1]
FOLDER = "experiments/smollm2-pareto"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """What writes the page, which is no package."""
    return load_script(f"{FOLDER}/page.py")


@pytest.fixture(scope="module")
def front(page) -> ModuleType:
    """The tables beside it."""
    return page.front


@pytest.fixture(scope="module")
def pareto() -> ModuleType:
    """What measures."""
    return load_script(f"{FOLDER}/pareto.py")


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((REPOSITORY / FOLDER / "pareto.json").read_text(encoding="utf-8"))


def row(share, kl, method="dense", **others):
    """A row of a small grid."""
    retain = 1.0 if method == "dense" else 0.5
    made = {"method": method, "retain": retain, "recover": "none", "weights": "float32"}
    made |= {"bits": None, "press": None, "perplexity": 20.0, "top1": 0.5, "bytes_per_token": 9.0}
    return made | {"share": share, "kl": kl} | others


ROWS = [
    row(1, 0.0),
    row(0.5, 0.2, press="keydiff:0.5"),
    row(0.25, 0.1, bits="hqq4"),
    row(0.5, 0.3, "rap", recover="fit+full"),
    row(0.125, 0.4, "rap", recover="fit+full", bits="hqq4"),
    row(0.125, 0.5, bits="hqq2"),
    row(1, 0.01, weights="int8"),
]


EVICTED, QUANTIZED = {"press": "keydiff:0.5"}, {"bits": "hqq4"}
MORE = ({}, QUANTIZED, EVICTED, EVICTED | QUANTIZED)


def test_the_front_has_what_nothing_beats(front):
    found = front.front(front.cache_rows(ROWS))
    assert [(one["share"], one["kl"]) for one in found] == [(1, 0.0), (0.25, 0.1), (0.125, 0.4)]
    # Of two that are equally small the nearer one alone, whichever comes first.
    assert front.front(ROWS[-2:-4:-1]) == [ROWS[4]]


def test_the_best_is_the_nearest_that_is_small_enough(front):
    assert front.best(ROWS[:-1], 1.4) == ROWS[2]
    assert front.best(ROWS[:-1], 4) == ROWS[2]
    assert front.best(ROWS[:-1], 4.01) == ROWS[4]
    assert front.best(ROWS, 9) is None


def test_picks_say_what_each_sort_can_do(front):
    table = front.picks(ROWS)
    found = {line[0]: line[1:] for line in table["rows"]}
    assert found["2x"] == [
        "hqq4: 0.100 (4.0x)",
        "hqq4: 0.100 (4.0x)",
        "rap 0.5 distilled: 0.300 (2.0x)",
        "rap 0.5 distilled: 0.300 (2.0x)",
    ]
    assert found["8x"] == [
        "rap 0.5 distilled + hqq4: 0.400 (8.0x)",
        "hqq2: 0.500 (8.0x)",
        "rap 0.5 distilled + hqq4: 0.400 (8.0x)",
        "",
    ]


def test_tables_have_every_row_once(front):
    made = {table["title"]: table for table in front.tables(ROWS, "as measured")}
    assert made["Quantized cache"]["rows"] == [
        ["dense", "0.000 (1.0x)", "0.100 (4.0x)", "0.500 (8.0x)"],
        ["rap 0.5 distilled", "0.300 (2.0x)", "0.400 (8.0x)", ""],
    ]
    assert made["Token eviction"]["header"] == ["model", "keydiff:0.5"]
    assert made["Token eviction"]["rows"][0] == ["dense", "0.200 (2.0x)"]
    weights = made["Quantized weights, the cache as it is"]
    assert weights["rows"][0] == ["dense", "0.000, 20.00", "0.010, 20.00"]


def test_the_best_of_every_compression_is_a_row(front):
    table = front.tables(ROWS, "as measured")[0]
    assert table["header"][1:4] == ["best of all", "best without pruning", "best with rap"]
    assert [row[:2] for row in table["rows"]] == [
        ["1.4x", "hqq4: 0.100 (4.0x)"],
        ["2x", "hqq4: 0.100 (4.0x)"],
        ["4x", "hqq4: 0.100 (4.0x)"],
        ["8x", "rap 0.5 distilled + hqq4: 0.400 (8.0x)"],
    ]
    assert table["rows"][3][2] == "hqq2: 0.500 (8.0x)"
    assert table["rows"][1][3] == "rap 0.5 distilled: 0.300 (2.0x)"


def test_rows_are_drawn_by_what_they_are(page):
    sorts = [page.sort_of(one) for one in page.drawn(ROWS)]
    assert sorts == ["press", "bits", "rest", "rest", "bits"]
    merged = [row(0.5, 1.0, "rap:merge=all", recover="fit", **more) for more in MORE]
    assert [page.sort_of(one) for one in merged] == ["rap", "rap bits", "rap press", "rap press"]
    assert page.sort_of(row(0.5, 1.0, "palu", bits="hqq4")) == "palu"


def test_every_model_is_planned_once_and_latents_are_not_evicted(pareto):
    merged = pareto.checkpoint("rap:merge=all 0.5 fit=fitted/merge=all")
    assert (merged.method, merged.recover) == ("rap:merge=all", "fit")
    assert str(merged.directory) == "fitted/merge=all"
    made = pareto.checkpoint("rap 0.7 fit+full=distilled/rap-0.7")
    chosen = pareto.subjects([made])
    assert chosen[1] == made
    assert len(chosen) == 6
    assert len({len(one.axes()) for one in chosen}) == 1
    for one in chosen:
        axes = [axis for stage in one.axes() for axis in stage]
        assert len(set(axes)) == len(axes) > 4
        presses = {cache.press for _, cache in axes}
        assert (presses == {None}) == (one.method == "palu")


@pytest.mark.parametrize(
    "text", ["rap 0.7=out", "rap 0.7 fit", "rap 0.7 long=out", "rap 0.7 fit=/out"]
)
def test_what_names_no_checkpoint_is_refused(pareto, text):
    with pytest.raises(pareto.argparse.ArgumentTypeError):
        pareto.checkpoint(text)


def test_the_committed_page_is_built_from_the_committed_result(page, front, result):
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_measured(text, result) == text
    note = result["tables"][1]["note"]
    assert front.tables(result["rows"], note) == result["tables"]


def test_a_page_without_the_place_is_refused(page, result):
    with pytest.raises(SystemExit, match="has no place"):
        page.with_measured("# Pruning\n", result)


def test_the_figure_can_be_drawn_again(page, front, result, tmp_path):
    page.draw(result["rows"], tmp_path / "figure.svg")
    for path in (tmp_path / "figure.svg", page.FIGURE):
        text = path.read_text(encoding="utf-8")
        for _, _, label in page.SORTS.values():
            assert f">{label}<" in text, label
        for said in ("hqq2", *map(page.name, front.front(page.drawn(result["rows"])))):
            assert f">{said.partition(':0.5 + hqq4')[0]}" in text, said


def test_names_of_the_figure_cover_neither_each_other_nor_a_point(page, result):
    with matplotlib.rc_context(page.themed.SETTINGS):
        figure = page.figure_of(result["rows"])
        figure.draw_without_rendering()
        (axes,) = figure.axes
        boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert len(boxes) == len(axes.texts) > 10
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)
    for row in page.drawn(result["rows"]):
        point = axes.transData.transform(page.place(row))
        assert [said for said, box in boxes.items() if box.padded(2).contains(*point)] == []
    assert all(box.x1 <= axes.bbox.x1 for box in boxes.values())
