"""The whole story, one line per stage: checkpoint and ratio in, smaller checkpoint out."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from . import assets
from .calibration.bos import Bos, bos_token, check_bos, describe_bos
from .calibration.memory import describe_memory, estimate_memory
from .calibration.run import calibrate, check_windows
from .calibration.text import load_windows, read_text
from .checkpoint.card import CARD_FILE, model_card, unmeasured
from .checkpoint.files import PLAN_FILE, check_output, whole_directory, write_json
from .checkpoint.load import copy_processor, load_config, load_dense, load_tokenizer
from .checkpoint.provenance import provenance
from .checkpoint.source import resolve_source
from .evaluation.cost.footprint import footprint
from .evaluation.quality.perplexity import DEFAULT_WINDOW, perplexity
from .methods import Method, parse_method, traits_of
from .methods.base import traits
from .model.errors import CheckpointError, RapError
from .model.families import WRAPPERS
from .model.fingerprint import fingerprint_model
from .model.layers import attention_spec, base_model_type, refuse_pruned, trained_length
from .planning.plan import Plan
from .recovery.runs import finish
from .recovery.stages import check_recovery, recover_stage, work_folder
from .surgery.replace import Replacement

REPORT_FILE = "rap_report.json"
EVALUATION_WINDOWS = 16
STREAMED_CHARACTERS = 4_000_000  # about a million tokens, 450 windows of 2048


@dataclass(frozen=True)
class Decision:
    """A plan, with the dense model and tokenizer it was made for, and how its windows began."""

    plan: Plan | Replacement
    model: Any
    tokenizer: Any
    bos: int | None = None


@dataclass(frozen=True)
class Compression:
    """What `compress` returns: the pruned model, its plan, and JSON-able measurements."""

    model: Any
    plan: Plan | Replacement
    report: dict[str, Any]


def compress(
    source: Any,
    retain: float = 0.7,
    output: str | Path | None = None,
    *,
    method: Method | str = "rap",
    tokenizer: Any = None,
    calibration: str = "bundled",
    num_windows: int = 32,
    window: int = 1024,
    evaluate: str | None = "bundled",
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    recover: str = "none",
    bos: Bos = "auto",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Compression:
    """Compress a model (or checkpoint directory, hub name, `bundled`) to `retain` of its KV cache.

    Calibrates, plans, cuts, recovers (`recover` is one of `recovery.stages.RECOVERIES`), measures
    perplexity and footprint before and after (`evaluate` names the held-out text, None skips it),
    and writes the checkpoint to `output` if one is given. A live model needs its `tokenizer`.
    `method` is a method, which knows its own `retain`, or the text of one,
    `name[:recipe][:setting=value]...`. All windows of text begin as `bos.bos_token` decides.
    Raises a RapError for any input that cannot work, before the work it would waste.
    """
    check_recovery(recover)
    if isinstance(method, str):
        method = parse_method(method, retain, seed=seed)
    if output is not None:
        check_output(output, force=force)
    text: dict[str, Any] = {
        "calibration": calibration,
        "num_windows": num_windows,
        "window": window,
    }
    common: dict[str, Any] = {"seed": seed, "bos": check_bos(bos), "progress": progress}
    model, tokenizer = _open(source, tokenizer, dtype, device_map)
    held_out = _held_out(evaluate, model, tokenizer, bos)
    judged: dict[str, Any] = {"tokens": held_out, "bos": bos, "progress": progress}
    decision = decide(model, method, tokenizer=tokenizer, **text, **common)
    small = method.apply(decision.model, decision.plan)
    models = (small, model, tokenizer)
    small, recovery = recover_stage(*models, recover, texts=[calibration], output=output, **common)
    report = {
        "source": source if isinstance(source, str) else str(model.name_or_path),
        "model_type": decision.plan.model_type,
        "calibration": _calibrated_on(num_windows, window, calibration, decision.bos),
        "retain": method.retain,
        "kept_fraction": decision.plan.kept_fraction,
        "method": method.describe(),
        "traits": traits(method),
        "dense": measure(model, tokenizer, evaluate, **judged),
        "pruned": measure(small, tokenizer, evaluate, **judged),
        "recovery": recovery,
        "provenance": provenance(**text, evaluate=evaluate, dtype=str(dtype), seed=seed, bos=bos),
    }
    if output is not None:
        save(small, decision.plan, output, tokenizer, report=report, force=force)
        finish(work_folder(output))
    return Compression(small, decision.plan, report)


def decide(
    source: Any,
    method: Method,
    *,
    tokenizer: Any = None,
    calibration: str = "bundled",
    num_windows: int = 32,
    window: int = 1024,
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    seed: int = 0,
    bos: Bos = "auto",
    progress: bool = False,
) -> Decision:
    """Load, calibrate what the method needs, and plan; nothing is cut."""
    model, tokenizer = _open(source, tokenizer, dtype, device_map)
    first = bos_token(bos, tokenizer, model.config)
    sizes = {"num_windows": num_windows, "window": window}
    windows = load_windows(calibration, tokenizer, **sizes, seed=seed, bos=first)
    check_windows(model, windows)
    needs = method.needs_for(model)
    if progress and needs:
        estimate = describe_memory(estimate_memory(model, windows, needs))
        Console(stderr=True).print(estimate, soft_wrap=True)
    statistics = calibrate(model, windows, needs, progress=progress)
    return Decision(method.plan(model, statistics), model, tokenizer, first)


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
    result: dict[str, Any] = {**_footprint(model), "fingerprint": fingerprint_model(model)}
    if text is not None:
        found = perplexity(
            model,
            tokens if tokens is not None else evaluation_tokens(text, tokenizer),
            window=_evaluation_window(model),
            max_windows=EVALUATION_WINDOWS,
            bos=bos_token(bos, tokenizer, model.config),
            progress=progress,
        )
        result |= {"perplexity": found.value, "evaluation": {"text": text, **asdict(found)}}
    return result


def evaluation_tokens(text: str, tokenizer: Any) -> Tensor:
    """Token ids [N] of a held-out text: `bundled` test novels, a file, or a dataset name.

    Of a streamed dataset (C4) the first four million characters are read.
    """
    if text == "bundled":
        found = assets.reference_text("test")
    else:
        found = read_text(text, max_characters=STREAMED_CHARACTERS)
    if not found.strip():
        raise RapError("the evaluation text is empty: give a text with some words in it")
    # verbose=False: the text is longer than the model's window on purpose.
    ids = tokenizer(found, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(ids)


def save(
    small: Any,
    plan: Plan | Replacement,
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
        small.save_pretrained(folder)
        plan.save(folder / PLAN_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if base_model_type(small.config) in WRAPPERS:
            copy_processor(source or small.name_or_path, folder)
        if report is not None:
            write_json(folder / REPORT_FILE, report)
        elif dense is not None:
            named = str(source or dense.name_or_path)
            report = unmeasured(plan, named, dense, small, traits_of(plan))
        if report is not None:
            card = model_card(report, Path(output).resolve().name)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")


def _open(source: Any, tokenizer: Any, dtype: Any, device_map: str | None) -> tuple[Any, Any]:
    if not isinstance(source, (str, Path)):
        refuse_pruned(source.config)
        attention_spec(source.config)
        if tokenizer is None:
            raise RapError("a live model has no tokenizer: pass tokenizer=... beside it")
        return source, tokenizer
    path = resolve_source(source)
    config = load_config(path)
    refuse_pruned(config)
    attention_spec(config)
    tokenizer = tokenizer or load_tokenizer(path)
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    return load_dense(path, dtype=dtype, **placement), tokenizer


def _held_out(text: str | None, model: Any, tokenizer: Any, bos: Bos) -> Tensor | None:
    """Tokens of the text to evaluate on, refused before the calibration that would be wasted."""
    if text is None:
        return None
    tokens, window = evaluation_tokens(text, tokenizer), _evaluation_window(model)
    if bos_token(bos, tokenizer, model.config) is not None:
        window -= 1
    if len(tokens) < window:
        raise RapError(
            f"the evaluation text has {len(tokens)} tokens, one window needs {window}: give a "
            "longer text, or none"
        )
    return tokens


def _evaluation_window(model: Any) -> int:
    longest = trained_length(model.config) or DEFAULT_WINDOW
    return min(DEFAULT_WINDOW, int(longest))


def _calibrated_on(num_windows: int, window: int, text: str, bos: int | None) -> str:
    read = f"{num_windows} windows of {window} tokens from {_public_name(text)}"
    return f"{read}, {describe_bos(bos)}"


def _public_name(text: str) -> str:
    """A file's name without its folder: the model card is for others."""
    return Path(text).name if Path(text).is_file() else text


def _footprint(model: Any) -> dict[str, Any]:
    found = asdict(footprint(model))
    found["parameters"] = found.pop("total_parameters")
    return found
