"""Does llama.cpp compute what the checkpoint says? Tokens, log-probabilities, cache, tokenizer.

Shapes: T tokens, V vocabulary, E model dim.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.device import AUTO, placement
from ...checkpoint.gguf import is_gguf
from ...checkpoint.load import load, load_tokenizer
from ...checkpoint.reading import reading
from ...checkpoint.source import resolve_source
from ...model.errors import CheckpointError, RapError
from ..agreement import Agreement
from ..engine import GIB
from ..gguf.export import export_gguf
from ..verify import (
    MAX_TOKENS,
    Verification,
    bundled_prompts,
    channels,
    check_tolerance,
    dense_caches,
    kept_fraction,
)
from .engine import Answered, Asked, Completion, require_xllamacpp, run_llamacpp

CACHE = "f32"
PROBE = Path(__file__).with_name("tokenizer_probe.json")  # digits, emoji, CJK, code
# What a matrix type rounds, in nats over the whole vocabulary, with a float32 cache and no flash
# attention: SmolLM2 at width 32 is off by 5e-5, 0.04, 0.5 and 1.1. Coarse types also answer for
# their greedy tokens, since a largest difference alone does not tell them from a wrong model.
TOLERANCES = {"f32": 2e-4, "f16": 0.2, "bf16": 1.5, "q8_0": 3.0}
_MISMATCHED = 0.1
_FILE_TYPES = {0: "f32", 1: "f16", 7: "q8_0", 32: "bf16"}


def verify_llamacpp(
    source: str | Path,
    *,
    reference: str | Path | None = None,
    kind: str = "f32",
    tolerance: float | None = None,
    device: str = AUTO,
) -> Verification:
    """Run the bundled prompts through llama.cpp and compare with transformers in float32.

    `source` is a GGUF file, compared with the checkpoint `reference` or, without one, with itself
    as transformers reads it; or a checkpoint, which is exported as `kind` for the occasion. Every
    position's log-probabilities over the whole vocabulary come from the engine's hidden states,
    greedy tokens from decoding. The reference runs on `device`.

    Raises RapError, also for a tolerance below 0, CheckpointError or EngineError.
    """
    check_tolerance(tolerance)
    require_xllamacpp()
    with tempfile.TemporaryDirectory(prefix="rap-gguf-") as folder:
        file = Path(source)
        if not is_gguf(source):
            file = Path(folder) / "exported.gguf"
            export_gguf(source, file, kind=kind)
        elif reference is None:
            reference = resolve_source(source)
        kind = file_type(file)
        bound = tolerance if tolerance is not None else TOLERANCES[kind]
        return _compare(file, str(reference or source), kind, bound, placement(device))


def file_type(file: str | Path) -> str:
    """How a GGUF file's matrices are stored; RapError for types that have no known tolerance."""
    from gguf import GGUFReader  # an optional extra

    if not Path(file).is_file():
        raise CheckpointError(f"there is no file {file}: check the path")
    with reading(f"read {file}", "download it again, or export it anew"):
        field = GGUFReader(file).get_field("general.file_type")
    number = int(field.contents()) if field is not None else -1
    if number not in _FILE_TYPES:
        raise RapError(
            f"{file} is stored as type {number}: only {', '.join(_FILE_TYPES.values())} can be "
            "compared; export one of these to verify"
        )
    return _FILE_TYPES[number]


