"""Measurements of every model of a comparison, dense or pruned, by any method."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.held_out import HELD_OUT
from ...data.protocol import EVALUATION_WINDOWS
from ...evaluation.cost.footprint import bytes_by_layer, footprint, reconstructs
from ...evaluation.cost.latency import PLAIN, measure_point, time_prefill
from ...evaluation.quality.fidelity import DenseStates
from ...evaluation.quality.perplexity import perplexity
from ...evaluation.retrieval.documents import check_wording
from ...evaluation.retrieval.recall import copy_loss, recall_grid
from ...model.errors import RapError, UnsupportedModelError
from ...model.fingerprint import fingerprint_model
from ...model.layers import windowed_layers
from ...runtime.settings import Count, check_fields, read_value, split_setting
from ...runtime.state import evaluating

OrNone = Annotated[int, Field(ge=0)]  # 0 skips what it is a number of


@dataclass(frozen=True, kw_only=True)
class Measures:
    """How the models are measured; the same for all of a comparison.

    text: evaluation dataset, by default a held-out split of the calibration data. Perplexity over
        `num_windows` (None: all) windows of `window` tokens of it (None: 2,048, or the context
        length if less).
    fidelity: divergence from the dense model and agreement with it, on the same windows.
    other_texts: a comma list of texts of other kinds; perplexity and fidelity over as many windows
        of each. A cut that was calibrated on one kind of text may cost another far more.
    recall: share of numbers given back, at each distance (tokens) among `recall_facts` facts, over
        `recall_documents` questions; 0 skips recall and copying. Asked in `recall_wording`, one of
        documents.WORDINGS.
    copy_documents: passages read a second time after 512 tokens.
    decode: median time of `decode_steps` steps after `decode_context` tokens, batch 1; 0 skips it.
    prefill: median time, of `PREFILL_ROUNDS`, to read `prefill_tokens` tokens; 0 skips it.
    """

    text: str = HELD_OUT
    window: Count | None = None
    num_windows: Count | None = EVALUATION_WINDOWS
    fidelity: bool = True
    other_texts: str = ""
    recall_distances: tuple[Count, ...] = (256, 1000)
    recall_facts: Count = 4
    recall_documents: OrNone = 32
    recall_wording: str = "plain"
    copy_documents: Count = 16
    decode_context: Count = 1024
    decode_steps: OrNone = 24
    prefill_tokens: OrNone = 0

    def __post_init__(self) -> None:
        check_fields(self, "measure")
        for name in ("text", "recall_distances"):
            if not getattr(self, name):
                raise RapError(f"measure {name} cannot be empty: name it, or remove the setting")
        check_wording(self.recall_wording)
        self.texts()

    def settings(self) -> dict[str, Any]:
        """All fields as plain data, but those of `LATER` that are as they were before they came.

        So cells that were measured before there was one are still known as theirs.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in LATER or value != LATER[name]
        }

    def texts(self) -> list[str]:
        """All datasets, the first of which most numbers are of; RapError if one is named twice."""
        named = [self.text, *(name.strip() for name in self.other_texts.split(",") if name.strip())]
        if len(set(named)) < len(named):
            raise RapError(f"measure other_texts names a text twice: {', '.join(named)}")
        return named


# The dense model against itself.
SAME = {"value": 0.0, "low": 0.0, "high": 0.0}
ALL = {"value": 1.0, "low": 1.0, "high": 1.0}
ITSELF = {"kl": SAME, "kl_p99": 0.0, "top1": ALL, "perplexity_ratio": ALL}
# Fields that came after cells had been measured, and what all cells had been measured with.
LATER = {"recall_wording": "plain", "other_texts": "", "prefill_tokens": 0}
PREFILL_ROUNDS = 5


def changed_measures(measures: Measures, changes: Sequence[str]) -> Measures:
    """The measures with `name=value` changes: a number, null, a list such as 256,1000, or a name.

    Raises RapError for a name that is not a field, or a value it cannot have.
    """
    known = {field.name: field.default for field in fields(Measures)}
    given: dict[str, Any] = {}
    for change in changes:
        name, text = split_setting(change)
        if name not in known:
            raise RapError(f"cannot measure {change!r}: write name=value, of {', '.join(known)}")
        if isinstance(known[name], str):
            given[name] = text
        elif isinstance(known[name], tuple):
            given[name] = tuple(read_value(part) for part in text.split(","))
        else:
            given[name] = read_value(text)
    return replace(measures, **given)


@dataclass(frozen=True)
class HeldOut:
    """A text to measure on: its `tokens` [N], and the dense model's `states` on its windows.

    `states` (`dense_states`) are what a model other than the dense one is compared with.
    """

    tokens: Tensor
    states: DenseStates | None = None


