"""Which layers lose the needles: a pruned model with a few layers of the dense one in their places.

    python experiments/smollm2-needle-layers/run.py PRUNED DENSE --text wikitext2-test.txt

For every group of layers in turn, those of the dense model take the place of the pruned ones (the
attention and what was distilled with it), and the answers of `rap evaluate retrieval` are scored:
the loss of their tokens, and the share of documents that are right. Both models run in bfloat16.
The two groups that gain most are then tried together, and their layers one by one. layers.json in
this folder has a row for the dense model, the pruned one, and each of these; rows that are there
are not measured again.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rap.checkpoint.files import write_json
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source
from rap.data.text import read_text

sys.path.insert(0, str(Path(__file__).parents[1]))
from needles import DOCUMENTS, LENGTH, needles, score

RESULT = Path(__file__).with_name("layers.json")
GROUP = 3


class DenseLayer(nn.Module):
    """A layer of the dense model inside another: with cos and sin of its own."""

    def __init__(self, layer: nn.Module, rotary: nn.Module):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """As a layer of Llama, for a text that begins at position 0."""
        positions = torch.arange(hidden_states.shape[1])[None]
        kwargs["position_embeddings"] = self.rotary(hidden_states, positions)
        return self.layer(hidden_states, **kwargs)


def with_dense(pruned: Any, dense: Any, indices: Sequence[int]) -> dict[int, nn.Module]:
    """Put layers of the dense model into the pruned one; its own, to be put back."""
    layers = pruned.model.layers
    before = {index: layers[index] for index in indices}
    for index in indices:
        layers[index] = DenseLayer(dense.model.layers[index], dense.model.rotary_emb)
    return before


def table(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The rows as `rap report` shows them."""
    return {
        "title": "One needle, with some layers of the dense model",
        "note": f"{DOCUMENTS} documents of {LENGTH:,} tokens; loss of the answer in nats/token.",
        "header": ["layers of the dense model", "loss", "right"],
        "rows": [
            [name, f"{rows[name]['loss']:.2f}", f"{rows[name]['right']:.0%}"]
            for name in sorted(rows, key=_place)
        ],
    }


def _place(name: str) -> int:
    """The dense model, the pruned one, groups in their order, single layers in theirs."""
    if name in ("all", "none"):
        return ("all", "none").index(name) - 2
    return int(name.split()[0]) + (0 if "to" in name else 1000)


def closer(
    rows: dict[str, dict[str, float]], groups: dict[str, Sequence[int]]
) -> dict[str, Sequence[int]]:
    """The two groups of least loss together, and each of their layers by itself."""
    best = sorted(sorted(groups, key=lambda name: rows[name]["loss"])[:2], key=_place)
    layers = [i for name in best for i in groups[name]]
    return {" and ".join(best): layers} | {str(i): [i] for i in layers}


def main() -> None:
    """Score the dense model, the pruned one, and the pruned one with groups of dense layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pruned")
    parser.add_argument("dense")
    parser.add_argument("--text", required=True)
    asked = parser.parse_args()
    pruned, dense = (
        load(resolve_source(name), dtype="bfloat16") for name in (asked.pruned, asked.dense)
    )
    tokenizer = load_tokenizer(resolve_source(asked.dense))
    _, documents = needles(tokenizer, read_text(asked.text))
    rows = json.loads(RESULT.read_text("utf-8"))["rows"] if RESULT.is_file() else {}
    command = "python experiments/smollm2-needle-layers/run.py " + shlex.join(sys.argv[1:])

    def measure(places: dict[str, Sequence[int]]) -> None:
        for name, layers in places.items():
            if name not in rows:
                before = with_dense(pruned, dense, layers)
                rows[name] = score(pruned, documents)
                for index, own in before.items():
                    pruned.model.layers[index] = own
            about = {"rows": rows, "table": table(rows), "command": command}
            write_json(RESULT, about | {"provenance": provenance()})
            print(name, rows[name], flush=True)

    if "all" not in rows:
        rows["all"] = score(dense, documents)
    count = len(dense.model.layers)
    groups: dict[str, Sequence[int]] = {
        f"{i} to {i + GROUP - 1}": range(i, i + GROUP) for i in range(0, count, GROUP)
    }
    measure({"none": []} | groups)
    measure(closer(rows, groups))


if __name__ == "__main__":
    main()
