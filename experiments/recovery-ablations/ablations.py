"""The paper's ablations of the recovery on the bundled model, one command each.

    python experiments/recovery-ablations/ablations.py rank    # of LoRA: 4, 8, 16
    python experiments/recovery-ablations/ablations.py corpus  # novels, or another kind

Every cut is the paper's (whole pairs, value channels, single pairs). Ablations that need no
training are analyses: `rap analyze allocation`, `share` and others. Writes ablation-<name>.json
beside this file.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import rap
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.recovery.config import recovery_config
from rap.recovery.distillation import distill
from rap.studies.report.report import markdown_table

WINDOW, EVALUATION_WINDOWS, CALIBRATION_WINDOWS = 512, 48, 32
# Written for this ablation: text that shares neither words nor form with the novels.
FOREIGN = "def f{0}(x): return x * {0} + {1}\nassert f{0}({1}) == {2}\n"


class Bench:
    """The dense model in its context, and its text to judge on."""

    def __init__(self) -> None:
        reading = CalibrationText(num_windows=CALIBRATION_WINDOWS, window=WINDOW)
        self.dense = DenseContext.open(
            "bundled", dtype=torch.float32, reading=reading, progress=True
        )
        self.tokens = self.dense.held_out("bundled")

    def cut(self, **settings: Any) -> Any:
        """The model cut by the paper's recipe with some settings changed."""
        method = rap.Rap.paper(align=2, **settings)
        return method.apply(self.dense.model, self.dense.plan(method))

    def value(self, model: Any) -> str:
        """Perplexity on the test novels, printable."""
        found = rap.perplexity(model, self.tokens, window=WINDOW, max_windows=EVALUATION_WINDOWS)
        return f"{found.value:.2f}"

    def distilled(self, small: Any, windows: torch.Tensor, **changes: Any) -> Any:
        """After the fast recovery, judged on held-out windows of its own text."""
        return distill(small, self.dense.model, windows, recovery_config("fast", **changes)).model

    def novels(self) -> torch.Tensor:
        """Windows of the calibration novels for distillation."""
        fast = recovery_config("fast")
        count = fast.num_windows or 640
        return rap.load_windows(
            "bundled", self.dense.tokenizer, num_windows=count, window=fast.window, seed=1
        )


def rank(bench: Bench) -> Iterator[list[str]]:
    """LoRA rank of a short distillation at retain 0.5."""
    small, windows = bench.cut(retain=0.5), bench.novels()
    yield ["no recovery", bench.value(small)]
    for size in (4, 8, 16):
        better = bench.distilled(small, windows, rank=size, alpha=2 * size)
        yield [f"rank {size}", bench.value(better)]


def corpus(bench: Bench) -> Iterator[list[str]]:
    """A short distillation at retain 0.5 on novels, or on text of another kind."""
    small, fast = bench.cut(retain=0.5), recovery_config("fast")
    yield ["no recovery", bench.value(small)]
    yield ["novels", bench.value(bench.distilled(small, bench.novels()))]
    lines = "".join(FOREIGN.format(n, n % 97, n * (n % 97) + n % 97) for n in range(12000))
    ids = bench.dense.tokenizer(lines, add_special_tokens=False, verbose=False).input_ids
    rows = torch.tensor(ids[: len(ids) // fast.window * fast.window]).view(-1, fast.window)
    yield ["program lines", bench.value(bench.distilled(small, rows[: fast.num_windows]))]


ABLATIONS = {
    "rank": (rank, "LoRA rank of the fast recovery, retain 0.5"),
    "corpus": (corpus, "Corpus of the fast recovery, retain 0.5"),
}


def main() -> None:
    """Run one ablation, print its table, write its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=ABLATIONS)
    name = parser.parse_args().name
    run, title = ABLATIONS[name]
    bench = Bench()
    rows = [["dense", bench.value(bench.dense.model)]]
    for row in run(bench):
        rows.append(row)
        print(*row, flush=True)
    table = {
        "title": f"Ablation: {title}",
        "note": (
            f"The paper's cut of the bundled model; perplexity over {EVALUATION_WINDOWS} windows "
            f"of {WINDOW} tokens of the test novels."
        ),
        "header": ["setting", "perplexity"],
        "rows": rows,
    }
    print(markdown_table(table))
    made = provenance()
    result = {"table": table, "command": made["command"], "provenance": made}
    write_json(Path(__file__).with_name(f"ablation-{name}.json"), result)


if __name__ == "__main__":
    main()
