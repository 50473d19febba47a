"""What each method's attention must cost, by formula, and what a model of those sizes does cost.

The formulas are the paper's appendix `cost_model`, extended to the whole attention block of its
table `effsweep`. Published sizes are built on the meta device: nothing is downloaded or stored.

Symbols: H query heads, G KV heads, D head dim, E model dim, N groups of KV heads that share a
latent, r its rank, S tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from rap.evaluation.cost.footprint import footprint
from rap.model.cache_layout import PairEntry
from rap.model.kinds.latent import LatentEntry
from rap.model.modeling import CONFIG_VERSION, config_class, model_class
from rap.runtime.state import evaluating


@dataclass(frozen=True)
class Sizes:
    """H, G, D and E of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class Cost:
    """One attention layer, in elements and multiply-adds.

    `cache` is elements per token. `weights` are all parameters without biases, `kv_weights` those
    of keys and values, with both factors where there are two. `rebuilding` is the part of them that
    every decode step applies to the whole cache. `mixing` is multiply-adds per query and attended
    position: scores and their product with the values. `repeated` are multiply-adds of a token
    beyond one for each weight: query heads share maps.
    """

    cache: int
    weights: int
    kv_weights: int
    rebuilding: int
    mixing: int
    repeated: int = 0

    def forward_flops(self, tokens: int) -> int:
        """FLOPs of a first pass over `tokens`; masked positions are multiplied too."""
        return 2 * tokens * (self.weights + self.repeated + tokens * self.mixing)

    def decode_flops(self, context: int) -> int:
        """FLOPs of one more token that attends to `context` tokens, itself included."""
        once = self.weights + self.repeated - self.rebuilding
        return 2 * (once + context * (self.rebuilding + self.mixing))


def pruned(sizes: Sizes, key_width: int, value_width: int) -> Cost:
    """Narrow heads, by whole pairs or not; at both widths D, the dense layer."""
    heads, groups, model = sizes.num_heads, sizes.num_kv_heads, sizes.hidden_size
    width = key_width + value_width
    return Cost(
        cache=groups * width,
        weights=model * (heads + groups) * width,
        kv_weights=model * groups * width,
        rebuilding=0,
        mixing=heads * width,
    )


def merged(sizes: Sizes, merge: int, width: int, *, factored: bool) -> Cost:
    """Groups of `merge` KV heads cached as one of `width` channels, of keys and of values.

    Absorbed, W_q and W_o have `width` channels a head; factored they stay dense, and every KV head
    has a map of queries and one of outputs, which each of its query heads is multiplied by.
    """
    heads, dim, model = sizes.num_heads, sizes.head_dim, sizes.hidden_size
    cached = sizes.num_kv_heads // merge
    lower, maps = 2 * cached * width * model, 2 * dim * width
    outer = 2 * heads * (dim if factored else width) * model
    return Cost(
        cache=2 * cached * width,
        weights=outer + lower + factored * sizes.num_kv_heads * maps,
        kv_weights=lower,
        rebuilding=0,
        mixing=2 * heads * width,
        repeated=factored * (heads - sizes.num_kv_heads) * maps,
    )


def dense(sizes: Sizes) -> Cost:
    """Full heads."""
    return pruned(sizes, sizes.head_dim, sizes.head_dim)


def low_rank(sizes: Sizes, groups: int, key_rank: int, value_rank: int, *, fold: bool) -> Cost:
    """PaLU (`fold`: the output projection reads the values' latents) or SVD-LLM (both rebuilt).

    The query projection keeps its size either way, and the output projection is H r wide when
    folded, r being the rank of a whole group: more than dense where r exceeds D.
    """
    heads, dim, model = sizes.num_heads, sizes.head_dim, sizes.hidden_size
    rows = sizes.num_kv_heads * dim // groups
    lower = groups * (key_rank + value_rank) * model
    rebuilding = groups * rows * (key_rank if fold else key_rank + value_rank)
    read = value_rank if fold else dim
    return Cost(
        cache=groups * (key_rank + value_rank),
        weights=heads * dim * model + lower + rebuilding + heads * read * model,
        kv_weights=lower + rebuilding,
        rebuilding=rebuilding,
        mixing=heads * (dim + read),
    )


# Table `rap_complexity`: parameters and FLOPs of K and V over dense, for one KV head of input H D.
# With G heads that each have their own factors, and not with one factorisation over all of them.
COMPLEXITY = {
    "SVD-LLM": lambda rho, heads: rho + rho / heads,
    "PaLU": lambda rho, heads: rho + rho / (2 * heads),
    "RAP": lambda rho, heads: rho,
}

_LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
# Model type and sizes as published.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": (
        "llama",
        _LARGE
        | {"vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "Mistral-7B": ("mistral", _LARGE | {"vocab_size": 32768, "sliding_window": None}),
}


def sizes_of(name: str) -> Sizes:
    """The attention sizes of a published model."""
    fields = PUBLISHED[name][1]
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    return Sizes(*(fields[field] for field in names))


def widths_of(
    *, pairs: int | None = None, latent: tuple[int, int, int, bool] | None = None
) -> dict[str, Any] | None:
    """A layer's entry in the `rap` section: kept pairs, or groups, ranks and fold; None: dense."""
    if pairs is not None:
        return PairEntry(pairs, 0, 2 * pairs).fields()
    if latent is None:
        return None
    groups, keys, values, fold = latent
    return LatentEntry(groups=groups, fold=fold, keys=keys, values=values).fields()


def built(name: str, widths: dict[str, Any] | None, num_layers: int = 1) -> Any:
    """A published model on the meta device with every layer's attention of these widths."""
    model_type, fields = PUBLISHED[name]
    section = {"version": CONFIG_VERSION, "layers": [widths] * num_layers}
    config = config_class(model_type)(
        **(fields | {"num_hidden_layers": num_layers}), rap=section, dtype="float16"
    )
    with torch.device("meta"):
        return model_class(model_type)(config).to(torch.float16).eval()


@dataclass(frozen=True)
class Counted:
    """The figures of Cost and its FLOPs, per layer, counted on a live model of equal layers."""

    cache: float
    weights: float
    kv_weights: float
    forward_flops: float
    decode_flops: float


@torch.no_grad()
def count(model: PreTrainedModel, *, tokens: int, context: int) -> Counted:
    """Count a built model: cache tensors, parameters, and products of a pass over `tokens`.

    The decode step is the one that attends to `context` tokens.
    """
    layers = model.config.num_hidden_layers
    sizes = footprint(model)
    element = getattr(torch, sizes.kv_dtype).itemsize
    model.set_attn_implementation("eager")
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    with evaluating(model), FlopCounterMode(display=False) as counter:
        # Without a cache transformers looks into positions, which have no values on meta.
        model(input_ids=ids, use_cache=True)
    names = {f"{type(model).__name__}.model.layers.{index}.self_attn" for index in range(layers)}
    flops = [
        sum(counts.values()) for at, counts in counter.get_flop_counts().items() if at in names
    ]
    return Counted(
        cache=sizes.kv_bytes_per_token / element / layers,
        weights=sizes.attention_parameters / layers,
        kv_weights=sizes.kv_parameters / layers,
        forward_flops=sum(flops) / layers,
        decode_flops=sizes.attention_flops(context) / layers,
    )
