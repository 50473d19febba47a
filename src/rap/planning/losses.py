"""Estimated cost of pruning: in loss, or in squared error of logits and outputs.

Taking d off a layer's keys (or off what its o_proj reads) adds about 1/2 E[(g^T d)^2] nats per
token to the loss of a trained model, where g is the gradient of the summed loss: the empirical
Fisher stands for the Hessian. With d = (I - P) x, and g and x independent (K-FAC,
https://arxiv.org/abs/1503.05671, section 3), it is 1/2 tr(O (I - P) C (I - P)^T),
C = E[x x^T] of what is projected by P and O = E[g g^T]: the weighted low-rank problem of
subspace.py, whose singular values are then losses that compare across layers. Without gradients O
is what reads the projection instead: the queries, W_o. Tokens and heads are taken as independent:

* Values: every query head has an x and a g of its own and shares P with its group, so that a group
  loses the sum over heads of 1/2 tr(O_h (I - P) C_h (I - P)^T). P is the best for the sums of the
  O_h and of the C_h, for a sum of products has no best P in closed form; its price is exact.
* Keys: g is the sum over the query heads that read a key, terms between these heads included.
* Pairs: P is complex-linear, and g^T d is the real part of g^H d over complex pairs. Of its square
  the mean over phases is half of tr(O (I - P) C (I - P)^H), exact where E[x x^T] or E[g g^T] of the
  complex pairs is 0 (before rotation keys have a mean, so it is not quite).

Moments of merged heads (merging.py) are of N groups of g heads, whose pairs and channels stand side
by side: there is a matrix of each group, and a cached head has up to g D channels.

Shapes: G KV heads, R query heads of each, P pairs, F channels that never rotate, D head dim.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..model.rope import AttentionShape
from .budgets import ranking, split_steps
from .folding import REAL_SHARE, spectrum
from .scores import LayerScores
from .subspace import Factors, output_gram, shrunk, weighted_subspace

Metric = Literal["loss", "output"]
_KEY_READER = {"loss": "key_gradient", "output": "query_moment"}


# Second moments of what is projected, and of what reads it, float64, a matrix per KV head (values:
# per query head of each).
Moments = tuple[Tensor, Tensor]


class Orders(NamedTuple):
    """Pairs and channels that are kept as they are: their indices, the first to be kept first.

    None where the best directions of them are kept instead.
    """

    pairs_GP: Tensor | None = None
    free_GF: Tensor | None = None
    channels_GD: Tensor | None = None

    @classmethod
    def of(cls, scores: LayerScores, mixes_keys: bool, mixes_values: bool) -> "Orders":
        """Those of a layer of these scores whose keys, or values, may be mixed."""
        return cls(
            None if mixes_keys else ranking(scores.pairs_GP),
            None if mixes_keys else ranking(scores.free_GF),
            None if mixes_values else ranking(scores.channels_GD),
        )


DIRECTIONS = Orders()


def key_moments(statistics: Mapping[str, Tensor], metric: Metric) -> Moments:
    """Of a layer's key pairs, complex [G, P, P], and of what reads them in units of `metric`."""
    return as_complex(statistics["key_moment"]), as_complex(statistics[_KEY_READER[metric]])


def free_moments(statistics: Mapping[str, Tensor], metric: Metric) -> Moments:
    """Of a layer's key channels that never rotate, [G, F, F], and of what reads them."""
    reader = statistics[{"loss": "free_gradient", "output": "query_free_moment"}[metric]]
    return statistics["key_free_moment"].double(), reader.double()


def value_moments(
    statistics: Mapping[str, Tensor], w_o: Tensor, shape: AttentionShape, metric: Metric
) -> Moments:
    """Of what o_proj reads, [G, R, D, D], and of what that adds to, in units of `metric`."""
    reader = statistics["value_gradient"] if metric == "loss" else output_gram(w_o, shape).cpu()
    groups = (shape.num_kv_heads, shape.group_size)
    values = statistics["value_moment"].double()
    return values.unflatten(0, groups), reader.double().unflatten(0, groups)


def value_subspace(values: Moments, rank: int, shrinkage: float = 0.0) -> Factors:
    """The `rank` directions [G] of a group's values that are best for its query heads together.

    By `shrinkage` s a moment M [D, D] counts as M + s tr(M)/D I: directions that the calibration
    text leaves idle keep a part. That is a shrunk covariance (Ledoit and Wolf 2004,
    https://doi.org/10.1016/S0047-259X(03)00096-4) but for a factor, which changes no subspace.
    """
    moment_GDD, reader_GDD = (shrunk(part_GRDD.sum(1), shrinkage) for part_GRDD in values)
    return weighted_subspace(moment_GDD, reader_GDD, rank)


def apart(moments: Moments) -> Moments:
    """Moments by which parts are worth as much together as one by one.

    For keys that are normalised: the gradient by what a norm divides has no part along it, so a
    whole head seems to lose nothing and its parts to make up for each other. But a cut divides by
    what the dense head did (norms.py), and there they do not.
    """
    moment, reader = moments
    return moment, torch.diag_embed(torch.diagonal(reader, dim1=-2, dim2=-1))


def part_losses(
    keys: Moments,
    values: Moments,
    free: Moments,
    shape: AttentionShape,
    frequencies: Tensor,
    context: int,
    orders: Orders = DIRECTIONS,
) -> tuple[list[float], list[float]]:
    """What a layer's keys, and its values, are expected to lose at every width, in nats per token.

    Widths are 0 ... D/2 steps of two channels (of g merged heads g D/2); no width loses less than a
    larger one. Moments must be of the metric "loss". `orders` says what is kept as it is, and in
    which order.
    """
    lost_keys = _key_losses(keys, free, shape, frequencies, context, orders)
    lost_values = _value_losses(values, orders)
    return (
        [0.5 * float(lost) for lost in lost_keys],
        [0.5 * float(lost) for lost in lost_values[::2]],
    )


