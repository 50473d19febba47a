"""All methods on the real model, beside each other: builds docs/real-model.md and its figure.

    python docs/real_model.py

Every figure is read from the result files in experiments/; what none of them has is left open.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from first_page import EXPERIMENTS, REPOSITORY, Measured, over_share
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from rap.data.bos import describe_bos
from rap.studies.report.report import markdown_table

PAGE, FIGURE = "docs/real-model.md", "docs/real-model.svg"
RATIOS = (0.7, 0.5)
RECOVERIES = {"none": "cut", "fit": "fitted", "fit+full": "distilled"}
MORE = ("smollm2-starkv", "smollm2-fit-svdllm", "smollm2-fit-others", "smollm2-fit-shrinkage")
TIMED = "smollm2-times"
TEXTS = ("smollm2-fit-texts", "smollm2-texts", "smollm2-texts-distilled", "smollm2-fit-shrinkage")
RECALLED = ("smollm2-recall", "smollm2-recall-fit", "smollm2-texts", "smollm2-texts-distilled")
RULED = {"4k": "smollm2-ruler", "8k": "smollm2-ruler-8k"}
TASKS = ("single-needle", "multi-key", "multi-value")
# rap beside what is read most, each in a colour; all others are grey.
COLORS = {"rap": "#1f5fa8", "rap:paper": "#b5651d", "palu": "#3d3d3d", "a3": "#2e8b57"}
COLORS |= {"svdllm": "#8a6fb3", "elitekv:plus": "#c04f7c"}
GREY = "#c9c9c9"
HEAD = """# All methods on a really pretrained model

SmolLM2-135M-Instruct: 30 layers, 3 KV heads of 64 channels. Calibrated, fitted and distilled on
the validation text of WikiText-2 (96 windows of 512 tokens to fit). {protocol}
Cut: nothing is trained. Fitted: `--recover fit`, layer by layer. Distilled: `--recover fit+full`
behind that, 64 steps. KV,
parameters and FLOPs of attention are parts of the dense model's, counted on caches, weights and
products (FLOPs of a decode step at {context:,} tokens); decode{prefill} is time on a CPU, in turns
with the dense model. KL is the divergence of the next-token distributions from the dense model's,
in nats a token. Methods are in the order of their least KL, those that rebuild nothing at decode
first. `docs/methods.md` says what each of them is.

Built by `python docs/real_model.py` from the result files; the command of every cell stands in
`docs/results/real.md`.
"""
FIGURE_NOTE = """![KL divergence against the share of the KV cache](real-model.svg)

Hollow: cut only. Filled: fitted. Grey: all other methods, cut only.
"""
BEYOND = """## Beyond eight windows of one text

Perplexity over all {windows} windows of {window:,} tokens of {text}, {bos}, where the tables above
have its first {few}; of the bundled novels and of Python code (eight
windows each), which calibration did not see; share of twelve numbers given back after 256 and
1,000 tokens; RULER-like documents of 4,096 and of 8,192 tokens: one needle, one of several keys,
several values (sixteen and eight documents); the mean of six zero-shot tasks, 500 questions each.
Open cells were not measured.
"""


@dataclass(frozen=True)
class Key:
    """A model of the comparison."""

    method: str
    retain: float = 1.0
    recover: str = "none"

    def __str__(self) -> str:
        name = self.method if self.retain == 1 else f"{self.method} at {self.retain:g}"
        return name if self.recover == "none" else f"{name}, {RECOVERIES[self.recover]}"


DENSE = Key("dense")


class Evidence:
    """Whatever was measured of each model, by `Key`."""

    def __init__(self, experiments: Path = EXPERIMENTS) -> None:
        self.experiments, first = experiments, Measured(experiments)
        self.cells = {Key(*key): cell for key, cell in first.cells.items()}
        for folder in MORE:
            self.cells |= dict(self._cells(folder))
        self.timed = dict(self._cells(TIMED))
        self.texts = {key: cell for folder in TEXTS for key, cell in self._cells(folder)}
        self.recalled = {key: cell for folder in RECALLED for key, cell in self._cells(folder)}
        self.ruled = {length: dict(self._named(folder)) for length, folder in RULED.items()}
        self.whole = dict(self._named("smollm2-whole-test"))
        self.scores = {key: first.score(key.method, key.retain, key.recover) for key in self.cells}
        self.dense, self.protocol = self.cells[DENSE], first.protocol

    def _cells(self, folder: str) -> Iterator[tuple[Key, dict[str, Any]]]:
        file = self.experiments / folder / "compare.json"
        if file.is_file():
            for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
                yield Key(cell["method"], cell["retain"], cell["recover"]), cell

    def _named(self, folder: str) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Results of single models, which their files are named by."""
        names = {re.sub(r"[:=]", "-", key.method): key.method for key in self.cells}
        for file in sorted((self.experiments / folder).glob("*.json")):
            found = re.fullmatch(r"(.+?)(?:-(0\.\d+))?(?:-(fit|distilled))?", file.stem)
            if found is None or found[1] not in names:
                continue
            recover = {"distilled": "fit+full"}.get(found[3], found[3] or "none")
            key = Key(names[found[1]], float(found[2] or 1), recover)
            yield key, json.loads(file.read_text(encoding="utf-8"))

    def at(self, retain: float) -> list[list[Key]]:
        """The models of a ratio, a list per method: rebuilding none first, then by least KL."""
        methods = dict.fromkeys(key.method for key in self.cells if key.retain == retain)
        groups = [
            [key for r in RECOVERIES if (key := Key(method, retain, r)) in self.cells]
            for method in methods
        ]

        def rank(keys: list[Key]) -> tuple[bool, float]:
            cells = [self.cells[key] for key in keys]
            return cells[0]["reconstructs"], min(cell["kl"]["value"] for cell in cells)

        return sorted(groups, key=rank)


