"""Quality with a cache that is compressed after the prefix: fewer bits, fewer tokens, or both.

A pass over a whole window never reads what a cache holds, so it cannot show what compressing it
costs. Here a prefix is read, its cache compressed, and the continuation read in pieces with that
cache in use; only the continuation is scored. With an exact cache this is plain perplexity of the
same tokens. Recall asks its question after the compression.

Shapes: B windows in a batch, T tokens of a window, L prefix, N = T - 1 - L scored tokens, C of them
in a piece, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ...data.bos import Bos, bos_token
from ...model.errors import RapError
from ...runtime.logits import decoder_of
from ...runtime.memory import in_precision
from ...runtime.state import evaluating
from ..quality.intervals import exponential
from ..quality.perplexity import check_sizes, whole_windows
from ..retrieval.documents import (
    ANSWER,
    NAMES,
    Document,
    FactWriter,
    check_grid,
    check_numbers,
)
from ..retrieval.recall import RecallCell, recall_documents
from .presses import Press, check_press, pressed
from .quantized_cache import check_cache_kind, quantized_cache


@dataclass(frozen=True)
class CacheCompression:
    """Compression of a cache after the prefix: a press evicts, then entries are quantized.

    `bits` is a key of `CACHE_KINDS`. The default compresses nothing.
    """

    bits: str | None = None
    press: Press | None = None

    def check(self) -> None:
        """Raise RapError for an unknown kind, or a package that is missing."""
        if self.bits is not None:
            check_cache_kind(self.bits)
        if self.press is not None:
            check_press(self.press)

    def __str__(self) -> str:
        named = ([f"cache {self.bits}"] if self.bits else []) + (
            [str(self.press)] if self.press else []
        )
        return ", ".join(named) or "nothing"


@dataclass(frozen=True)
class CompressedQuality:
    """Perplexity of continuations, and the bytes a sequence's cache holds per token read.

    `prefix_bytes_per_token` right after the compression, `kv_bytes_per_token` at the end of the
    window, with the newest tokens as the cache keeps them. Scales, zero points and padding count.
    Each window begins with the token `bos`, if any.
    """

    perplexity: float
    nats_per_token: float
    num_windows: int
    num_tokens: int
    window: int
    prefix: int
    piece: int
    prefix_bytes_per_token: float
    kv_bytes_per_token: float
    bos: int | None = None


@dataclass(frozen=True)
class _Continuation:
    """Losses (nats) and whether the greedy guess is right [B, N], and bytes of one sequence."""

    losses_BN: Tensor
    right_BN: Tensor
    prefix_bytes: float
    kv_bytes: float


@torch.no_grad()
def compressed_perplexity(
    model: PreTrainedModel,
    token_ids: Tensor | Sequence[int],
    compression: CacheCompression,
    *,
    window: int = 512,
    prefix: int = 256,
    piece: int = 32,
    max_windows: int | None = None,
    batch_size: int = 4,
    bos: Bos = "auto",
    dtype: torch.dtype | None = torch.float32,
) -> CompressedQuality:
    """Perplexity of the T - 1 - L last tokens of every window, read through a compressed cache.

    The first `prefix` tokens of a window are read at once and their cache is compressed; the rest
    is read `piece` tokens at a time. Inside a piece tokens see each other as they are: pieces of 1
    are what decoding does. Windows begin with `bos` and weights are cast to `dtype` (None leaves
    them) as in `perplexity`.

    Raises RapError as `perplexity` and the compressions do, and for a prefix or piece that leaves
    nothing to score.
    """
    check_pieces(window, prefix, piece)
    check_sizes(window, max_windows, batch_size)
    bos = bos_token(bos, config=model.config)
    windows_NT, _ = whole_windows(model, token_ids, window, max_windows, bos)
    model = in_precision(model, dtype)
    total, at_prefix, at_end = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    with evaluating(model):
        for ids_BT in windows_NT.split(batch_size):
            continued = _continue(model, ids_BT, prefix, piece, compression)
            total += continued.losses_BN.sum(dtype=torch.float64).cpu()
            at_prefix, at_end = continued.prefix_bytes / prefix, continued.kv_bytes / (window - 1)
    num_tokens = len(windows_NT) * (window - 1 - prefix)
    nats = float(total / num_tokens)
    if not math.isfinite(nats):
        raise RapError(f"the loss is {nats}: the weights or the compressed cache hold NaN or inf")
    sizes = (len(windows_NT), num_tokens, window, prefix, piece)
    return CompressedQuality(exponential(nats), nats, *sizes, at_prefix, at_end, bos)


def check_pieces(window: int, prefix: int, piece: int) -> None:
    """RapError for a prefix or piece that leaves nothing of a window to score."""
    if not 1 <= prefix <= window - 2 or piece < 1:
        raise RapError(
            f"a prefix of {prefix} tokens and pieces of {piece} cannot score windows of {window}:"
            " give a prefix from 1 to the window less 2, and pieces of 1 or more"
        )


@torch.no_grad()
def compressed_recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_ids: np.ndarray,
    compression: CacheCompression,
    *,
    distances: Sequence[int] = (256,),
    facts: Sequence[int] = (4,),
    num_documents: int = 16,
    seed: int = 0,
    bos: Bos = "auto",
    wording: str = "plain",
) -> list[RecallCell]:
    """`recall_grid` on the same documents, their question asked after the compression.

    Raises RapError for a `wording` that is not one of documents.WORDINGS, no documents, or
    documents that cannot be made.
    """
    if distances:  # none are asked where recall is not wanted
        check_grid(num_documents, distances, facts)
    text, writer = np.asarray(text_ids), FactWriter(tokenizer, wording=wording)
    first = bos_token(bos, tokenizer, model.config)
    asked: dict[str, Any] = {"num_documents": num_documents, "seed": seed, "bos": first}
    cells = []
    with evaluating(model):
        for distance in distances:
            for num_facts in facts:
                documents = recall_documents(writer, text, distance, num_facts, **asked)
                right = [_answered(model, one, writer, compression) for one in documents]
                whole = float(np.mean([answer.all() for answer in right]))
                token = float(np.mean(np.concatenate(right)))
                cells.append(RecallCell(distance, num_facts, num_documents, whole, token))
    return cells


def read_on(
    model: Any, ids_BT: Tensor, prefix: int, piece: int, cache: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Float32 logits [B, C, V] and the tokens they predict [B, C], of C = `piece` tokens or fewer.

    `cache` holds the first `prefix` tokens, however compressed, and is added to.
    """
    for start in range(prefix, ids_BT.shape[1] - 1, piece):
        stop = min(start + piece, ids_BT.shape[1] - 1)
        # Given, because a cache with evicted tokens counts too few of them.
        positions = torch.arange(start, stop, device=ids_BT.device).expand(len(ids_BT), -1)
        logits = model(
            input_ids=ids_BT[:, start:stop],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits.float()
        yield logits, ids_BT[:, start + 1 : stop + 1]


def held_bytes(cache: Any) -> int:
    """Bytes of everything a cache holds, counted on its tensors' storage, each once."""
    held = (tensor for layer in cache.layers for tensor in _tensors(vars(layer)))
    storages = {one.data_ptr(): one.nbytes() for one in (x.untyped_storage() for x in held)}
    return sum(storages.values())


def question_start(document: Document, writer: FactWriter) -> int:
    """The first token of the question that a recall document ends in."""
    answered = int(np.flatnonzero(document.kinds == ANSWER)[0])
    lengths = []
    for name in NAMES:
        ids, kinds = writer.question(name, 1000)  # of four digits, as all are
        stem = ids[: kinds.index(ANSWER)]
        if list(document.ids[answered - len(stem) : answered]) == stem:
            lengths.append(len(stem))
    return answered - max(lengths)


def _answered(
    model: PreTrainedModel, document: Document, writer: FactWriter, compression: CacheCompression
) -> np.ndarray:
    """Whether each token of the answer is the greedy choice, bool [tokens of the answer]."""
    prefix, ids_T = question_start(document, writer), torch.from_numpy(document.ids)
    rest = len(ids_T) - prefix
    continued = _continue(model, ids_T[None], prefix, rest, compression)
    check_numbers(continued.losses_BN)
    right: np.ndarray = continued.right_BN[0].numpy()
    return right[document.kinds[prefix + 1 :] == ANSWER]


def _continue(
    model: Any, ids_BT: Tensor, prefix: int, piece: int, compression: CacheCompression
) -> _Continuation:
    """Read a prefix, compress its cache, and predict the tokens after the next in pieces."""
    ids_BT = ids_BT.to(model.get_input_embeddings().weight.device)
    batch = len(ids_BT)
    bits, press = compression.bits, compression.press
    _, decoder = decoder_of(model)
    cache = quantized_cache(model, bits) if bits else DynamicCache(config=model.config)
    with pressed(model, press) if press else nullcontext():
        decoder(input_ids=ids_BT[:, :prefix], past_key_values=cache, use_cache=True)
    at_prefix = held_bytes(cache) / batch
    losses, right = [], []
    for logits, targets in read_on(model, ids_BT, prefix, piece, cache):
        losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
        right.append((logits.argmax(-1) == targets).cpu())
    joined = torch.cat(losses, 1), torch.cat(right, 1)
    return _Continuation(*joined, at_prefix, held_bytes(cache) / batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All plain tensors in nested containers and in tensors made of others (quanto's)."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__") and type(value) is not Tensor:
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
