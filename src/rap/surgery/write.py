"""A checkpoint on disk rewritten by a plan, with one layer's attention in memory.

The output's layout is known from the plan before anything is read, so each shard's header is
written first and every tensor follows as soon as it is made. Experts that the model joins are
copied one by one, and joined once more for the fingerprint alone.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..checkpoint.card import CARD_FILE, model_card, unmeasured
from ..checkpoint.files import (
    CONFIG_FILE,
    PLAN_FILE,
    REPORT_FILE,
    whole_directory,
    write_json,
    write_legacy_rope,
)
from ..checkpoint.load import load_config, load_tokenizer
from ..checkpoint.shards import DTYPE_NAMES, DTYPES, WEIGHTS_FILE, write_header, write_index
from ..checkpoint.stored import StoredModel
from ..model.errors import CheckpointError, PlanError
from ..model.fingerprint import Fingerprint
from ..model.modeling import auto_class
from ..planning.plan import Plan
from ..runtime.progress import Progress
from .weights import PrunedWeights, check_config, pruned_config

_WEIGHTS = (
    *(".safetensors", ".bin", ".pth", ".pt", ".gguf", ".index.json"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data"),
)
_WRITTEN = (CONFIG_FILE, CARD_FILE, REPORT_FILE)  # a report is of the model it came with


@dataclass(frozen=True)
class _Entry:
    """One tensor of an output shard, with its shape and type after pruning.

    `name` is the output's and `target` the model's; `source` is the dense checkpoint's, empty for
    a tensor that only the pruned model has. `part` is set for one of several tensors that the model
    joins.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    target: str
    source: str = ""
    part: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Hashed:
    """Stored weights, each hashed when it is first read."""

    def __init__(self, stored: StoredModel):
        self.stored, self.model, self.seen = stored, stored.model, Fingerprint()
        self.dtype = stored.dtype

    @property
    def fingerprint(self) -> str:
        return self.stored.fingerprint

    def tensor(self, name: str) -> Tensor:
        tensor = self.stored.tensor(name)
        if name not in self.seen.names():
            self.seen.add(name, tensor)
        return tensor


class _Rewriter:
    """The state of one streamed application: the pruned weights, and both fingerprints."""

    def __init__(self, stored: StoredModel, plan: Plan, changed: Mapping[str, Tensor]):
        self.stored, self.dense, self.small = stored, _Hashed(stored), Fingerprint()
        self.weights = PrunedWeights(self.dense, plan, changed)
        self.conversions = stored.conversions
        self.parts: dict[str, list[tuple[str, str]]] = {}
        self.where: dict[str, Path] = {}
        self.written: set[int] = set()

    def entries(self, path: Path) -> list[_Entry]:
        """The tensors of an output shard, in the order in which safetensors would write them.

        Tensors the model does not have (old checkpoints store RoPE frequencies) are left out, as
        `from_pretrained` ignores them.
        """
        with safe_open(path, "pt") as shard:
            stored = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            targets = {name: self.conversions.target(name) for name in stored}
            targets = {n: both for n, both in targets.items() if both[0] in self.stored.expected}
            names = self.conversions.stored_names([t for t, part in targets.values() if not part])
            result = [
                entry
                for name, (target, part) in targets.items()
                for entry in self._entries(
                    stored[name], name if part else names[target], name, target, part
                )
            ]
        self.where |= dict.fromkeys(targets, path)
        order = list(DTYPE_NAMES)
        return sorted(result, key=lambda entry: (order.index(entry.dtype), entry.name))

    def _entries(
        self, stored: Any, name: str, source: str, target: str, part: str | None
    ) -> Iterator[_Entry]:
        index = self.weights.owner(target)
        if index is None:
            dtype = self.stored.taken_in(target, DTYPES[stored.get_dtype()])
            yield _Entry(name, dtype, tuple(stored.get_shape()), target, source, part)
            return
        sketch = self.weights.sketch(index)
        if target in sketch:
            made = sketch[target]
            yield _Entry(name, made.dtype, tuple(made.shape), target, source)
        # What the dense layer has not goes beside the first of its tensors that is met.
        if index not in self.written:
            self.written.add(index)
            added = {n: x for n, x in sketch.items() if n not in self.weights.inside[index]}
            names = self.conversions.stored_names(added)
            for new, tensor in added.items():
                yield _Entry(names[new], tensor.dtype, tuple(tensor.shape), new)

    def rewrite(self, entry: _Entry) -> Tensor:
        """The output tensor of an entry, hashed on both sides if it is one of the model's."""
        if entry.part is not None:
            self.parts.setdefault(entry.target, []).append((entry.source, entry.part))
            return self._read(entry.source, entry.target)
        result = self.weights.tensor(entry.target)
        if self.weights.owner(entry.target) is None and entry.target not in self.weights.changed:
            self.small.add_same(entry.target, self.dense.seen)
        else:
            self.small.add(entry.target, result)
        return result

    def finish(self) -> None:
        """Hash what was written in parts or not at all, when all shards are done."""
        for target, parts in self.parts.items():
            joined = self.stored.join(target, parts, partial(self._read, target=target))
            self.dense.seen.add(target, joined)
            self.small.add_same(target, self.dense.seen)
        # Replaced tensors that nothing was made of are hashed too: a plan is for all weights.
        for name in sorted(self.stored.expected - self.dense.seen.names()):
            if name in self.stored.where:
                self.dense.tensor(name)

    def _read(self, source: str, target: str) -> Tensor:
        return self.stored.read(self.where[source], source, target)


