"""What a compression reads and recovers with, where nothing else is asked for.

A model that people use is calibrated on more than one kind of text and recovered: what is measured
best is what happens (docs/how-to/calibration-data.md). A model too small to be one is for tests,
where seconds count: it reads what it is given, and is left as it was pruned.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.load import load_config, load_tokenizer, without_tensors
from ..data.own import OWN
from ..data.sampling import first_token
from ..data.splits import REPEATED
from ..data.stdlib import PYTHON
from ..data.text import ENCYCLOPEDIA, completed_source
from ..model.errors import RapError
from ..runtime.layerwise import stand_alone

DEFAULT = "auto"
PRETRAINED = 20_000_000  # parameters; the bundled test model has 4.6 million
# Where nobody gives a text. What the model writes keeps its facts, passages that come twice keep
# retrieval, and are articles: novels and samples have few facts (docs/log.md, 2026-11-27).
UNASKED = ("bundled", OWN, f"{REPEATED}{ENCYCLOPEDIA}", PYTHON)


# How far a way of folding is compared: merged heads that are folded for near tokens alone lose what
# stands 4,096 tokens back, and perplexity with it (docs/log.md, 2026-11-27).
FOLDING = {"reach": "far"}


@dataclass(frozen=True)
class Defaults:
    """The choices for one dense model: `pretrained` ones are recovered, `writes` that it can.

    A model writes samples where it is in memory and its tokenizer has a token to begin with. Layers
    that do not stand `alone` are not recovered: what remains is end-to-end distillation, which is
    for a GPU.
    """

    pretrained: bool
    writes: bool
    alone: bool = True

    @classmethod
    def of(cls, source: Any, tokenizer: Any = None, *, in_memory: bool = True) -> "Defaults":
        """Those of a live model with its `tokenizer`, or of a checkpoint by name.

        What is no model is left to whoever opens it, who says why.
        """
        model = _described(source)
        pretrained = model is not None and num_parameters(model) >= PRETRAINED
        writes = pretrained and in_memory and _begins(source, tokenizer)
        return cls(pretrained, writes, model is None or _alone(model))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a method that has them, where nothing else sets them."""
        return dict(FOLDING) if self.pretrained else {}

    def calibration(self, asked: str | Path, num_windows: int | None = None) -> str:
        """The sources to read: `text.completed_source` of what was asked for, or UNASKED.

        As asked where the model is not pretrained, or there would be more sources than windows. A
        model that does not write completes `bundled`.
        """
        named = UNASKED[0] if asked == DEFAULT else str(asked)
        if not self.pretrained:
            return named
        if asked == DEFAULT and self.writes and (num_windows or len(UNASKED)) >= len(UNASKED):
            return ",".join(UNASKED)
        return completed_source(named, own=self.writes, most=num_windows)

    def recovery(self, asked: str) -> str:
        """A name of `recovery.stages.RECOVERIES`."""
        if asked != DEFAULT:
            return asked
        return "fit" if self.pretrained and self.alone else "none"


def _described(source: Any) -> Any:
    """A live model, or one without tensors; None of what is no model."""
    if not isinstance(source, (str, Path)):
        return source
    try:
        return without_tensors(load_config(source))
    except RapError:
        return None


def num_parameters(model: Any) -> int:
    """How many a model has, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


def _alone(model: Any) -> bool:
    try:
        return stand_alone(model.config)
    except RapError:  # a family that is not supported, as whoever opens it says
        return True


def _begins(source: Any, tokenizer: Any) -> bool:
    """Whether the model's documents can begin; not those of a live one without its tokenizer."""
    if tokenizer is None and not isinstance(source, (str, Path)):
        return False
    try:
        first_token(load_tokenizer(source) if tokenizer is None else tokenizer)
    except RapError:
        return False
    return True
