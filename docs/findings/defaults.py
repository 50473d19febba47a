"""The defaults that the bundled model chose, and what the real model says of them; see page.py."""

from rap.studies.report.findings import Answer, Default

STAYS, CHANGES, UNDECIDED = "Stays", "Changes", "Open"

DEFAULTS = (
    Default(
        title="`--recover none` as what a ratio costs",
        chosen="There the default cut is free at 0.7 and costs a few per cent at 0.5.",
        real=Answer(
            verdict=CHANGES,
            figures=lambda r: (
                f"{r.loss('rap', 0.7):.0%} at 0.7 and {r.loss('rap', 0.5):.0%} at 0.5, "
                f"{r.loss('rap', 0.5, 'fit'):.0%} at 0.5 after the fit; PaLU, cut only, "
                f"{r.loss('palu', 0.7):.0%} and {r.loss('palu', 0.5):.0%}."
            ),
            holds=lambda r: (
                r.loss("rap", 0.7) > 0.2 and r.loss("rap", 0.5, "fit") < 0.5 * r.loss("rap", 0.5)
            ),
            why="The fit belongs to every cut of a real model below 0.9, and needs no more text "
            "than the calibration.",
        ),
    ),
    Default(
        title="`key_share=0.5`, one width for keys and values",
        chosen="There one pool with prices of its own was a little better, and slower to decode.",
        real=Answer(
            verdict=STAYS,
            figures=lambda r: (
                f"at 0.7 {r.ppl('rap'):.2f} and KL {r.kl('rap'):.3f}, pooled "
                f"{r.ppl('rap:key_share=pooled'):.2f} and {r.kl('rap:key_share=pooled'):.3f}; a "
                f"decode step takes {r.slower('rap'):.0%} and "
                f"{r.slower('rap:key_share=pooled'):.0%} of the dense one."
            ),
            holds=lambda r: (
                0.98 < r.ppl("rap:key_share=pooled") / r.ppl("rap") < 1
                and r.slower("rap:key_share=pooled") > 1.2 * r.slower("rap")
            ),
            why="Half a per cent of perplexity is not worth a third of the speed.",
        ),
    ),
    Default(
        title="`budget=error`, widths by expected loss",
        chosen="There it beats equal widths down to 0.4.",
        real="not measured against equal widths.",
    ),
    Default(
        title="`context`, over which folded pairs may drift: all that the model was made for",
        chosen="There recall at 1,000 tokens chose it over 512, against perplexity (`docs/log.md`, "
        "2026-11-20).",
        real="not measured.",
    ),
    Default(
        title="The refit of output projections, off unless asked for",
        chosen="There it repairs cuts of channels and little else.",
        real="not measured alone.",
    ),
    Default(
        title="Rates of recovery",
        chosen="The 5e-3 of `fast` is that of the bundled model.",
        real="distillation was not measured, so a real model should be given the rate of `paper`. "
        "The fit's rate and drift were chosen on the real model (`docs/log.md`, 2026-11-22).",
    ),
)
