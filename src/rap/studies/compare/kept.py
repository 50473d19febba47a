"""Models of a comparison that are kept as checkpoints, for measures and recoveries to come.

OUT/models/<name>/made.json     what the cell says of how the model was made
OUT/models/<name>/...           the checkpoint, which any command takes
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...checkpoint.device import placement
from ...checkpoint.files import read_json, whole_directory, write_json
from ...checkpoint.load import load
from ...checkpoint.writing import write_model
from .cells import Cell

MADE = "made.json"

MadeModel = tuple[Any, dict[str, Any]]  # the model, and what its cell says of how it was made


@dataclass(frozen=True)
class KeptModels:
    """A folder of models; those of another run are found also if this one keeps none."""

    folder: Path
    keeps: bool
    placed: Mapping[str, Any] = field(default_factory=dict)  # where, as the dense model

    def find(self, cell: Cell) -> MadeModel | None:
        """The model of a cell in the dtype it was measured in, if it was kept.

        Raises CheckpointError if its files are damaged.
        """
        path = self.folder / cell.model_name
        if not (path / MADE).is_file():
            return None
        made = read_json(path / MADE, f"remove {path}, and repeat the command")
        return load(path, dtype=cell.config["dtype"], **placement(**self.placed)), made

    def keep(self, cell: Cell, made: MadeModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a model and its tokenizer, if models are to be kept."""
        if not self.keeps:
            return
        model, figures = made
        with whole_directory(self.folder / cell.model_name, own=True) as partial:
            write_model(model, partial)
            tokenizer.save_pretrained(partial)
            write_json(partial / MADE, figures)
