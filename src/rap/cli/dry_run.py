"""`--dry-run`: what a command would do and the memory it takes, from configs alone.

Models are built without weights: tensors on a CPU that nothing is written to take no memory.
"""

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..calibration.memory import estimate_memory, must_recompute
from ..checkpoint.device import working_device
from ..checkpoint.load import check_dtype, without_tensors
from ..checkpoint.provenance import device_name
from ..data.own import SAMPLES, reads_samples
from ..data.protocol import EVALUATION_WINDOWS
from ..evaluation.quality.perplexity import evaluation_window
from ..model.layers import text_config
from ..pipeline.defaults import num_parameters
from ..recovery.config import PRESETS, RecoveryConfig
from ..recovery.fit import estimate_fit
from ..recovery.layer_fit import FitConfig
from ..recovery.stages import REFIT_TOKENS
from ..runtime.memory import free_memory
from .options import print_table

Step = dict[str, Any]


def device_of(device: str, device_map: str | None) -> torch.device:
    """Where a command runs; of a device map, the accelerator if there is one."""
    return working_device("cpu" if device_map == "cpu" else device)


def unloaded(config: PreTrainedConfig, device: torch.device) -> Any:
    """A model of a config whose weights are reserved and never touched.

    For a CPU in float32, in which calibration and evaluation work there.
    """
    stored = config.dtype
    kept = {} if device.type == "cuda" else {"dtype": torch.float32}
    model = without_tensors(config, **kept)
    config.dtype = stored  # building writes the type it was built in
    model.to_empty(device="cpu").tie_weights()
    return model.eval()


def sampling_steps(sources: Collection[str]) -> list[Step]:
    """What a model writes for the source `own`, if that is one of them and nothing is kept yet."""
    if not reads_samples(sources):
        return []
    what = f"{SAMPLES.documents} documents of {SAMPLES.tokens} tokens, once for a model"
    return [_step("sample", what, SAMPLES.documents * SAMPLES.tokens)]


def calibration_step(
    model: Any, needs: Collection[str], num_windows: int, window: int
) -> tuple[Step, dict[str, int]]:
    """Reading the text, and the bytes held meanwhile by part."""
    if not needs:
        return _step("calibrate", "nothing: the method reads weights alone", 0), {}
    windows = torch.empty(num_windows, window, dtype=torch.long, device="meta")
    again = must_recompute(model, windows, needs)
    what = f"{num_windows} windows of {window} tokens for {', '.join(sorted(needs))}"
    held = estimate_memory(model, windows, needs, checkpointing=again)["total"]
    return _step("calibrate", what, num_windows * window), {"calibration": held}


def recovery_step(
    name: str, small: Any, dense: Any, config: RecoveryConfig | FitConfig | None
) -> tuple[list[Step], dict[str, int]]:
    """What a recovery reads and trains, and its bytes in addition to both models' weights."""
    steps: list[Step] = []
    memory: dict[str, int] = {}
    first, _, last = name.rpartition("+")
    if "fit" in (first, last):
        fit = config if isinstance(config, FitConfig) else FitConfig()
        what = f"{fit.num_windows} windows of {fit.window} tokens, {fit.steps} steps a layer"
        steps.append(_step("fit", what, fit.num_windows * fit.window))
        windows = torch.empty(fit.num_windows, fit.window, dtype=torch.long, device="meta")
        held = estimate_fit(small, dense, windows, fit)
        memory |= {f"fit {key}": value for key, value in held.items()}
    distilled = PRESETS.get(last)
    if distilled is not None and isinstance(config, RecoveryConfig):
        distilled = config
    refits = last == "closed-form" or (distilled is not None and distilled.refit)
    if refits and first != "fit":
        steps.append(_step("refit", "output projections", REFIT_TOKENS))
    if distilled is not None:
        steps.append(_distillation(distilled))
    if last == "projections":
        steps.append(_step("recover", "trains the bases of a model of method matryoshka", None))
    return steps, memory


def _distillation(config: RecoveryConfig) -> Step:
    count = config.steps
    if count is None and config.num_windows is not None:
        count = config.epochs * config.num_windows // config.global_batch
    if count is None:
        what = f"{config.epochs} epochs of all windows of {config.window} tokens there are"
        return _step("distil", what, None)
    trained = "LoRA" if config.tune == "lora" else "the attention's matrices, in float32"
    what = f"{count} steps of {config.global_batch} windows of {config.window} tokens, {trained}"
    return _step("distil", what, count * config.global_batch * config.window)


def evaluation_step(text: str | None, dense: Any) -> Step:
    """Measuring dense and pruned on held-out text."""
    if text is None:
        return _step("evaluate", "nothing", 0)
    window = evaluation_window(dense, None)
    what = f"{text}: perplexity and fidelity, {EVALUATION_WINDOWS} windows of {window} tokens"
    return _step("evaluate", what, EVALUATION_WINDOWS * window)


def _step(name: str, what: str, tokens: int | None) -> Step:
    return {"step": name, "what": what, "tokens": tokens}


def weight_bytes(config: PreTrainedConfig, model: Any, dtype: str, device: torch.device) -> int:
    """Of a model loaded as `dtype` (what its config stores if "auto"), copies included."""
    check_dtype(dtype)
    stored: Any = config.dtype or text_config(config).dtype or torch.float32
    chosen = stored if dtype == "auto" else getattr(torch, dtype)
    copied = device.type == "cpu" and chosen.itemsize < torch.float32.itemsize
    # A CPU works on a copy in float32.
    return num_parameters(model) * (chosen.itemsize + (torch.float32.itemsize if copied else 0))


def described(
    steps: list[Step], memory: dict[str, int], device: torch.device, **about: Any
) -> dict[str, Any]:
    """The report of a dry run as JSON-able data."""
    return {
        "dry_run": True,
        **about,
        "steps": steps,
        "memory_bytes": memory,
        "free_bytes": free_memory(device),
        "device": device_name(device.type),
    }


def say(report: dict[str, Any]) -> None:
    """The report as tables for people."""
    rows = [
        [step["step"], "-" if step["tokens"] is None else f"{step['tokens']:,}", step["what"]]
        for step in report["steps"]
    ]
    print_table(
        "Dry run: no weights or text were read, nothing is written",
        ["step", "tokens", "what"],
        rows,
    )
    sizes = [[name, f"{size / 2**20:,.0f} MiB"] for name, size in report["memory_bytes"].items()]
    free = [f"free on {report['device']}", f"{report['free_bytes'] / 2**20:,.0f} MiB"]
    print_table("Memory", ["", "about"], [*sizes, free])
