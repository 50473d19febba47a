"""How far continuations move from the dense model's when they read a compressed cache.

A model reads the prefixes once, with a press or without; each kind of bits then quantizes what is
left. The dense model, its cache as it is, is the reference.

Shapes: W windows, T tokens of a window, L prefix, N = T - 1 - L judged tokens, C of them in a
piece, V vocabulary; G KV heads, S tokens kept.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from rap.data.bos import Bos, bos_token
from rap.evaluation.cache.compressed import check_pieces, held_bytes, read_on
from rap.evaluation.cache.presses import Press, pressed
from rap.evaluation.cache.quantized_cache import quantized_cache
from rap.evaluation.quality.fidelity import check_vocabularies, divergence
from rap.evaluation.quality.perplexity import token_losses, whole_windows
from rap.model.errors import RapError
from rap.runtime.logits import decoder_of, vocabulary
from rap.runtime.state import evaluating


@dataclass(frozen=True)
class CacheFidelity:
    """KL(dense || model) in nats/token, with that of every window; agreement; perplexity; bytes.

    All over the judged tokens, but for `bytes_per_token`: what the cache holds of one prefix, a
    token of it, right after the compression. Scales, zero points and padding count.
    """

    kl: float
    window_kl: list[float]
    top1: float
    perplexity: float
    bytes_per_token: float


@dataclass(frozen=True)
class Prefixes:
    """Keys and values [W, G, S, width] that every layer of a model keeps of the prefixes."""

    layers: list[tuple[Tensor, Tensor]]

    def cache(self, model: Any, bits: str | None, dtype: torch.dtype | None = None) -> Cache:
        """A cache that holds them, in so many bits; with a `dtype`, of the first window alone."""
        cache = quantized_cache(model, bits) if bits else DynamicCache(config=model.config)
        for index, states in enumerate(self.layers):
            keys, values = (one if dtype is None else one[:1].to(dtype) for one in states)
            cache.update(keys, values, index)
        return cache


class DenseContinuations:
    """What the dense model predicts after every prefix: one pass, many comparisons.

    `num_windows` windows of `window` tokens, spread evenly over `token_ids`; the first `prefix` of
    each are read at once, the rest in pieces of `piece`. Models run as they are; bytes are counted
    in `stored`, the dtype that a cache would be kept in. Raises RapError as `perplexity` does.
    """

    def __init__(
        self,
        dense: Any,
        token_ids: Tensor | Sequence[int],
        *,
        window: int,
        prefix: int,
        piece: int,
        num_windows: int,
        bos: Bos = "auto",
        stored: torch.dtype = torch.bfloat16,
    ) -> None:
        check_pieces(window, prefix, piece)
        first = bos_token(bos, config=dense.config)
        windows, _ = whole_windows(dense, token_ids, window, None, first)
        device = dense.get_input_embeddings().weight.device
        self.ids_WT = spread(windows, num_windows).to(device)
        self.prefix, self.piece, self.stored = prefix, piece, stored
        self.vocabulary = vocabulary(dense)
        cache = self.read(dense).cache(dense, None)
        with torch.no_grad(), evaluating(dense):
            pieces = read_on(dense, self.ids_WT, prefix, piece, cache)
            self._logits_WCV = [logits for logits, _ in pieces]

    @torch.no_grad()
    def read(self, model: Any, press: Press | None = None) -> Prefixes:
        """The prefixes, read by a model; a press evicts from them. RapError as of `pressed`."""
        check_vocabularies(vocabulary(model), self.vocabulary)
        cache: Any = DynamicCache(config=model.config)
        with evaluating(model), pressed(model, press) if press else nullcontext():
            ids_WL = self.ids_WT[:, : self.prefix]
            decoder_of(model)[1](input_ids=ids_WL, past_key_values=cache, use_cache=True)
        return Prefixes([(layer.keys, layer.values) for layer in cache.layers])

    @torch.no_grad()
    def compare(self, model: Any, prefixes: Prefixes, bits: str | None = None) -> CacheFidelity:
        """Continue from the prefixes in so many bits; RapError if the divergence is not finite."""
        kl, same, nats = [], [], []
        cache = prefixes.cache(model, bits)
        with evaluating(model):
            read = read_on(model, self.ids_WT, self.prefix, self.piece, cache)
            for (logits_WCV, targets_WC), dense_WCV in zip(read, self._logits_WCV, strict=True):
                # A window at a time: a divergence takes several times the memory of the logits.
                pairs = [divergence(*pair) for pair in zip(dense_WCV, logits_WCV, strict=True)]
                kl.append(torch.stack([pair[0] for pair in pairs]))
                same.append(torch.stack([pair[1] for pair in pairs]))
                nats.append(token_losses(logits_WCV.flatten(0, 1), targets_WC.flatten()))
        kl_WN = torch.cat(kl, 1).double()
        if not torch.isfinite(kl_WN).all():
            raise RapError("the divergence is not finite: the weights or the cache hold NaN or inf")
        held = held_bytes(prefixes.cache(model, bits, self.stored))
        return CacheFidelity(
            kl=float(kl_WN.mean()),
            window_kl=kl_WN.mean(1).tolist(),
            top1=float(torch.cat(same, 1).double().mean()),
            perplexity=math.exp(float(torch.cat(nats).double().mean())),
            bytes_per_token=held / self.prefix,
        )


def spread(windows_NT: Tensor, count: int) -> Tensor:
    """`count` of the windows at even distances, the first among them; RapError for too few."""
    if not 1 <= count <= len(windows_NT):
        raise RapError(
            f"{count} windows were asked for, and the text has {len(windows_NT)}: use 1 or"
            " more, or give a longer text"
        )
    return windows_NT[torch.arange(count) * len(windows_NT) // count]
