"""Targets: engines, as settings of a method whose head dimensions they take without padding."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig

from ..checkpoint.stored import without_weights
from ..methods import Method, Rap
from ..model.errors import RapError
from ..model.layers import text_config
from ..planning.budgets import nearest_width
from .gguf.plain import QUANTIZED_BLOCK, check_plain
from .layout import head_dim
from .plain_forms import check_stock, check_widely_read

MAX_WIDTHS = 6
# What a method lacks that has no such setting of a target.
_NEEDS = {
    "align": "widths to align (align)",
    "profile": "one width for all heads (profile)",
    "merge": "heads to merge (merge)",
}


@dataclass(frozen=True)
class Target:
    """What an engine's attention takes without padding.

    step: head dimensions are multiples of so many channels.
    plain: whether it runs plain checkpoints alone, where every head of every layer has one width.
    merges: whether KV heads are merged, which may then be wider than the dense ones.
    """

    step: int
    plain: bool = False
    merges: bool = False


# vLLM on CPUs declares no size between 32 and 64, and every multiple of 32 up to 256. llama.cpp
# quantizes caches in blocks, and decodes widths between slowly. A stock export must suit every
# engine, so it takes the strictest of the usual ones.
TARGETS = {
    "any": Target(16),
    "cpu": Target(32),
    "flash": Target(8),
    "llamacpp": Target(QUANTIZED_BLOCK, plain=True),
    "mlx": Target(32, plain=True),
    "plain": Target(32, plain=True, merges=True),
    "stock": Target(16, plain=True),
    "vllm": Target(16),
}


def settings_for(
    target: str, config: PreTrainedConfig, method: Method, given: Mapping[str, Any]
) -> dict[str, Any]:
    """What a target adds to the settings that a method was `given`, for the model of a config.

    Raises RapError for an unknown target, one that needs what the method has not, or one that
    decides what was given by hand; UnsupportedModelError for a model whose pruned form the target
    cannot load. All of it shows in the config, so that nobody pays for what leads nowhere.
    """
    engine = _known(target)
    _check_model(config, target)
    # Plain checkpoints have one width, whatever else the method would do without a target.
    dim = head_dim(text_config(config))
    about = (dim, "uniform") if engine.plain else _decided(method, config)
    wanted = target_settings(target, *about)
    known = {one.name for one in fields(method)}
    for name in wanted:
        if name not in known:
            raise RapError(
                f"--target {target} needs a method with {_NEEDS[name]}, which {method.name!r} has "
                "not: remove --target, or take another method"
            )
        if name in given and name != "merge":
            raise RapError(f"--target {target} decides {name}: remove --{name}, or the target")
    return {name: value for name, value in wanted.items() if name not in given}


def target_settings(target: str, width: int, budget: str) -> dict[str, Any]:
    """Settings of a method whose result the target serves without padding.

    `align` in channels, and `profile` for targets that run plain checkpoints. `width` is that of
    the widest head that can be cached, which for merged heads is that of all that become one.
    Engines keep metadata per distinct width: where layers differ (a `budget` other than uniform),
    at most six widths are possible.
    Raises RapError for an unknown target or a head that leaves no width to choose.
    """
    engine = _known(target)
    plain = {"profile": "stock"} if engine.plain else {}
    if engine.merges:
        return {"align": engine.step, **plain, "merge": "auto"}
    align = engine.step
    if budget != "uniform":
        while width / align > MAX_WIDTHS:
            align *= 2
    if width <= align:
        raise RapError(
            f"heads of {width} channels have no smaller width that target {target!r} serves "
            "without padding: use --align instead"
        )
    return {"align": align, **plain}


def check_pruned(target: str, config: PreTrainedConfig, method: Method) -> None:
    """Raise RapError where a plain target rounds `retain` to all channels of a head, or to none."""
    if not (isinstance(method, Rap) and TARGETS[target].plain and method.retain < 1):
        return
    whole, _ = _decided(method, config)
    align = method.align or 1
    width = nearest_width(method.retain * whole, whole, align)
    if width in (0, whole):
        remedy = "choose another ratio, or remove --target"
        if whole <= align:
            remedy = "there is none, so remove --target"
        raise RapError(
            f"retain {method.retain} of heads of {whole} channels rounds to {width}, where nothing "
            f"can be pruned; --target {target} supports multiples of {align} below {whole}: "
            f"{remedy}"
        )


def _decided(method: Method, config: PreTrainedConfig) -> tuple[int, str]:
    """The widest head that the method can cache of this model, and the budget it spends by."""
    dim, budget = head_dim(text_config(config)), getattr(method, "budget", "error")
    if not isinstance(method, Rap):
        return dim, budget
    model = without_weights(config)
    decided = method.decided(model)
    widths = [x.merge * x.shape.head_dim for x in decided.dense(model).present]
    return max(widths, default=dim), decided.budget


def _known(target: str) -> Target:
    if target not in TARGETS:
        raise RapError(f"unknown target {target!r}: use one of {', '.join(TARGETS)}")
    return TARGETS[target]


def _check_model(config: PreTrainedConfig, target: str) -> None:
    """Raise UnsupportedModelError for a dense config whose pruned form the target cannot load."""
    if TARGETS[target].plain:
        check_stock(config)
    if target == "mlx":
        check_widely_read(config, "mlx-lm")
    if target == "llamacpp":
        check_plain(config)
