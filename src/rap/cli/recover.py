"""`rap recover`: quality back into a pruned checkpoint, by refitting and distillation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.card import NEARNESS, interval_text, is_hub_name
from ..checkpoint.device import AUTO, placement, say_device
from ..checkpoint.files import PLAN_FILE, REPORT_FILE, check_output, read_json
from ..checkpoint.load import check_dtype, is_pruned, load, load_config, load_dense, load_tokenizer
from ..checkpoint.provenance import provenance
from ..checkpoint.source import check_apart
from ..data.bos import bos_token
from ..data.held_out import HELD_OUT, split
from ..data.own import reads_samples
from ..data.text import check_sources, named_sources
from ..evaluation.quantization import KINDS, quantize_weights
from ..methods import METHODS
from ..methods.base import traits
from ..model.errors import RapError
from ..pipeline import DEFAULT, Defaults, held_out, measure, measure_against, save
from ..planning.plan import Plan
from ..recovery.config import PRESETS, RecoveryConfig, recovery_config
from ..recovery.layer_fit import FitConfig, fit_config
from ..recovery.runs import clear_work, processes
from ..recovery.stages import RECOVERIES, read_texts, recover_stage, work_folder
from ..runtime.settings import read_settings
from ..surgery.weights import check_teacher
from . import dry_run as dry
from . import options
from .groups import grouped
from .options import console, print_json, print_table

PRESET_NAMES = [name for name in RECOVERIES if name not in ("none", "projections")]
Preset = Annotated[
    str, typer.Option("--preset", "--recover", help=f"One of: {', '.join(PRESET_NAMES)}.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="Training data, as --calibration of compress; repeatable."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Preset setting such as steps=100; repeatable (for fit+X, of X)."),
]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What recovers: a preset with changed settings, and its training data."""

    preset: Preset = "fit"
    text: Texts = None
    changes: Changes = None

    def split(self, evaluate: str, teacher: str) -> tuple[list[str], str | None]:
        """What is trained on, and the evaluation dataset (None for 'none'), which it leaves out.

        As for `rap compress`, a single source is completed, which the teacher's samples may be of.
        Raises RapError for one of several sources with a comma in its name.
        """
        asked = self.text or [DEFAULT]
        texts = [Defaults.of(teacher).calibration(asked[0])] if len(asked) == 1 else asked
        names = [name for text in texts for name in named_sources(text)]
        if len(texts) > 1 and (several := next((name for name in names if "," in name), None)):
            raise RapError(f"{several} has a comma in its name: give it alone, or rename it")
        joined = texts[0] if len(texts) == 1 else ",".join(names)
        shown = split(joined, None if evaluate == "none" else evaluate)[1]
        return [split(text, shown)[0] for text in texts], shown


def configured(preset: str, changes: list[str], seed: int) -> RecoveryConfig | FitConfig | None:
    """Settings of a preset's last part with `name=value` changes; None if it has none.

    Raises RapError for an unknown preset or setting.
    """
    if preset not in PRESET_NAMES:
        raise RapError(f"unknown recovery preset {preset!r}: use one of {', '.join(PRESET_NAMES)}")
    values, last = read_settings(changes), preset.rpartition("+")[2]
    if last == "fit":
        return fit_config(**{"seed": seed, **values})
    if preset != "closed-form":
        return recovery_config(last, **{"seed": seed, **values})
    if values:
        raise RapError(f"closed-form has no setting {', '.join(values)}: remove it")
    return None


Teacher = Annotated[str, typer.Option("--teacher", "--dense", help="The dense model (teacher).")]
TeacherDtype = Annotated[
    str, typer.Option(help=f"Data type of the teacher, or quantized weights: {', '.join(KINDS)}.")
]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """How the pruned checkpoint and its teacher are loaded."""

    dtype: options.Dtype = "auto"
    teacher_dtype: TeacherDtype = "auto"
    device: options.Device = AUTO
    device_map: options.DeviceMap = None