def one_width(of_keys: Sequence[float], of_values: Sequence[float]) -> list[float]:
    """What a layer loses at every width if its keys are as wide as its values."""
    return [sum(both) for both in zip(of_keys, of_values, strict=True)]


def width_errors(
    keys: Moments,
    values: Moments,
    free: Moments,
    shape: AttentionShape,
    frequencies: Tensor,
    context: int,
    scales: tuple[float, float],
    orders: Orders = DIRECTIONS,
) -> list[float]:
    """Relative squared error of a layer's output at every width, 0 ... D/2 steps of two channels.

    Moments must be of the metric "output"; `scales` are `rap.model.layers.logit_scales`. Values:
    what their cut loses. Keys: what the logits lose, times the values' energy, for a logit error d
    moves the output by about d times the spread of the values it mixes. Relative to the layer's own
    output: in absolute terms the first layers look cheap, and cutting them is what hurts most
    (docs/log.md). `orders` as in `part_losses`.
    """
    lost_values = _value_losses(values, orders)[::2]
    (key, of_pairs), (channel, of_free) = keys, free
    pairs, still = (key, of_pairs * scales[0] ** 2), (channel, of_free * scales[1] ** 2)
    lost_logits = _key_losses(pairs, still, shape, frequencies, context, orders)
    lost = lost_values + lost_logits / shape.num_heads * lost_values[0]
    whole = float(lost[0]) or 1.0  # a layer that gives nothing loses nothing
    return [float(error) / whole for error in lost]


def _key_losses(
    keys: Moments,
    free: Moments,
    shape: AttentionShape,
    frequencies: Tensor,
    context: int,
    orders: Orders,
) -> Tensor:
    """What pairs and channels that never rotate lose together, at 0 ... g D/2 steps."""
    if orders.pairs_GP is None:
        lost_pairs = _tails(_slots(keys, frequencies, context))
    else:
        lost_pairs = _dropped(*keys, orders.pairs_GP)
    if orders.free_GF is None:
        lost_free = _tails(_directions(*free))
    else:
        lost_free = _dropped(*free, orders.free_GF)
    merged = shape.num_kv_heads // len(keys[0])
    pairs, size = merged * shape.geometry.num_pairs, merged * shape.head_dim // 2
    kept = [split_steps(pairs, size, steps) for steps in range(size + 1)]
    return torch.stack([lost_pairs[pairs] + lost_free[channels] for pairs, channels in kept])


def _value_losses(values: Moments, orders: Orders) -> Tensor:
    """What values lose at 0 ... D channels."""
    if orders.channels_GD is None:
        return _without_directions(values)
    return _dropped(*values, orders.channels_GD)


def _slots(keys: Moments, frequencies: Tensor, context: int) -> Tensor:
    """What each further slot saves, summed over heads, descending [P].

    Every head's own weights descend, so the sum keeps each head's n best at every n.
    """
    heads = [spectrum(read, key, frequencies, context) for key, read in zip(*keys, strict=True)]
    return torch.stack(heads).sum(0)


def _directions(moment: Tensor, reader: Tensor) -> Tensor:
    """What each further direction of a subspace saves, summed over heads, descending [n]."""
    return weighted_subspace(moment, reader, 1).singular.square().sum(0)


def _without_directions(values: Moments) -> Tensor:
    """What values lose at 0 ... D directions of their subspace, summed over query heads [D + 1].

    In the basis of the directions I - P keeps what is beyond the first n. Of single query heads
    that can be less for a smaller n: see `_beyond`.
    """
    moment_GRDD, reader_GRDD = values
    factors = value_subspace(values, moment_GRDD.shape[-1])
    down, up = factors.down[:, None], factors.up[:, None]
    return _beyond(_products(down @ moment_GRDD @ down.mT, up.mT @ reader_GRDD @ up))


def _dropped(moment: Tensor, reader: Tensor, order_GN: Tensor) -> Tensor:
    """tr(O C) [N + 1] over what each head drops when it keeps the first n of its order."""
    both = _products(moment, reader)
    rows = both.gather(1, order_GN[:, :, None].expand_as(both))
    return _beyond(rows.gather(2, order_GN[:, None, :].expand_as(both)))


def _products(moment: Tensor, reader: Tensor) -> Tensor:
    """Entries [G, n, n] whose sum is tr(O C), over query heads, and of pairs its real share."""
    both = (reader * moment.conj()).real
    if moment.is_complex():
        both = REAL_SHARE * both
    return both if both.ndim == 3 else both.sum(1)


def _beyond(both_GNN: Tensor) -> Tensor:
    """Sum [N + 1] of what heads lose by everything from the nth on, which never rises with n.

    What is dropped together can cancel, so that keeping one more costs more. Such a width is priced
    as the dearest that keeps more: no plan is expected to lose less than it does.
    """
    lost = [both_GNN[:, n:, n:].sum() for n in range(both_GNN.shape[-1] + 1)]
    return torch.stack(lost).flip(0).cummax(0).values.flip(0)


def _tails(descending: Tensor) -> Tensor:
    """Sum of everything from each position on, and a final zero."""
    return torch.cat([descending.flip(0).cumsum(0).flip(0), descending.new_zeros(1)])


def as_complex(moment: Tensor) -> Tensor:
    """A moment of pairs, complex128 [...], of its real and imaginary parts [..., 2]."""
    return torch.view_as_complex(moment.double().contiguous())
