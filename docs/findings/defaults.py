"""The defaults that the bundled model chose, and their effect on SmolLM2; see page.py."""

from figures import by_budget, compared, cut_only
from findings import RAP, Answer, Default

POOLED = "rap:key_share=pooled"
SEARCHED = "rap:budget=search"
STAYS, CHANGES, UNDECIDED = "Stays", "Changes", "Open"

DEFAULTS = (
    Default(
        title="`--recover none` as the cost of a ratio",
        bundled=lambda r: f"{r.loss(RAP, 0.7):.1%} at 0.7 and {r.loss(RAP, 0.5):.1%} at 0.5.",
        real=Answer(
            verdict=CHANGES,
            figures=lambda r: (
                f"{r.loss(RAP, 0.7):.0%} at 0.7 and {r.loss(RAP, 0.5):.0%} at 0.5, "
                f"{r.loss(RAP, 0.7, 'fit'):.0%} and {r.loss(RAP, 0.5, 'fit'):.0%} after "
                f"layer-wise distillation; PaLU, no recovery, {r.loss('palu', 0.7):.0%} and "
                f"{r.loss('palu', 0.5):.0%}."
            ),
            holds=lambda r: (
                r.loss(RAP, 0.7) > 0.2 and r.loss(RAP, 0.5, "fit") < 0.5 * r.loss(RAP, 0.5)
            ),
            why="Use `--recover fit` whenever you prune a pretrained model. By default "
            "it reads three times as many tokens as calibration.",
        ),
    ),
    Default(
        title="`key_share=0.5`, equal dimensions for keys and values",
        bundled=lambda r: f"{cut_only(r, RAP, POOLED)}: a pool is better, and slower to decode.",
        real=Answer(
            verdict=STAYS,
            figures=lambda r: (
                f"{compared(r, RAP, POOLED)}; a decode step takes {r.slower(RAP):.0%} and "
                f"{r.slower(POOLED):.0%} of the dense model's."
            ),
            holds=lambda r: (
                0.98 < r.ppl(POOLED) / r.ppl(RAP) < 1
                and r.ppl(POOLED, 0.5) > 1.02 * r.ppl(RAP, 0.5)
                and r.slower(POOLED) > 1.15 * r.slower(RAP)
            ),
            why="A pool gains 0.5% at 0.7. It loses more at 0.5, and a fifth of the speed.",
        ),
    ),
    Default(
        title="`budget=error`, head dimensions by estimated loss",
        bundled=lambda r: (
            "on the windows of analyses "
            + ", ".join(
                f"{by_budget(r, 'error', retain):.2f} at {retain:g} where equal widths have "
                f"{by_budget(r, 'uniform', retain):.2f}"
                for retain in (0.7, 0.5)
            )
            + "."
        ),
        real=Answer(
            verdict=STAYS,
            figures=lambda r: (
                f"{compared(r, RAP, 'rap:budget=uniform:merge=1')}; searched from there "
                f"(`--budget search`) {r.ppl(SEARCHED, 0.5):.2f} at 0.5."
            ),
            holds=lambda r: (
                all(
                    r.loss("rap:budget=uniform:merge=1", x) > 1.3 * r.loss(RAP, x)
                    for x in (0.7, 0.5)
                )
                and 0.94 < r.ppl(SEARCHED, 0.5) / r.ppl(RAP, 0.5) < 0.97
            ),
            why="Equal head dimensions lose four tenths more than budgets by estimated loss. A "
            "search gains a few percent more, for many times the cost of pruning.",
        ),
    ),
    Default(
        title="`context` for merging pairs: the model's maximum",
        bundled=lambda r: (
            "recall at 1,000 tokens chose it over 512, against perplexity ([log](../log.md), "
            "2026-11-20)."
        ),
        real=Answer(
            verdict=STAYS,
            figures=lambda r: f"{compared(r, RAP, 'rap:context=512:merge=1')}.",
            holds=lambda r: all(
                r.ppl("rap:context=512:merge=1", x) > 1.1 * r.ppl(RAP, x) for x in (0.7, 0.5)
            ),
            why="A shorter context is worse in perplexity too. Windows of 2,048 tokens use the "
            "slow pairs that it would fold.",
        ),
    ),
    Default(
        title="Refit of output projections, off by default",
        bundled=lambda r: "it repairs channel pruning and little else ([log](../log.md)).",
        real=Answer(
            verdict=STAYS,
            figures=lambda r: (
                f"at 0.5 from {r.ppl(RAP, 0.5):.2f} to {r.ppl(RAP, 0.5, 'closed-form'):.2f}, "
                f"KL from {r.kl(RAP, 0.5):.3f} to {r.kl(RAP, 0.5, 'closed-form'):.3f}; "
                f"layer-wise distillation {r.ppl(RAP, 0.5, 'fit'):.2f} and "
                f"{r.kl(RAP, 0.5, 'fit'):.3f}."
            ),
            holds=lambda r: (
                r.ppl(RAP, 0.5, "closed-form") > 0.95 * r.ppl(RAP, 0.5)
                and r.ppl(RAP, 0.5, "fit") < 0.7 * r.ppl(RAP, 0.5)
            ),
            why="Refitting the outputs alone gains little: folding and low-rank values already "
            "choose them well.",
        ),
    ),
    Default(
        title="Learning rates of recovery",
        bundled=lambda r: "the 5e-3 of `fast` is its own ([log](../log.md), 2026-11-20).",
        real="the rates of `fit` and `full` were chosen on SmolLM2 ([log](../log.md), "
        "2026-11-22). That of `fast` was not measured there.",
    ),
)