@grouped
def recover_command(
    pruned: Annotated[Path, typer.Argument(help="Pruned checkpoint written by `rap compress`.")],
    output: options.Output,
    *,
    teacher: Teacher,
    train: Training,
    evaluate: options.Evaluate = HELD_OUT,
    loaded: Loaded,
    bos: options.Bos = "auto",
    seed: options.Seed = 0,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Recover PRUNED with its dense model as the teacher; a killed run resumes when repeated."""
    check_output(output, force=force)
    check_apart(output, teacher, pruned)
    chosen = configured(train.preset, train.changes or [], seed)
    texts, shown = train.split(evaluate, teacher)
    check_sources(*texts, shown)
    placement(loaded.device, loaded.device_map)
    if dry_run:
        return _tell(pruned, output, teacher, train.preset, chosen, loaded, shown, as_json)
    plan, old_report = _read(pruned, teacher, loaded.teacher_dtype)
    tokenizer = load_tokenizer(pruned)
    small = load(pruned, dtype=loaded.dtype, **_placement(loaded.device, None))
    dense, samples = _teacher(teacher, loaded, texts, tokenizer)
    say_device(small)
    tokens = held_out(shown, tokenizer, small, bos)
    recovered, recovery = recover_stage(
        small,
        dense,
        tokenizer,
        train.preset,
        texts=texts,
        config=_unless_fitted(chosen, old_report),
        fitted=_fitted(old_report, train.preset, texts),
        samples=samples,
        seed=seed,
        output=output,
        bos=bos,
        progress=True,
    )
    if not processes().is_main_process:
        return
    models = {"before_recovery": small, "pruned": recovered}
    judged: dict[str, Any] = {"tokens": tokens, "bos": bos, "progress": True}
    read = {"dtype": loaded.dtype, "bos": bos, "device": str(small.device), "texts": texts}
    made = {"pruned": str(pruned), "teacher": teacher, "evaluate": shown or "none", "seed": seed}
    report = {
        **_described(plan, teacher),
        **old_report,
        **_figures(models, dense, loaded.teacher_dtype, old_report, tokenizer, shown, judged),
        "recovery": recovery,
        "provenance": provenance(**made, **read),
    }
    save(recovered, plan, output, tokenizer, report=report, force=force)
    clear_work(work_folder(output))
    _say(report, output, as_json)


def _tell(
    pruned: Path,
    output: Path,
    teacher: str,
    preset: str,
    chosen: RecoveryConfig | FitConfig | None,
    loaded: Loaded,
    text: str | None,
    as_json: bool,
) -> None:
    """What recovering would do; shapes of both models are those of their configs."""
    _read(pruned, teacher, loaded.teacher_dtype)
    small_config, dense_config = load_config(pruned), load_config(teacher)
    device = dry.device_of(loaded.device, None)
    small, dense = (dry.unloaded(one, device) for one in (small_config, dense_config))
    steps, held = dry.recovery_step(preset, small, dense, chosen)
    stored = "auto" if loaded.teacher_dtype in KINDS else loaded.teacher_dtype
    memory = {
        "pruned weights": dry.weight_bytes(small_config, small, loaded.dtype, device),
        "dense weights": dry.weight_bytes(dense_config, dense, stored, device),
    }
    report = dry.described(
        [*steps, dry.evaluation_step(text, dense)],
        memory | held,
        device,
        pruned=str(pruned),
        teacher=teacher,
        output=str(output),
        preset=preset,
        resumes=work_folder(output).is_dir(),
    )
    print_json(report) if as_json else dry.say(report)


def _figures(
    models: dict[str, Any],
    dense: Any,
    teacher_dtype: str,
    old_report: dict[str, Any],
    tokenizer: Any,
    text: str | None,
    judged: dict[str, Any],
) -> dict[str, Any]:
    """What is measured of all models; how near to the dense one, unless its weights are rounded."""
    if teacher_dtype not in KINDS:
        return measure_against(dense, models, tokenizer, text, **judged)
    figures = {name: measure(model, tokenizer, text, **judged) for name, model in models.items()}
    known: dict[str, Any] = old_report.get("dense") or {}
    asked = {"text": text, "bos": bos_token(judged["bos"], tokenizer, dense.config)}
    if text is not None and asked.items() <= known.get("evaluation", {}).items():
        return {"dense": known, **figures}
    return {"dense": measure(dense, tokenizer, text, **judged), **figures}


def _teacher(
    source: str, loaded: Loaded, texts: list[str], tokenizer: Any
) -> tuple[Any, tuple[list[str], dict[str, Any]] | None]:
    """The dense model in a dtype, or with quantized weights: it is only read.

    And `stages.read_texts` of the model as it is stored, where that is another: its own samples are
    those that calibration read.
    """
    dtype, placed = loaded.teacher_dtype, _placement(loaded.device, loaded.device_map)
    rounded = dtype in KINDS
    writes = dtype != "auto" and reads_samples(x for text in texts for x in named_sources(text))
    dense: Any = load_dense(source, **placed) if rounded or writes else None
    samples = read_texts(texts, dense, tokenizer, progress=True) if writes else None
    if rounded:
        return quantize_weights(dense, dtype), samples
    del dense  # before the other form of it is loaded
    return load_dense(source, dtype=dtype, **placed), samples


def _placement(device: str, device_map: str | None) -> dict[str, Any]:
    """As `device.placement`; of several processes each runs on a separate device.

    Only the teacher may be spread over several.
    """
    if processes().num_processes > 1 and device_map is None:
        if device != AUTO:
            raise RapError(f"each process chooses its device; remove --device {device}")
        device = str(processes().device)
    return placement(device, device_map)


def _read(pruned: Path, teacher: str, teacher_dtype: str) -> tuple[Plan, dict[str, Any]]:
    """The plan and report beside a checkpoint that was cut from such a teacher.

    The report may be missing. RapError for what is no pruned checkpoint, or another teacher.
    """
    check_dtype(teacher_dtype, KINDS)
    # Whole heads leave a plain checkpoint of the family, with the plan beside it.
    if not (pruned.is_dir() and (pruned / PLAN_FILE).is_file()):
        if not (pruned.is_dir() and is_pruned(load_config(pruned))):
            raise RapError(
                f"{pruned} is not a pruned checkpoint: run `rap compress` first, or copy "
                f"{PLAN_FILE} into it if it was trained from one"
            )
        raise RapError(
            f"{pruned} has no {PLAN_FILE}: copy it from the checkpoint that it was trained from"
        )
    report = pruned / REPORT_FILE
    stored = read_json(report, "remove it, or compress again") if report.is_file() else {}
    plan = Plan.load(pruned / PLAN_FILE)
    check_teacher(plan, teacher)
    return plan, stored


def _fitted(report: dict[str, Any], preset: str, texts: list[str]) -> dict[str, Any] | None:
    """The report of the fit that a checkpoint ended with, where distilling is to follow it."""
    recovery = report.get("recovery") or {}
    last = "fit" in recovery and "distillation" not in recovery
    return recovery if last and recovery["texts"] == texts and preset in PRESETS else None


def _unless_fitted(
    config: RecoveryConfig | FitConfig | None, report: dict[str, Any]
) -> RecoveryConfig | FitConfig | None:
    """The settings without a refit, if layers were distilled: it would undo some of that."""
    if isinstance(config, RecoveryConfig) and "fit" in (report.get("recovery") or {}):
        return replace(config, refit=False)
    return config


def _described(plan: Plan, teacher: str) -> dict[str, Any]:
    """What `rap compress` would have written of a checkpoint that `rap apply` made."""
    name = plan.method.get("name")
    return {
        "source": teacher,
        "on_hub": is_hub_name(teacher),
        "model_type": plan.model_type,
        "calibration": "not recorded",
        "retain": plan.retain,
        "kept_fraction": plan.kept_fraction,
        "method": plan.method,
        "traits": traits(METHODS[name]) if name in METHODS else {},
    }


def _say(report: dict[str, Any], output: Path, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    recovery = report["recovery"]
    steps = {"perplexity_before": "pruned", "perplexity_fitted": "layer-wise distilled"}
    steps |= {"perplexity_refitted": "refitted"}
    steps |= {"perplexity_distilled": "distilled", "perplexity_after": "saved"}
    rows = [[label, f"{recovery[key]:.3f}"] for key, label in steps.items() if key in recovery]
    print_table("Recovery, on held-out samples of its data", ["", "perplexity"], rows)
    if "kl" in report["pruned"]:
        rows = [
            [
                name,
                *(
                    interval_text(report[key][figure], form)
                    for key in ("before_recovery", "pruned")
                ),
            ]
            for figure, (name, _, form) in NEARNESS.items()
        ]
        named = report["dense"]["evaluation"]["dataset"]
        print_table(f"Compared with the dense model on {named}", ["", "pruned", "recovered"], rows)
    console.print(f"wrote {output}")
