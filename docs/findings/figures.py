"""Figures of the findings, read from the results of either model; see page.py."""

import math

from findings import RAP, Results

from rap.methods.naming import named_today
from rap.model.errors import RapError

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5)
COSTLY = (RAP, "palu", "svdllm")
LONG = 2048  # tokens of the longest documents with needles


def both(results: Results, *methods: str, recover: str = "none") -> str:
    """Perplexity of methods at 0.7 and 0.5."""
    return "; ".join(
        f"{method} {results.ppl(method, 0.7, recover):.2f} at 0.7 and "
        f"{results.ppl(method, 0.5, recover):.2f} at 0.5"
        for method in methods
    )


def ratios(results: Results, *methods: str) -> list[float]:
    """Of 0.7 and 0.5, those at which all of these were measured, no recovery; RapError if none."""
    found = [r for r in (0.7, 0.5) if all((m, r, "none") in results.cells for m in methods)]
    if not found:
        raise RapError(f"no ratio at which all of {', '.join(methods)} were measured: run them")
    return found


def cut_only(results: Results, *methods: str) -> str:
    """Perplexity of methods, no recovery, at the ratios at which all were measured."""
    return "; ".join(
        f"{method} "
        + " and ".join(
            f"{results.ppl(method, retain):,.2f} at {retain:g}"
            for retain in ratios(results, *methods)
        )
        for method in methods
    )


def compared(results: Results, *methods: str) -> str:
    """Perplexity and KL of methods, no recovery, at the ratios at which all were measured."""
    return ", ".join(
        f"at {retain:g} "
        + " against ".join(
            f"{results.ppl(method, retain):,.2f} (KL {results.kl(method, retain):.3f})"
            for method in methods
        )
        for retain in ratios(results, *methods)
    )


def sweep(results: Results, method: str, recover: str = "none") -> str:
    """Perplexity of a method from 0.9 to 0.5."""
    return slashed([results.ppl(method, retain, recover) for retain in RATIOS])


def slashed(values: list[float]) -> str:
    """Perplexities in a row."""
    return " / ".join(f"{value:,.2f}" for value in values)


def costs(results: Results) -> str:
    """Attention parameters at 0.7 and the time of a decode step, as parts of dense."""
    return (
        "parameters at 0.7: "
        + ", ".join(f"{m} {results.share(m, 'attention_parameters'):.1%}" for m in COSTLY)
        + "; a decode step takes, of the dense model's, "
        + ", ".join(f"{m} {results.slower(m):.0%}" for m in COSTLY)
        + "."
    )


def only_rap_shrinks(results: Results) -> bool:
    """Whether low rank has more parameters than its cache, rebuilds, and decodes slower."""
    return all(
        results.share(RAP, "attention_parameters") + 0.1
        < results.share(method, "attention_parameters")
        and results.cell(method)["reconstructs"]
        and results.slower(method) > results.slower(RAP)
        for method in COSTLY[1:]
    )


def orphans(results: Results, row: int) -> dict[str, float]:
    """Shares of orphans and broken pairs at the first or last retain ratio, and by chance."""
    found = results.analysis("orphans")["rows"][row]
    return {**found["channels"], "chance": found["chance"]}


def orphaned(results: Results) -> str:
    """Orphans and broken pairs at 0.9 and 0.5."""
    most, least = orphans(results, 0), orphans(results, -1)
    return (
        f"orphans {most['orphans']:.1%} at 0.9 and {least['orphans']:.1%} at 0.5, broken pairs "
        f"{most['broken']:.1%} and {least['broken']:.1%}; by chance {least['chance']:.1%} at 0.5. "
        "RAP 0% by construction."
    )


def kept_halves(results: Results) -> tuple[float, float]:
    """How many heads keep a pair at 0.5, on average over the faster and the slower half."""
    kept = results.analysis("kept-pairs")["kept"]["0.5"]
    half = len(kept) // 2
    return sum(kept[:half]) / half, sum(kept[half:]) / half


def told_halves(results: Results) -> str:
    """The two shares of `kept_halves`."""
    fast, slow = kept_halves(results)
    return (
        f"at 0.5 a pair of the faster half is kept in {fast:.0%} of the heads, one of the slower "
        f"half in {slow:.0%}."
    )


