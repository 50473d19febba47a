"""Statistics and weights of a layer to the importance of its pairs and channels: pure functions.

A pair is worth about two channels on every scale, so free channels, pairs and value channels can be
compared. Larger is more important.

Shapes: H query heads, G KV heads, R = H/G, D head dim, P pairs, F channels that never rotate,
E model dim. K tensors are in canonical channel order, V tensors in the dense one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.errors import CalibrationError, RapError
from ..model.rope import AttentionShape

Named = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class LayerScores:
    """Scores of one layer: every pair, every free key channel, every value channel of each head."""

    pairs_GP: Tensor
    free_GF: Tensor
    channels_GD: Tensor


def equal_scores(shape: AttentionShape) -> LayerScores:
    """Of a layer where every pair and channel counts as much."""
    heads, geometry = shape.num_kv_heads, shape.geometry
    return LayerScores(
        pairs_GP=torch.ones(heads, geometry.num_pairs),
        free_GF=torch.ones(heads, geometry.num_free),
        channels_GD=torch.ones(heads, shape.head_dim),
    )


@dataclass(frozen=True)
class Score:
    """A scorer: the statistics it needs, and `layer(statistics, weights, shape, seed)`.

    `weights` maps the projections q, k, v, o to weight matrices laid out as in nn.Linear.
    """

    needs: frozenset[str]
    layer: Callable[[Named, Named, AttentionShape, int], LayerScores]


def score_layers(
    name: str,
    statistics: Iterable[Named | None],
    weights: Iterable[Named | None],
    shapes: Iterable[AttentionShape | None],
    seed: int = 0,
) -> list[LayerScores | None]:
    """Score every layer with `SCORES[name]`; None where a layer has no shape.

    `weights` may be a generator, so that one layer is held at a time. Raises RapError for an
    unknown name, CalibrationError for statistics that were not collected or are not finite.
    """
    if name not in SCORES:
        raise RapError(f"unknown score {name!r}: use one of {', '.join(sorted(SCORES))}")
    scored: list[LayerScores | None] = []
    rows = enumerate(zip(statistics, weights, shapes, strict=True))
    for index, (layer_statistics, layer_weights, shape) in rows:
        if shape is None:
            scored.append(None)
            continue
        scores = SCORES[name].layer(
            layer_statistics or {}, layer_weights or {}, shape, seed * 1_000_003 + index
        )
        for what, tensor in vars(scores).items():
            if not torch.isfinite(tensor).all():
                raise CalibrationError(
                    f"layer {index}: score {name!r} is not finite in {what}: check the weights of "
                    "this layer, or calibrate in float32 or bfloat16"
                )
        scored.append(scores)
    return scored


def fisher(statistics: Named, weights: Named, shape: AttentionShape, seed: int) -> LayerScores:
    """Root-Fisher sum over inputs and over a pair's channels of sqrt(F) (paper, eq. `score`)."""
    key, value = _take(statistics, "fisher", "root_fisher_k", "root_fisher_v")
    return _per_channel(key, value, shape)


def weighted_fisher(
    statistics: Named, weights: Named, shape: AttentionShape, seed: int
) -> LayerScores:
    """Second-order saliency: sum over inputs and a pair's channels of F W^2 (paper, Prop. 1)."""
    key, value = _take(statistics, "weighted-fisher", "weighted_fisher_k", "weighted_fisher_v")
    return _per_channel(key, value, shape)


def magnitude(statistics: Named, weights: Named, shape: AttentionShape, seed: int) -> LayerScores:
    """Sum over a pair's channels of the L2 norm of the channel's row of W_k (W_v for values).

    Where keys are normalised, the size of the normalised channel instead (`key_sizes`).
    """
    rows = (weights[projection].detach().float().cpu() for projection in ("k", "v"))
    norm_k, norm_v = (row.norm(dim=1).view(shape.num_kv_heads, shape.head_dim) for row in rows)
    if "key_sizes" in weights:
        norm_k = weights["key_sizes"].detach().float().cpu()
    return _per_channel(norm_k[:, shape.geometry.canonical_order()], norm_v, shape)


def energy(statistics: Named, weights: Named, shape: AttentionShape, seed: int) -> LayerScores:
    """What a pair or channel adds to the output's energy, from forward passes only.

    Pair p: sum over the group's query heads of E|q_p|^2, times E|k_p|^2; the rotation changes
    neither. A free channel counts 2 E[q_c^2] E[k_c^2], half of what a pair of two such channels
    has. Value channel c: E[v_c^2] times the squared norms of its W_o columns over the group.
    """
    q_HD, k_GD, v_GD = _take(statistics, "energy", "energy_q", "energy_k", "energy_v")
    pairs, rotary = shape.geometry.num_pairs, shape.geometry.rotary_dim
    groups = (shape.num_kv_heads, shape.group_size, shape.head_dim)
    q_GD = q_HD.view(groups).sum(1)
    q_GP, k_GP = (x[:, :pairs] + x[:, pairs:rotary] for x in (q_GD, k_GD))
    output_EGRD = weights["o"].detach().float().cpu().reshape(-1, *groups)
    return LayerScores(
        pairs_GP=q_GP * k_GP,
        free_GF=2 * q_GD[:, rotary:] * k_GD[:, rotary:],
        channels_GD=v_GD * output_EGRD.square().sum(dim=(0, 2)),
    )


def gate(statistics: Named, weights: Named, shape: AttentionShape, seed: int) -> LayerScores:
    """Mean squared derivative of the loss by one scalar gate per pair or channel.

    To second order this is (twice) the loss of closing the gate, correlations inside the pair
    included, as in Molchanov et al., https://arxiv.org/abs/1906.10771.
    """
    gate_k, gate_v = _take(statistics, "gate", "gate_fisher_k", "gate_fisher_v")
    pairs = shape.geometry.num_pairs
    return LayerScores(gate_k[:, :pairs], gate_k[:, pairs:], gate_v)


def random(statistics: Named, weights: Named, shape: AttentionShape, seed: int) -> LayerScores:
    """Uniform noise per channel, the same for the same seed: the control of every comparison."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(2, shape.num_kv_heads, shape.head_dim, generator=generator)
    return _per_channel(noise[0], noise[1], shape)


SCORES: dict[str, Score] = {
    "fisher": Score(frozenset({"fisher"}), fisher),
    "weighted-fisher": Score(frozenset({"fisher"}), weighted_fisher),
    "magnitude": Score(frozenset(), magnitude),
    "energy": Score(frozenset({"energy"}), energy),
    "gate": Score(frozenset({"gate"}), gate),
    "random": Score(frozenset(), random),
}


def _per_channel(key_GD: Tensor, value_GD: Tensor, shape: AttentionShape) -> LayerScores:
    pairs, rotary = shape.geometry.num_pairs, shape.geometry.rotary_dim
    return LayerScores(
        pairs_GP=key_GD[:, :pairs] + key_GD[:, pairs:rotary],
        free_GF=key_GD[:, rotary:],
        channels_GD=value_GD,
    )


def _take(statistics: Named, score: str, *names: str) -> list[Tensor]:
    missing = [name for name in names if name not in statistics]
    if missing:
        needs = ", ".join(sorted(SCORES[score].needs))
        raise CalibrationError(
            f"score {score!r} needs {', '.join(missing)}, which was not collected: calibrate again "
            f"with the statistics {needs}"
        )
    return [statistics[name] for name in names]
