"""Step 3 without the model: a checkpoint rewritten tensor by tensor as a plan says.

The output's layout is known from the plan before anything is read, so each shard's header is
written first and every tensor follows as soon as it is cut: one tensor is in memory at a time.
Experts that the model joins are copied one by one, and joined once more for the fingerprint alone.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..calibration.progress import Progress
from ..checkpoint.card import CARD_FILE, model_card, unmeasured
from ..checkpoint.files import PLAN_FILE, REPORT_FILE, whole_directory, write_json
from ..checkpoint.load import load_config
from ..checkpoint.shards import DTYPE_NAMES, DTYPES, write_header, write_index
from ..checkpoint.stored import StoredModel, without_weights
from ..model.errors import CheckpointError, PlanError
from ..model.fingerprint import Fingerprint
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    check_dense,
    projection_tensors,
    text_config,
)
from ..model.modeling import auto_class
from ..planning.plan import Plan, PlanHeader
from .apply import added_tensors, cut_layer, pruned_config

_WEIGHTS = (
    *(".safetensors", ".bin", ".pth", ".pt", ".gguf", ".index.json"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data"),
)
_WRITTEN = ("config.json", CARD_FILE)


@dataclass(frozen=True)
class _Entry:
    """One tensor of an output shard: where it comes from and its shape after the cut.

    `name` is the output's, `source` the dense checkpoint's, `target` the model's; `part` is set for
    one of several tensors that the model joins.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer: AttentionLayer | None = None
    role: str = ""
    value: Tensor | None = None
    source: str = ""
    target: str = ""
    part: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Rewriter:
    """The state of one streamed application: the plan, names to cut, and both fingerprints."""

    def __init__(self, stored: StoredModel, plan: Plan, changed: Mapping[str, Tensor]):
        self.stored, self.plan, self.changed = stored, plan, changed
        self.spec = attention_spec(stored.model.config)
        self.layers = attention_layers(stored.model)
        shapes = [layer.shape for layer in self.layers]
        plan.check_model(base_model_type(stored.model.config), shapes)
        self.cuts = projection_tensors(self.layers, self.spec)
        self.expected, self.conversions = stored.expected, stored.conversions
        self.added = added_tensors(plan, self.layers)
        self.dense, self.small = Fingerprint(), Fingerprint()
        self.parts: dict[str, list[tuple[str, str]]] = {}
        self.where: dict[str, Path] = {}

    def entries(self, path: Path) -> list[_Entry]:
        """The tensors of an output shard, in the order in which safetensors would write them.

        Tensors the model does not have (old checkpoints store RoPE frequencies) are left out, as
        `from_pretrained` ignores them.
        """
        with safe_open(path, "pt") as shard:
            stored = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            targets = {name: self.conversions.target(name) for name in stored}
            targets = {name: both for name, both in targets.items() if both[0] in self.expected}
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
        dtype = self.stored.taken_in(target, DTYPES[stored.get_dtype()])
        shape = tuple(stored.get_shape())
        layer, role = self.cuts.get(target, (None, ""))
        if layer is None or self.plan.layers[layer.index] is None:
            yield _Entry(name, dtype, shape, source=source, target=target, part=part)
            return
        small = tuple(self._cut(torch.empty(shape, dtype=dtype, device="meta"), layer, role).shape)
        yield _Entry(name, dtype, small, layer, role, source=source, target=target)
        first = "k" if layer.shape is not None and layer.shape.source is None else "q"
        if first in re.split("[+=]", role) and target.endswith(".weight"):
            added = {f"{layer.path}.{name}": x for name, x in self.added[layer.path].items()}
            names = self.conversions.stored_names(added)
            for target, value in added.items():
                entry = _Entry(names[target], value.dtype, tuple(value.shape), value=value)
                yield replace(entry, target=target)

    def rewrite(self, entry: _Entry) -> Tensor:
        """The output tensor of an entry, hashed on both sides if it is one of the model's."""
        if entry.value is not None:
            self.small.add(entry.target, entry.value)
            return entry.value
        dense = self._read(entry.source, entry.target)
        if entry.part is not None:
            self.parts.setdefault(entry.target, []).append((entry.source, entry.part))
            return dense
        self.dense.add(entry.target, dense)
        if entry.target in self.changed:
            result = self.changed[entry.target].to(entry.dtype)
        elif entry.layer is None:
            self.small.add_same(entry.target, self.dense)
            return dense
        else:
            result = self._cut(dense, entry.layer, entry.role)
        self.small.add(entry.target, result)
        return result

    def join(self) -> None:
        """Hash the tensors that the model joins from several stored ones, when all are written."""
        for target, parts in self.parts.items():
            joined = self.stored.join(target, parts, partial(self._read, target=target))
            self.dense.add(target, joined)
            self.small.add_same(target, self.dense)

    def _read(self, source: str, target: str) -> Tensor:
        return self.stored.read(self.where[source], source, target)

    def _cut(self, tensor: Tensor, layer: AttentionLayer, role: str) -> Tensor:
        return cut_layer(role, tensor, layer, self.plan, self.spec)


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
    """Write the pruned checkpoint of `source` (directory or hub name) to the directory `output`.

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
            weight_map.update({entry.name: shard.name for entry in entries})
            total_bytes += sum(entry.num_bytes for entry in entries)
        rewriter.join()
        _check_complete(rewriter)
        fingerprint = rewriter.dense.value()
        if plan.dense_fingerprint and fingerprint != plan.dense_fingerprint:
            raise PlanError(
                f"the plan was made from other weights ({plan.dense_fingerprint[:12]}) than those "
                f"in {stored.name} ({fingerprint[:12]}): make a new plan for this checkpoint"
            )
        if len(shards) > 1:
            write_index(partial, weight_map, total_bytes)
        _carry(stored.folder, partial)
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


def check_config(config: PreTrainedConfig, plan: PlanHeader) -> None:
    """Raise PlanError unless a plan was made for models of this config; no weight is read.

    Raises CheckpointError for a model that is pruned or quantized, UnsupportedModelError for a
    family that is not known.
    """
    check_dense(config)
    attention_spec(config)
    # Before layers are built, which a wrong number of them makes long.
    plan.check_kind(base_model_type(config), text_config(config).num_hidden_layers)
    shapes = [layer.shape for layer in attention_layers(without_weights(config))]
    plan.check_model(base_model_type(config), shapes)


def _each_shard(
    shards: list[Path], rewriter: _Rewriter, output: Path, *, progress: bool
) -> Iterator[tuple[Path, list[_Entry]]]:
    sizes = {path: path.stat().st_size / 1e6 for path in shards}
    with Progress("rewriting", sum(sizes.values()), "MB", shown=progress) as bar:
        for path, size in sizes.items():
            entries = rewriter.entries(path)
            written = sum(entry.num_bytes for entry in entries)
            with (output / path.name).open("wb") as file:
                write_header(file, ((x.name, x.dtype, x.shape) for x in entries))
                for entry in entries:
                    tensor = rewriter.rewrite(entry).contiguous()
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                    bar.advance(size * entry.num_bytes / written)
            yield path, entries


def _check_complete(rewriter: _Rewriter) -> None:
    missing = sorted(rewriter.expected - rewriter.dense.names())
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


def _write_config(output: Path, model: PreTrainedModel, rewriter: _Rewriter) -> Any:
    """Write config, remote code and plan; the pruned model on the meta device."""
    config = pruned_config(model.config, rewriter.plan)
    config.rap["fingerprint"] = rewriter.small.value()
    with torch.device("meta"):
        small = auto_class(config).from_config(config)
    custom_object_save(small, output, config=config)
    config.save_pretrained(output)
    rewriter.plan.save(output / PLAN_FILE)
    return small