def probe(results: Results) -> list[float]:
    """Perplexity with each layer alone cut to 0.5, first layer first."""
    rows = [row for row in results.analysis("probe")["rows"] if row["retain"] == 0.5]
    return [row["perplexity"] for row in sorted(rows, key=lambda row: row["layer"])]


def probe_dense(results: Results) -> float:
    """Dense perplexity on the windows of the probe."""
    return float(results.analysis("probe")["dense"])


def thirds(results: Results) -> dict[str, float]:
    """Mean perplexity of the probe over the first four layers, the last four, and those between."""
    found = probe(results)
    parts = {"first": found[:4], "between": found[4:-4], "last": found[-4:]}
    return {name: sum(part) / len(part) for name, part in parts.items()}


def by_budget(results: Results, budget: str, retain: float) -> float:
    """Perplexity of `rap:merge=1` with widths by this budget, on the windows of analyses."""
    rows = results.analysis("loss")["rows"]
    (row,) = (one for one in rows if (one["budget"], one["retain"]) == (budget, retain))
    return float(row["perplexity"])


def bars(results: Results, share: str = "K as wide as V") -> dict[str, float]:
    """Perplexity of the paper's cut at 0.7 by scorer (M, F) and layer budget (U, A)."""
    rows = results.analysis("allocation")["rows"]
    return {row["name"].split(":")[0]: row["perplexity"][share] for row in rows}


def shares(results: Results) -> dict[str, float]:
    """Perplexity of the paper's cut at 0.5 by what K gets of the budget."""
    return {str(row["share"]): row["perplexity"] for row in results.analysis("share")["rows"]}


def starved(results: Results) -> float:
    """The part of the keys that one pool keeps at 0.5."""
    rows = {str(row["share"]): row for row in results.analysis("share")["rows"]}
    return float(rows["pooled"]["keys"])


def dense_window(results: Results, name: str) -> str:
    """Dense perplexity on the windows of an analysis."""
    return f"{results.analysis(name)['dense']:.2f}"


def bases(results: Results, what: str) -> list[float]:
    """Perplexity at every rope base, lowest base first."""
    return [row[what] for row in results.analysis("rope-base")["rows"]]


def told_bases(results: Results) -> str:
    """Channels, pairs and the dense model at every base."""
    return (
        "at 0.5, uniform widths, bases "
        f"{' / '.join(f'{base:,.0f}' for base in bases(results, 'base'))}: channels "
        f"{slashed(bases(results, 'channels'))}, pairs {slashed(bases(results, 'pairs'))}, dense "
        f"{slashed(bases(results, 'dense'))}."
    )


def recalls(results: Results, retain: float) -> dict[str, list[float]]:
    """Recall at every distance by method, no recovery, of the experiment on recall alone."""
    cells = results.file("smollm2-recall/compare")["cells"]
    return {
        cell["method"]: [entry["accuracy"] for entry in cell["recall"]]
        for cell in cells
        if cell["retain"] in (retain, 1.0)
    }


def told_recalls(results: Results, *methods: str) -> str:
    """Recall of methods at 0.9, 0.7 and 0.5, and of the dense model."""

    def shown(values: list[float]) -> str:
        return " / ".join(f"{value:.0%}" for value in values)

    ratios = (0.9, 0.7, 0.5)
    each = "; ".join(
        f"{method} {', '.join(shown(recalls(results, ratio)[method]) for ratio in ratios)}"
        for method in methods
    )
    fitted = [
        shown([entry["accuracy"] for entry in cell["recall"]])
        for cell in results.file("smollm2-recall-fit/compare")["cells"]
        if cell["recover"] == "fit"
    ]
    return (
        f"recall of one of 4 numbers at 256 / 1,000 tokens, 12 documents, no recovery, at 0.9, "
        f"0.7, 0.5: {each}; dense {shown(recalls(results, 0.5)['dense'])}. Distilled, {RAP} has "
        f"{' and '.join(fitted)} at 0.7 and 0.5."
    )


