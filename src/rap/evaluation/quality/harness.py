"""Benchmark tasks by lm-eval on a live model: the paper's zero-shot and LongBench sets, or any.

https://github.com/EleutherAI/lm-evaluation-harness, optional: `pip install lm-eval`.
"""

import copy
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.provenance import installed_version
from ...model.errors import RapError
from ...runtime.state import evaluating
from .choices import choice_scorer

# In the order of preference, for tasks that no group gives a metric.
METRICS = ("acc_norm", "acc", "exact_match", "score", "f1", "word_perplexity")
UNFILTERED = "none"
# Means of zeros and ones. lm-eval makes errors only of all metrics at once, some by resampling.
SHARES = ("acc_norm", "acc", "exact_match")
WHOLE = 1e-6  # how far from a whole number of right answers rounding takes it


@dataclass(frozen=True)
class TaskGroup:
    """Tasks with the metric that is reported of each, and how many examples of each are read."""

    metrics: Mapping[str, str]
    limit: int | None = None


GROUPS = {
    # Section "Metrics" of the paper.
    "paper-zero-shot": TaskGroup(
        {
            "openbookqa": "acc_norm",
            "hellaswag": "acc_norm",
            "piqa": "acc_norm",
            "arc_easy": "acc_norm",
            "arc_challenge": "acc_norm",
            "winogrande": "acc",
        }
    ),
    "paper-longbench": TaskGroup(
        {f"longbench_{task}": "score" for task in ("triviaqa", "qasper", "trec", "samsum", "lcc")},
        limit=50,
    ),
}


