"""Distillation of the dense into the pruned model: train adapters, merge, keep the better.

Shapes: N windows, T tokens of a window.
"""

import copy
import importlib.util
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from ..data.text import fingerprint_windows
from ..evaluation.quality.perplexity import perplexity
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from ..runtime.state import evaluating
from .adapters import add_adapters, merge
from .config import RecoveryConfig
from .data import WindowDataset, check_rows, hold_out, whole_batches
from .runs import begin, explained, processes
from .trainer import DistillationTrainer

PLATEAU = {"factor": 0.5, "patience": 1, "threshold": 1e-3}


@dataclass(frozen=True)
class Distillation:
    """The recovered model (plain, merged), and JSON-able measurements of what was done."""

    model: PreTrainedModel
    report: dict[str, Any]


def distill(
    small: Any,
    teacher: Any,
    windows: Tensor,
    config: RecoveryConfig,
    *,
    validation: Tensor | None = None,
    work: Path | None = None,
    progress: bool = False,
) -> Distillation:
    """Train what `config.tune` names on `small` towards `teacher`; return the better model, merged.

    `windows` and `validation` are LongTensors [N, T]; without `validation` the last tenth of
    `windows` is held out. `small` and `teacher` are left untouched. The result is `small` itself if
    its held-out perplexity (float32) is the lower one, so it is never worse than what recovery
    started from. Like transformers' Trainer it seeds the generators of torch, NumPy and Python.
    With a `work` folder the same call continues a run that was killed, to the same weights;
    `runs.clear_work` removes it. Under torchrun or `accelerate launch` every process calls this,
    and gets the same model; on several machines `work` must be a folder they share.

    Raises RapError for windows or vocabularies that do not fit, a full disk, three steps without a
    finite loss before a good one, or adapters that turn out not to have been applied.
    """
    _check(small, teacher, {"windows": windows, "validation": validation}, config)
    if validation is None:
        windows, validation = hold_out(windows, config.validation_windows)
    windows = whole_batches(windows, config.global_batch)
    started = time.monotonic()
    with ExitStack() as stack:
        work = work or _temporary(stack)
        stack.enter_context(explained(work))
        stack.enter_context(evaluating(teacher))
        arguments = _arguments(config, len(windows), work, small.device)
        checkpoint = _begin(work, small, teacher, windows, validation, config)
        student = copy.deepcopy(small).to(arguments.device)
        if not _is_spread(teacher):
            stack.callback(teacher.to, teacher.device)
            teacher.to(arguments.device)
        before = _held_out(student, validation)
        adapted = add_adapters(student, config)
        data = WindowDataset(windows), WindowDataset(validation)
        trainer = DistillationTrainer(adapted, teacher, config, data, arguments, progress)
        with torch.enable_grad():
            trainer.run(checkpoint)
        _load_best(trainer, work)
        dtypes = {name: parameter.dtype for name, parameter in small.named_parameters()}
        merged = merge(trainer.model, validation[0], dtypes)
        after = _held_out(merged, validation)
    report = {
        "windows": list(windows.shape),
        "validation_windows": list(validation.shape),
        "perplexity_before": before,
        "perplexity_after": after,
        "kept": "after" if after < before else "before",
        "seconds": time.monotonic() - started,
        **_description(small, merged, teacher, trainer),
    }
    if not after < before:
        return Distillation(small, report)
    return Distillation(_as_found(merged, small), report)


def _is_spread(model: PreTrainedModel) -> bool:
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def _temporary(stack: ExitStack) -> Path:
    """A temporary folder that all processes of this machine share, gone when `stack` closes."""
    names = [""]
    if processes().is_main_process:
        names[0] = stack.enter_context(tempfile.TemporaryDirectory(prefix="rap-recover-"))
    return Path(broadcast_object_list(names)[0])


def _as_found(merged: PreTrainedModel, small: PreTrainedModel) -> Any:
    """Take off what training put on: checkpointing, its hook on the embedding, mode, device.

    The trainer says in the config that no cache is used, and who decodes by hand would lose it.
    """
    merged.config.use_cache = small.config.use_cache
    merged.disable_input_require_grads()
    vars(merged).pop("_require_grads_hooks", None)
    if not small.is_gradient_checkpointing:
        merged.gradient_checkpointing_disable()
    return merged.train(small.training).to(small.device)