def whole(results: Results, model: str) -> float:
    """Perplexity of a model over the whole test set."""
    return float(results.file(f"smollm2-whole-test/{model}")["value"])


def needles(results: Results, model: str, far: str = "") -> float:
    """The share of single needles that a model found in 4,096 tokens, or with "-8k" in 8,192."""
    cells = results.file(f"smollm2-ruler{far}/{model}")["ruler"]
    (found,) = [cell for cell in cells if cell["task"] == "single-needle"]
    return float(found["accuracy"]["value"])


def spearman(results: Results) -> list[float]:
    """Spearman of the two Fisher scores, a head each."""
    return [value for layer in results.analysis("scores")["spearman"] for value in layer]


def overlaps(results: Results) -> dict[float, float]:
    """Pairs in common of the two Fisher scores by retain ratio, the mean over heads."""
    rows = results.analysis("scores")["rows"]
    return {row["retain"]: sum(row["overlap"]) / len(row["overlap"]) for row in rows}


def scored(results: Results) -> dict[float, tuple[float, float]]:
    """Perplexity by root-Fisher and by weighted Fisher, by retain ratio."""
    rows = results.analysis("scores")["rows"]
    values = {row["retain"]: row["perplexity"] for row in rows}
    return {retain: (one["fisher"], one["weighted-fisher"]) for retain, one in values.items()}


def told_scores(results: Results) -> str:
    """How like the two Fisher scores are, and what each costs."""
    orders = spearman(results)
    return (
        f"Spearman {sum(orders) / len(orders):.2f} (lowest of {len(orders)} heads "
        f"{min(orders):.2f}), pairs in common "
        + ", ".join(f"{share:.0%} at {retain:g}" for retain, share in overlaps(results).items())
        + "; perplexity "
        + ", ".join(
            f"{root:.2f} and {weighted:.2f} at {retain:g}"
            for retain, (root, weighted) in scored(results).items()
        )
        + "."
    )


def matched(results: Results) -> dict[str, tuple[float, float, str]]:
    """Parameters over dense, perplexity, and recall of what has the parameters of `rap` at 0.7."""
    whole, *cells = results.file("matched/matched")["cells"]
    return {
        f"{cell['method']} at {cell['retain']:g}": (
            cell["attention_parameters"] / whole["attention_parameters"],
            cell["perplexity"],
            " / ".join(f"{entry['accuracy']:.0%}" for entry in cell["recall"]),
        )
        for cell in cells
        if cell["recover"] == "none"
    }


def needed(results: Results) -> float:
    """The part of the cache at which PaLU head by head has those parameters on Llama-3-8B."""
    solved = {one["method"]: one["llama"] for one in results.file("matched/matched")["solved"]}
    return float(solved["palu:group_size=1"][0])


def rounded(results: Results, recipe: str, retain: float, recover: str = "none") -> float:
    """What 4-bit weights, one scale a tensor, add to the loss of a model, nats per token."""
    for cell in results.file("composition/composition")["measured"]:
        if (cell["recipe"], cell["retain"], cell["recover"]) == (recipe, retain, recover):
            return math.log(cell["weights"]["rtn4-tensor"] / cell["weights"]["float32"])
    raise RapError(f"no composition of {recipe} at {retain} after {recover}: measure it")


def packed(results: Results, method: str, retain: float, recover: str = "none") -> float:
    """What weights in nf4 add to the loss of the real model, nats per token."""
    rows = results.file("smollm2-pareto/pareto")["rows"]
    found = {
        row["weights"]: row["perplexity"]
        for row in rows
        if (named_today(row["method"]), row["retain"], row["recover"]) == (method, retain, recover)
        and row["bits"] is row["press"] is None
    }
    return math.log(found["nf4"] / found["float32"])


def ranks(results: Results) -> dict[str, float]:
    """Perplexity after a recovery, by the rank of its adapters."""
    return results.column("recovery-ablations/ablation-rank")


def adjacent(results: Results) -> float:
    """Needles right before the question that PaLU finds in the longest documents."""
    cells = results.file("needle/needle")["needle"]["palu at 0.5"]
    (cell,) = (one for one in cells if (one["length"], one["depth"]) == (LONG, 1.0))
    return float(cell["accuracy"])