def apply_streamed(
    source: str | Path | StoredModel,
    plan: Plan,
    output: str | Path,
    *,
    traits: Mapping[str, str] | None = None,
    changed: Mapping[str, Tensor] | None = None,
    report: dict[str, Any] | None = None,
    force: bool = False,
    progress: bool = False,
) -> None:
    """Write the pruned checkpoint of `source` (directory or Hub ID) to the directory `output`.

    Byte for byte the tensors that `apply` and `save_pretrained` would write, with one tensor in
    memory at a time. `changed` are tensors of the pruned model that were fitted since, by name.
    With a `report` it is written too, with the fingerprint of what is written, and the card is made
    of it; else of `traits`, what the plan's method says of itself. Raises PlanError (also when the
    weights turn out to be other ones than were planned for, in which case nothing is written) or
    CheckpointError.
    """
    stored = source if isinstance(source, StoredModel) else _opened(source, plan)
    rewriter, shards = _Rewriter(stored, plan, changed or {}), stored.shards
    with whole_directory(output, force=force) as partial:
        weight_map, total_bytes = {}, 0
        for shard, entries in _each_shard(shards, rewriter, partial, progress=progress):
            weight_map.update({entry.name: shard for entry in entries})
            total_bytes += sum(entry.num_bytes for entry in entries)
        rewriter.finish()
        _check_complete(rewriter)
        fingerprint = rewriter.dense.seen.value()
        if plan.dense_fingerprint and fingerprint != plan.dense_fingerprint:
            raise PlanError(
                f"the plan was made from other weights ({plan.dense_fingerprint[:12]}) than those "
                f"in {stored.name} ({fingerprint[:12]}): make a new plan for this checkpoint"
            )
        if len(shards) > 1:
            write_index(partial, weight_map, total_bytes)
        _carry(stored.folder, partial)
        _name_tokenizer(stored.folder, partial)
        small = _write_config(partial, stored.model, rewriter)
        if report is not None:
            report["pruned"]["fingerprint"] = rewriter.small.value()
            write_json(partial / REPORT_FILE, report)
        said = report or unmeasured(plan, stored.name, stored.model, small, traits)
        card = model_card(said, Path(output).resolve().name)
        (partial / CARD_FILE).write_text(card, encoding="utf-8")


def _opened(source: str | Path, plan: Plan) -> StoredModel:
    """The checkpoint; a plan of another model is refused before its weights are looked at."""
    check_config(load_config(source), plan)
    return StoredModel(source)


def _each_shard(
    shards: list[Path], rewriter: _Rewriter, output: Path, *, progress: bool
) -> Iterator[tuple[str, list[_Entry]]]:
    """The name of every shard that was written, with what is in it.

    A lone one may be called a part of one, which is found through an index alone.
    """
    sizes = {path: path.stat().st_size / 1e6 for path in shards}
    with Progress("rewriting", sum(sizes.values()), "MB", shown=progress) as bar:
        for path, size in sizes.items():
            entries = rewriter.entries(path)
            written = sum(entry.num_bytes for entry in entries)
            name = path.name if len(shards) > 1 else WEIGHTS_FILE
            with (output / name).open("wb") as file:
                write_header(file, ((x.name, x.dtype, x.shape) for x in entries))
                for entry in entries:
                    tensor = rewriter.rewrite(entry).contiguous()
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                    bar.advance(size * entry.num_bytes / written)
            yield name, entries


def _check_complete(rewriter: _Rewriter) -> None:
    missing = sorted(rewriter.stored.expected - rewriter.dense.seen.names())
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors ({missing[0]}, ...): it is incomplete, "
            "or stored under other names; use the in-memory `rap apply`"
        )


def _carry(source: Path, output: Path) -> None:
    """Copy what is beside the weights: tokenizer, chat templates, licence.

    A folder that has weights is the dense model in another form and is left out whole.
    """
    for path in sorted(source.iterdir()):
        target = output / path.name
        if path.is_dir():
            hidden = path.name.startswith((".", "__"))
            if not hidden and not any(inner.name.endswith(_WEIGHTS) for inner in path.rglob("*")):
                shutil.copytree(path, target, copy_function=shutil.copyfile)
        elif not path.name.endswith(_WEIGHTS) and path.name not in _WRITTEN:
            shutil.copyfile(path, target)


def _name_tokenizer(source: Path, output: Path) -> None:
    """Write the tokenizer that transformers makes of the dense checkpoint over its copy.

    For some families it takes another class than the one that the files name, and does so by the
    model type, which the pruned model has no longer.
    """
    with contextlib.suppress(CheckpointError):  # there is none, or it is made by remote code
        load_tokenizer(source).save_pretrained(output)


def _write_config(output: Path, model: PreTrainedModel, rewriter: _Rewriter) -> Any:
    """Write config, remote code and plan; the pruned model on the meta device."""
    config, plan = pruned_config(model.config, rewriter.weights.plan), rewriter.weights.plan
    plain = not hasattr(config, "rap")
    if not plain:
        config.rap["fingerprint"] = rewriter.small.value()
    with torch.device("meta"):
        small = auto_class(config).from_config(config)
    if not plain:
        custom_object_save(small, output, config=config)
    config.save_pretrained(output)
    if plain:
        write_legacy_rope(output / CONFIG_FILE)
    plan.save(output / PLAN_FILE)
    return small