def measure(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, HeldOut],
    measures: Measures,
    *,
    seed: int = 0,
    bos: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Cost and quality of `model` as JSON-able data, on the `texts` that `measures` names.

    Windows and documents of them begin with the token `bos`, if any. The dense model is
    timed interleaved with it, so that a busy machine slows both alike.
    """
    first, *others = measures.texts()
    tokens = texts[first].tokens
    cost = footprint(model)
    result: dict[str, Any] = {
        **asdict(cost),
        "attention_flops": {
            "context": measures.decode_context,
            "value": cost.attention_flops(measures.decode_context),
        },
        "prefill_kv_bytes_per_token": prefill_bytes(model),
        "reconstructs": reconstructs(model),
        "fingerprint": fingerprint_model(model),
        **_quality(model, dense, texts[first], measures, bos, progress),
    }
    if others:
        result["other_texts"] = {
            name: _quality(model, dense, texts[name], measures, bos, progress) for name in others
        }
    if measures.recall_documents:
        result |= _context_use(model, tokenizer, tokens, measures, seed, bos)
    if measures.decode_steps:
        result |= _decode_seconds(model, dense, measures)
    if measures.prefill_tokens:
        result |= _prefill_seconds(model, dense, measures)
    return result


def dense_states(
    dense: PreTrainedModel,
    tokens: Tensor,
    measures: Measures,
    bos: int | None,
    progress: bool = False,
) -> DenseStates | None:
    """What cells are compared with, if they are: the dense model's states on the held-out text."""
    if not measures.fidelity:
        return None
    return DenseStates(dense, tokens, **_sizes(measures), bos=bos, progress=progress)


def _sizes(measures: Measures) -> dict[str, Any]:
    return {"window": measures.window, "max_windows": measures.num_windows}


def _quality(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    text: HeldOut,
    measures: Measures,
    bos: int | None,
    progress: bool,
) -> dict[str, Any]:
    """Perplexity, and what tells how near the dense model is, of one pass over the text."""
    figures: dict[str, Any] = {}
    if text.states is None or model is dense:
        scored = perplexity(model, text.tokens, **_sizes(measures), bos=bos, progress=progress)
        if measures.fidelity and model is dense:
            figures = ITSELF
    else:
        compared = text.states.compare(model, progress=progress)
        scored, figures = compared.perplexity, compared.figures()
    return {"perplexity": scored.value, "evaluation": asdict(scored), **figures}


def _context_use(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    measures: Measures,
    seed: int,
    bos: int | None,
) -> dict[str, Any]:
    text = np.asarray(tokens)
    recall = recall_grid(
        model,
        tokenizer,
        text,
        distances=measures.recall_distances,
        facts=(measures.recall_facts,),
        num_documents=measures.recall_documents,
        seed=seed,
        bos=bos,
        wording=measures.recall_wording,
    )
    copied = copy_loss(model, text, num_documents=measures.copy_documents, seed=seed, bos=bos)
    return {"recall": [asdict(cell) for cell in recall], "copy_gain": copied.gain}


@torch.no_grad()
def prefill_bytes(model: Any) -> float:
    """Bytes of the real cache tensors after a prefill, per token of it, at any context.

    Layers with a window beside others without are not counted, as in `Footprint`.
    """
    tokens = 16
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    with evaluating(model):
        cache = model(input_ids=ids, use_cache=True).past_key_values
    bounded = windowed_layers(model.config)
    held = (by for index, by in enumerate(bytes_by_layer(cache)) if index not in bounded)
    return sum(held) / tokens


def _decode_seconds(
    model: PreTrainedModel, dense: PreTrainedModel, measures: Measures
) -> dict[str, float]:
    """Median seconds of a decode step, batch 1, of both models, timed in turns.

    None of a model whose cache cannot be filled at random, for not all of its layers attend.
    """
    try:
        point = measure_point(
            {"model": model, "dense": dense},
            batch=1,
            context=measures.decode_context,
            rounds=measures.decode_steps,
            variants=(PLAIN,),
        )
    except UnsupportedModelError:
        return {}
    ours, theirs = (point.median(name, PLAIN.name) for name in ("model", "dense"))
    if ours is None or theirs is None:
        raise RapError("no memory to time decoding: give a smaller decode_context, or 0 steps")
    return {"decode_seconds": ours, "dense_decode_seconds": theirs}


def _prefill_seconds(
    model: PreTrainedModel, dense: PreTrainedModel, measures: Measures
) -> dict[str, float]:
    """Median seconds to read a prompt, batch 1, of both models, timed in turns."""
    both = {"model": model, "dense": dense}
    read = time_prefill(both, tokens=measures.prefill_tokens, rounds=PREFILL_ROUNDS)
    return {
        "prefill_tokens": measures.prefill_tokens,
        "prefill_seconds": statistics.median(read["model"]),
        "dense_prefill_seconds": statistics.median(read["dense"]),
    }
