"""Formulas against models built on meta, and both against the paper's tables."""

from typing import Any

import pytest

from cases.scripts import load_script
from rap.model.cache_layout import FactoredEntry, PairEntry

FORMULAS = load_script("experiments/cost/formulas.py")
COMPLEXITY, PUBLISHED, Cost, built, count, dense, low_rank, merged, pruned, sizes_of, widths_of = (
    FORMULAS.COMPLEXITY,
    FORMULAS.PUBLISHED,
    FORMULAS.Cost,
    FORMULAS.built,
    FORMULAS.count,
    FORMULAS.dense,
    FORMULAS.low_rank,
    FORMULAS.merged,
    FORMULAS.pruned,
    FORMULAS.sizes_of,
    FORMULAS.widths_of,
)

# Table `effsweep`: attention parameters and FLOPs over dense. Ranks and widths are whole per head.
EFFSWEEP = {
    0.9: {"rap": 0.906, "palu": 0.942, "svdllm": 1.024},
    0.8: {"rap": 0.797, "palu": 0.881, "svdllm": 0.999},
    0.7: {"rap": 0.703, "palu": 0.824, "svdllm": 0.976},
    0.6: {"rap": 0.594, "palu": 0.763, "svdllm": 0.951},
    0.5: {"rap": 0.500, "palu": 0.702, "svdllm": 0.926},
}
TOKENS = 64
LLAMA = sizes_of("Llama-3-8B")


def variant(method: str, retain: float) -> tuple[Cost, dict[str, Any] | None]:
    """The formula of a method at a ratio, and the widths of a layer to build."""
    rank = round(retain * LLAMA.head_dim)
    if method == "rap":
        pairs = round(retain * 64)
        return pruned(LLAMA, 2 * pairs, 2 * pairs), widths_of(pairs=pairs)
    latents = {
        "palu": (8, rank, rank, True),
        "palu, groups of 4": (2, 4 * rank, 4 * rank, True),
        "svdllm": (1, 8 * rank, 8 * rank, False),
        "svdllm, head by head": (8, rank, rank, False),
    }
    groups, keys, values, fold = latents[method]
    cost = low_rank(LLAMA, groups, keys, values, fold=fold)
    return cost, widths_of(latent=(groups, keys, values, fold))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "method", ["rap", "palu", "palu, groups of 4", "svdllm", "svdllm, head by head", "dense"]
)
def test_counted_equals_formula(method: str, name: str) -> None:
    assert sizes_of(name) == LLAMA
    cost, widths = (dense(LLAMA), None) if method == "dense" else variant(method, 0.7)
    found = count(built(name, widths), tokens=TOKENS, context=1000)
    assert found.cache == cost.cache
    assert found.weights == cost.weights
    assert found.kv_weights == cost.kv_weights
    assert found.forward_flops == cost.forward_flops(TOKENS)
    assert found.decode_flops == cost.decode_flops(1000)


def test_layers_add_up() -> None:
    cost, widths = variant("palu", 0.5)
    found = count(built("Llama-3-8B", widths, num_layers=3), tokens=TOKENS, context=9)
    assert (found.weights, found.cache) == (cost.weights, cost.cache)
    assert found.forward_flops == cost.forward_flops(TOKENS)


@pytest.mark.parametrize("retain", EFFSWEEP)
@pytest.mark.parametrize("method", ["rap", "palu", "svdllm"])
def test_table_effsweep(method: str, retain: float) -> None:
    """To three digits: the FLOPs of a pass over 64 tokens. PaLU's are those of single heads."""
    cost, _ = variant(method, retain)
    published = EFFSWEEP[retain][method]
    assert round(cost.forward_flops(TOKENS) / dense(LLAMA).forward_flops(TOKENS), 3) == published
    # Parameters alone leave SVD-LLM up to a thousandth off.
    parameters = cost.weights / dense(LLAMA).weights
    assert abs(parameters - published) < (0.0011 if method == "svdllm" else 0.0005)


def test_which_pass_lengths_give_the_table() -> None:
    """All 15 cells at once: what the counted pass cannot have been longer or shorter than."""
    fitting = [
        tokens
        for tokens in range(1, 257)
        if all(
            round(
                variant(method, retain)[0].forward_flops(tokens)
                / dense(LLAMA).forward_flops(tokens),
                3,
            )
            == published
            for retain, row in EFFSWEEP.items()
            for method, published in row.items()
        )
    ]
    assert fitting == list(range(35, 81))


@pytest.mark.parametrize("retain", EFFSWEEP)
def test_palu_of_the_original_group_size_is_no_cell_of_the_table(retain: float) -> None:
    """Folding groups of four makes the output projection larger than dense."""
    cost, _ = variant("palu, groups of 4", retain)
    assert cost.cache == variant("palu", retain)[0].cache
    assert cost.weights / dense(LLAMA).weights > EFFSWEEP[retain]["palu"] + 0.5


@pytest.mark.parametrize("retain", [1.0, 0.75, 0.5])
def test_table_rap_complexity(retain: float) -> None:
    """Exact where rho D is whole; SVD-LLM's row is of factors per head, unlike in effsweep."""
    heads = LLAMA.num_heads
    whole = dense(LLAMA)
    rows = {"RAP": "rap", "PaLU": "palu", "SVD-LLM": "svdllm, head by head"}
    for row, method in rows.items():
        cost, _ = variant(method, retain)
        assert cost.kv_weights / whole.kv_weights == COMPLEXITY[row](retain, heads)
        assert cost.cache / whole.cache == retain
    # Keys' and values' FLOPs of S tokens are 2 S per weight: the same ratio.
    joint, _ = variant("svdllm", retain)
    assert joint.kv_weights / whole.kv_weights == retain + retain * LLAMA.num_kv_heads / heads
    assert variant("svdllm", 1.0)[0].rebuilding == 2 * 1024 * 1024


@pytest.mark.parametrize("merge", [2, 4])
@pytest.mark.parametrize("factored", [False, True])
def test_merged_heads_cost_what_is_counted(merge: int, factored: bool) -> None:
    width, heads = 64 * merge, LLAMA.num_kv_heads // merge
    entry: Any = PairEntry(width // 2, 0, width, heads=heads)
    if factored:
        entry = FactoredEntry(width // 2, 0, width, heads=heads, outputs=True)
    found = count(built("Llama-3-8B", entry.fields()), tokens=TOKENS, context=TOKENS)
    cost = merged(LLAMA, merge, width, factored=factored)
    assert (found.cache, found.weights) == (cost.cache, cost.weights)
    assert found.forward_flops == cost.forward_flops(TOKENS)
    assert found.decode_flops == cost.decode_flops(TOKENS)
    assert cost.cache == dense(LLAMA).cache / 2
