"""Findings on who gets which width: scores, layers, keys and values; see page.py."""

from figures import bars, dense_window, probe, probe_dense, shares, slashed, starved, thirds
from findings import CONFIRMED, CONTRADICTED, PARTLY, Answer, Finding, Results

BARS = {
    "FA": "Fisher adaptive",
    "FU": "Fisher uniform",
    "MA": "magnitude adaptive",
    "MU": "magnitude uniform",
}


def _scores_and_budgets(results: Results) -> str:
    """The paper's four bars, of the bundled model's comparison."""
    return (
        f"at 0.7: Fisher adaptive {results.ppl('rap:paper'):.2f}, Fisher uniform "
        f"{results.ppl('rap:paper:budget=uniform'):.2f}, magnitude adaptive "
        f"{results.ppl('rap:paper:score=magnitude'):.2f}, magnitude uniform "
        f"{results.ppl('rap:paper:score=magnitude:budget=uniform'):.2f}."
    )


WIDTHS = (
    Finding(
        title="Fisher scores and adaptive budgets each help, together most",
        paper="of the prune-only bars at 0.7, magnitude with uniform budgets is unusable, Fisher "
        "with adaptive ones the best (`fig:ablation_allocation`).",
        real=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                "at 0.7 on one window of 1,024 tokens (dense "
                f"{dense_window(r, 'allocation')}): "
                + ", ".join(f"{name} {bars(r)[bar]:,.2f}" for bar, name in BARS.items())
                + "; in one pool of K and V "
                + slashed([bars(r, "one pool")[bar] for bar in BARS])
                + "."
            ),
            holds=lambda r: all(
                3 * found["FU"] < found["FA"]
                and 10 * found["FA"] < found["MA"]
                and 2 * found["MA"] < found["MU"]
                for found in (bars(r), bars(r, "one pool"))
            ),
            why="The score is nearly everything: with weight magnitude the model is unusable. "
            "Adaptive budgets help this bad score. With Fisher they break the model: equal "
            "head dimensions cost a third or less.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=_scores_and_budgets,
            holds=lambda r: (
                r.ppl("rap:paper:budget=uniform")
                < r.ppl("rap:paper")
                < r.ppl("rap:paper:score=magnitude")
            ),
            why="The score matters, and the adaptive budget hurts. On novels, Fisher gives too "
            "little to the layers that serve recall ([log](../log.md), 2026-11-20).",
        ),
    ),
    Finding(
        title="K and V need equal budgets",
        paper="at 0.5, 11.64 / 11.37 / 13.61 for K's share 0.35 / 0.5 / 0.65 (`tab:kvsplit`); "
        "pooling starves K and costs 8 LongBench points.",
        real=Answer(
            verdict=CONFIRMED,
            figures=lambda r: (
                "RAP as published at 0.5 on one window of 1,024 tokens (dense "
                f"{dense_window(r, 'share')}): "
                + slashed([shares(r)[share] for share in ("0.35", "0.5", "0.65")])
                + f" for the same shares, pooled {shares(r)['pooled']:,.2f}, where K keeps "
                f"{starved(r):.0%}."
            ),
            holds=lambda r: (
                min(shares(r), key=lambda share: shares(r)[share]) == "0.5"
                and all(
                    value > 2 * shares(r)["0.5"]
                    for share, value in shares(r).items()
                    if share != "0.5"
                )
            ),
            why="Equal budgets are the best by far. A smaller share for K, or a pool, costs more"
            " than twice as much, and a larger share costs most. Adaptive budgets break all "
            "four. With dimensions by estimated loss a pool costs little (last section).",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"no recovery at 0.7: {r.ppl('rap:paper:key_share=0.35'):.2f} / "
                f"{r.ppl('rap:paper'):.2f} / {r.ppl('rap:paper:key_share=0.65'):.2f}, pooled "
                f"{r.ppl('rap:paper:key_share=pooled'):.2f}."
            ),
            holds=lambda r: (
                r.ppl("rap:paper:key_share=0.35")
                < r.ppl("rap:paper")
                < r.ppl("rap:paper:key_share=0.65")
            ),
            why="More for K is clearly worse, as in the paper. Less for K is better here, and "
            "pooling is best. The paper finds no difference between a little less and equal."
            " Pruned value channels cost this model most.",
        ),
        follows="giving K less helps on the bundled model only. The equal split stays, for quality "
        "and for the kernels.",
    ),
    Finding(
        title="Early and late layers are more fragile than the middle",
        paper="one layer pruned to 0.5: 10.8 on average for the first four, 9.0 for the last four, "
        "8.6 between (dense 8.28); layer 2 alone 13.4 (`fig:layer_probe`).",
        real=Answer(
            verdict=CONTRADICTED,
            figures=lambda r: (
                f"one layer pruned to 0.5: {thirds(r)['first']:.2f} on average for the first four, "
                f"{thirds(r)['last']:.2f} for the last four, {thirds(r)['between']:.2f} between "
                f"(dense {probe_dense(r):.2f} on these two windows); layer 24 alone "
                f"{probe(r)[24]:.2f}; layers 18 to 20 have {slashed(probe(r)[18:21])}."
            ),
            holds=lambda r: (
                thirds(r)["last"] < thirds(r)["between"]
                and thirds(r)["first"] < 1.01 * thirds(r)["between"]
                and probe(r).index(max(probe(r))) == 24
            ),
            why="The last layers are the least fragile, and the first hardly differ from the "
            "middle. Single layers there lose more, such as 24, and the three that "
            "[copy](budget.md#layers-that-copy) from the context.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"one layer pruned to 0.5, first to last of six: {slashed(probe(r))} (dense "
                f"{probe_dense(r):.2f} on these 12 windows)."
            ),
            holds=lambda r: (
                probe(r)[0] == min(probe(r))
                and probe(r)[-1] == max(probe(r))
                and probe(r)[-1] - probe_dense(r) > 3 * (probe(r)[0] - probe_dense(r))
            ),
            why="Layers differ as much as in the paper, and the last one is the most fragile. "
            "The first is the least fragile, contrary to the paper, for an unknown reason. "
            "Six layers hardly have a middle. Budgets by estimated loss agree: the last "
            "layer keeps all its channels ([log](../log.md)).",
        ),
    ),
)
