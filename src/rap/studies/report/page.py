"""One self-contained HTML page of result files: tables, figures, and where every number is from."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...model.errors import RapError
from ..analyses.recall_map import recall_maps
from ..analyses.registry import ANALYSES
from ..analyses.study import figure_of
from .charts import Series, legend, line_chart
from .report import PICTURES, SHORT, read_results, source_parts, tables_of

Record = dict[str, Any]

STYLE = Path(__file__).with_name("page.css")
DENSE = "dense"


def html_report(sources: Sequence[Path], title: str = "Results") -> str:
    """A page that needs no other file and no network; RapError as of `report.read_results`."""
    results = read_results(sources)
    named = [_title(result) for result in results]
    contents = "".join(
        f'<li><a href="#r{number}">{escape(name)}</a></li>' for number, name in enumerate(named)
    )
    sections = "".join(
        _section(number, name, result)
        for number, (name, result) in enumerate(zip(named, results, strict=True))
    )
    nav = f"<nav><ul>{contents}</ul></nav>" if len(results) > 1 else ""
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>"
        "<p>Built by <code>rap report</code> from result files; no figure is typed.</p>"
        f"{nav}{sections}</main></body></html>\n"
    )


def _title(result: Record) -> str:
    return str(result.get("title") or tables_of(result)[0]["title"])


def _section(number: int, name: str, result: Record) -> str:
    tables = tables_of(result)
    shown = "".join(_table(table, several=len(tables) > 1) for table in tables)
    cells = result.get("cells") or []
    command = f"<pre>{escape(result['command'])}</pre>" if result.get("command") else ""
    made = ", ".join(source_parts(result))
    figures = _figures(cells) + _picture(name, result)
    return (
        f'<section id="r{number}"><h2>{escape(name)}</h2>{figures}{shown}'
        f'<div class="source">{command}<p>{escape(made)}</p></div>{_origins(result)}</section>\n'
    )


def _picture(name: str, result: Record) -> str:
    """The picture beside a result file, or else the figure of an analysis, inside the page."""
    if "picture" in result:
        path = result["picture"]
        kind, data = PICTURES[path.suffix], path.read_bytes()
    elif result.get("analysis") in ANALYSES:
        kind, data = PICTURES[".png"], _drawn(name, result)
    else:
        return ""
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{escape(name, quote=True)}" src="{source}">'


def _drawn(name: str, result: Record) -> bytes:
    """The figure of an analysis from its data, a PNG of the same bytes every time."""
    written = io.BytesIO()
    try:
        figure = figure_of(ANALYSES[result["analysis"]], result["data"])
    except (KeyError, IndexError, TypeError) as error:
        raise RapError(
            f"the data of {name!r} are of another version ({error!r}): run "
            f"`rap analyze {result['analysis']}` again"
        ) from error
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def _table(table: Record, *, several: bool) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in table["header"])
    rows = "".join(
        f"<tr><th>{_broken(str(first))}</th>"
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in table["rows"]
    )
    title = f"<h3>{escape(table['title'])}</h3>" if several else ""
    note = f'<p class="note">{escape(table["note"])}</p>' if table.get("note") else ""
    return (
        f'{title}<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _broken(name: str) -> str:
    """A long name may break after its colons, and nowhere else."""
    return escape(name).replace(":", ":<wbr>")


def _figures(cells: Sequence[Record]) -> str:
    """Quality against cost, one chart a recovery, with one key for all; and maps of recall."""
    dense = next((cell for cell in cells if cell["method"] == DENSE), None)
    cut = [cell for cell in cells if cell["method"] != DENSE]
    if dense is None or not cut:
        return ""
    methods = list(dict.fromkeys(cell["method"] for cell in cut))
    labels = {
        recover: "cut, not recovered" if recover == "none" else f"recovery: {recover}"
        for recover in dict.fromkeys(cell["recover"] for cell in cut)
    }
    drawn = []
    for recover, after in labels.items():
        here = [cell for cell in cut if cell["recover"] == recover]
        for x_label, share in SHARES.items():
            drawn.append(_figure(methods, here, dense, "perplexity", x_label, share, after))
        if dense.get("recall"):
            x_label, share = next(iter(SHARES.items()))
            drawn.append(_figure(methods, here, dense, "recall", x_label, share, after))
    charts = f'{legend(methods, "dense")}<div class="figures">{"".join(drawn)}</div>'
    return charts + recall_maps(dense, cut, labels)


def _figure(
    methods: Sequence[str],
    here: Sequence[Record],
    dense: Record,
    what: str,
    x_label: str,
    share: Callable[[Record, Record], float],
    after: str,
) -> str:
    label, value = QUALITY[what]
    series = [
        Series(name, [(share(c, dense), value(c)) for c in here if c["method"] == name])
        for name in methods
    ]
    chart = line_chart(series, x_label, label, reference=value(dense), may_log=what == "perplexity")
    return f"<figure>{chart}<figcaption>{escape(label)}; {escape(after)}</figcaption></figure>"


def _origins(result: Record) -> str:
    """For every cell: the command that repeats it, its settings, weights and versions."""
    cells, failed = result.get("cells") or [], result.get("failed") or []
    if not cells:
        return ""
    blocks = "".join(_origin(cell) for cell in cells)
    errors = "".join(
        f"<article><h4>{_name(cell)}: failed</h4><pre>{escape(cell['command'])}</pre>"
        f"<p>{escape(cell['error'])}</p></article>"
        for cell in failed
    )
    return (
        "<details><summary>Where every number is from: command, settings, weights and versions"
        f" of {len(cells)} cells</summary>{errors}{blocks}</details>"
    )


def _origin(cell: Record) -> str:
    said = [
        f"perplexity {cell['perplexity']:.4f}",
        f"{cell['kv_bytes_per_token']:,} KV bytes a token in decode and "
        f"{cell['prefill_kv_bytes_per_token']:,.0f} in prefill",
        f"weights {cell['fingerprint'][:SHORT]} of dense {cell['dense_fingerprint'][:SHORT]}",
        f"seed {cell['seed']}",
        f"{cell['seconds']:.0f} s",
        *source_parts(cell),
    ]
    published = cell.get("paper") or {}
    if published:
        figures = [f"{key} {value}" for key, value in published.items()]
        said.append(f"in the paper: {', '.join(figures)}")
    settings = json.dumps(cell["settings"], sort_keys=True) if cell.get("settings") else ""
    shown = f"<p><code>{escape(settings)}</code></p>" if settings else ""
    return (
        f"<article><h4>{_name(cell)}</h4><pre>{escape(cell['command'])}</pre>"
        f"{shown}<p>{escape('; '.join(said))}</p></article>"
    )


def _name(cell: Record) -> str:
    if cell["method"] == DENSE:
        return DENSE
    return escape(f"{cell['method']} at {cell['retain']:g}, recovery {cell['recover']}")


def _recalled(cell: Record) -> float:
    return 100 * sum(entry["accuracy"] for entry in cell["recall"]) / len(cell["recall"])


SHARES: dict[str, Callable[[Record, Record], float]] = {
    "KV bytes, part of dense": lambda c, d: c["kv_bytes_per_token"] / d["kv_bytes_per_token"],
    "attention FLOPs of a decode step, part of dense": lambda c, d: (
        c["attention_flops"]["value"] / d["attention_flops"]["value"]
    ),
}
QUALITY: dict[str, tuple[str, Callable[[Record], float]]] = {
    "perplexity": ("perplexity", lambda cell: float(cell["perplexity"])),
    "recall": ("recall, % of numbers given back", _recalled),
}
