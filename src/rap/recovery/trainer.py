"""The training loop: transformers' Trainer with the distillation loss, and what guards it.

Shapes: B batch, T tokens, N = B (T - 1) predicted tokens, E model dim.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from ..evaluation.quality.perplexity import perplexity
from ..model.errors import RapError
from ..runtime.logits import Head, decoder_of
from ..runtime.products import multiplying
from ..runtime.progress import Progress
from .config import RecoveryConfig
from .data import WindowDataset
from .loss import attention_outputs, distillation_loss, last_outputs, matching_loss
from .runs import COMPLETE

MAX_BAD_STEPS = 3
FULL_BETAS = (0.9, 0.95)  # a run of a hundred steps: the mean of squares forgets in twenty


class DistillationTrainer(Trainer):
    """Trains the adapters of `model` towards a frozen `teacher`; evaluates by perplexity."""

    model: Any

    def __init__(
        self,
        model: Any,
        teacher: Any,
        config: RecoveryConfig,
        data: tuple[WindowDataset, WindowDataset],
        arguments: TrainingArguments,
        progress: bool,
    ):
        super().__init__(
            model,
            arguments,
            train_dataset=data[0],
            eval_dataset=data[1],
            callbacks=[BadSteps(), LastStep(), Complete()],
        )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        tokens = config.global_batch * data[0].windows_NT.shape[1]
        self.bar = Bar(arguments.max_steps, tokens)
        if progress and self.is_world_process_zero():
            self.add_callback(self.bar)
        self.teacher, self.config, self.validation_NT = teacher, config, data[1].windows_NT

    @property
    def bad_steps(self) -> list[int]:
        """Steps that were skipped because their gradient was not finite."""
        counters = [c for c in self.callback_handler.callbacks if isinstance(c, BadSteps)]
        return counters[0].steps

    def run(self, checkpoint: Path | None) -> None:
        """Train from the start or from a checkpoint, also one of the last step.

        Raises RapError if no step had a finite gradient; it gives up after `MAX_BAD_STEPS` of them.
        """
        if checkpoint is None or not self._ended_with(checkpoint):
            with self.bar.running:
                self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if len(self.bad_steps) == self.state.global_step:
            raise RapError(
                f"the loss was not finite in the first {len(self.bad_steps)} steps: recover in "
                "float32 or bfloat16, or give a lower learning_rate"
            )

    def _ended_with(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is of the last step, or of the one that it was given up at."""
        stored = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        kept = stored.stateful_callbacks.get("BadSteps") or {"args": {"steps": []}}
        bad = kept["args"]["steps"]
        if stored.global_step < self.args.max_steps and len(bad) < MAX_BAD_STEPS:
            return False
        self.state = stored
        self.bad_steps[:] = bad
        return True

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW; where matrices are trained, each at a rate in units of its root mean square."""
        if self.config.tune != "full" or self.optimizer is not None:
            return super().create_optimizer(model)
        rate = self.config.learning_rate
        groups = [
            {"params": [matrix], "lr": rate * float(matrix.detach().square().mean().sqrt())}
            for matrix in self.model.parameters()
            if matrix.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=FULL_BETAS, weight_decay=self.config.weight_decay
        )
        return self.optimizer

    def history(self) -> list[dict[str, float]]:
        """Loss, rate and held-out perplexity by step, in the order they were logged."""
        names = {"loss": "loss", "learning_rate": "rate", "eval_perplexity": "perplexity"}
        return [
            {"step": entry["step"]} | {names[key]: entry[key] for key in names if key in entry}
            for entry in self.state.log_history
            if names.keys() & entry.keys()
        ]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch of windows [B, T]; logits exist a chunk at a time."""
        ids_BT = inputs["input_ids"]
        student = self.accelerator.unwrap_model(model).get_base_model()
        if self.state.global_step < self.config.match_steps:
            return self._match(model, student, ids_BT)
        _, decoder = decoder_of(student)
        teacher_BTE = self._teach(ids_BT)
        with last_outputs([decoder]) as hidden:
            self._run(model, ids_BT)
        return distillation_loss(
            hidden[0].to(student.dtype)[:, :-1].flatten(0, 1),
            teacher_BTE[:, :-1].flatten(0, 1),
            ids_BT[:, 1:].flatten(),
            (Head(student), Head(self.teacher)),
            self.config,
        )

    def _match(self, model: Any, student: Any, ids_BT: Tensor) -> Tensor:
        with attention_outputs(self.teacher) as wanted:
            self._teach(ids_BT)
        with attention_outputs(student) as outputs:
            self._run(model, ids_BT)
            # A copy: checkpointing runs the layers again while gradients are computed.
            return matching_loss(list(outputs), wanted)

    def _run(self, model: Any, ids_BT: Tensor) -> None:
        # Through the wrapper, or data parallelism would not average the gradients.
        with multiplying(model, self.config.products):
            model(input_ids=ids_BT, use_cache=False, logits_to_keep=1)

    @torch.no_grad()
    def _teach(self, ids_BT: Tensor) -> Tensor:
        """The teacher's last hidden states [B, T, E]."""
        ids_BT = ids_BT.to(self.teacher.get_input_embeddings().weight.device)
        with multiplying(self.teacher, self.config.products):
            states = decoder_of(self.teacher)[1](input_ids=ids_BT, use_cache=False)[0]
        return states.to(self.teacher.dtype)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Held-out perplexity of the student, in its own precision."""
        held_out = perplexity(
            self.model.get_base_model(),
            self.validation_NT.flatten(),
            window=self.validation_NT.shape[1],
            bos=None,
            dtype=None,
        )
        metrics = {"eval_perplexity": held_out.value}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # Adapters alone: peft would look up the base model's config, on the hub if it is a name.
        self.model.save_pretrained(output_dir, save_embedding_layers=False)


class BadSteps(TrainerCallback, ExportableState):
    """Skips a step whose gradient is not finite, halves the rate, and stops at the third."""

    def __init__(self, steps: list[int] | None = None):
        self.steps = steps or []

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Drop gradients that are not finite: an optimizer leaves weights without one alone."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Averaged over the processes already, so all of them see the same and do the same.
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return
        model.zero_grad(set_to_none=True)
        self.steps.append(state.global_step + 1)
        _halve_rate(kwargs["optimizer"], kwargs["lr_scheduler"])
        if len(self.steps) >= MAX_BAD_STEPS:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this, so that a resumed run counts on."""
        return {"args": {"steps": list(self.steps)}, "attributes": {}}