def _description(
    small: PreTrainedModel, merged: PreTrainedModel, teacher: PreTrainedModel, trainer: Any
) -> dict[str, Any]:
    return {
        "config": asdict(trainer.config),
        "steps": trainer.state.global_step,
        "chosen_step": trainer.state.best_global_step,
        "skipped_steps": trainer.bad_steps,
        "processes": processes().num_processes,
        "fingerprint_before": fingerprint_model(small),
        "fingerprint_after": fingerprint_model(merged),
        "teacher_fingerprint": fingerprint_model(teacher),
        "teacher_dtype": str(teacher.dtype).removeprefix("torch."),
        "history": trainer.history(),
    }


def _check(
    small: Any, teacher: Any, given: dict[str, Tensor | None], config: RecoveryConfig
) -> None:
    check_rows(small, teacher, given)
    if _is_spread(small):
        raise RapError("the student is spread over several devices: load it on one to train it")
    if config.report_to is not None and importlib.util.find_spec(config.report_to) is None:
        raise RapError(f"report_to {config.report_to!r} is not installed: pip install it first")


def _arguments(
    config: RecoveryConfig, num_windows: int, work: Path, device: torch.device
) -> TrainingArguments:
    world = processes().num_processes
    micro, accumulation = _micro_batch(config, num_windows, world)
    updates = max(1, num_windows // config.global_batch)
    steps = config.steps or config.epochs * updates
    every = min(config.evaluate_every or updates, steps)
    plateau = config.schedule == "plateau"
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=True,
        learning_rate=config.learning_rate,
        lr_scheduler_type="reduce_lr_on_plateau" if plateau else config.schedule,
        lr_scheduler_kwargs=dict(PLATEAU) if plateau else None,
        # The schedule's first step of a warm-up has rate 0: a run of one step would train nothing.
        warmup_steps=min(config.warmup_steps, steps - 1),
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        optim="adamw_torch",
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        # One more than needed: a process killed while it writes the newest has the one before.
        save_total_limit=2,
        metric_for_best_model="perplexity",
        greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
        logging_steps=max(1, every // 10),
        logging_first_step=True,
        report_to=config.report_to or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False,
        use_cpu=device.type == "cpu",
        seed=config.seed,
        data_seed=config.seed,
    )
    # Of several GPUs one process takes one. Trainer would run copies of the student on all of
    # them, whose hooks are the same, and double the batch.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _micro_batch(config: RecoveryConfig, num_windows: int, world: int) -> tuple[int, int]:
    """Windows per device and forward pass, and how many of those make the global batch."""
    if config.global_batch % world:
        raise RapError(
            f"a global batch of {config.global_batch} windows cannot be shared by {world} "
            "processes: give a multiple"
        )
    share = config.global_batch // world
    most = min(config.micro_batch, num_windows // world)
    if most < 1:
        raise RapError(f"{num_windows} windows are fewer than the {world} processes: give more")
    micro = next(size for size in range(most, 0, -1) if share % size == 0)
    return micro, share // micro


def _begin(
    work: Path,
    small: PreTrainedModel,
    teacher: PreTrainedModel,
    windows: Tensor,
    validation: Tensor,
    config: RecoveryConfig,
) -> Path | None:
    record = {
        "student": fingerprint_model(small),
        "teacher": fingerprint_model(teacher),
        "windows": fingerprint_windows(windows),
        "validation": fingerprint_windows(validation),
        "configuration": asdict(config),
    }
    with processes().main_process_first():
        return begin(work, record)


def _load_best(trainer: Any, work: Path) -> None:
    """Load the adapters of the checkpoint with the best held-out perplexity."""
    # Only the main process writes it, and may delete the folder once all have read it.
    processes().wait_for_everyone()
    folder = work / f"checkpoint-{trainer.state.best_global_step}"
    set_peft_model_state_dict(trainer.model, load_file(folder / "adapter_model.safetensors"))
    processes().wait_for_everyone()


def _held_out(model: PreTrainedModel, validation_NT: Tensor) -> float:
    size = validation_NT.shape[1]
    return perplexity(model, validation_NT.flatten(), window=size, bos=None).value
