"""Every scorer against its formula written out with loops, on grouped heads and partial rotary."""

import pytest
import torch

from rap.model.errors import CalibrationError, RapError
from rap.model.rope import AttentionShape, HeadGeometry
from rap.planning.scores import SCORES, score_layers

HIDDEN = 10
GEOMETRIES = [
    HeadGeometry(8, 8, "half"),
    HeadGeometry(8, 8, "interleaved"),
    HeadGeometry(8, 4, "half"),
    HeadGeometry(8, 4, "interleaved"),
    HeadGeometry(8, 0),
]


@pytest.fixture(params=GEOMETRIES, ids=lambda g: f"{g.rotary_dim}of{g.head_dim}-{g.pairing}")
def shape(request):
    return AttentionShape(6, 2, HIDDEN, request.param)


def make_weights(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    weights = {
        projection: torch.randn(count * shape.head_dim, HIDDEN, generator=generator)
        for projection, count in heads.items()
    }
    weights["o"] = torch.randn(HIDDEN, shape.num_heads * shape.head_dim, generator=generator)
    return weights


def make_statistics(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv = (shape.num_kv_heads, shape.head_dim)
    sizes = {
        "root_fisher_k": kv,
        "root_fisher_v": kv,
        "weighted_fisher_k": kv,
        "weighted_fisher_v": kv,
        "gate_fisher_k": (kv[0], shape.geometry.num_pairs + shape.geometry.num_free),
        "gate_fisher_v": kv,
        "energy_q": (shape.num_heads, shape.head_dim),
        "energy_k": kv,
        "energy_v": kv,
    }
    return {name: torch.rand(size, generator=generator) for name, size in sizes.items()}


def score(name, shape, seed=0):
    found = score_layers(name, [make_statistics(shape)], [make_weights(shape)], [shape], seed)
    return found[0]


def dense_order(canonical_GD, shape):
    """Canonical channels back in the dense order, so that pair_channels indexes them."""
    dense = torch.empty_like(canonical_GD)
    dense[:, shape.geometry.canonical_order()] = canonical_GD
    return dense


@pytest.mark.parametrize("name", sorted(SCORES))
def test_every_scorer_scores_every_pair_and_channel(name, shape):
    found = score(name, shape)
    assert found.pairs_GP.shape == (2, shape.geometry.num_pairs)
    assert found.free_GF.shape == (2, shape.geometry.num_free)
    assert found.channels_GD.shape == (2, 8)
    for tensor in vars(found).values():
        assert tensor.dtype == torch.float32
        assert (tensor >= 0).all()


@pytest.mark.parametrize(
    ("name", "statistic"), [("fisher", "root_fisher"), ("weighted-fisher", "weighted_fisher")]
)
def test_fisher_scores_sum_both_channels_of_a_pair(name, statistic, shape):
    statistics, found = make_statistics(shape), score(name, shape)
    key_GD = dense_order(statistics[f"{statistic}_k"], shape)
    for pair, (first, second) in enumerate(shape.geometry.pair_channels().tolist()):
        expected = key_GD[:, first] + key_GD[:, second]
        torch.testing.assert_close(found.pairs_GP[:, pair], expected, rtol=0, atol=0)
    torch.testing.assert_close(found.free_GF, key_GD[:, shape.geometry.rotary_dim :])
    assert torch.equal(found.channels_GD, statistics[f"{statistic}_v"])


def test_magnitude_is_the_norm_of_the_rows(shape):
    weights, found = make_weights(shape), score("magnitude", shape)
    key, value = weights["k"].view(2, 8, HIDDEN), weights["v"].view(2, 8, HIDDEN)
    for head in range(2):
        for pair, (first, second) in enumerate(shape.geometry.pair_channels().tolist()):
            expected = key[head, first].norm() + key[head, second].norm()
            torch.testing.assert_close(found.pairs_GP[head, pair], expected)
        for free in range(shape.geometry.num_free):
            expected = key[head, shape.geometry.rotary_dim + free].norm()
            torch.testing.assert_close(found.free_GF[head, free], expected)
        for channel in range(8):
            expected = value[head, channel].norm()
            torch.testing.assert_close(found.channels_GD[head, channel], expected)


def test_energy_multiplies_queries_of_the_group_with_the_key(shape):
    statistics, weights = make_statistics(shape), make_weights(shape)
    q, k = (dense_order(statistics[f"energy_{projection}"], shape) for projection in "qk")
    output, found = weights["o"], score("energy", shape)
    for head in range(2):
        group = range(3 * head, 3 * head + 3)
        for pair, (i, j) in enumerate(shape.geometry.pair_channels().tolist()):
            query = sum(q[h, i] + q[h, j] for h in group)
            expected = query * (k[head, i] + k[head, j])
            torch.testing.assert_close(found.pairs_GP[head, pair], expected)
        for free in range(shape.geometry.num_free):
            channel = shape.geometry.rotary_dim + free
            expected = 2 * sum(q[h, channel] for h in group) * k[head, channel]
            torch.testing.assert_close(found.free_GF[head, free], expected)
        for channel in range(8):
            columns = sum(output[:, 8 * h + channel].square().sum() for h in group)
            expected = statistics["energy_v"][head, channel] * columns
            torch.testing.assert_close(found.channels_GD[head, channel], expected)


def test_a_pair_of_equal_channels_is_worth_two_free_ones():
    shape = AttentionShape(6, 2, HIDDEN, HeadGeometry(8, 4))
    alike = {name: torch.full_like(x, 0.5) for name, x in make_statistics(shape).items()}
    weights = {
        projection: torch.ones_like(weight) for projection, weight in make_weights(shape).items()
    }
    for name in ("fisher", "weighted-fisher", "magnitude", "energy"):
        [found] = score_layers(name, [alike], [weights], [shape])
        torch.testing.assert_close(found.pairs_GP, 2 * found.free_GF[:, :2])


def test_gates_are_split_into_pairs_and_free_channels(shape):
    statistics, found = make_statistics(shape), score("gate", shape)
    both = torch.cat([found.pairs_GP, found.free_GF], dim=1)
    assert torch.equal(both, statistics["gate_fisher_k"])
    assert torch.equal(found.channels_GD, statistics["gate_fisher_v"])


def test_random_scores_depend_on_seed_and_layer_only(shape):
    def draw(seed):
        return score_layers("random", [None] * 2, [None] * 2, [shape] * 2, seed)

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(a.channels_GD, b.channels_GD) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].channels_GD, first[1].channels_GD)
    assert not torch.equal(first[0].channels_GD, other[0].channels_GD)
    # The next layer of one seed is not the same layer of the next seed, nor are keys values.
    assert not torch.equal(first[1].channels_GD, other[0].channels_GD)
    keys = first[0].pairs_GP.sum() + first[0].free_GF.sum()
    assert abs(float(keys - first[0].channels_GD.sum())) > 1e-3


