"""`rap demo`: the bundled model at four budgets beside the dense one, in under two minutes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import assets
from ..analysis.figures import quality_against_cache
from ..calibration import calibrate
from ..checkpoint import write_json
from ..corpus import load_windows
from ..evaluation.footprint import footprint
from ..evaluation.perplexity import perplexity
from ..methods import Rap
from ..pipeline import evaluation_tokens
from ..provenance import provenance
from . import options
from .options import console, print_json, print_table

RETAINS = (0.9, 0.8, 0.7, 0.5)
# The bundled model was trained on sequences of this length.
WINDOW, EVALUATION_WINDOWS, CALIBRATION_WINDOWS = 512, 48, 32
PROMPT = "It was a dark evening, and the old man"
SAMPLE_TOKENS = 40


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("demo")(demo_command)


def demo_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of results.json and the figure.")
    ] = Path("runs/demo"),
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Compress the bundled model to 90, 80, 70 and 50 % of its KV cache and compare with dense."""
    results = run_demo(seed=seed)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    figure = output / "perplexity.png"
    quality_against_cache(results["rows"], figure, "Bundled model, cut without training")
    if as_json:
        print_json(results)
        return
    dense = results["rows"][0]
    print_table(
        "Bundled Llama (4.6M parameters), novels it was not trained on",
        ["", "KV bytes/token", "of dense", "attention parameters", "perplexity"],
        [_table_row(row, dense) for row in results["rows"]],
    )
    for row in results["rows"]:
        if "sample" in row:
            console.print(f"\n[bold]{_label(row)}[/bold]: {row['sample']}", highlight=False)
    console.print(f"\nwrote {output / 'results.json'} and {figure}")


def run_demo(seed: int = 0) -> dict[str, Any]:
    """The demo's figures: dense first, then one row per retain ratio, with two samples."""
    torch.manual_seed(seed)
    model = assets.reference_model(dtype=torch.float32)
    tokenizer = assets.reference_tokenizer()
    tokens = evaluation_tokens("bundled", tokenizer)
    windows = load_windows(
        "bundled", tokenizer, num_windows=CALIBRATION_WINDOWS, window=WINDOW, seed=seed
    )
    statistics = calibrate(model, windows, Rap().needs, progress=True)
    rows = [_measure(model, tokens, 1.0) | {"sample": _sample(model, tokenizer)}]
    for retain in RETAINS:
        method = Rap(retain=retain, seed=seed)
        small = method.apply(model, method.plan(model, statistics))
        rows.append(_measure(small, tokens, retain))
        if retain == 0.7:
            rows[-1]["sample"] = _sample(small, tokenizer)
    return {"rows": rows, "provenance": provenance(method=Rap().describe(), seed=seed)}


def _measure(model: Any, tokens: torch.Tensor, retain: float) -> dict[str, Any]:
    quality = perplexity(model, tokens, window=WINDOW, max_windows=EVALUATION_WINDOWS)
    cost = asdict(footprint(model))
    return {"retain": retain, "perplexity": quality.value, **cost}


def _sample(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _label(row: dict[str, Any]) -> str:
    return "dense" if row["retain"] == 1.0 else f"retain {row['retain']}"


def _table_row(row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    return [
        _label(row),
        f"{row['kv_bytes_per_token']:,}",
        f"{row['kv_bytes_per_token'] / dense['kv_bytes_per_token']:.1%}",
        f"{row['attention_parameters']:,}",
        f"{row['perplexity']:.2f}",
    ]
