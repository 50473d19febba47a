"""The model card written beside a pruned checkpoint, every figure taken from its report."""

from pathlib import Path
from typing import Any

_TEMPLATE = """---
{base}library_name: transformers
tags:
- rap
- kv-cache
- pruning
- rope
---

# {title}

A {model_type} model whose KV cache is {kept:.1%} of the dense model's, made by cutting the weights
of attention (RoPE-Aligned Pruning): whole RoPE pairs of keys and queries, channels or directions of
values. Nothing is reconstructed when it decodes.

| | dense | this model |
|---|---:|---:|
{rows}

```python
import rap  # or pass trust_remote_code=True without the package
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = AutoTokenizer.from_pretrained("{path}")
```

Method: `{method}`

Calibration: {calibration}. The weights' fingerprint and every layer's widths are in `config.json`
(section `rap`), the full decision in `plan.rap` (`rap inspect plan plan.rap`), the measurements and
versions in `rap_report.json`. The licence is that of the dense model.
"""


def model_card(report: dict[str, Any], title: str) -> str:
    """The README.md of a checkpoint, from the report that is saved beside it."""
    source = str(report["source"])
    # Only a hub name is a link that others can follow; a local path stays out of the card.
    is_local = source.startswith((".", "/", "~")) or Path(source).exists()
    is_hub_name = source.count("/") == 1 and not is_local
    return _TEMPLATE.format(
        base=f"base_model: {source}\n" if is_hub_name else "",
        title=title,
        model_type=report["model_type"],
        kept=report["kept_fraction"],
        rows="\n".join(_row(name, dense, small) for name, dense, small in comparison(report)),
        path=title,
        method=report["method"],
        calibration=report["calibration"],
    )


def comparison(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Printable (name, dense, pruned) rows of a report: what a person looks at first."""
    dense, small = report["dense"], report["pruned"]
    rows = [
        (
            "KV cache, bytes per token",
            f"{dense['kv_bytes_per_token']:,}",
            f"{small['kv_bytes_per_token']:,}",
        ),
        (
            "attention parameters",
            f"{dense['attention_parameters']:,}",
            f"{small['attention_parameters']:,}",
        ),
        ("all parameters", f"{dense['parameters']:,}", f"{small['parameters']:,}"),
    ]
    if "perplexity" in dense:
        rows.append(("perplexity", f"{dense['perplexity']:.3f}", f"{small['perplexity']:.3f}"))
    return rows


def _row(name: str, dense: str, small: str) -> str:
    return f"| {name} | {dense} | {small} |"
