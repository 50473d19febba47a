"""The HTML page: whole in itself, true to its result files, and drawn in themed colours."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from command import error_violations, run
from rap.analysis.charts import Series, legend, line_chart
from rap.analysis.page import html_report

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

    VOID = ("meta", "wbr", "path", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "path"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else(folder):
    page = html_report([folder])
    parsed = _Balance()
    parsed.feed(page)
    assert parsed.open == []
    picture = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    assert parsed.links == ["#r0", "#r1", picture]
    assert not re.search(r"https?:|url\(|@import|<script", page)


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
        "rap compare bundled --methods rap --retain 0.5 -o runs/cell",
        "perplexity 46.4400; 3,072 KV bytes a token in decode and 3,072 in prefill",
        "in the paper: perplexity 397, source tab:main",
        "torch 2.13.0, transformers 5.19.0; a <device>; 2026-11-21",
        '{"name": "rap", "retain": 0.5}',
        "Plain",
    ):
        assert said in text, said
    # Perplexity against bytes and against FLOPs, and recall.
    assert page.count("<figure>") == 3
    assert "rap: 46.44 at 50.0%" in text


def test_every_colour_of_the_page_is_a_variable_with_a_dark_value(folder):
    page = html_report([folder])
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark = (set(re.findall(r"(--[a-z0-9-]+):", part)) for part in style.split("@media")[:2])
    assert light == dark
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", style)) <= light
    assert not re.search(r'(fill|stroke|color)="', page)


def test_a_chart_puts_its_points_where_they_belong():
    svg = line_chart([Series("a", [(0.5, 40.0), (1.0, 20.0)])], "x", "y", reference=20.0)
    (first, last) = re.findall(r'<g transform="translate\(([\d.]+),([\d.]+)\)">', svg)
    reference = re.search(r'class="reference" d="M\d+,([\d.]+)H', svg)
    assert float(first[0]) < float(last[0])
    assert float(first[1]) < float(last[1])
    assert reference is not None
    assert reference[1] == last[1]


def test_a_wide_range_is_logarithmic_and_zero_stays_on_a_linear_axis():
    def heights(values: list[float], **options: Any) -> list[float]:
        points = [(0.1 * n + 0.1, value) for n, value in enumerate(values)]
        svg = line_chart([Series("a", points)], "x", "y", **options)
        return [float(y) for y in re.findall(r"translate\([\d.]+,([\d.]+)\)\"><title", svg)]

    low, middle, high = heights([10.0, 100.0, 1000.0])
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert len(heights([10.0, float("inf"), 1000.0])) == 2
    assert len(heights([0.0, 50.0, 100.0], may_log=False)) == 3


def test_series_beyond_the_colours_differ_by_marker():
    keys = re.findall(r'class="marker (s\d)" d="([^"]+)"', legend([str(n) for n in range(20)]))
    assert len(set(keys)) == 20


def test_report_command(folder, tmp_path):
    for name in ("page.html", "page.md"):
        result = run("report", folder, "-o", tmp_path / "out" / name)
        assert result.code == 0, result.err
    page = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert "| rap | 0.5 | none | rap_________ | `rap compare bundled --methods rap" in page
    assert (tmp_path / "out" / "page.html").read_text(encoding="utf-8") == html_report([folder])
    for arguments, reason in (
        ((folder, "-o", tmp_path / "page.txt"), "a report ends in .md or .html"),
        ((tmp_path / "nowhere",), "there is no folder"),
    ):
        result = run("report", *arguments)
        assert error_violations(result) == []
        assert reason in result.err
