"""`rap evaluate cache`: the cost of further cache compression, by quantization or eviction."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoint.provenance import provenance
from ..data.held_out import evaluation_tokens
from ..evaluation.cache.compressed import (
    CacheCompression,
    check_pieces,
    compressed_perplexity,
    compressed_recall,
)
from ..evaluation.cache.presses import PRESSES, parse_press
from ..evaluation.cache.quantized_cache import CACHE_KINDS
from ..evaluation.quality.perplexity import check_sizes
from ..evaluation.retrieval.documents import check_grid
from ..model.errors import RapError
from . import options
from .checkpoints import (
    Opened,
    Quantize,
    ResultFile,
    Words,
    deliver,
    label,
    open_checkpoint,
)
from .groups import LoadingOptions, grouped

CACHE_LOADING = LoadingOptions(dtype="float32")
HEADER = ["cache", "perplexity", "recall", "after the prefix", "at the end", "of exact"]


Bits = Annotated[
    str | None,
    typer.Option(help=f"Quantize the cache (transformers): {', '.join(CACHE_KINDS)}."),
]
Evict = Annotated[
    str | None,
    typer.Option(help=f"Evict tokens (kvpress), as in knorm:0.5: {', '.join(PRESSES)}."),
]
Text = Annotated[
    str,
    typer.Option(
        help="'bundled' test novels, 'wikitext2' or 'c4', a .txt or .jsonl file, or a dataset ID."
    ),
]
Window = Annotated[int, typer.Option(help="Tokens per window.")]
Prefix = Annotated[int, typer.Option(help="Tokens per window before the cache is compressed.")]
Piece = Annotated[int, typer.Option(help="Tokens per forward pass afterwards; 1 equals decoding.")]
MaxWindows = Annotated[int | None, typer.Option(help="Number of evaluation windows [all].")]
Distance = Annotated[int, typer.Option(help="Recall: tokens between a fact and its question.")]
Documents = Annotated[int, typer.Option(help="Recall: number of questions, 0 for none.")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is read with a compressed cache: windows of text, and questions."""

    window: Window = 512
    prefix: Prefix = 256
    piece: Piece = 32
    max_windows: MaxWindows = None
    distance: Distance = 256
    documents: Documents = 16
    wording: Words = "plain"

    def check(self) -> None:
        """RapError for windows or questions that there cannot be."""
        check_pieces(self.window, self.prefix, self.piece)
        check_sizes(self.window, self.max_windows)
        if self.documents:
            check_grid(self.documents, [self.distance])


@grouped
def cache_command(
    model: options.Model,
    *,
    bits: Bits = None,
    press: Evict = None,
    text: Text = "bundled",
    asked: Asked,
    quantize: Quantize = None,
    load: LoadingOptions = CACHE_LOADING,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Quality and bytes with the cache compressed after a prefix, in bits, in tokens, or in both.

    A prefix is read, its cache is compressed, and the continuation is read with that cache. The
    first row is the same measure with the cache as it is. Needs pip install hqq or
    optimum-quanto; for presses: pip install --no-deps kvpress cachetools fire termcolor.
    """
    if bits is None and press is None:
        raise RapError("no cache compression is given; use --bits hqq4, --press knorm:0.5, or both")
    compression = CacheCompression(bits, parse_press(press) if press else None)
    compression.check()
    asked.check()
    opened = open_checkpoint(
        model, load.device, load.device_map, [output], quantize, load.dtype, load.bos
    )
    ids = evaluation_tokens(text, opened.tokenizer)
    exact, compressed = (
        _measured(opened, ids, one, asked, load.seed) for one in (CacheCompression(), compression)
    )
    title = f"{label(opened)}: {asked.prefix} tokens read, then the cache compressed"
    rows = [_row(row, exact) for row in (exact, compressed)]
    made = provenance(seed=load.seed, quantize=quantize, dtype=load.dtype)
    figures = {
        "text": text,
        "bits": bits,
        "press": press,
        "wording": asked.wording,
        "exact": exact,
        "compressed": compressed,
    }
    table = {"title": title, "header": HEADER, "rows": rows}
    deliver(opened, figures, table, made, output, as_json)


def _measured(
    opened: Opened, ids: Any, compression: CacheCompression, asked: Asked, seed: int
) -> dict[str, Any]:
    """Perplexity, bytes and, if questions are asked, recall, as JSON-able data."""
    quality = compressed_perplexity(
        opened.model,
        ids,
        compression,
        window=asked.window,
        prefix=asked.prefix,
        piece=asked.piece,
        max_windows=asked.max_windows,
        bos=opened.bos,
        dtype=None,
    )
    recall = compressed_recall(
        opened.model,
        opened.tokenizer,
        np.asarray(ids),
        compression,
        distances=[asked.distance] if asked.documents else [],
        num_documents=asked.documents,
        seed=seed,
        bos=opened.bos,
        wording=asked.wording,
    )
    cells = [asdict(cell) for cell in recall]
    return {"compression": str(compression), **asdict(quality), "recall": cells}


def _row(row: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    """Bytes are per token read."""
    recall = ", ".join(f"{cell['accuracy']:.0%}" for cell in row["recall"])
    share = row["kv_bytes_per_token"] / exact["kv_bytes_per_token"]
    return [
        row["compression"],
        f"{row['perplexity']:.4f}",
        recall or "-",
        f"{row['prefix_bytes_per_token']:,.0f} B",
        f"{row['kv_bytes_per_token']:,.0f} B",
        f"{share:.0%}",
    ]
