"""Settings of recovery by distillation: one dataclass, and the named presets as a table."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ..model.errors import RapError
from ..runtime.products import Products
from ..runtime.settings import Count, NotNegative, Positive, Seed, check_fields

Steps = Annotated[int, Field(ge=0)]


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
    perplexity is measured and a checkpoint is written. With `refit` output projections are refitted
    in closed form first, unless layers were fitted.

    Loss: `ce_weight` * CE + `kl_weight` * T^2 * KL at temperature T; `divergence` "reverse" is
    KL(student || teacher), "forward" the other one; `top_k` keeps the teacher's k likeliest tokens
    and lumps the others together.

    `products` is the type in which the layers of a float32 model multiply matrices, as that of a
    fit; the output layer, weights, their updates and what judges them are in their own.
    """

    window: Annotated[int, Field(ge=2)] = 256  # it predicts from its second token on
    num_windows: Count | None = None
    validation_windows: Count = 64
    epochs: Count = 20
    steps: Count | None = None
    refit: bool = False
    match_steps: Steps = 0
    global_batch: Count = 128
    micro_batch: Count = 8
    evaluate_every: Count | None = None
    learning_rate: Positive = 1e-4
    schedule: Literal["plateau", "cosine"] = "plateau"
    warmup_steps: Steps = 0
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0
    tune: Literal["lora", "full"] = "lora"
    rank: Count = 8
    alpha: Count = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    ce_weight: NotNegative = 1.0
    kl_weight: NotNegative = 1.0
    temperature: Positive = 2.0
    divergence: Literal["reverse", "forward"] = "reverse"
    top_k: Count | None = None
    gradient_checkpointing: bool = False
    products: Products = "auto"
    report_to: Literal["tensorboard", "trackio"] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self, "recovery")
        if self.steps is not None and self.match_steps > self.steps:
            raise RapError(
                f"recovery match_steps cannot be {self.match_steps}: all steps are {self.steps}"
            )
        if self.ce_weight + self.kl_weight == 0:
            raise RapError("recovery kl_weight cannot be 0: ce_weight is 0 as well")


# `paper` is the recipe of the paper's appendix, which refits nothing. `fast` was tuned on the
# bundled model: a short run needs a larger rate and fewer windows per step than a long one. `long`
# trains on sequences long enough to use far keys, which windows of 256 tokens never ask for.
PRESETS: dict[str, RecoveryConfig] = {
    "paper": RecoveryConfig(),
    "fast": RecoveryConfig(
        num_windows=640,
        refit=True,
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
        refit=True,
        steps=120,
        global_batch=4,
        micro_batch=2,
        evaluate_every=40,
        tune="full",
        learning_rate=1e-3,
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
        refit=True,
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


def recovery_config(name: str, **changes: Any) -> RecoveryConfig:
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
