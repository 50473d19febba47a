"""`--dry-run`: what a command would do and about what it takes, from configs alone.

Models are built without weights: tensors on a CPU that nothing is written to take no memory. Time
is what the matrix products take at the speed of one that is measured here. That is a lower bound:
attention, memory traffic and small matrices come on top.
"""

import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import typer
from transformers import PreTrainedConfig

from ..calibration.memory import estimate_memory, must_recompute
from ..calibration.observers import ForwardStatistic
from ..calibration.registry import STATISTICS, WINDOWS
from ..checkpoint.device import working_device
from ..checkpoint.load import check_dtype, without_tensors
from ..checkpoint.provenance import device_name
from ..data.own import SAMPLES, reads_samples
from ..data.protocol import EVALUATION_WINDOWS
from ..evaluation.quality.perplexity import evaluation_window
from ..model.layers import attention_spec, text_config, text_decoder
from ..recovery.config import PRESETS, RecoveryConfig
from ..recovery.fit import estimate_fit
from ..recovery.layer_fit import FitConfig
from ..recovery.stages import REFIT_TOKENS
from ..runtime.memory import free_memory
from .options import print_table

FORWARD, BACKWARD = 2, 4  # FLOPs a token and parameter
PROBE = 1024  # rows and columns of the product that is timed
SAID = (
    "Times are those of the matrix products alone, at the speed of one that was timed now: expect "
    "two to four times as much."
)

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


def parameters(model: Any) -> int:
    """How many a model has, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiplied(model: Any) -> int:
    """How many parameters a token is multiplied with: all but a table that is only looked up.

    Of a mixture of experts all of them are counted, so that its times are too long.
    """
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    looked_up = head is None or head.weight is not table
    return parameters(model) - (table.numel() if looked_up else 0)


def sampling_steps(model: Any, sources: Collection[str]) -> list[Step]:
    """What a model writes for the source `own`, if that is one of them and nothing is kept yet."""
    if not reads_samples(sources):
        return []
    what = f"{SAMPLES.documents} documents of {SAMPLES.tokens} tokens, once for a model"
    tokens = SAMPLES.documents * SAMPLES.tokens
    return [_step("sample", what, tokens, tokens * FORWARD * multiplied(model))]


def calibration_step(
    model: Any, needs: Collection[str], num_windows: int, window: int
) -> tuple[Step, dict[str, int]]:
    """Reading the text, and the bytes held meanwhile by part."""
    if not needs:
        return _step("calibrate", "nothing: the method reads weights alone", 0, 0), {}
    windows = torch.empty(num_windows, window, dtype=torch.long, device="meta")
    statistics = [STATISTICS[need] for need in needs if need != WINDOWS]
    each, again = FORWARD, must_recompute(model, windows, needs)
    if not all(issubclass(one, ForwardStatistic) for one in statistics):
        each += BACKWARD + (FORWARD if again else 0)
    tokens = num_windows * window
    what = f"{num_windows} windows of {window} tokens for {', '.join(sorted(needs))}"
    held = estimate_memory(model, windows, needs, checkpointing=again)["total"]
    step = _step("calibrate", what, tokens, tokens * each * multiplied(model))
    return step, {"calibration": held}


def recovery_step(
    name: str, small: Any, dense: Any, config: RecoveryConfig | FitConfig | None
) -> tuple[list[Step], dict[str, int]]:
    """What a recovery reads and trains, and its bytes in addition to both models' weights."""
    steps: list[Step] = []
    memory: dict[str, int] = {}
    first, _, last = name.rpartition("+")
    both = multiplied(dense) + multiplied(small)
    if "fit" in (first, last):
        fit = config if isinstance(config, FitConfig) else FitConfig()
        size = fit.num_windows * fit.window
        read = _fitted(small, fit.scope)
        trained = fit.steps * fit.batch * fit.window
        flops = size * FORWARD * both + trained * (FORWARD + BACKWARD) * read
        what = f"{fit.num_windows} windows of {fit.window} tokens, {fit.steps} steps a layer"
        steps.append(_step("fit", what, size, flops))
        windows = torch.empty(fit.num_windows, fit.window, dtype=torch.long, device="meta")
        memory |= {
            f"fit {key}": value for key, value in estimate_fit(small, dense, windows, fit).items()
        }
    if last in ("closed-form", *PRESETS) and first != "fit":
        steps.append(
            _step("refit", "output projections", REFIT_TOKENS, REFIT_TOKENS * FORWARD * both)
        )
    if last in PRESETS:
        chosen = config if isinstance(config, RecoveryConfig) else PRESETS[last]
        steps.append(_distillation(chosen, small, dense))
    if last == "projections":
        steps.append(
            _step("recover", "trains the bases of a model of method matryoshka", None, None)
        )
    return steps, memory