@dataclass(frozen=True)
class TaskScore:
    """`value` of one metric of one task, as lm-eval gives it (accuracies are shares).

    `stderr` is the standard error of shares of right answers, None for other metrics and of a
    single example.
    """

    task: str
    metric: str
    value: float
    num_examples: int
    version: str
    stderr: float | None = None


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    folder: Path | None = None,
    batch_size: int = 1,
    seed: int = 0,
) -> list[TaskScore]:
    """Score a dense or pruned model on tasks of lm-eval, or groups of GROUPS.

    Tasks show as many examples as they say themselves, those of the groups none. `limit` is how
    many questions of each are asked, the first ones (default: the group's limit, or all); `folder`
    holds further tasks as YAML files. The same call gives the same digits. The model is left in
    the mode it was in.

    Raises RapError as `check_questions` does, if lm-eval is missing, a task is unknown, or its data
    cannot be loaded.
    """
    check_questions(limit, batch_size, folder)
    lm_eval = _lm_eval()
    metrics, limits = _expand(tasks)
    if limit is None and len(limits) > 1:
        raise RapError(
            f"{', '.join(tasks)} read different numbers of examples: give a limit, or run them one "
            "by one"
        )
    manager = _manager(metrics, folder)
    with evaluating(model), _as_rap_error(metrics):
        found = lm_eval.simple_evaluate(
            model=_wrapped(model, tokenizer, batch_size),
            tasks=list(metrics),
            num_fewshot=None,
            limit=limit if limit is not None else limits.pop(),
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    return [_score(task, metrics, found) for task in found["results"] if task in found["n-samples"]]


def check_questions(limit: int | None, batch_size: int, folder: Path | None = None) -> None:
    """RapError for a limit or a batch without a question, or a folder of tasks that is none."""
    if folder is not None and not folder.is_dir():
        raise RapError(f"there is no directory {folder} of tasks: check the path")
    if limit is not None and limit < 1:
        raise RapError(f"limit {limit} leaves nothing to read: give 1 or more, or remove it")
    if batch_size < 1:
        raise RapError(f"batch_size must be at least 1, not {batch_size}")


def mean_score(scores: Sequence[TaskScore]) -> float:
    """The plain mean over tasks, as the paper averages them."""
    return sum(score.value for score in scores) / len(scores)


def mean_stderr(scores: Sequence[TaskScore]) -> float | None:
    """The standard error of `mean_score`, the tasks being independent; None if one has none."""
    squares = [score.stderr**2 for score in scores if score.stderr is not None]
    return math.sqrt(sum(squares)) / len(scores) if len(squares) == len(scores) else None


def harness_version() -> str | None:
    """The installed version of lm-eval, or None."""
    return installed_version("lm_eval")


def _expand(tasks: Sequence[str]) -> tuple[dict[str, str | None], set[int | None]]:
    """Every task with its metric (None: the best known one), and the limits the groups ask for."""
    metrics: dict[str, str | None] = {}
    limits: set[int | None] = set()
    for name in tasks:
        group = GROUPS.get(name)
        metrics |= dict(group.metrics) if group is not None else {name: None}
        limits.add(group.limit if group is not None else None)
    if not metrics:
        raise RapError(f"no task is named: give --tasks, such as {next(iter(GROUPS))}")
    return metrics, limits


def _manager(tasks: Mapping[str, str | None], folder: Path | None) -> Any:
    """What finds all the tasks: those of the folder alone if they are enough, which is fast."""
    if folder is not None:
        own = _index(folder, False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = _index(folder, True)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise RapError(
            f"lm-eval has no task {', '.join(unknown)}: `lm-eval ls tasks` names them, or use "
            f"{' or '.join(GROUPS)}"
        )
    return manager


@functools.cache
def _index(folder: Path | None, with_defaults: bool) -> Any:
    """lm-eval's index of tasks; that of its own thousands of files takes seconds to make."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    return manager(include_path=str(folder) if folder else None, include_defaults=with_defaults)


def _score(task: str, metrics: Mapping[str, str | None], found: Mapping[str, Any]) -> TaskScore:
    by_filter: dict[str, dict[str, float]] = {}
    for key, value in found["results"][task].items():
        name, comma, filtered = key.partition(",")
        if comma and not name.endswith("_stderr"):
            by_filter.setdefault(filtered, {})[name] = float(value)
    # Tasks whose answers are looked for in what was generated name the ways of looking.
    used = UNFILTERED if UNFILTERED in by_filter else next(iter(by_filter), UNFILTERED)
    values = by_filter.get(used, {})
    wanted = metrics.get(task)
    chosen = [wanted] if wanted else [*METRICS, *values]
    metric = next((name for name in chosen if name in values), None)
    if metric is None:
        raise RapError(
            f"task {task} has no metric {wanted}, but {', '.join(values) or 'none'}: this lm-eval "
            "defines it otherwise"
        )
    version = str(found["versions"].get(task, ""))
    count = int(found["n-samples"][task]["effective"])
    value = values[metric]
    shown = metric if used == UNFILTERED else f"{metric}, {used}"
    return TaskScore(task, shown, value, count, version, _stderr(metric, value, count))


def _stderr(metric: str, value: float, count: int) -> float | None:
    """Of a share of `count` examples: sqrt(p (1 - p) / (n - 1)), as lm-eval has it.

    None for a mean that no number of right answers gives, such as truthfulqa_mc2's `acc`.
    """
    if metric not in SHARES or count < 2 or abs(value * count - round(value * count)) > WHOLE:
        return None
    return math.sqrt(value * (1 - value) / (count - 1))


def _wrapped(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """The model as lm-eval takes it: as it is, on the device where it is."""
    device = str(model.get_input_embeddings().weight.device)
    # A copy, because lm-eval gives one that pads with nothing a padding token.
    own = copy.deepcopy(tokenizer)
    settings = {"tokenizer": own, "batch_size": batch_size, "device": device}
    return choice_scorer()(pretrained=model, **settings)


def _lm_eval() -> Any:
    try:
        importlib.import_module("lm_eval.tasks")
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise RapError("benchmark tasks need lm-eval: pip install lm-eval") from error


@contextmanager
def _as_rap_error(tasks: Mapping[str, str | None]) -> Iterator[None]:
    """Data that cannot be had is the user's to mend, as is a task of theirs with a mistake.

    Hub, network, builders of datasets, templates and missing columns raise many kinds.
    """
    damaged = importlib.import_module("datasets.exceptions").DatasetsError
    template = importlib.import_module("jinja2").TemplateError
    try:
        yield
    except RapError:
        raise
    except (OSError, ValueError, ImportError, LookupError, damaged, template) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, LookupError):
            reason = f"{type(error).__name__}: {reason}"
        raise RapError(
            f"lm-eval could not run {', '.join(tasks)} ({reason}): check the network, or the "
            "task's needs"
        ) from error
