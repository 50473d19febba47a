"""The HTML page: whole in itself, true to its result files, and drawn in themed colours."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cases.command import error_violations, run
from rap.model.errors import RapError
from rap.studies.report.charts import COLORS
from rap.studies.report.page import html_report

PACKAGES = {"torch": "2.13.0", "transformers": "5.19.0"}
MADE = {
    "rap": "0.1.0",
    "packages": PACKAGES,
    "device": "a <device>",
    "time": "2026-11-21T08:00:00Z",
}


def _cell(method: str, retain: float, perplexity: float, accuracy: float = 1.0) -> dict[str, Any]:
    return {
        "method": method,
        "retain": retain,
        "recover": "none",
        "perplexity": perplexity,
        "kv_bytes_per_token": round(6144 * retain),
        "prefill_kv_bytes_per_token": 6144 * retain,
        "attention_flops": {"context": 1024, "value": round(1e6 * retain)},
        "recall": [{"distance": 256, "accuracy": accuracy, "num_facts": 4}],
        "fingerprint": f"{method:_<12}" + "0" * 52,
        "dense_fingerprint": "d" * 64,
        "seed": 0,
        "seconds": 12.3,
        "settings": {"name": method, "retain": retain},
        "command": f"rap compare bundled --methods {method} --retain {retain} -o runs/cell",
        "provenance": MADE,
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    """A comparison of two methods, one of them with a name that HTML would trip over."""
    cells = [
        _cell("dense", 1.0, 42.17),
        _cell("rap", 0.7, 43.47),
        _cell("rap", 0.5, 46.44),
        {**_cell("a<b&c", 0.7, 400.0, 0.0), "paper": {"perplexity": 397, "source": "tab:main"}},
    ]
    result = {
        "title": "Side by <side>",
        "tables": [
            {"title": "At 0.7", "header": ["method", "PPL"], "rows": [["a<b&c", "400.00"]]},
            {"title": "Sweep", "header": ["retain", "rap"], "rows": [["0.5", "46.44"]]},
        ],
        "cells": cells,
        "failed": [
            {"method": "bad", "retain": 0.5, "recover": "none", "error": "no <memory>",
             "command": "rap compare bundled --methods bad"},
        ],
        "command": "rap compare -o runs/compare",
        "provenance": MADE,
    }  # fmt: skip
    (tmp_path / "compare.json").write_text(json.dumps(result), encoding="utf-8")
    plain = {"table": {"title": "Plain", "header": ["a", "b"], "rows": [["x", 1]]}}
    (tmp_path / "plain.json").write_text(json.dumps(plain), encoding="utf-8")
    (tmp_path / "plain.png").write_bytes(b"a picture")
    return tmp_path


class _Balance(HTMLParser):
    """Counts tags that close what is not open, and collects links and text."""

    VOID = ("meta", "wbr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else(folder):
    page = html_report([folder])
    parsed = _Balance()
    parsed.feed(page)
    assert parsed.open == []
    picture = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    # Markers are drawn once a chart and used by their id, which no other chart has.
    markers = [link for link in parsed.links if re.fullmatch(r"#r0-\w+-\d+", link)]
    assert [link for link in parsed.links if link not in markers] == ["#r0", "#r1", picture]
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link != picture} == set(parsed.ids)
    assert not re.search(r"https?:|url\(|@import|<script", page)


def test_results_of_one_title_are_told_apart(folder):
    again = json.loads((folder / "plain.json").read_text("utf-8"))
    (folder / "other.json").write_text(json.dumps(again), encoding="utf-8")
    names = re.findall(r'<li><a href="#r\d">(.*)</a></li>', html_report([folder]))
    assert names == [
        "Side by &lt;side&gt;",
        *(f"Plain ({folder.name}/{file}.json)" for file in ("other", "plain")),
    ]


def test_the_page_says_what_the_files_say(folder):
    page = html_report([folder])
    parsed = _Balance()
    parsed.feed(page)
    text = " ".join(" ".join(parsed.text).split())
    for said in (
        "Side by <side>",
        "a<b&c",
        "400.00",
        "no <memory>",
        "rap compare bundled --methods rap:merge=1 --retain 0.5 -o runs/cell",
        "perplexity 46.4400; 3,072 KV bytes/token in decode and 3,072 in prefill",
        "in the paper: perplexity 397, source tab:main",
        "torch 2.13.0, transformers 5.19.0; a <device>; 2026-11-21",
        '{"name": "rap", "retain": 0.5}',
        "Plain",
    ):
        assert said in text, said
    # Perplexity against bytes and against FLOPs, and recall; and a map of it.
    assert page.count("<figure>") == 3
    assert page.count('<figure class="map">') == 1
    assert "rap:merge=1: perplexity 46.44, +0.0965 nats, at 50.0%" in text
    # Text is text, to be searched and read out.
    assert "loss over dense, nats/token" in text
    assert 'role="img" aria-label="loss over dense, nats/token against KV bytes' in page


def test_dense_has_a_key_only_where_a_chart_shows_it(folder):
    key = r'<ul class="legend">.*?</svg>dense</li>'
    assert re.search(key, html_report([folder]), re.DOTALL)
    result = json.loads((folder / "compare.json").read_text("utf-8"))
    result["cells"] = [{**cell, "recall": []} for cell in result["cells"]]
    (folder / "compare.json").write_text(json.dumps(result), encoding="utf-8")
    page = html_report([folder])
    assert '<ul class="legend">' in page
    assert not re.search(key, page, re.DOTALL)


def test_columns_of_text_are_to_the_left(folder):
    page = html_report([folder])
    assert '<th>method</th><th class="number">PPL</th>' in page
    assert '<th>a&lt;b&amp;c</th><td class="number">400.00</td>' in page


def test_every_colour_of_the_page_is_a_variable_with_a_dark_value(folder):
    page = html_report([folder])
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark = (set(re.findall(r"(--[a-z0-9-]+):", part)) for part in style.split("@media")[:2])
    assert light == dark
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", page)) <= light
    assert {f"--{name}" for name in COLORS} <= light
    body = page[page.index("</style>") :]
    assert "var(--series-0)" in body
    assert not re.search(r'(fill|stroke|color)="', body)
    assert not re.search(r"(fill|stroke): (?!var|none)", body)


def _recalled(method: str, retain: float, shares: dict[int, float], recover: str) -> dict[str, Any]:
    recall = [{"distance": d, "accuracy": share, "num_facts": 4} for d, share in shares.items()]
    return {**_cell(method, retain, 50.0), "recall": recall, "recover": recover}


def _maps(folder: Path, cells: list[dict[str, Any]]) -> str:
    table = {"title": "T", "header": ["method"], "rows": [["a"]]}
    path = folder / "compare.json"
    path.write_text(json.dumps({"table": table, "cells": cells}), encoding="utf-8")
    return html_report([path]).partition('<div class="maps">')[2].partition("</div>\n<h3>")[0]


def test_a_map_of_recall_has_a_square_for_every_ratio_and_distance(tmp_path):
    dense = _recalled("dense", 1.0, {64: 1.0, 900: 0.97}, "none")
    cut = [
        _recalled("a<b", 0.5, {64: 0.25, 900: 0.0}, "none"),
        _recalled("a<b", 0.7, {64: 0.5, 900: 0.125}, "none"),
        _recalled("c", 0.7, {64: 0.75, 900: 0.6}, "none"),
        _recalled("c", 0.7, {64: 0.8, 900: 0.7}, "fast"),
    ]
    maps = _maps(tmp_path, [dense, *cut])
    first, second = maps.split("</figure>")[:2]
    assert re.findall(r"<th(?: [^>]*)?>(.*?)</th>", first) == [
        "tokens", "retain 0.7", "retain 0.5", "64", "900", "64", "900", "dense", "a&lt;b", "c",
    ]  # fmt: skip
    square = r'<td class="square( start)?"(?: style="--share:(\d+%)")?>(\d+%)?</td>'
    found = re.findall(square, first)
    # The colour and the text say the same; a group of columns begins with a line.
    assert all(colour == text for _, colour, text in found)
    assert [text for _, _, text in found] == [
        *("100%", "97%", "100%", "97%"),
        *("50%", "12%", "25%", "0%"),
        *("75%", "60%", "", ""),
    ]
    assert [bool(start) for start, _, _ in found] == [True, False] * 6
    assert [text for _, _, text in re.findall(square, second)] == ["100%", "97%", "80%", "70%"]
    assert "numbers after so many tokens; recovery: fast" in second
    assert "broad" not in maps
    many = [_recalled("c", r, {64: 0.5, 900: 0.5}, "none") for r in (0.9, 0.8, 0.7, 0.6)]
    assert '<figure class="map broad">' in _maps(tmp_path, [dense, *many])
    assert _maps(tmp_path, [{**dense, "recall": []}, *cut]) == ""


def test_grey_lines_can_be_seen_on_both_pages(folder):
    style = html_report([folder]).partition("</style>")[0]
    for block in style.split("}"):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        if "page" in colors:  # paper is white
            drawn = [name for name in colors if name.startswith("series-")]
            assert all(_contrast(colors[name], colors["page"]) >= 3 for name in drawn)


def test_the_squares_of_a_map_take_their_colour_from_the_theme(folder):
    style = html_report([folder]).partition("</style>")[0]
    rule = re.search(r"\.map \.square \{([^}]*)\}", style)
    assert rule is not None
    assert "color-mix(in srgb, var(--heat) var(--share, 0%), var(--page))" in rule[1]
    # Printers leave backgrounds out unless they are told.
    assert "print-color-adjust: exact" in rule[1]
    for theme, ink in (("#1c1f23", "light"), ("#e6e8eb", "dark")):
        block = next(part for part in style.split("}") if f"--ink: {theme}" in part)
        heat = re.search(r"--heat: (#\w+)", block)
        assert heat is not None
        assert _contrast(heat[1], theme) >= 4.5, ink


def _contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21 (WCAG 2.2)."""

    def luminance(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_an_analysis_without_a_picture_beside_it_is_drawn_from_its_data(tmp_path):
    rows = [{"retain": 0.5, "layer": layer, "perplexity": 40.0 + layer} for layer in range(3)]
    data = {"dense": 40.0, "rows": rows, "how": "Counted."}
    table = {"title": "Probe", "header": ["layer"], "rows": [["0"]]}
    path = tmp_path / "analysis-probe.json"

    def page(**changes: Any) -> str:
        result = {"analysis": "probe", "table": table, "data": data, **changes}
        path.write_text(json.dumps(result), encoding="utf-8")
        return html_report([tmp_path])

    drawn = re.search(r'<img alt="Probe" src="data:image/png;base64,([^"]+)">', page())
    assert drawn is not None
    assert base64.b64decode(drawn[1]).startswith(b"\x89PNG")
    assert page() == page()
    higher = [{**row, "perplexity": 50.0} for row in rows]
    assert drawn[1] not in page(data={**data, "rows": higher})
    assert "<img" not in page(analysis="another")
    with pytest.raises(RapError, match="run `rap analyze probe` again"):
        page(data={"rows": rows})
    (tmp_path / "analysis-probe.svg").write_text("<svg/>", encoding="utf-8")
    assert "data:image/svg+xml;base64," in page()


def test_report_command(folder, tmp_path):
    for name in ("page.html", "page.md"):
        result = run("report", folder, "-o", tmp_path / "out" / name)
        assert result.code == 0, result.err
    page = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert "| rap:merge=1 | 0.5 | none | rap_________ | `rap compare bundled --methods rap:" in page
    assert (tmp_path / "out" / "page.html").read_text(encoding="utf-8") == html_report([folder])
    for arguments, reason in (
        ((folder, "-o", tmp_path / "page.txt"), "a report ends in .md or .html"),
        ((tmp_path / "nowhere",), "there is no "),
        ((tmp_path / "nowhere.json",), "name result files"),
    ):
        result = run("report", *arguments)
        assert error_violations(result) == []
        assert reason in result.err
