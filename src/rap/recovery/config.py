"""Settings of recovery by distillation: one dataclass, and the named presets as a table."""

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from ..model.errors import RapError

SCHEDULES = ("plateau", "cosine")
DIVERGENCES = ("reverse", "forward")
LOGGERS = ("tensorboard", "trackio")
TUNED = ("lora", "full")


def _names(kinds: tuple[Any, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    shown = [kind for kind in kinds if kind in words and not (kind is int and float in kinds)]
    return " or ".join(words[kind] for kind in shown)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Hyper-parameters of distillation; the defaults are the paper's (its appendix on setup).

    What is trained: `tune` "lora" puts adapters of `rank`, `alpha` and `dropout` on the attention's
    projections, "full" moves the projections' matrices themselves, in float32; `learning_rate` is
    then in units of each matrix's root mean square, as that of a fit is.

    Text: `num_windows` windows of `window` tokens (None: all there are), of which one in ten, at
    most `validation_windows`, is held out where no validation text is given. Length: `epochs`, or
    `steps` optimizer steps if given, of which the first `match_steps` match attention outputs layer
    by layer instead of logits; each over `global_batch` windows in micro batches of
    `micro_batch` windows per device. Every `evaluate_every` steps (None: every epoch) the held-out
    perplexity is measured and a checkpoint is written.

    Loss: `ce_weight` * CE + `kl_weight` * T^2 * KL at temperature T; `divergence` "reverse" is
    KL(student || teacher), "forward" the other one; `top_k` keeps the teacher's k likeliest tokens
    and lumps the others together.
    """

    window: int = 256
    num_windows: int | None = None
    validation_windows: int = 64
    epochs: int = 20
    steps: int | None = None
    match_steps: int = 0
    global_batch: int = 128
    micro_batch: int = 8
    evaluate_every: int | None = None
    learning_rate: float = 1e-4
    schedule: str = "plateau"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    tune: str = "lora"
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    ce_weight: float = 1.0
    kl_weight: float = 1.0
    temperature: float = 2.0
    divergence: str = "reverse"
    top_k: int | None = None
    gradient_checkpointing: bool = False
    report_to: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            kinds = get_args(field.type) or (field.type,)
            kinds = (*kinds, int) if float in kinds else kinds
            self._check(
                field.name, type(getattr(self, field.name)) in kinds, f"give {_names(kinds)}"
            )
        self._check_choice("schedule", SCHEDULES)
        self._check_choice("divergence", DIVERGENCES)
        self._check_choice("tune", TUNED)
        if self.report_to is not None:
            self._check_choice("report_to", LOGGERS)
        for name in ("epochs", "global_batch", "micro_batch", "rank", "validation_windows"):
            self._check(name, getattr(self, name) >= 1, "give 1 or more")
        for name in ("num_windows", "steps", "evaluate_every", "top_k"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "give 1 or more, or remove it")
        self._check("window", self.window >= 2, "a window predicts from its second token on")
        for name in ("learning_rate", "temperature", "alpha", "clip"):
            self._check(name, getattr(self, name) > 0, "give a positive number")
        for name in ("ce_weight", "kl_weight", "weight_decay", "match_steps", "warmup_steps"):
            self._check(name, getattr(self, name) >= 0, "give zero or a positive number")
        few = self.steps is None or self.match_steps <= self.steps
        self._check("match_steps", few, f"all steps are {self.steps}")
        self._check("dropout", 0 <= self.dropout < 1, "give a share from 0 up to 1")
        self._check("kl_weight", self.ce_weight + self.kl_weight > 0, "ce_weight is 0 as well")

    def _check_choice(self, name: str, known: tuple[str, ...]) -> None:
        self._check(name, getattr(self, name) in known, f"use one of {', '.join(known)}")

    def _check(self, name: str, good: bool, remedy: str) -> None:
        if not good:
            raise RapError(f"recovery {name} cannot be {getattr(self, name)!r}: {remedy}")


# `paper` is the schedule of the paper's appendix. `fast` was tuned on the bundled model: a short
# run needs a larger rate and fewer windows per step than a long one. `long` trains on sequences
# long enough to use far keys, which windows of 256 tokens never ask for.
PRESETS: dict[str, RecoveryConfig] = {
    "paper": RecoveryConfig(),
    "fast": RecoveryConfig(
        num_windows=640,
        steps=40,
        global_batch=16,
        learning_rate=5e-3,
        schedule="cosine",
        warmup_steps=4,
        evaluate_every=20,
        validation_windows=32,
    ),
    "full": RecoveryConfig(
        window=512,
        num_windows=512,
        validation_windows=16,
        steps=120,
        global_batch=4,
        micro_batch=2,
        evaluate_every=40,
        tune="full",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=4,
        ce_weight=0.0,
        temperature=1.0,
        divergence="forward",
    ),
    "long": RecoveryConfig(
        window=4096,
        num_windows=16384,
        validation_windows=32,
        steps=1000,
        global_batch=16,
        micro_batch=1,
        learning_rate=2e-4,
        schedule="cosine",
        warmup_steps=50,
        evaluate_every=50,
        gradient_checkpointing=True,
    ),
}


def preset(name: str, **changes: Any) -> RecoveryConfig:
    """The named preset with some fields changed.

    RapError for an unknown name or field, or one that a run with the others would not read.
    """
    if name not in PRESETS:
        raise RapError(f"unknown recovery preset {name!r}: use one of {', '.join(PRESETS)}")
    known = {field.name for field in fields(RecoveryConfig)}
    for key in changes:
        if key not in known:
            raise RapError(f"recovery has no setting {key!r}; it has: {', '.join(sorted(known))}")
    config = replace(PRESETS[name], **changes)
    for key, reason in _unread(config).items():
        if key in changes:
            raise RapError(f"recovery {name!r} would not read {key}: {reason}")
    return config


def _unread(config: RecoveryConfig) -> dict[str, str]:
    """What a run with these settings does not read, why, and what to do about it."""
    found = {}
    if config.steps is not None:
        found["epochs"] = f"it ends after {config.steps} steps, give steps=null as well"
    if config.schedule == "plateau":
        found["warmup_steps"] = "schedule plateau has no warm-up, give schedule=cosine as well"
    if config.tune == "full":
        remedy = "tune full has no adapters, give tune=lora as well"
        found |= dict.fromkeys(("rank", "alpha", "dropout"), remedy)
    of_divergence = ("temperature", "divergence", "top_k")
    if config.kl_weight == 0:
        found |= dict.fromkeys(of_divergence, "kl_weight is 0")
    if config.match_steps == config.steps:
        remedy = "all steps match attention outputs, give fewer match_steps"
        found |= dict.fromkeys(("ce_weight", "kl_weight", *of_divergence), remedy)
    return found