def _compare(
    file: Path, reference: str, kind: str, bound: float, placed: dict[str, Any]
) -> Verification:
    model = load(reference, dtype=torch.float32, attn_implementation="eager", **placed)
    _check_same_shape(file, reference, model)
    prompts = bundled_prompts(reference, model.config)
    probe: list[str] = json.loads(PROBE.read_text(encoding="utf-8"))
    settings: dict[str, Any] = {"cache": CACHE, "flash_attention": "disabled"}
    asked = Asked(prompts=prompts, texts=probe, max_tokens=MAX_TOKENS)
    decoded = run_llamacpp(file, asked, **settings)
    read = run_llamacpp(file, Asked(hidden=prompts), **settings)
    compared = agreement(model, prompts, read.hidden, decoded.completions)
    caches = dense_caches(reference, model.config)
    dense = channels(caches) * 4  # of float32
    capacity = tokens_per_gib(decoded)
    differences = tokenizer_differences(reference, probe, decoded.texts)
    decoded_tokens = sum(len(each.tokens) for each in decoded.completions)
    allowed = 0 if kind == "f32" else _MISMATCHED * decoded_tokens
    return Verification(
        engine="llama.cpp",
        version=f"xllamacpp {decoded.version}",
        dtype=kind,
        num_tokens=compared.num_tokens,
        mismatched_tokens=compared.mismatched_tokens,
        max_logprob_error=compared.max_logprob_error,
        tolerance=bound,
        tokens_per_gib=capacity,
        dense_tokens_per_gib=GIB // dense,
        kept_fraction=kept_fraction(model.config, caches),
        passed=compared.mismatched_tokens <= allowed
        and compared.max_logprob_error <= bound
        and capacity >= 0.99 * (GIB // dense)
        and not differences,
        tokenizer_differences=differences,
    )


def _check_same_shape(file: Path, reference: str, model: Any) -> None:
    """Raise CheckpointError for a reference that the file cannot have been made from."""
    from gguf import GGUFReader  # an optional extra

    shapes = {tensor.name: tensor.shape.tolist() for tensor in GGUFReader(file).tensors}
    found = shapes.get("token_embd.weight")
    own = list(reversed(model.get_input_embeddings().weight.shape))
    if found != own:
        raise CheckpointError(
            f"{file} has embeddings of {found}, {reference} of {own}: it was not made from that, "
            "give the checkpoint that it was made from"
        )


def tokens_per_gib(answered: Answered) -> int:
    """Tokens that fit into a GiB, by the engine's own account of its buffers."""
    return int(GIB * answered.cache_cells / answered.cache_bytes)


def tokenizer_differences(
    reference: str, texts: Sequence[str], found: Sequence[list[int]]
) -> list[str]:
    """The texts that the engine cuts into other tokens than the checkpoint's tokenizer does."""
    try:
        tokenizer = load_tokenizer(reference)
    except CheckpointError:
        return []
    own = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return [text for text, a, b in zip(texts, own, found, strict=True) if a != b]


@torch.no_grad()
def agreement(
    model: Any,
    prompts: Sequence[Sequence[int]],
    hidden: Sequence[list[list[float]]],
    completions: Sequence[Completion],
) -> Agreement:
    """Whole-vocabulary errors on the prompts, and on what was decoded greedily behind them.

    The engine's hidden states go through the reference's output projection, because its server
    sums a softmax in float32, which alone is off by 2e-4. For the same reason decoded tokens are
    compared by how far they lie behind the likeliest one.
    """
    num_tokens = mismatched = 0
    largest = 0.0
    for prompt, states in zip(prompts, hidden, strict=True):
        states_TE = torch.tensor(states, device=model.device)
        found_TV = model.lm_head(states_TE).double().log_softmax(-1).cpu()
        error = (_logprobs(model, prompt) - found_TV).abs().max()
        largest, num_tokens = max(largest, float(error)), num_tokens + len(prompt)
    for each in completions:
        start = len(each.prompt) - 1
        logprobs_TV = _logprobs(model, each.prompt + each.tokens[:-1])[start:]
        mismatched += int((logprobs_TV.argmax(-1) != torch.tensor(each.tokens)).sum())
        for row_V, listed in zip(logprobs_TV, each.alternatives, strict=False):
            ids = torch.tensor([token for token, _ in listed])
            found = torch.tensor([value for _, value in listed], dtype=torch.float64)
            behind = (row_V[ids] - row_V[ids[0]]) - (found - found[0])
            largest = max(largest, float(behind.abs().max()))
        num_tokens += len(each.tokens)
    return Agreement(num_tokens, mismatched, largest)


def _logprobs(model: Any, ids: Sequence[int]) -> Tensor:
    """log p(next token | tokens so far) [T, V] of the reference, uncached."""
    ids_1T = torch.tensor([list(ids)], device=model.device)
    logits = model(input_ids=ids_1T, use_cache=False).logits[0]
    return logits.double().log_softmax(-1).cpu()
