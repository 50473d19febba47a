"""`rap evaluate fidelity`: how near a pruned checkpoint stays to its dense model."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..checkpoint.card import interval_text
from ..checkpoint.device import AUTO
from ..checkpoint.provenance import provenance
from ..data.held_out import evaluation_tokens
from ..evaluation.quality.fidelity import Fidelity, fidelity
from ..evaluation.quality.perplexity import check_sizes
from ..model.fingerprint import fingerprint_model
from . import options
from .checkpoints import Dense, ResultFile, deliver, label, open_checkpoint, open_dense
from .options import print_table

Text = Annotated[
    str,
    typer.Option(
        help="'bundled' test novels, 'wikitext2' or 'c4', a .txt or .jsonl file, or a dataset ID."
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Tokens per evaluation window [2048, or the model's maximum].")
]
MaxWindows = Annotated[int | None, typer.Option(help="Number of evaluation windows [all].")]


def fidelity_command(
    pruned: Annotated[
        str, typer.Argument(help="Pruned checkpoint, or any model with the same vocabulary.")
    ],
    dense: Dense,
    text: Text = "bundled",
    window: Window = None,
    max_windows: MaxWindows = None,
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    bos: options.Bos = "auto",
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """KL of PRUNED to its dense model, top-1 agreement, and perplexities.

    Both run in float32 over contiguous non-overlapping windows, as for perplexity. Intervals are
    bootstrap intervals over windows; that of the ratio of perplexities is over pairs of windows.
    """
    check_sizes(window, max_windows)
    opened = open_checkpoint(pruned, device, device_map, [output], dtype="float32", bos=bos)
    original = open_dense(dense, device, device_map)
    measured = fidelity(
        opened.model,
        original,
        evaluation_tokens(text, opened.tokenizer),
        window=window,
        max_windows=max_windows,
        bos=opened.bos,
        progress=not as_json,
    )
    made = provenance(max_windows=max_windows)
    table = _table(f"{label(opened)} beside {dense}", measured, text)
    figures = {
        "dense": dense,
        "dense_fingerprint": fingerprint_model(original),
        "text": text,
        "bos": opened.bos,
        **asdict(measured),
    }
    deliver(opened, figures, table, made, output, as_json)
    if not as_json:
        print_table(
            "By position in the window",
            ["tokens before", "KL", "same most likely token"],
            [
                [f"{p.start + 1:,}-{p.stop:,}", f"{p.kl:.4g}", f"{p.top1:.2%}"]
                for p in measured.positions
            ],
        )


def _table(title: str, measured: Fidelity, text: str) -> dict[str, Any]:
    rows = [
        ["KL(dense || pruned), nats a token", interval_text(vars(measured.kl), ".4g")],
        ["99th percentile over tokens", f"{measured.kl_p99:.4g}"],
        ["same most likely token", interval_text(vars(measured.top1), ".2%")],
        ["perplexity", f"{measured.perplexity.value:.4f}"],
        ["perplexity of dense", f"{measured.dense_perplexity.value:.4f}"],
        ["perplexity, multiple of dense", interval_text(vars(measured.perplexity_ratio), ".4f")],
    ]
    windows = f"{measured.num_windows} windows of {measured.window:,} tokens of {text}"
    header = ["", "value (95 % interval)"]
    return {"title": f"{title}: {windows}", "header": header, "rows": rows}