def main_table(evidence: Evidence, retain: float) -> str:
    """What the models of a ratio cost and how near the dense one they are, in Markdown."""
    timed = any("prefill_seconds" in cell for cell in evidence.timed.values())
    header = ["method", "rebuilt", "KV", "parameters", "FLOPs", "decode"]
    header += ["prefill"] * timed
    header += [f"PPL, {name}" for name in RECOVERIES.values()]
    header += [f"KL, {name}" for name in RECOVERIES.values()]
    dense = evidence.dense
    rows = [
        ["dense", "", *["100%"] * (4 + timed), f"{dense['perplexity']:.2f}", "", "", "0", "", ""]
    ]
    for keys in evidence.at(retain):
        cell, by_recovery = evidence.cells[keys[0]], {key.recover: key for key in keys}
        found = [evidence.cells.get(by_recovery.get(name, Key(""))) for name in RECOVERIES]
        times = evidence.timed.get(Key(keys[0].method, retain), cell)
        rows.append(
            [
                f"**{keys[0].method}**" if keys[0].method == "rap" else keys[0].method,
                "yes" if cell["reconstructs"] else "no",
                *(_share(cell, dense, n) for n in ("kv_bytes_per_token", "attention_parameters")),
                f"{cell['attention_flops']['value'] / dense['attention_flops']['value']:.0%}",
                _time(times, "decode"),
                *[_time(times, "prefill")] * timed,
                *(_number(one and one["perplexity"]) for one in found),
                *("" if one is None else f"{one['kl']['value']:.3f}" for one in found),
            ]
        )
    return markdown_table({"header": header, "rows": rows})


def timed_on(evidence: Evidence, retain: float) -> str:
    """Where the times of a ratio were taken, a paragraph; nothing where none were."""
    cells = (cell for key, cell in evidence.timed.items() if key.retain == retain)
    devices = sorted({cell["provenance"]["device"] for cell in cells})
    return f"Timed on {', '.join(devices)}.\n\n" if devices else ""


def _share(cell: dict[str, Any], dense: dict[str, Any], name: str) -> str:
    return f"{cell[name] / dense[name]:.0%}"


def _time(cell: dict[str, Any], what: str) -> str:
    spent = cell.get(f"{what}_seconds")
    return "" if spent is None else f"{spent / cell[f'dense_{what}_seconds']:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def beyond_table(evidence: Evidence) -> str:
    """What else was measured of any model that has more than its windows, in Markdown."""
    header = ["model", "all windows", "novels", "code", "recall"]
    header += [*(f"RULER-like, {length}" for length in RULED), "six tasks"]
    rows = []
    for keys in [[DENSE], *(keys for retain in RATIOS for keys in evidence.at(retain))]:
        for key in keys:
            texts = evidence.texts.get(key, {}).get("other_texts", {})
            row = [
                _number(evidence.whole.get(key, {}).get("value")),
                *(_number(texts.get(n, {}).get("perplexity")) for n in ("bundled", "code.txt")),
                _parts(
                    cell["accuracy"] for cell in evidence.recalled.get(key, {}).get("recall", [])
                ),
                *(_parts(_tasks(ruled.get(key))) for ruled in evidence.ruled.values()),
                evidence.scores[key],
            ]
            if any(row):
                rows.append([str(key), *row])
    return markdown_table({"header": header, "rows": rows})


