"""What is measured of a model and its cut, and how a pruned checkpoint is written."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration.bos import Bos, bos_token
from ..calibration.held_out import check_enough, dataset_name, evaluation_tokens
from ..calibration.own import with_samples
from ..calibration.protocol import EVALUATION_WINDOWS
from ..calibration.text import named_sources
from ..calibration.workbench import CalibrationText, Workbench
from ..checkpoint.card import CARD_FILE, model_card, unmeasured
from ..checkpoint.files import PLAN_FILE, REPORT_FILE, whole_directory, write_json
from ..checkpoint.load import copy_processor, load_tokenizer
from ..checkpoint.provenance import provenance
from ..checkpoint.writing import write_model
from ..evaluation.cost.footprint import footprint
from ..evaluation.quality.fidelity import DenseStates
from ..evaluation.quality.perplexity import Perplexity, evaluation_window, perplexity
from ..methods import Method, traits_of
from ..methods.base import traits
from ..model.errors import CheckpointError
from ..model.families import WRAPPERS
from ..model.fingerprint import fingerprint_model
from ..model.layers import base_model_type
from ..planning.plan import Plan


def measure(
    model: Any,
    tokenizer: Any,
    text: str | None,
    *,
    tokens: Tensor | None = None,
    bos: Bos = "auto",
    progress: bool = False,
) -> dict[str, Any]:
    """Footprint, weights' fingerprint and, on a held-out text, perplexity, as JSON-able data.

    `tokens` [N] are those of the text, for a caller that has them already. Windows begin as
    `bos.bos_token` decides.
    """
    result = _weights(model)
    if text is not None:
        windows = _held_out_windows(model, tokenizer, text, tokens, bos)
        result |= quality(text, perplexity(model, **windows, progress=progress))
    return result


def measure_against(
    dense: Any,
    models: Mapping[str, Any],
    tokenizer: Any,
    text: str | None,
    *,
    tokens: Tensor | None = None,
    bos: Bos = "auto",
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """As `measure`, all in one pass each: `dense`, and every one of `models` with its fidelity."""
    result = {name: _weights(model) for name, model in {"dense": dense, **models}.items()}
    if text is None:
        return result
    windows = _held_out_windows(dense, tokenizer, text, tokens, bos)
    states = DenseStates(dense, **windows, progress=progress)
    for name, model in models.items():
        compared = states.compare(model, progress=progress)
        result["dense"] |= quality(text, compared.dense_perplexity)
        result[name] |= quality(text, compared.perplexity) | compared.figures()
    return result


def _held_out_windows(
    model: Any, tokenizer: Any, text: str, tokens: Tensor | None, bos: Bos
) -> dict[str, Any]:
    """What all models are judged on, as arguments of `perplexity` and `DenseStates`."""
    first = bos_token(bos, tokenizer, model.config)
    ids = tokens if tokens is not None else evaluation_tokens(text, tokenizer)
    window = fitting_window(model, ids, first)
    return {"token_ids": ids, "window": window, "max_windows": EVALUATION_WINDOWS, "bos": first}


def fitting_window(model: Any, tokens: Tensor, bos: int | None) -> int:
    """Tokens per evaluation window of a text [N]: all there are where they are fewer than usual."""
    return min(evaluation_window(model, None), len(tokens) + (bos is not None))


def quality(text: str, scored: Perplexity) -> dict[str, Any]:
    """A perplexity as a report has it."""
    named = {"text": text, "dataset": dataset_name(text)}
    return {"perplexity": scored.value, "evaluation": {**named, **asdict(scored)}}


def save(
    small: Any,
    plan: Plan,
    output: str | Path,
    tokenizer: Any = None,
    *,
    source: Any = None,
    dense: Any = None,
    report: dict[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write a pruned checkpoint whole or not at all: weights, config, plan, tokenizer, card.

    Without a `tokenizer`, the one beside the dense `source` is copied, if there is one. Without a
    `report`, the card compares sizes with the `dense` model, if that is given.
    """
    if tokenizer is None and source is not None:
        try:
            tokenizer = load_tokenizer(source)
        except CheckpointError:
            tokenizer = None
    with whole_directory(output, force=force) as folder:
        write_model(small, folder)
        plan.save(folder / PLAN_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if base_model_type(small.config) in WRAPPERS:
            copy_processor(source or small.config.name_or_path, folder)
        if report is not None:
            write_json(folder / REPORT_FILE, report)
        elif dense is not None:
            named = str(source or dense.name_or_path)
            report = unmeasured(plan, named, dense, small, traits_of(plan))
        if report is not None:
            card = model_card(report, Path(output).resolve().name)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
    small.name_or_path = str(output)  # as if it had been loaded from there


def describe(bench: Workbench, method: Method, plan: Plan) -> dict[str, Any]:
    """What was cut and how, as JSON-able data."""
    names = named_sources(bench.reading.text)
    _, drawn = with_samples(names, bench.model, bench.tokenizer)
    return {
        "source": bench.name,
        "model_type": plan.model_type,
        "calibration": bench.reading.describe(bench.bos),
        **drawn,
        "retain": method.retain,
        "kept_fraction": plan.kept_fraction,
        "method": method.describe(),
        "attention": plan.about(),
        "traits": traits(method),
    }


def made_with(
    read: CalibrationText, evaluate: str | None, dtype: Any, **more: Any
) -> dict[str, Any]:
    """Code, versions and settings that repeat a compression."""
    return provenance(
        calibration=read.text,
        num_windows=read.num_windows,
        window=read.window,
        evaluate=evaluate,
        dtype=str(dtype),
        seed=read.seed,
        bos=read.bos,
        **more,
    )


def held_out(text: str | None, bench: Workbench) -> Tensor | None:
    """Tokens of the text to evaluate on, before the calibration that would be wasted.

    Raises RapError if they are fewer than a window.
    """
    if text is None:
        return None
    tokens, window = bench.held_out(text), evaluation_window(bench.model, None)
    if bench.bos is not None:
        window -= 1
    check_enough(text, len(tokens), window)
    return tokens


def _weights(model: Any) -> dict[str, Any]:
    """Footprint and fingerprint."""
    found = asdict(footprint(model))
    found["parameters"] = found.pop("total_parameters")
    return {**found, "fingerprint": fingerprint_model(model)}
