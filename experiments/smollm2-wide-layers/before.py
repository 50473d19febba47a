"""Half of SmolLM2's cache, some layers wider than others: answers and text before recovery.

    python experiments/smollm2-wide-layers/before.py STATISTICS --text wikitext2-test.txt

STATISTICS is what `rap compress smollm2 --retain 0.5 -o OUT` keeps in OUT's work folder
(`.OUT.recovery/statistics/statistics-*.safetensors`) while it recovers. A row a variant goes to
before.json in this folder: loss and accuracy of the answers of eight needles in 4,096 tokens
(bfloat16), perplexity over dense and KL on two windows of 2,048. Rows that are there are kept.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from run import budgets_with

import rap
from rap.calibration.statistics import Statistics
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source
from rap.data.text import read_text
from rap.methods import parse_method
from rap.methods.rap import Rap

sys.path.insert(0, str(Path(__file__).parents[1]))
from needles import needles, score

RESULT = Path(__file__).with_name("before.json")
FAR = "rap:reach=far"
Wide = tuple[int, int, float]  # the first and the last wide layer, and what they keep
VARIANTS: dict[str, tuple[str, Wide | None]] = {
    "plain": ("rap:reach=far:merge=auto:profile=stock:align=32", None),
    "merged": (FAR, None),
    "merged reach 8192": ("rap:reach=8192", None),
    "15-20 at 0.75": (FAR, (15, 20, 0.75)),
    "15-20 at 1": (FAR, (15, 20, 1.0)),
    "18-20 at 0.75": (FAR, (18, 20, 0.75)),
}


def measured(
    dense: Any, statistics: Statistics, name: str, ids: torch.Tensor, documents: Sequence[Any]
) -> dict[str, float]:
    """The row of a variant."""
    method, wide = VARIANTS[name]
    own: Callable[..., Any] = Rap.budgets
    if wide is not None:
        Rap.budgets = budgets_with(*wide)  # type: ignore[method-assign]
    try:
        plan = parse_method(method, 0.5, seed=0).plan(dense, statistics)
    finally:
        Rap.budgets = own  # type: ignore[method-assign]
    small: Any = rap.apply(dense, plan)
    near = rap.fidelity(small, dense, ids, window=2048, max_windows=2)
    ratio = near.perplexity.value / near.dense_perplexity.value
    found = score(small.to(torch.bfloat16), documents)
    return found | {"kl": near.kl.value, "ratio": ratio, "kept": plan.kept_fraction}


def main() -> None:
    """Measure the variants that have no row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("statistics")
    parser.add_argument("--text", required=True)
    asked = parser.parse_args()
    source = resolve_source("smollm2")
    dense, tokenizer = load(source, dtype="float32"), load_tokenizer(source)
    ids, documents = needles(tokenizer, read_text(asked.text))
    statistics = Statistics.load(asked.statistics)
    rows = json.loads(RESULT.read_text("utf-8"))["rows"] if RESULT.is_file() else {}
    command = "python experiments/smollm2-wide-layers/before.py " + shlex.join(sys.argv[1:])
    for name in VARIANTS:
        if name not in rows:
            rows[name] = measured(dense, statistics, name, ids, documents)
        table = {
            "title": "Half of the cache, some layers wider, before recovery",
            "note": "Eight needles in 4,096 tokens; two windows of 2,048 tokens of WikiText-2.",
            "header": ["layers", "loss of the answer", "right", "perplexity over dense", "KL"],
            "rows": [
                [n, f"{r['loss']:.2f}", f"{r['right']:.0%}", f"{r['ratio']:.3f}", f"{r['kl']:.3f}"]
                for n, r in rows.items()
            ],
        }
        write_json(
            RESULT, {"rows": rows, "table": table, "command": command, "provenance": provenance()}
        )
        print(name, rows[name], flush=True)


if __name__ == "__main__":
    main()
