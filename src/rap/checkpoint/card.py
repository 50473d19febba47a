"""The model card of a pruned checkpoint; every number is from its report or plan."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..model.cache_layout import dense_layout
from ..model.layers import windowed_layers

CARD_FILE = "README.md"

_TEMPLATE = """---
{base}library_name: transformers
tags:
- rap
- kv-cache
- pruning
- rope
---

# {title}

{what}

| | dense | this model |
|---|---:|---:|
{rows}

```python
{imported}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = AutoTokenizer.from_pretrained("{path}")
```

Method: `{method}`

{calibration}{recorded} in `plan.rap` (`rap inspect plan plan.rap`){measured}.
The licence is that of the dense model.
"""
_RECORDED = (
    "The weights' fingerprint and every layer's widths are in `config.json`\n(section `rap`), the "
    "full decision"
)
_MEASURED = ", the measurements and\nversions in `rap_report.json`"


# What loading takes, by what the checkpoint ships; one that does not say needs the package.
_IMPORT = "import rap"
_IMPORTS = {
    "code": f"{_IMPORT}  # or pass trust_remote_code=True without the package\n",
    "stock": "",
}


# What tells how near a cut is to its dense model: the row, the dense model's own figure, a format.
NEARNESS = {
    "perplexity_ratio": ("perplexity, multiple of dense", "1", ".3f"),
    "kl": ("KL from dense, nats/token", "0", ".3g"),
    "top1": ("same most likely token as dense", "100%", ".1%"),
}
_ENDS = ("value", "low", "high")


def model_card(report: dict[str, Any], title: str) -> str:
    """The README.md of a checkpoint, from the report saved with it, or `unmeasured`.

    `traits` of the report is what the method says of itself (`methods.base.traits`); reports of
    earlier releases have none, and their card says only which method it was.
    """
    about = report.get("traits") or {}
    source = str(report["source"])
    on_hub = report.get("on_hub", is_hub_name(source))
    return _TEMPLATE.format(
        base=f"base_model: {source}\n" if on_hub else "",
        title=title,
        what=_what(report, about),
        imported=_IMPORTS.get(about.get("ships", ""), f"{_IMPORT}\n"),
        rows="\n".join(f"| {' | '.join(row)} |" for row in comparison(report)),
        path=title,
        method=report["method"],
        calibration=_calibrated(report),
        recorded="The full decision is" if about.get("ships") == "stock" else _RECORDED,
        measured=_MEASURED if "provenance" in report else "",
    )


def is_hub_name(source: str) -> bool:
    """Whether others can follow a source as a link; a local path, which there is now, is none."""
    is_local = source.startswith((".", "/", "~")) or Path(source).exists()
    return source.count("/") == 1 and not is_local


def plain_report(report: dict[str, Any]) -> dict[str, Any]:
    """The report of the same model as a plain checkpoint, which needs no package."""
    return {**report, "traits": {**(report.get("traits") or {}), "ships": "stock"}}


def unmeasured(
    plan: Any,
    source: str,
    dense: PreTrainedModel,
    small: PreTrainedModel,
    traits: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The part of a card from a Plan and sizes alone; both models may be on the meta device."""
    windowed = windowed_layers(dense.config)
    caches = [
        (cache.elements, dense_layout(shape).elements)
        for index, (cache, shape) in enumerate(zip(plan.caches, plan.shapes, strict=True))
        if cache is not None and shape is not None and index not in windowed
    ]
    return {
        "source": source,
        "on_hub": is_hub_name(source),
        "model_type": plan.model_type,
        "kept_fraction": plan.kept_fraction,
        "method": plan.method,
        "traits": dict(traits or {}),
        "dense": _sizes(dense, sum(whole for _, whole in caches)),
        "pruned": _sizes(small, sum(kept for kept, _ in caches)),
    }


def _sizes(model: PreTrainedModel, cached: int) -> dict[str, int]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"kv_bytes_per_token": cached * model.dtype.itemsize, "parameters": parameters}


def _what(report: dict[str, Any], about: dict[str, str]) -> str:
    """What the model is and how it was made, as a paragraph."""
    name = report["method"].get("name", "rap")
    text = (
        f"A {report['model_type']} model whose KV cache is {report['kept_fraction']:.1%} of the "
        f"dense model's, made by method `{name}` of the rap package. "
    )
    if about:
        what = about["reconstructs"].capitalize()
        text += f"It keeps {about['summary']}. "
        text += f"{what} are" if what else "Nothing is"
        text += " reconstructed from the cache when it decodes."
    return textwrap.fill(text.strip(), 100)


def comparison(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Printable (name, dense, pruned) rows of a report: what a person looks at first."""
    dense, small = report["dense"], report["pruned"]
    names = {
        "kv_bytes_per_token": "KV cache, bytes per token",
        "attention_parameters": "attention parameters",
        "parameters": "all parameters",
    }
    rows = [
        (name, f"{dense[figure]:,}", f"{small[figure]:,}")
        for figure, name in names.items()
        if figure in dense
    ]
    if dense.get("windowed_kv_bytes_per_token"):
        name = f"KV cache of sliding windows of {dense['window']:,} tokens, bytes"
        whole, kept = (x["windowed_kv_bytes_per_token"] * x["window"] for x in (dense, small))
        rows.insert(1, (name, f"{whole:,}", f"{kept:,}"))
    if "perplexity" in dense and "perplexity" in small:
        name = f"perplexity{_measured_on(dense.get('evaluation') or {})}"
        rows.append((name, f"{dense['perplexity']:.3f}", f"{small['perplexity']:.3f}"))
    for figure, (name, of_dense, form) in NEARNESS.items():
        # One recovered with a teacher of rounded weights, or by an earlier release, has none.
        if figure in small:
            rows.append((name, of_dense, interval_text(small[figure], form)))
    return rows


def _measured_on(evaluation: Mapping[str, Any]) -> str:
    """The evaluation dataset and its windows; nothing where a report does not name it."""
    if "dataset" not in evaluation:
        return ""
    windows = f"{evaluation['num_windows']} x {evaluation['window']:,} tokens"
    return f" on {evaluation['dataset']}, {windows}"


def interval_text(figure: Mapping[str, float], form: str) -> str:
    """A figure with the ends of its interval in brackets, where it has one of some width."""
    value, low, high = (format(figure[key], form) if key in figure else "" for key in _ENDS)
    return f"{value} ({low} to {high})" if low != high else value


def _calibrated(report: dict[str, Any]) -> str:
    """What was read, and of a streamed compression what it kept small and why."""
    found = f"Calibration: {report['calibration']}. " if "calibration" in report else ""
    if "objective" in report:
        about = report["objective"]
        metric = f"metric `{about['metric']}`, " if about["metric"] else ""
        found += f"Objective: {metric}statistics {about['statistics']} ({about['why']}). "
    return found