def _tasks(result: dict[str, Any] | None) -> Iterator[float]:
    cells = {} if result is None else {cell["task"]: cell for cell in result["ruler"]}
    return (cells[name]["accuracy"]["value"] for name in TASKS if name in cells)


def _parts(shares: Iterator[float]) -> str:
    return " / ".join(f"{share:.0%}" for share in shares)


def draw(evidence: Evidence, path: Path) -> None:
    """KL against the share of the cache, on a logarithmic axis."""
    with matplotlib.rc_context({"svg.hashsalt": "rap", "svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=(8.2, 4.8), layout="constrained")
        axes = figure.subplots()
        methods = dict.fromkeys(key.method for key in evidence.cells if key != DENSE)
        for method in [*(m for m in methods if m not in COLORS), *COLORS]:
            _curves(axes, evidence, method)
        what, shown = "KL from the dense model, nats a token", StrMethodFormatter("{x:g}")
        over_share(axes, what, [0.03, 0.1, 0.3, 1, 3, 10], shown)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _curves(axes: Axes, evidence: Evidence, method: str) -> None:
    """A method's points: cut hollow, fitted filled."""
    color = COLORS.get(method, GREY)
    for recover in ("none", "fit"):
        cells = [c for k, c in evidence.cells.items() if (k.method, k.recover) == (method, recover)]
        whole = evidence.dense["kv_bytes_per_token"]
        points = sorted((c["kv_bytes_per_token"] / whole, c["kl"]["value"]) for c in cells)
        if not points or (recover == "fit" and color == GREY):
            continue
        filled = recover == "fit"
        style: dict[str, Any] = {"color": color, "marker": "o" if color != GREY else "."}
        style |= {"markerfacecolor": color if filled or color == GREY else "white"}
        style |= {"linestyle": "-" if filled else "--", "linewidth": 1.6 if color != GREY else 0.8}
        label = f"{method}, {RECOVERIES[recover]}" if color != GREY else None
        axes.plot(
            *zip(*points, strict=True), label=label, zorder=1 if color == GREY else 2, **style
        )


def page(evidence: Evidence) -> str:
    """The whole page."""
    scored, context = evidence.dense["evaluation"], evidence.dense["attention_flops"]["context"]
    tokens = next(
        (c["prefill_tokens"] for c in evidence.timed.values() if "prefill_tokens" in c), 0
    )
    prefill = f", like reading {tokens:,} tokens (prefill)," if tokens else ""
    head = HEAD.format(protocol=evidence.protocol, context=context, prefill=prefill)
    parts = [_filled(head)]
    parts.append(FIGURE_NOTE)
    parts += [
        f"## At {retain:.0%} of the cache\n\n{timed_on(evidence, retain)}"
        f"{main_table(evidence, retain)}\n"
        for retain in RATIOS
    ]
    whole = evidence.whole[DENSE]
    about = {key: whole[key] for key in ("window", "text")} | {"few": scored["num_windows"]}
    about |= {"windows": whole["num_windows"], "bos": describe_bos(whole["bos"])}
    parts.append(f"{_filled(BEYOND.format(**about))}\n{beyond_table(evidence)}\n")
    return "\n".join(parts)


def _filled(text: str) -> str:
    """Paragraphs of Markdown, wrapped again after figures were put into them."""
    blocks = (" ".join(block.split()) for block in text.strip().split("\n\n"))
    return "\n\n".join(textwrap.fill(x, 100, break_on_hyphens=False) for x in blocks) + "\n"


def main() -> None:
    """Write the page, and the figure."""
    evidence = Evidence()
    (REPOSITORY / PAGE).write_text(page(evidence), encoding="utf-8")
    draw(evidence, REPOSITORY / FIGURE)


if __name__ == "__main__":
    main()
