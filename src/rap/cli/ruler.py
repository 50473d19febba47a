"""`rap evaluate ruler`: tasks of long context after RULER."""

from dataclasses import asdict
from typing import Annotated

import numpy as np
import typer

from ..calibration.held_out import evaluation_tokens
from ..checkpoint.provenance import provenance
from ..evaluation.quality.documents import check_grid
from ..evaluation.quality.perplexity import check_sizes
from ..evaluation.quality.ruler import check_tasks, ruler_grid, ruler_table
from ..evaluation.quality.ruler_tasks import TASKS
from . import options
from .checkpoints import Haystack, Opening, ResultFile, deliver, label, open_checkpoint
from .groups import grouped


@grouped
def ruler_command(
    model: options.Model,
    *,
    text: Haystack = "bundled",
    lengths: Annotated[
        list[int], typer.Option("--length", help="Tokens of a document; repeatable.")
    ] = [1024, 2048, 4096, 8192],  # noqa: B006 - typer copies it
    tasks: Annotated[
        list[str], typer.Option("--task", help="Task to run, by name; repeatable [all].")
    ] = list(TASKS),  # noqa: B006 - typer copies it
    documents: Annotated[int, typer.Option(help="Documents per setting.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Documents per forward pass.")] = 1,
    how: Opening,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Six tasks of long context after RULER, over length; no text is generated.

    An answer is right if every token of it is the greedy choice after the question and the answers
    before it. Intervals are bootstrap intervals over documents.
    """
    check_tasks(tasks)
    check_grid(documents, lengths)
    check_sizes(batch_size=batch_size)
    opened = open_checkpoint(model, how.device, how.device_map, [output], how.quantize, bos=how.bos)
    cells = ruler_grid(
        opened.model,
        opened.tokenizer,
        np.asarray(evaluation_tokens(text, opened.tokenizer)),
        tasks=tasks,
        lengths=lengths,
        num_documents=documents,
        batch_size=batch_size,
        seed=how.seed,
        bos=opened.bos,
    )
    title = f"Tasks of long context, {label(opened)}: share of answers (95 % interval)"
    table = ruler_table(title, cells)
    made = provenance(seed=how.seed, documents=documents, quantize=how.quantize)
    figures = {"text": text, "bos": opened.bos, "ruler": [asdict(cell) for cell in cells]}
    deliver(opened, figures, table, made, output, as_json)