def _fitted(model: Any, scope: str) -> int:
    """How many parameters a token is multiplied with while all layers are fitted."""
    name = attention_spec(model.config).attention
    layers = [layer for layer in text_decoder(model).layers if hasattr(layer, name)]
    return sum(parameters(one if scope == "block" else getattr(one, name)) for one in layers)


def _distillation(config: RecoveryConfig, small: Any, dense: Any) -> Step:
    count = config.steps
    if count is None and config.num_windows is not None:
        count = config.epochs * config.num_windows // config.global_batch
    if count is None:
        what = f"{config.epochs} epochs of all windows of {config.window} tokens there are"
        return _step("distil", what, None, None)
    tokens = count * config.global_batch * config.window
    each = FORWARD * multiplied(dense) + (FORWARD + BACKWARD) * multiplied(small)
    trained = "LoRA" if config.tune == "lora" else "the attention's matrices, in float32"
    what = f"{count} steps of {config.global_batch} windows of {config.window} tokens, {trained}"
    return _step("distil", what, tokens, tokens * each)


def evaluation_step(text: str | None, small: Any, dense: Any) -> Step:
    """Measuring dense and pruned on held-out text."""
    if text is None:
        return _step("evaluate", "nothing", 0, 0)
    window = evaluation_window(dense, None)
    tokens = EVALUATION_WINDOWS * window
    what = f"{text}: perplexity and fidelity, {EVALUATION_WINDOWS} windows of {window} tokens"
    return _step(
        "evaluate", what, tokens, tokens * FORWARD * (2 * multiplied(dense) + multiplied(small))
    )


def _step(name: str, what: str, tokens: int | None, flops: int | None) -> Step:
    return {"step": name, "what": what, "tokens": tokens, "flops": flops}


def weight_bytes(config: PreTrainedConfig, model: Any, dtype: str, device: torch.device) -> int:
    """Of a model loaded as `dtype` (what its config stores if "auto"), copies included."""
    check_dtype(dtype)
    stored: Any = config.dtype or text_config(config).dtype or torch.float32
    chosen = stored if dtype == "auto" else getattr(torch, dtype)
    copied = device.type == "cpu" and chosen.itemsize < torch.float32.itemsize
    # A CPU works on a copy in float32.
    return parameters(model) * (chosen.itemsize + (torch.float32.itemsize if copied else 0))


def described(
    steps: list[Step], memory: dict[str, int], device: torch.device, **about: Any
) -> dict[str, Any]:
    """The report of a dry run as JSON-able data, with times at the speed measured here."""
    rate = product_speed(device)
    timed = [
        step | {"seconds_at_least": None if step["flops"] is None else step["flops"] / rate}
        for step in steps
    ]
    known = [step["seconds_at_least"] for step in timed if step["seconds_at_least"] is not None]
    return {
        "dry_run": True,
        **about,
        "steps": timed,
        "memory_bytes": memory,
        "free_bytes": free_memory(device),
        "device": device_name(device.type),
        "flops_per_second": rate,
        "seconds_at_least": sum(known),
    }


def product_speed(device: torch.device) -> float:
    """FLOPs a second of a plain float32 matrix product on the device that would be used."""
    left, right = torch.randn(2, PROBE, PROBE, device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * PROBE**3 / best


def say(report: dict[str, Any]) -> None:
    """The report as tables for people."""
    rows = []
    for step in report["steps"]:
        seconds, tokens = step["seconds_at_least"], step["tokens"]
        shown = "as long as the text" if seconds is None else str(timedelta(seconds=round(seconds)))
        rows.append([step["step"], "-" if tokens is None else f"{tokens:,}", shown, step["what"]])
    print_table(
        "Dry run: no weights or text were read, nothing is written",
        ["step", "tokens", "at least", "what"],
        rows,
    )
    sizes = [[name, f"{size / 2**20:,.0f} MiB"] for name, size in report["memory_bytes"].items()]
    free = [f"free on {report['device']}", f"{report['free_bytes'] / 2**20:,.0f} MiB"]
    print_table("Memory", ["", "about"], [*sizes, free])
    typer.echo(SAID)