def test_weights_in_bfloat16_give_float32_scores(shape):
    weights = {projection: weight.bfloat16() for projection, weight in make_weights(shape).items()}
    for name in ("magnitude", "energy"):
        [found] = score_layers(name, [make_statistics(shape)], [weights], [shape])
        assert {tensor.dtype for tensor in vars(found).values()} == {torch.float32}


def test_layers_without_a_shape_have_no_scores(shape):
    found = score_layers(
        "fisher",
        [None, make_statistics(shape)],
        iter([None, make_weights(shape)]),
        [None, shape],
    )
    assert found[0] is None
    assert found[1] is not None


@pytest.mark.parametrize("name", ["fisher", "weighted-fisher", "gate", "energy"])
def test_a_statistic_that_was_not_collected_is_named(name, shape):
    needed = next(iter(SCORES[name].needs))
    with pytest.raises(CalibrationError, match=f"'{name}' needs .*statistics {needed}"):
        score_layers(name, [{}], [make_weights(shape)], [shape])


def test_an_unknown_score_is_refused_with_the_known_ones():
    with pytest.raises(RapError, match="unknown score 'taylor': use one of energy, fisher"):
        score_layers("taylor", [], [], [])


def test_scores_that_are_not_finite_are_refused_with_the_layer(shape):
    weights = [make_weights(shape), make_weights(shape)]
    weights[1]["v"][3, 2] = float("nan")
    with pytest.raises(CalibrationError, match=r"layer 1: score 'magnitude' .* channels_GD"):
        score_layers("magnitude", [None] * 2, weights, [shape] * 2)
