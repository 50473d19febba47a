"""Measurements of a model and its pruned model, and the writing of pruned checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration.dense_context import DenseContext
from ..checkpoint.card import CARD_FILE, is_hub_name, model_card, plain_report, unmeasured
from ..checkpoint.files import PLAN_FILE, REPORT_FILE, whole_directory, write_json, write_model
from ..checkpoint.load import copy_processor, load_tokenizer
from ..checkpoint.provenance import provenance
from ..checkpoint.stored import StoredModel
from ..data.bos import Bos, bos_token
from ..data.held_out import check_enough, dataset_name, evaluation_tokens
from ..data.own import with_samples
from ..data.protocol import EVALUATION_WINDOWS
from ..data.text import named_sources
from ..evaluation.cost.footprint import footprint
from ..evaluation.quality.fidelity import DenseStates
from ..evaluation.quality.perplexity import (
    Perplexity,
    evaluation_window,
    perplexity,
    whole_windows,
)
from ..methods import Method, traits_of
from ..methods.base import traits
from ..model.errors import CheckpointError
from ..model.families import WRAPPERS
from ..model.fingerprint import fingerprint_model
from ..model.layers import base_model_type
from ..planning.plan import Plan
from ..runtime.layerwise import answering
from ..runtime.sources import LayerSource, LoadedLayers, StoredLayers
from ..surgery.write import apply_streamed


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
    """As `measure`, all in one pass each: `dense`, and every one of `models` with its KL."""
    found = {name: _weights(model) for name, model in {"dense": dense, **models}.items()}
    if text is None:
        return found
    sources = {name: LoadedLayers(model) for name, model in models.items()}
    windows = _held_out_windows(dense, tokenizer, text, tokens, bos)
    return _compared(found, LoadedLayers(dense), sources, text, windows, None, progress)


def measure_pruned(
    context: DenseContext, small: LayerSource, plan: Plan, text: str | None, tokens: Tensor | None
) -> dict[str, dict[str, Any]]:
    """As `measure_against` of one pruned model, for the dense model of the context.

    Sizes of weights in files are by the plan and their shapes alone.
    """
    dense = context.source
    if small.in_memory:
        found = {"dense": _weights(dense.model), "pruned": _weights(small.model)}
    else:
        said = unmeasured(plan, context.name, dense.model, small.model)
        found = {name: said[name] for name in ("dense", "pruned")}
        found["dense"]["fingerprint"] = dense.fingerprint
    if text is None:
        return found
    windows = _held_out_windows(dense.model, context.tokenizer, text, tokens, context.bos)
    pruned = {"pruned": small}
    return _compared(found, dense, pruned, text, windows, context.kept_in, context.progress)


def _compared(
    found: dict[str, dict[str, Any]],
    dense: LayerSource,
    models: Mapping[str, LayerSource],
    text: str,
    windows: dict[str, Any],
    folder: Path | None,
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """`found`, with what the windows say of every model; `folder` as `answering` has it."""
    ids, _ = whole_windows(dense.model, **windows)
    how: dict[str, Any] = {"folder": folder, "progress": progress}
    with answering(dense, ids, "dense model", **how) as model:
        states = DenseStates(model, **windows, progress=progress)
    for name, one in models.items():
        with answering(one, ids, "pruned model", **how) as model:
            compared = states.compare(model, progress=progress)
        found["dense"] |= quality(text, compared.dense_perplexity)
        found[name] |= quality(text, compared.perplexity) | compared.figures()
    return found


def _held_out_windows(
    model: Any, tokenizer: Any, text: str, tokens: Tensor | None, bos: Bos
) -> dict[str, Any]:
    """What all models are judged on, as arguments of `perplexity` and `DenseStates`."""
    first = bos_token(bos, tokenizer, model.config)
    ids = (
        tokens
        if tokens is not None
        else evaluation_tokens(text, tokenizer, evaluation_window(model, None))
    )
    window = fitting_window(model, ids, first)
    return {"token_ids": ids, "window": window, "max_windows": EVALUATION_WINDOWS, "bos": first}


def fitting_window(model: Any, tokens: Tensor, bos: int | None) -> int:
    """Tokens per evaluation window of a text [N]: all there are where they are fewer than usual."""
    return min(evaluation_window(model, None), len(tokens) + (bos is not None))


def quality(text: str, scored: Perplexity) -> dict[str, Any]:
    """A perplexity as a report has it."""
    named = {"text": text, "dataset": dataset_name(text)}
    return {"perplexity": scored.value, "evaluation": {**named, **asdict(scored)}}


def write(
    small: LayerSource,
    context: DenseContext,
    plan: Plan,
    output: str | Path,
    report: dict[str, Any],
    *,
    force: bool = False,
) -> None:
    """Write the pruned checkpoint with its report; tensor by tensor where weights are in files."""
    if not isinstance(small, StoredLayers):
        model = small.whole("saving")
        return save(model, plan, output, context.tokenizer, report=report, force=force)
    dense = context.stored
    assert dense is not None
    assert isinstance(dense.weights, StoredModel)
    how: dict[str, Any] = {"report": report, "force": force, "progress": context.progress}
    return apply_streamed(dense.weights, plan, output, changed=small.changed, **how)


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
    """Write a pruned checkpoint atomically: weights, config, plan, tokenizer, card.

    Without a `tokenizer`, the one beside the dense `source` is copied, if there is one. Without a
    `report`, the card compares sizes with the `dense` model, if that is given.
    """
    if tokenizer is None and source is not None:
        try:
            tokenizer = load_tokenizer(source)
        except CheckpointError:
            tokenizer = None
    if report is not None and not hasattr(small.config, "rap"):
        report = plain_report(report)
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


def describe(context: DenseContext, method: Method, plan: Plan) -> dict[str, Any]:
    """What was pruned and how, as JSON-able data."""
    names = named_sources(context.reading.text)
    _, drawn = with_samples(names, context.model, context.tokenizer)
    return {
        "source": context.name,
        "on_hub": is_hub_name(context.name),
        "model_type": plan.model_type,
        "calibration": context.reading.describe(context.bos),
        **drawn,
        "retain": method.retain,
        "kept_fraction": plan.kept_fraction,
        "method": plan.method,
        "attention": plan.about(),
        "traits": traits(method),
    }


def made_with(
    context: DenseContext, evaluate: str | None, dtype: str | None, statistics: str | None
) -> dict[str, Any]:
    """How a compression is repeated, code and versions included.

    With the statistics of a file also what was read for those.
    """
    read, given, found = context.reading, context.given, dict[str, Any]()
    more: dict[str, Any] = {"device": str((context.stored or context.model).device)}
    if given is not None:
        read = replace(read, num_windows=given.num_windows, window=given.window)
        text = f"{read.num_windows} windows of {read.window} tokens, from a file of statistics"
        found["calibration"], more["statistics"] = text, statistics
    found["provenance"] = provenance(
        calibration=read.text,
        num_windows=read.num_windows,
        window=read.window,
        evaluate=evaluate,
        dtype=dtype,
        seed=read.seed,
        bos=read.bos,
        **more,
    )
    return found


def held_out(text: str | None, tokenizer: Any, model: Any, bos: Bos) -> Tensor | None:
    """Tokens of the text to evaluate on, before the calibration that would be wasted.

    Raises RapError if they are fewer than a window.
    """
    if text is None:
        return None
    window = evaluation_window(model, None)
    tokens = evaluation_tokens(text, tokenizer, window)
    begins = bos_token(bos, tokenizer, model.config) is not None
    check_enough(text, len(tokens), window - begins)
    return tokens


def _weights(model: Any) -> dict[str, Any]:
    """Footprint and fingerprint."""
    found = asdict(footprint(model))
    found["parameters"] = found.pop("total_parameters")
    return {**found, "fingerprint": fingerprint_model(model)}
