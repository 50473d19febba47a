"""The fit of a checkpoint on disk to the one it is cut from, with one layer of each in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..calibration.bos import Bos, bos_token
from ..calibration.sources import StoredLayers
from ..checkpoint.reading import reading
from ..evaluation.quality.streamed import streamed_perplexity
from ..model.errors import RapError
from ..model.layers import decoder_layers, trained_length
from ..surgery.weights import PrunedWeights
from .data import recovery_windows
from .fit import REMOVE, fit_from, layer_file
from .layer_fit import FitConfig
from .runs import FIT_FOLDER

RECOVERIES = ("none", "fit")


class FittedTensors(Mapping[str, Tensor]):
    """What a fit trained and left in its folder, by the model's names, read when asked for."""

    def __init__(self, folder: Path, model: Any):
        self._where: dict[str, tuple[Path, str]] = {}
        for index, (place, _) in enumerate(decoder_layers(model)):
            path = layer_file(folder, index)
            if path.is_file():
                with reading(f"go on with {path}", REMOVE), safe_open(path, "pt") as file:
                    names = list(file.keys())
                self._where |= {f"{place}.{name}": (path, name) for name in names}

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self._where[name]
        with reading(f"go on with {path}", REMOVE), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@dataclass(frozen=True)
class StreamedStage:
    """What may follow a streamed cut: `name` is one of RECOVERIES, the rest as `recover_stage`.

    Layers work on `device`. Finished ones are written to `work`, from which a killed run goes on.
    """

    name: str
    work: Path
    text: str = "bundled"
    config: FitConfig | None = None
    seed: int = 0
    bos: Bos = "auto"
    device: str = "cpu"
    progress: bool = False

    def __post_init__(self) -> None:
        if self.name not in RECOVERIES:
            raise RapError(
                f"recovery {self.name!r} needs the whole model in memory: --stream takes "
                f"{' or '.join(RECOVERIES)}; or recover the checkpoint it writes"
            )

    @property
    def settings(self) -> FitConfig:
        """Those that were given, or the fit's own."""
        return self.config or FitConfig(seed=self.seed)

    @property
    def sizes(self) -> Tensor:
        """As many windows as fit, on the meta device: for estimates."""
        shape = self.settings.num_windows, self.settings.window
        return torch.empty(shape, dtype=torch.long, device="meta")

    def run(
        self, cut: PrunedWeights, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[PrunedWeights, dict[str, Any]]:
        """The better of the pruned and the fitted model on held-out windows, and the report."""
        if self.name == "none":
            return cut, {}
        dense, plan = cut.dense, cut.plan
        config = self.settings
        first = bos_token(self.bos, tokenizer, dense.model.config)
        longest = trained_length(dense.model.config)
        windows, validation = recovery_windows(
            [self.text], tokenizer, config, longest=longest, bos=first
        )
        report: dict[str, Any] = {"name": self.name, "texts": [self.text], "bos": first}
        report["perplexity_before"] = self._held_out(cut, validation, "judging the cut")
        folder = self.work / FIT_FOLDER
        small, original = (StoredLayers(x, self.device, exact=True) for x in (cut, dense))
        layers = fit_from(small, original, windows, config, work=folder, progress=self.progress)
        report["fit"] = {"config": asdict(config), "layers": [asdict(layer) for layer in layers]}
        fitted = PrunedWeights(dense, plan, FittedTensors(folder, cut.model))
        report["perplexity_fitted"] = self._held_out(fitted, validation, "judging the fit")
        better = report["perplexity_fitted"] < report["perplexity_before"]
        report["perplexity_after"] = report[f"perplexity_{'fitted' if better else 'before'}"]
        return fitted if better else cut, report

    def _held_out(self, weights: PrunedWeights, windows: Tensor, what: str) -> float:
        source = StoredLayers(weights, self.device)
        return streamed_perplexity(source, windows, what, folder=self.work, progress=self.progress)
