"""Does an engine compute the checkpoint? Tokens, log-probabilities and cache capacity.

The reference reads the engine's own tokens in one pass without a cache, so a greedy token that
differs is counted once and does not spoil the ones behind it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .. import assets
from ..checkpoint.device import AUTO, placement
from ..checkpoint.files import PLAN_FILE
from ..checkpoint.load import is_pruned, load, load_config, load_tokenizer, without_tensors
from ..evaluation.cost.footprint import footprint
from ..model.cache_layout import CacheLayout, dense_layout
from ..model.errors import CheckpointError, RapError
from ..model.layers import attention_layers, text_config, trained_length, windowed_layers
from ..model.rope import AttentionShape
from ..planning.plan import Plan
from .engine import GIB, Round, Transcript, run_vllm
from .layout import check_division
from .refusals import check_served


@dataclass(frozen=True)
class Agreement:
    """Compared tokens, greedy choices that differ, and the largest |difference| in nats."""

    num_tokens: int
    mismatched_tokens: int
    max_logprob_error: float


@torch.no_grad()
def agreement(reference: PreTrainedModel, transcripts: Iterable[Transcript]) -> Agreement:
    """Compare transcripts with a reference causal LM (run in its own dtype, uncached).

    Raises CheckpointError for a reference that is not finite.
    """
    num_tokens = mismatched = 0
    largest = 0.0
    for transcript in transcripts:
        logprobs_TV = reference_logprobs(reference, transcript.prompt + transcript.tokens[:-1])
        start = len(transcript.prompt) - 1
        chosen = torch.tensor(transcript.tokens)
        mismatched += int((logprobs_TV[start:].argmax(-1) != chosen).sum())
        errors = _errors(logprobs_TV[start:], chosen, transcript.logprobs)
        if transcript.prompt_logprobs:
            read = torch.tensor(transcript.prompt[1:])
            errors += _errors(logprobs_TV[:start], read, transcript.prompt_logprobs)
        num_tokens += len(errors)
        largest = worst([largest, *errors])
    return Agreement(num_tokens, mismatched, largest)


def reference_logprobs(reference: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """log p(next token | tokens so far), [T, V] in float64 on the CPU, uncached.

    Raises CheckpointError for a reference whose log-probabilities are NaN.
    """
    ids_1T = torch.tensor([list(tokens)], device=reference.device)
    logits_TV = reference(input_ids=ids_1T, use_cache=False).logits[0]
    logprobs_TV = logits_TV.double().log_softmax(-1).cpu()
    # Nothing can agree with what is no number.
    if logprobs_TV.isnan().any():
        raise CheckpointError(
            "the reference's log-probabilities are NaN: its weights hold NaN or inf, or "
            "activations overflow; check the checkpoint, in float32"
        )
    return logprobs_TV


def worst(errors: Iterable[float]) -> float:
    """The largest error; infinite with one that is no number, which comparisons would drop."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _errors(logprobs_TV: Tensor, tokens: Tensor, reported: list[float]) -> list[float]:
    expected = logprobs_TV.gather(1, tokens[:, None])[:, 0]
    errors: list[float] = (expected - torch.tensor(reported, dtype=torch.float64)).abs().tolist()
    return errors


ENGINES = ("transformers", "vllm")
PROMPT_TOKENS = (1, 7, 32, 100, 300)
MAX_TOKENS = 16
# The same dense model in two engines differs by 4e-6 to 1e-5 in float32 and by 0.13 in bfloat16,
# where near ties also change greedy tokens; a wrong channel costs 0.3 and more in any precision.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.2, "float16": 0.05}


@dataclass(frozen=True)
class Verification:
    """What an engine's run of the bundled prompts showed; every field is plain data for JSON.

    Log-probability errors are in nats. Capacities are tokens per GiB of KV cache on one device, of
    this checkpoint as measured in the engine and of the dense model by its sizes, which the plan
    beside a plain checkpoint records; their ratio is `1 / kept_fraction` unless the engine pads
    heads to a size it takes. Of an engine with its own tokenizer, the texts are listed that it cuts
    into other tokens.
    """

    engine: str
    version: str
    dtype: str
    num_tokens: int
    mismatched_tokens: int
    max_logprob_error: float
    tolerance: float
    tokens_per_gib: int
    dense_tokens_per_gib: int
    kept_fraction: float
    passed: bool
    tokenizer_differences: list[str] = field(default_factory=list)

    @property
    def capacity_ratio(self) -> float:
        """Tokens that fit into the same memory, over the dense model's."""
        return self.tokens_per_gib / self.dense_tokens_per_gib


