"""A dense model in context: opened once, its text and statistics read once, for all that asks.

Shapes: N windows, T tokens of a window, K tokens of a text.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..checkpoint.device import AUTO, placement, say_device, working_device
from ..checkpoint.load import load_config, load_dense, load_tokenizer
from ..checkpoint.source import resolve_source
from ..checkpoint.stored import StoredModel
from ..data.bos import Bos, bos_token, check_bos, describe_bos
from ..data.digests import settle_config, settle_tokenizer
from ..data.held_out import evaluation_tokens
from ..data.own import refuse_samples
from ..data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS, EVALUATION_WINDOW
from ..data.text import fingerprint_windows, load_windows, named_sources, shown_name
from ..model.errors import RapError
from ..model.layers import attention_spec, check_dense, trained_length
from ..runtime.memory import describe_memory, in_fast_precision, in_precision
from ..runtime.sources import LayerSource, LoadedLayers, StoredLayers
from .memory import estimate_memory, must_recompute
from .registry import backward_needs, check_held
from .run import calibrate, check_length, check_windows
from .statistics import Statistics


@dataclass(frozen=True)
class CalibrationText:
    """What is read to calibrate: `num_windows` windows of `window` tokens, drawn from a text.

    `text` is what `text.named_sources` reads; windows begin as `bos.bos_token` decides by `bos`.
    """

    text: str = "bundled"
    num_windows: int = CALIBRATION_WINDOWS
    window: int = CALIBRATION_WINDOW
    seed: int = 0
    bos: Bos = "auto"

    def describe(self, bos: int | None) -> str:
        """For a report: sources as `text.shown_name` has them, each of a mixture."""
        names = (shown_name(source) for source in named_sources(self.text))
        read = f"{self.num_windows} windows of {self.window} tokens from {' and '.join(names)}"
        return f"{read}, {describe_bos(bos)}"


@dataclass(eq=False)
class DenseContext:
    """The dense `model` and its `tokenizer`, with what is read and measured of them only once.

    With `kept_in`, statistics are stored there, and a later context of the same weights and reading
    takes them from there. The weights of a `stored` model are not in memory: `model` has its
    modules, and layers are read one at a time. `given` are statistics from elsewhere, which are
    taken as they are.
    """

    model: Any
    tokenizer: Any
    name: str
    reading: CalibrationText = field(default_factory=CalibrationText)
    kept_in: Path | None = None
    progress: bool = False
    stored: StoredLayers | None = field(default=None, kw_only=True)
    given: Statistics | None = field(default=None, kw_only=True)
    _statistics: Statistics | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(
        cls,
        source: Any,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = AUTO,
        device_map: str | None = None,
        reading: CalibrationText | None = None,
        kept_in: Path | None = None,
        progress: bool = False,
    ) -> "DenseContext":
        """Load what `source.resolve_source` resolves, or take a live model with its tokenizer.

        Raises a RapError, before weights are read, for a model that is pruned already or of no
        known family, a live model without a tokenizer, or a source that cannot be read; and for a
        folder `kept_in` of the same weights under another config or with another tokenizer.
        """
        reading = reading or CalibrationText()
        check_bos(reading.bos)
        if isinstance(source, (str, Path)):
            path = resolve_source(source)
            config = load_config(path)
            check_dense(config)
            attention_spec(config)
            tokenizer = tokenizer or load_tokenizer(path)
            placed = placement(device, device_map)
            model, name = load_dense(path, dtype=dtype, **placed), str(source)
        else:
            check_dense(source)
            attention_spec(source.config)
            if tokenizer is None:
                raise RapError("a live model has no tokenizer; pass tokenizer=... as well")
            if device != AUTO or device_map is not None:
                raise RapError(
                    "a model in memory runs where it is; move it, and remove device and device_map"
                )
            model, name = source, str(source.name_or_path or "a live model")
        if progress:
            say_device(model)
        context = cls(model, tokenizer, name, reading, kept_in, progress)
        if kept_in is not None:
            check_held(model)
            settle_config(kept_in, context.fingerprint, model.config)
            settle_tokenizer(kept_in, context.fingerprint, tokenizer)
        return context

    @classmethod
    def from_files(
        cls,
        source: str | Path,
        *,
        device: str = AUTO,
        reading: CalibrationText | None = None,
        kept_in: Path | None = None,
        given: Statistics | None = None,
        progress: bool = False,
    ) -> "DenseContext":
        """As `open`, but weights stay in their files, and layers work on `device`.

        Raises CalibrationError also for the source `own`, which a whole model writes.
        """
        reading = reading or CalibrationText()
        check_bos(reading.bos)
        refuse_samples(named_sources(reading.text), "which --stream does not hold")
        placed = working_device(device)
        stored = StoredModel(resolve_source(source))
        return cls(
            stored.model,
            load_tokenizer(stored.folder),
            str(source),
            reading,
            kept_in,
            progress,
            stored=StoredLayers(stored, placed),
            given=given,
        )

    def on(self, model: Any) -> "DenseContext":
        """The same windows for another model with this tokenizer; nothing else is shared."""
        other = replace(self, model=model, kept_in=None, stored=None, given=None)
        other.windows = self.windows
        return other

    @cached_property
    def source(self) -> LayerSource:
        """Where the layers of the dense model are."""
        return self.stored or LoadedLayers(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """Of the dense weights."""
        return self.source.fingerprint

    @cached_property
    def bos(self) -> int | None:
        """The token that windows of text begin with, or None."""
        return bos_token(self.reading.bos, self.tokenizer, self.model.config)

    @cached_property
    def windows(self) -> Tensor:
        """The calibration windows, LongTensor [N, T]; CalibrationError if the model cannot."""
        read = self.reading
        check_length(self.model, read.window)
        windows = load_windows(
            read.text,
            self.tokenizer,
            num_windows=read.num_windows,
            window=read.window,
            seed=read.seed,
            bos=self.bos,
            model=self.model,
            progress=self.progress,
        )
        check_windows(self.model, windows)
        return windows

    def held_out(self, text: str) -> Tensor:
        """Token ids [K] of an evaluation dataset, as `held_out.evaluation_tokens` reads it."""
        longest = trained_length(self.model.config) or EVALUATION_WINDOW
        return evaluation_tokens(text, self.tokenizer, min(EVALUATION_WINDOW, longest))

    def statistics(self, needs: Collection[str]) -> Statistics:
        """Statistics that cover `needs`: those there are, or collected with what is there already.

        Ask for all needs at once where they are known: each collection reads all windows.
        """
        if self.given is not None:
            return self.given
        if self._statistics is None:
            self._statistics = self._stored()
        known = self._statistics.needs if self._statistics is not None else frozenset()
        if self._statistics is None or not set(needs) <= known:
            self._statistics = self._collect(frozenset(needs) | known)
        return self._statistics

    def statistics_for(self, methods: Iterable[Any]) -> Statistics:
        """Statistics that cover what every one of `methods` needs for this model."""
        needs = (method.needs_for(self.model) for method in methods)
        return self.statistics(frozenset().union(*needs))

    def plan(self, method: Any) -> Any:
        """The plan of a method for this model; unsupported settings raise an error first."""
        method.check_model(self.model)
        return method.plan_from(self.source, self.statistics_for([method]))

    def kept_needs(self) -> frozenset[str] | None:
        """What statistics that an earlier context left in `kept_in` cover; None if it left none."""
        if self.kept_in is None or not any(self.kept_in.glob("statistics-*")):
            return None
        stored = self._stored()
        return None if stored is None else stored.needs

    def key(self, **settings: Any) -> str:
        """Eight digits that name what is made of the weights and the windows by such settings."""
        made = {"weights": self.fingerprint, "windows": fingerprint_windows(self.windows)}
        text = json.dumps(made | settings, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def _collect(self, needs: frozenset[str]) -> Statistics:
        collected = self._read(needs)
        if self.kept_in is not None:
            collected.save(self._file(self.kept_in))
        return collected

    def _read(self, needs: frozenset[str]) -> Statistics:
        if self.stored is not None and not backward_needs(needs):
            return calibrate(
                self.stored, self.windows, needs, folder=self.kept_in, progress=self.progress
            )
        model = in_fast_precision(self.model) if self.stored is None else self._whole(self.stored)
        again = must_recompute(model, self.windows, needs)
        if self.progress and needs and self.stored is None:
            estimate = estimate_memory(model, self.windows, needs, checkpointing=again)
            Console(stderr=True).print(describe_memory(estimate), soft_wrap=True)
        return calibrate(model, self.windows, needs, checkpointing=again, progress=self.progress)

    def _whole(self, stored: StoredLayers) -> Any:
        """All weights, which gradients of the loss take."""
        placed = {} if stored.device.type == "cpu" else {"device_map": str(stored.device)}
        return in_precision(load_dense(resolve_source(self.name), **placed), torch.float32)

    def _stored(self) -> Statistics | None:
        path = self._file(self.kept_in) if self.kept_in is not None else None
        return Statistics.load(path) if path is not None and path.is_file() else None

    def _file(self, folder: Path) -> Path:
        """Named by the weights, the windows they read, and the precision if it is a lower one.

        A text's name stays when it changes, and weights have the fingerprint of their float32.
        """
        read = f"{self.fingerprint} {fingerprint_windows(self.windows)}"
        # A CPU reads in float32 whatever the weights are loaded as.
        if self.model.device.type != "cpu" and self.model.dtype != torch.float32:
            read += f" {self.model.dtype}"
        digest = hashlib.sha256(read.encode()).hexdigest()[:8]
        return folder / f"statistics-{digest}.safetensors"
