"""`rap demo`: the bundled model at four budgets, and distilled at the smallest, beside dense."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..calibration.workbench import CalibrationText, Workbench
from ..checkpoint.files import check_output, write_json
from ..checkpoint.provenance import provenance
from ..evaluation.cost.footprint import footprint
from ..evaluation.quality.perplexity import perplexity
from ..methods import Rap
from ..recovery.stages import recover_stage
from ..studies.report.figures import quality_against_cache
from . import options
from .options import console, print_json, print_table

RETAINS = (0.9, 0.8, 0.7, 0.5)
# Perplexity in windows of this length: the split of the demo's text is the one of the tests.
WINDOW, EVALUATION_WINDOWS, CALIBRATION_WINDOWS = 512, 48, 32
PROMPT = "It was a dark evening, and the old man"
SAMPLE_TOKENS, SAMPLE_RETAIN = 40, 0.7
RECOVERY = "fast"


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
    """Compress the bundled model to 90, 80, 70 and 50 % of its KV cache and compare with dense.

    The smallest is then distilled from the dense model, the only training there is.
    """
    check_output(output, force=True)
    results = run_demo(seed=seed)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    figure = output / "perplexity.png"
    quality_against_cache(
        results["rows"], figure, "Bundled model, cut without training, and distilled"
    )
    if as_json:
        print_json(results)
        return
    dense = results["rows"][0]
    print_table(
        "Bundled Llama on novels it was not trained on; only the last row was trained",
        ["", "KV bytes/token", "of dense", "attention parameters", "perplexity"],
        [_table_row(row, dense) for row in results["rows"]],
    )
    for row in results["rows"]:
        if "sample" in row:
            console.print(f"\n{_label(row)}: {row['sample']}", highlight=False)
    console.print(f"\nwrote {output / 'results.json'} and {figure}")


def run_demo(seed: int = 0) -> dict[str, Any]:
    """The demo's figures: dense, per retain ratio the paper's cut and the default, distilled."""
    torch.manual_seed(seed)
    reading = CalibrationText("bundled", CALIBRATION_WINDOWS, WINDOW, seed)
    bench = Workbench.open("bundled", dtype=torch.float32, reading=reading, progress=True)
    model, tokenizer, tokens = bench.model, bench.tokenizer, bench.held_out("bundled")
    # Single pairs in both, so that the two cuts are compared at the same cache.
    recipes = {"paper": Rap.paper(align=2, seed=seed), "rap": Rap(align=2, seed=seed)}
    bench.statistics_for(recipes.values())
    rows = [_measure(model, tokens) | {"method": "dense", "retain": 1.0}]
    rows[0]["sample"] = _sample(model, tokenizer)
    for retain in RETAINS:
        for name, recipe in recipes.items():
            method = replace(recipe, retain=retain)
            small = method.apply(model, bench.plan(method))
            rows.append(_measure(small, tokens) | {"method": name, "retain": retain})
            if name == "rap" and retain == SAMPLE_RETAIN:
                rows[-1]["sample"] = _sample(small, tokenizer)
    recovered, _ = recover_stage(small, model, tokenizer, RECOVERY, seed=seed, progress=True)
    rows.append(_measure(recovered, tokens) | {"method": "recovered", "retain": RETAINS[-1]})
    rows[-1]["sample"] = _sample(recovered, tokenizer)
    described = {name: recipe.describe() for name, recipe in recipes.items()}
    return {"rows": rows, "provenance": provenance(methods=described, seed=seed)}


def _measure(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    quality = perplexity(model, tokens, window=WINDOW, max_windows=EVALUATION_WINDOWS)
    return {"perplexity": quality.value, **asdict(footprint(model))}


def _sample(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _label(row: dict[str, Any]) -> str:
    names = {"paper": "the paper's cut", "rap": "rap", "recovered": "rap, distilled"}
    known = row["method"] in names
    return f"{row['retain']}, {names[row['method']]}" if known else "dense"


def _table_row(row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    return [
        _label(row),
        f"{row['kv_bytes_per_token']:,}",
        f"{row['kv_bytes_per_token'] / dense['kv_bytes_per_token']:.1%}",
        f"{row['attention_parameters']:,}",
        f"{row['perplexity']:.2f}",
    ]