class LastStep(TrainerCallback):
    """Evaluates and saves the weights that training ends with, wherever it ends."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for both at the last step."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True


class Complete(TrainerCallback):
    """Marks a checkpoint once it is written: one killed half way is not resumed from."""

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called when every file of the checkpoint has been written."""
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


class Bar(TrainerCallback):
    """Shows optimizer steps of so many tokens, with the time left and the last figures."""

    def __init__(self, steps: int, tokens: int) -> None:
        self.steps, self.tokens = steps, tokens
        self.figures: dict[str, float] = {}
        self.running = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar at the step that training starts from."""
        done = state.global_step
        bar = Progress("recover", self.steps, "steps", tokens=self.tokens, done=done)
        self.bar = self.running.enter_context(bar)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One optimizer step further."""
        self.bar.update(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        """Show the last loss and perplexity."""
        names = {"loss": "loss", "eval_perplexity": "held-out perplexity"}
        self.figures |= {names[key]: logs[key] for key in names if key in logs}
        text = ", ".join(f"{name} {value:.3f}" for name, value in self.figures.items())
        self.bar.update(state.global_step, figures=text)


def _halve_rate(optimizer: Any, scheduler: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        if "initial_lr" in group:
            group["initial_lr"] *= 0.5
    # A schedule that is a factor of the first rate would undo the halving at its next step.
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * 0.5 for rate in scheduler.base_lrs]
