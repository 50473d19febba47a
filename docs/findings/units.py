"""Findings on what is pruned: pairs or channels, and which of them; see page.py."""

import itertools

from figures import (
    RATIOS,
    bases,
    both,
    cut_only,
    kept_halves,
    orphaned,
    orphans,
    overlaps,
    ratios,
    scored,
    spearman,
    sweep,
    told_bases,
    told_halves,
    told_scores,
)
from findings import CONFIRMED, CONTRADICTED, PARTLY, Answer, Finding

UNITS = (
    Finding(
        title="Pruning single channels breaks the model, RoPE pairs do not",
        paper="after the same distillation, perplexity 397 for KVPruner and 9.12 for RAP at 0.7 "
        "(dense 8.28); KVPruner is not monotonic in the budget (`tab:pplsweep`).",
        real=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"no recovery, {cut_only(r, 'kvpruner:paper', 'rap:paper', 'rap')}; from 0.9 to "
                f"0.5 rap:paper has {sweep(r, 'rap:paper')}, and with equal widths "
                f"{both(r, 'rap:paper:budget=uniform')}."
            ),
            holds=lambda r: (
                all(
                    4 * r.ppl("rap:paper:budget=uniform", x) < r.ppl("rap:paper", x)
                    for x in (0.7, 0.5)
                )
                and all(
                    2 < r.ppl("kvpruner:paper", retain) / r.ppl("rap:paper", retain) < 20
                    and r.loss("rap:paper", retain) > 5
                    for retain in ratios(r, "kvpruner:paper", "rap:paper")
                )
            ),
            why="Channels are far worse than pairs, but pairs by the paper's recipe break this "
            "model too, through its adaptive budgets (below). Channels after "
            "distillation were not measured.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"from 0.9 to 0.5, no recovery: rap:paper {sweep(r, 'rap:paper')}, kvpruner:paper "
                f"{sweep(r, 'kvpruner:paper')}. Recovered: rap:paper "
                f"{sweep(r, 'rap:paper', 'fast')}, kvpruner:paper "
                f"{sweep(r, 'kvpruner:paper', 'fast')}, the default rap {sweep(r, 'rap', 'fast')}."
            ),
            holds=lambda r: (
                all(
                    r.ppl("kvpruner:paper", retain, recover) > r.ppl("rap:paper", retain, recover)
                    for retain in RATIOS
                    for recover in ("none", "fast")
                )
                and all(
                    r.ppl("kvpruner:paper", more, "fast") < r.ppl("kvpruner:paper", less, "fast")
                    for more, less in itertools.pairwise(RATIOS)
                )
            ),
            why="The order is the paper's at every ratio; the factor is far smaller, and channels "
            "get worse step by step.",
        ),
    ),
    Finding(
        title="Rotating the surviving channels at their own frequency does not save them",
        paper="index-aware KVPruner reaches 94 at 0.7 and 952 at 0.5 after distillation, still ten "
        "times RAP (`tab:steelman`).",
        real=Answer(
            verdict=CONFIRMED,
            figures=lambda r: (
                "no recovery, "
                + cut_only(r, "rap:paper", "kvpruner-indexed:paper", "kvpruner:paper")
                + "."
            ),
            holds=lambda r: all(
                1.5 * r.ppl("rap:paper", retain) < r.ppl("kvpruner-indexed:paper", retain)
                and r.ppl("kvpruner-indexed:paper", retain) < r.ppl("kvpruner:paper", retain)
                for retain in ratios(r, "rap:paper", "kvpruner-indexed:paper", "kvpruner:paper")
            ),
            why="Their own frequencies help, and what is left is still far above RoPE pairs by "
            "the same scores and budgets. Channels after distillation were not measured.",
        ),
        bundled=Answer(
            verdict=CONTRADICTED,
            figures=lambda r: (
                f"no recovery, {both(r, 'rap:paper', 'kvpruner-indexed:paper')}. Recovered, "
                f"{both(r, 'rap:paper', 'kvpruner-indexed:paper', recover='fast')}."
            ),
            holds=lambda r: r.ppl("kvpruner-indexed:paper") < 1.1 * r.ppl("rap:paper"),
            why="Here the wrong frequencies are most of the damage and the lost partners little, "
            "and more at 0.5 than at 0.7. Half of this model's pairs (17 of 32) turn less than "
            "once in its 2,048 tokens, and a lone channel of such a pair is nearly a plain one.",
        ),
        follows="single channels are no alternative, whatever they rotate by.",
    ),
    Finding(
        title="Channel pruning orphans most of what it keeps",
        paper="orphans rise from 12.1% of the kept key channels at 0.9 to 62.7% at 0.5, broken "
        "pairs from 21.5% to 77.1% (`fig:kept_pairs`).",
        real=Answer(
            verdict=PARTLY,
            figures=orphaned,
            holds=lambda r: (
                0.3 < orphans(r, -1)["orphans"] < orphans(r, -1)["chance"]
                and orphans(r, -1)["broken"] > 0.5
            ),
            why="A third of what is kept and half of the pairs that are touched: nearer to the "
            "paper than the bundled model, and still below chance, which the paper's 62.7% is "
            "above.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=orphaned,
            holds=lambda r: 0.1 < orphans(r, -1)["orphans"] < orphans(r, -1)["chance"],
            why="They rise as in the paper and stay below chance, because the two channels of a "
            "pair have like scores here.",
        ),
    ),
    Finding(
        title="Fisher keeps the slow pairs",
        paper="pairs of high index, long wavelength, are kept more often (`fig:kept_pairs`).",
        real=Answer(
            verdict=CONFIRMED,
            figures=told_halves,
            holds=lambda r: kept_halves(r)[1] > kept_halves(r)[0] + 0.05,
            why="The pairs that never turn in any text it was made for are kept most.",
        ),
        bundled=Answer(
            verdict=CONTRADICTED,
            figures=told_halves,
            holds=lambda r: kept_halves(r)[0] > kept_halves(r)[1],
            why="The slower half turns less than once in the 2,048 tokens this model was made for, "
            "so one pair of it can replace another (which folding uses).",
        ),
        follows="slow pairs are not cheap because they are slow; what folding saves has to be "
        "shown on SmolLM2.",
    ),
    Finding(
        title="The base frequency is not what breaks single channels",
        paper="KVPruner stays near 51,000 at every base from 10,000 to 1,000,000 (0.5, before "
        "recovery); RAP is at 1,120 for 10,000 and at 330 to 380 above (`fig:rope_base_fig`).",
        real=Answer(
            verdict=PARTLY,
            figures=told_bases,
            holds=lambda r: (
                all(
                    2.5 * pairs < channels < 11 * pairs
                    for channels, pairs in zip(bases(r, "channels"), bases(r, "pairs"), strict=True)
                )
                and bases(r, "pairs") == sorted(bases(r, "pairs"))
                and bases(r, "channels")[0] > 2 * max(bases(r, "channels")[1:])
            ),
            why="Channels cost 2.7 to ten times as much as pairs at every base, most at the "
            "lowest one. Pairs grow worse with the base, where the paper's are worst at 10,000. "
            "Two windows; the model was trained at 100,000.",
        ),
        bundled=Answer(
            verdict=CONFIRMED,
            figures=told_bases,
            holds=lambda r: (
                all(
                    one > 1.5 * other
                    for one, other in zip(bases(r, "channels"), bases(r, "pairs"), strict=True)
                )
                and max(bases(r, "channels")) < 1.2 * min(bases(r, "channels"))
                and max(bases(r, "pairs")) < 1.05 * min(bases(r, "pairs"))
            ),
            why="Channels cost more than pairs at every base, and the base moves neither by a "
            "fifth. The weights stay those trained at 500,000, as the paper's stay: this shows the "
            "effect of a rotation on a pruned model, not what a model trained at another base "
            "would be like.",
        ),
    ),
    Finding(
        title="The two Fisher scores choose differently, and it hardly matters",
        paper="root-Fisher and weighted Fisher: Spearman 0.67, pairs in common 95%, 85% and 75% "
        "at 0.9, 0.7 and 0.5, under 4% of the heads with one set (`app:method`).",
        real=Answer(
            verdict=CONTRADICTED,
            figures=lambda r: f"{told_scores(r)} Equal widths, one window of 1,024 tokens.",
            holds=lambda r: (
                sum(spearman(r)) / len(spearman(r)) > 0.9
                and min(overlaps(r).values()) > 0.9
                and all(weighted < root for root, weighted in scored(r).values())
                and scored(r)[0.5][0] > 1.2 * scored(r)[0.5][1]
            ),
            why="They choose more alike than in the paper, and it matters: the weighted Fisher is "
            "better at every ratio, most at 0.5. The window is one, and the same for both.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=told_scores,
            holds=lambda r: (
                sum(spearman(r)) / len(spearman(r)) > 0.9
                and min(overlaps(r).values()) > 0.9
                and all(0 <= weighted / root - 1 < 0.02 for root, weighted in scored(r).values())
            ),
            why="It hardly matters, and the cheaper root-Fisher is a little better at every ratio. "
            "But they choose nearly the same pairs, so this model cannot say what another choice "
            "costs.",
        ),
        follows="whoever prunes pairs and channels by a score should try `score=weighted-fisher`. "
        "The default rap ranks nothing by either.",
    ),
)
