"""Does llama.cpp compute the checkpoint? Tokens, log-probabilities, cache, tokenizer.

llama.cpp runs in a subprocess always, and is never imported here.

Shapes: T tokens, V vocabulary, E model dim.
"""

import importlib.util
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.device import AUTO, placement
from ...checkpoint.gguf import is_gguf
from ...checkpoint.load import load, load_tokenizer
from ...checkpoint.reading import reading
from ...checkpoint.source import resolve_source
from ...model.errors import CheckpointError, RapError
from ..engine import GIB, EngineError, last_lines, run_worker
from ..gguf.export import export_gguf
from ..verify import (
    MAX_TOKENS,
    Agreement,
    Verification,
    bundled_prompts,
    channels,
    check_tolerance,
    dense_caches,
    kept_fraction,
    reference_logprobs,
    worst,
)

WORKER = Path(__file__).with_name("worker.py")
CACHES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
_CACHE_LINE = re.compile(
    r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells.*K \(\w+\): +([\d.]+) MiB, "
    r"V \(\w+\): +([\d.]+) MiB"
)

_REASON = re.compile(r"(?:error loading model: |llama_init_from_model: |GGML_ASSERT).*")


@dataclass(frozen=True)
class Completion:
    """Greedy tokens of one prompt; per token its log-probability and the likeliest tokens'.

    Both are empty where a token ended within a character, for which the server reports none.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    timings: dict[str, float]


@dataclass(frozen=True)
class Asked:
    """What to ask of the engine. `hidden` excludes all the others: it is another kind of server."""

    prompts: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    chat: Sequence[Mapping[str, str]] = ()
    hidden: Sequence[Sequence[int]] = ()
    max_tokens: int = 16
    alternatives: int = 64


@dataclass(frozen=True)
class Answered:
    """The engine's answers, its version, and the lines of its log about the cache."""

    version: str
    cache_bytes: float
    cache_cells: int
    completions: list[Completion] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    chat: str = ""
    hidden: list[list[list[float]]] = field(default_factory=list)
    log: str = ""


def require_xllamacpp() -> None:
    """Raise EngineError unless xllamacpp is installed (looked for, not imported)."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise EngineError("llama.cpp is not installed here: pip install xllamacpp")


def run_llamacpp(
    file: str | Path,
    asked: Asked,
    *,
    context: int = 1024,
    cache: str = "f16",
    flash_attention: str = "auto",
    threads: int = 1,
) -> Answered:
    """Start llama.cpp on a GGUF file, ask it, and stop it.

    `cache` is the type of keys and values, one of CACHES. Without flash attention ("disabled") the
    CPU backend computes attention in float32; with it, in half precision. Raises EngineError with
    llama.cpp's own reason if it refuses the file, or ends.
    """
    require_xllamacpp()
    if cache not in CACHES:
        raise EngineError(f"unknown cache type {cache!r}: use one of {', '.join(CACHES)}")
    job = {
        "file": str(file),
        "context": context,
        "cache": cache,
        "flash_attention": flash_attention,
        "threads": threads,
        # One batch, so that a whole prompt of embeddings fits and prefill is not cut up.
        "batch": max(512, *(len(prompt) for prompt in asked.hidden), 0),
        **vars(asked),
    }
    result, log = run_worker([str(WORKER)], job, "llama.cpp")
    if not result:
        raise failure(log)
    return _answered(result, log)


def failure(log: str) -> EngineError:
    """Why llama.cpp ended: its first line about an error, or its last lines."""
    for line in log.splitlines():
        found = _REASON.search(line)
        if found and "failed to initialize" not in line:
            return EngineError(f"llama.cpp refused the file: {found[0].strip()}")
    return EngineError(f"llama.cpp ended without a result; its last lines:\n{last_lines(log)}")


def _answered(result: dict[str, Any], log: str) -> Answered:
    sizes = _CACHE_LINE.search(log)
    if sizes is None:
        raise EngineError(
            "llama.cpp's log has no line about its KV cache: this version of xllamacpp is not known"
        )
    return Answered(
        version=result["version"],
        # The halves carry two decimals each, as the sum does.
        cache_bytes=(float(sizes[3]) + float(sizes[4])) * 2**20,
        cache_cells=int(sizes[2]),
        completions=[Completion(**each) for each in result.get("completions", [])],
        texts=result.get("texts", []),
        chat=result.get("chat", {}).get("content", ""),
        hidden=result.get("hidden", []),
        log=log,
    )


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
    from gguf import GGUFReader

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
        **vars(compared),
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
    from gguf import GGUFReader

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
    """The strings that the engine tokenizes differently than the checkpoint's tokenizer."""
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
        error = (reference_logprobs(model, prompt) - found_TV).abs().max()
        largest, num_tokens = worst([largest, float(error)]), num_tokens + len(prompt)
    for each in completions:
        start = len(each.prompt) - 1
        logprobs_TV = reference_logprobs(model, each.prompt + each.tokens[:-1])[start:]
        mismatched += int((logprobs_TV.argmax(-1) != torch.tensor(each.tokens)).sum())
        for row_V, listed in zip(logprobs_TV, each.alternatives, strict=False):
            ids = torch.tensor([token for token, _ in listed])
            found = torch.tensor([value for _, value in listed], dtype=torch.float64)
            behind = (row_V[ids] - row_V[ids[0]]) - (found - found[0])
            largest = worst([largest, float(behind.abs().max())])
        num_tokens += len(each.tokens)
    return Agreement(num_tokens, mismatched, largest)