def verify(
    source: str | Path,
    engine: str = "transformers",
    *,
    dtype: str = "float32",
    tolerance: float | None = None,
    device: str = AUTO,
    tensor_parallel_size: int = 1,
) -> Verification:
    """Run the bundled prompts through an engine and compare with the reference model.

    The reference is the checkpoint in transformers, in float32 with eager attention and no cache.
    Models of transformers run on `device`; vLLM chooses one. It passes if no log-probability is
    further off than `tolerance`, in float32 also every greedy token is the same, and the cache
    holds at least as many tokens as the dense model's would.
    Raises RapError for an unknown engine or dtype, a tolerance below 0, or a family that the engine
    does not run, CheckpointError, or EngineError.
    """
    check_tolerance(tolerance)
    for what, name, known in (("engine", engine, ENGINES), ("dtype", dtype, TOLERANCES)):
        if name not in known:
            raise RapError(f"unknown {what} {name!r}: use one of {', '.join(known)}")
    config, placed = load_config(source), placement(device)
    prompts = bundled_prompts(source, config)
    if engine == "vllm":
        if is_pruned(config):
            check_served(config)
            check_division(config, tensor_parallel_size)
        run = run_vllm(
            source,
            [Round(prompts, MAX_TOKENS, prompt_logprobs=True)],
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max(map(len, prompts)) + MAX_TOKENS,
        )
        transcripts, version, capacity = run.rounds[0], run.version, run.capacity_tokens
    else:
        model = load(source, dtype=dtype, **placed)
        transcripts = [transcribe(model, prompt, MAX_TOKENS) for prompt in prompts]
        version, capacity = transformers.__version__, GIB // footprint(model).kv_bytes_per_token
    reference = load(source, dtype="float32", attn_implementation="eager", **placed)
    compared = agreement(reference, transcripts)
    bound = tolerance if tolerance is not None else TOLERANCES[dtype]
    dense = dense_caches(source, config)
    dense_bytes = channels(dense, tensor_parallel_size) * getattr(torch, dtype).itemsize
    return Verification(
        engine=engine,
        version=version,
        dtype=dtype,
        **vars(compared),
        tolerance=bound,
        tokens_per_gib=capacity,
        dense_tokens_per_gib=GIB // dense_bytes,
        kept_fraction=kept_fraction(config, dense),
        passed=_agrees(compared, bound, dtype) and capacity >= 0.99 * (GIB // dense_bytes),
    )


def check_tolerance(tolerance: float | None) -> None:
    """RapError for a tolerance that nothing can pass: a number below 0, or none at all."""
    if tolerance is not None and not tolerance >= 0:
        raise RapError(f"tolerance {tolerance} passes nothing: give nats, 0 or more")


def bundled_prompts(source: str | Path, config: PreTrainedConfig) -> list[list[int]]:
    """Token ids of five prompts, 1 to 300 tokens: bundled text, or random without a tokenizer.

    Fewer of a model that was made for fewer tokens. Raises RapError where it is for none of them,
    and CheckpointError for a tokenizer of another model.
    """
    longest = (trained_length(config) or PROMPT_TOKENS[-1] + MAX_TOKENS) - MAX_TOKENS
    lengths = [length for length in PROMPT_TOKENS if length <= longest]
    if not lengths:
        raise RapError(
            f"the model was made for {longest + MAX_TOKENS} tokens, too few to compare: use one of "
            f"more than {MAX_TOKENS}"
        )
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError:
        ids = torch.randint(
            text_config(config).vocab_size,
            (sum(lengths),),
            generator=torch.Generator().manual_seed(0),
        ).tolist()
    else:
        text = assets.reference_text("validation")[: 20 * sum(lengths)]
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if max(ids) >= text_config(config).vocab_size:
            raise CheckpointError(
                f"the tokenizer of {source} has more words than the model: copy the model's own"
            )
    prompts = []
    for length in lengths:
        prompts.append(ids[:length])
        ids = ids[length:]
    return prompts


@torch.no_grad()
def transcribe(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> Transcript:
    """Greedy generation of a transformers model, through its KV cache, token by token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model(input_ids=ids, use_cache=True)
    before = output.logits[0].double().log_softmax(-1)
    prompt_logprobs = before[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    row = before[-1]
    while True:
        tokens.append(int(row.argmax()))
        logprobs.append(float(row[tokens[-1]]))
        if len(tokens) == max_tokens:
            return Transcript(list(prompt), tokens, logprobs, prompt_logprobs)
        output = model(
            input_ids=torch.tensor([[tokens[-1]]], device=model.device),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        row = output.logits[0, -1].double().log_softmax(-1)


def dense_caches(source: str | Path, config: PreTrainedConfig) -> list[CacheLayout]:
    """What layers cache in the dense model that a checkpoint was made from, if with the context.

    Layers without attention are left out, and windows beside full attention. A plain checkpoint's
    config describes itself alone: its plan, if it lies there, has the shapes of the dense layers.
    Of any other model without a `rap` section the config is the dense one's.
    """
    folder = Path(source)
    if not is_pruned(config) and (folder / PLAN_FILE).is_file():
        return _growing(Plan.load(folder).shapes, config)
    return _own_caches(config)


def kept_fraction(config: PreTrainedConfig, dense: Sequence[CacheLayout]) -> float:
    """Cached channels over those of the dense model's layers, from the config.

    Raises CheckpointError for a pruned one that does not say.
    """
    section = getattr(config, "rap", None)
    if section and "kept_fraction" not in section:
        raise CheckpointError(
            "config.json has no kept_fraction in its `rap` section: apply the plan again"
        )
    if section:
        return float(section["kept_fraction"])
    return channels(_own_caches(config)) / channels(dense)


def channels(caches: Sequence[CacheLayout], num_devices: int = 1) -> int:
    """Channels that layers cache per token on each of several devices."""
    heads = [max(1, one.num_heads // num_devices) if one.num_heads else 0 for one in caches]
    widths = [one.key_width + one.value_width for one in caches]
    return sum(number * width for number, width in zip(heads, widths, strict=True))


def _own_caches(config: PreTrainedConfig) -> list[CacheLayout]:
    layers = attention_layers(without_tensors(config))
    return _growing([layer.shape for layer in layers], config)


def _growing(
    shapes: Sequence[AttentionShape | None], config: PreTrainedConfig
) -> list[CacheLayout]:
    windowed = windowed_layers(config)
    return [
        dense_layout(shape)
        for index, shape in enumerate(shapes)
        if shape is not None and index not in windowed
    ]


def _agrees(compared: Agreement, tolerance: float, dtype: str) -> bool:
    same = compared.mismatched_tokens == 0 or dtype != "float32"
    return same and compared.max_logprob_error <= tolerance
