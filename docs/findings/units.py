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
from findings import CONFIRMED, CONTRADICTED, PARTLY, RAP, Answer, Finding

UNITS = (
    Finding(
        title="Pruning single channels breaks the model, RoPE pairs do not",
        paper="after the same distillation, perplexity 397 for KVPruner and 9.12 for RAP at 0.7 "
        "(dense 8.28); KVPruner is not monotonic in the budget (`tab:pplsweep`).",
        real=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"no recovery, {cut_only(r, 'kvpruner:paper', 'rap:paper', RAP)}; from 0.9 to "
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
            why="Single channels are far worse than pairs. The paper's recipe for pairs breaks "
            "this model too, through its adaptive budgets (below). Channels after "
            "distillation were not measured.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=lambda r: (
                f"from 0.9 to 0.5, no recovery: rap:paper {sweep(r, 'rap:paper')}, kvpruner:paper "
                f"{sweep(r, 'kvpruner:paper')}. Recovered: rap:paper "
                f"{sweep(r, 'rap:paper', 'fast')}, kvpruner:paper "
                f"{sweep(r, 'kvpruner:paper', 'fast')}, {RAP} {sweep(r, RAP, 'fast')}."
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
            why="The order is the paper's at every ratio. The factor is far smaller, and "
            "channels get worse step by step.",
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
            why="Their own frequencies help, but the result is still far worse than RoPE pairs "
            "with the same scores and budgets. Channels after distillation were not "
            "measured.",
        ),
        bundled=Answer(
            verdict=CONTRADICTED,
            figures=lambda r: (
                f"no recovery, {both(r, 'rap:paper', 'kvpruner-indexed:paper')}. Recovered, "
                f"{both(r, 'rap:paper', 'kvpruner-indexed:paper', recover='fast')}."
            ),
            holds=lambda r: r.ppl("kvpruner-indexed:paper") < 1.1 * r.ppl("rap:paper"),
            why="Here wrong frequencies cause most of the damage and lost partners little, more "
            "at 0.5 than at 0.7. Half of this model's pairs rotate less than once in its "
            "context. A single channel of such a pair hardly rotates.",
        ),
        follows="single channels are no alternative at any frequency.",
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
            why="Orphans are a third of the kept channels, and half of the touched pairs are "
            "broken. This is nearer to the paper than the bundled model, but below chance. "
            "The paper's share is above chance.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=orphaned,
            holds=lambda r: 0.1 < orphans(r, -1)["orphans"] < orphans(r, -1)["chance"],
            why="Both rise as in the paper. They stay below chance, because the two channels of "
            "a pair have similar scores here.",
        ),
    ),
    Finding(
        title="Fisher keeps the slow pairs",
        paper="pairs of high index, long wavelength, are kept more often (`fig:kept_pairs`).",
        real=Answer(
            verdict=CONFIRMED,
            figures=told_halves,
            holds=lambda r: kept_halves(r)[1] > kept_halves(r)[0] + 0.05,
            why="The pairs that never complete a rotation within the model's context are kept "
            "most.",
        ),
        bundled=Answer(
            verdict=CONTRADICTED,
            figures=told_halves,
            holds=lambda r: kept_halves(r)[0] > kept_halves(r)[1],
            why="The slower half rotates less than once within the model's 2,048 tokens, so that"
            " one pair can replace another. Folding uses this.",
        ),
        follows="slow pairs are not cheap because they are slow. Savings by folding must be "
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
            "lowest. Pairs get worse with the base, where the paper's are worst at 10,000. "
            "These are two windows, and the model was trained at 100,000.",
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
            why="Channels cost more than pairs at every base, and neither changes by a fifth "
            "with the base. As in the paper, the weights were trained at one base (500,000)."
            " This shows the effect of a rotation on a pruned model, not of training at "
            "another base.",
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
            why="The choices are more alike than in the paper, and the difference matters. The "
            "weighted Fisher score is better at every ratio, most at 0.5. Both use the same "
            "single window.",
        ),
        bundled=Answer(
            verdict=PARTLY,
            figures=told_scores,
            holds=lambda r: (
                sum(spearman(r)) / len(spearman(r)) > 0.9
                and min(overlaps(r).values()) > 0.9
                and all(0 <= weighted / root - 1 < 0.02 for root, weighted in scored(r).values())
            ),
            why="It hardly matters, and the cheaper root-Fisher is a little better at every "
            "ratio. But both choose nearly the same pairs, so this model cannot show the "
            "cost of another choice.",
        ),
        follows="try `score=weighted-fisher` to prune pairs or channels by a score. The default "
        "`rap` uses neither.",
    ),
)
