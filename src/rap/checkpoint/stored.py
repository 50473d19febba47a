"""A checkpoint as a model without weights, whose tensors are read by the model's own names.

What is read is not kept: a tensor is in memory for as long as its caller holds it. Checkpoints on
the hub keep older names (gpt_neox's head, the parts of multimodal models) and store the experts of
a layer one by one, where the model holds them joined: `Conversions` goes by transformers' own
rules.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ..model.errors import CheckpointError
from ..model.fingerprint import Fingerprint, tied_names
from ..model.layers import attention_spec, check_dense, text_config
from .load import check_generation_config, check_no_adapter, load_config, without_tensors
from .shards import DTYPES, check_depth, find_shards, same_values


class Conversions:
    """Names in the checkpoint against names in a model, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._state = model, model.state_dict()
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def target(self, stored: str) -> tuple[str, str | None]:
        """The model's name of a stored tensor, and what it matched if it is a part of that one."""
        prefix = self._model.base_model_prefix
        name, part = rename_source_key(
            stored, self._renamings, self._converters, prefix, self._state
        )
        if name not in self._state and stored in self._state:
            return stored, None
        return name, part

    def stored_names(self, names: Collection[str]) -> dict[str, str]:
        """What `save_pretrained` calls tensors that are stored whole, by the model's name.

        A tensor that it would store in parts keeps its name: it is whole in an older checkpoint.
        """
        splitting = [rule.reverse_transform() for rule in self._converters]
        marks = {
            name: torch.empty(0)
            for name in names
            if not any(rule.rename_source_key(name)[1] for rule in splitting)
        }
        stored = revert_weight_conversion(self._model, marks)
        name_of = {id(mark): name for name, mark in stored.items()}
        return {name: name_of[id(marks[name])] if name in marks else name for name in names}

    def join(
        self, target: str, parts: Iterable[tuple[str, str]], read: Callable[[str], Tensor]
    ) -> Tensor | None:
        """The tensor that loading joins of stored `parts`, pairs of a name and what it matched.

        None if their sizes do not fit together.
        """
        converter: Any = None
        for name, matched in sorted(parts, key=lambda part: dot_natural_key(part[0])):
            if converter is None:
                rules = (rule for rule in self._converters if matched in rule.source_patterns)
                converter = copy.deepcopy(next(rules))
            converter.add_tensor(target, name, matched, lambda name=name: read(name))
        try:
            joined = converter.convert(target, model=self._model, config=self._model.config)[target]
        except RuntimeError:
            return None
        return joined[0] if isinstance(joined, list) else joined


# What a hub repository may hold beside safetensors, often as large again, and is not read here.
_OTHER_FORMS = (
    *("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.onnx_data"),
    *("original/*", "consolidated*"),
)

LOW = (torch.float16, torch.bfloat16)


class Weights(Protocol):
    """The weights of a model that are not in memory: `model` has its modules and their names.

    `fingerprint` stands for all of them.
    """

    @property
    def model(self) -> Any: ...
    @property
    def fingerprint(self) -> str: ...

    def tensor(self, name: str) -> Tensor:
        """One of them, by its name in the state dict of the model, in its `dtype`."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The type of one of them."""
        ...


class StoredModel:
    """A dense checkpoint, directory or Hub ID, whose weights stay in their files.

    `model` has everything else of the model: configuration, modules on the meta device, and what no
    checkpoint stores (frequencies of RoPE) computed. `expected` are its names of all tensors that
    must be stored, `shapes` all its tensors' by name. Raises, before weights are read, a RapError
    for a model that is pruned or of no known family, and for files that are damaged or not whole.
    """

    def __init__(self, source: str | Path):
        self.name, config = str(source), load_config(source)
        check_dense(config)
        attention_spec(config)
        self.folder = Path(source)
        if not self.folder.is_dir():
            self.folder = Path(snapshot_download(self.name, ignore_patterns=list(_OTHER_FORMS)))
        check_no_adapter(self.folder)
        check_generation_config(self.folder)
        self.shards = find_shards(self.folder)
        check_depth(self.shards, config)
        self.model = without_weights(config)
        self._find()
        if self._unties():
            untie(config)
            self.model = without_weights(config)
            self._find()

    def tensor(self, name: str) -> Tensor:
        """A tensor by the model's name; experts that the model joins are read and joined."""
        parts = self._parts(name)
        if parts[0][2] is None:
            return self.read(*parts[0][:2], name)
        files = {stored: path for path, stored, _ in parts}
        pairs = [(stored, part) for _, stored, part in parts if part is not None]
        return self.join(name, pairs, lambda stored: self.read(files[stored], stored, name))

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is taken in, by the model's name."""
        path, stored, _ = self._parts(name)[0]
        with safe_open(path, "pt") as shard:
            return self.taken_in(name, DTYPES[shard.get_slice(stored).get_dtype()])

    def taken_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type for a tensor that is stored in `dtype`, by the model's name.

        It is that of the loaded model, which transformers makes of one type, less what the family
        keeps in float32: what is made of a tensor rounds as it would there.
        """
        if not dtype.is_floating_point:
            return dtype
        return torch.float32 if any(x.search(name) for x in self._exact) else self._loaded

    def join(self, name: str, parts: list[tuple[str, str]], read: Any) -> Tensor:
        """What the model joins of stored `parts`, as `Conversions.join`.

        Raises CheckpointError if they do not make up the whole.
        """
        joined = self.conversions.join(name, parts, read)
        if joined is None or joined.shape != self.shapes[name]:
            raise CheckpointError(
                f"{name} cannot be joined from {len(parts)} stored tensors: the checkpoint "
                "is incomplete, download it again"
            )
        return joined

    def read(self, path: Path, stored: str, name: str) -> Tensor:
        """A tensor by its file, its name there and the model's, or a part of one."""
        # Opened for each tensor: a shard that stays open keeps every page read of it mapped.
        with safe_open(path, "pt") as shard:
            tensor: Tensor = shard.get_tensor(stored)
        return tensor.to(self.taken_in(name, tensor.dtype))

    @cached_property
    def fingerprint(self) -> str:
        """That of the loaded model, from one reading of all weights, a tensor at a time."""
        result = Fingerprint()
        for name in sorted(self.expected):
            result.add(name, self.tensor(name))
        return result.value()

    def _find(self) -> None:
        """Where every tensor of the model is: file, name there, what it matched if it is a part."""
        self.conversions, state = Conversions(self.model), self.model.state_dict()
        self.shapes = {name: tensor.shape for name, tensor in state.items()}
        self.expected = state.keys() - tied_names(self.model)
        self._loaded = loaded_dtype(self.model.config, self.shards[0])
        self._exact = kept_in_float32(self.model, self._loaded)
        self.where: dict[str, list[tuple[Path, str, str | None]]] = {}
        for path in self.shards:
            with safe_open(path, "pt") as shard:
                for stored in shard.keys():  # noqa: SIM118
                    name, part = self.conversions.target(stored)
                    self.where.setdefault(name, []).append((path, stored, part))
                    if name in self.expected:
                        kept = shard.get_slice(stored)
                        _check_type(stored, kept.get_dtype())
                        if part is None:
                            self._check_shape(stored, kept.get_shape(), name)

    def _check_shape(self, stored: str, found: list[int], name: str) -> None:
        if list(self.shapes[name]) != found:
            raise CheckpointError(
                f"{stored} in {self.name} is stored as {found}, its config describes "
                f"{list(self.shapes[name])}: the checkpoint was changed or mixed with another one"
            )

    def _parts(self, name: str) -> list[tuple[Path, str, str | None]]:
        found = self.where.get(name) or self.where.get(self._tied.get(name, ""))
        if not found:
            raise CheckpointError(
                f"the checkpoint {self.name} lacks {name}: it is incomplete, or stored under other "
                "names; download it again, or compress it without --stream"
            )
        return found

    @property
    def _tied(self) -> dict[str, str]:
        return dict(self.model.all_tied_weights_keys)

    def _unties(self) -> bool:
        """Whether weights that the config says are tied are both stored, and differ."""
        pairs = [(a, b) for a, b in self._tied.items() if a in self.where and b in self.where]
        return not all(same_values(self.where[a][-1][:2], self.where[b][-1][:2]) for a, b in pairs)


def loaded_dtype(config: PreTrainedConfig, first_shard: Path) -> torch.dtype:
    """What `from_pretrained(dtype="auto")` makes of a checkpoint: its config's, or the first's."""
    if config.dtype is not None:
        return getattr(torch, str(config.dtype).removeprefix("torch."))
    with safe_open(first_shard, "pt") as shard:
        stored = (DTYPES.get(shard.get_slice(name).get_dtype()) for name in shard.keys())  # noqa: SIM118
        return next((x for x in stored if x and x.is_floating_point), torch.float32)


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns of names that transformers leaves in float32 where it loads a model in `dtype`."""
    return [
        re.compile(pattern.replace("*", ".*"))
        for name, dtypes in (("", LOW[:1]), ("_strict", LOW))
        if dtype in dtypes
        for pattern in getattr(model, f"_keep_in_fp32_modules{name}", None) or ()
    ]


def _check_type(stored: str, found: str) -> None:
    if found not in DTYPES:
        raise CheckpointError(
            f"{stored} is stored as {found}: streamed surgery takes float weights, compress the "
            "unquantized checkpoint"
        )


def untie(config: PreTrainedConfig) -> None:
    """Record in a config that the head is a separate weight.

    transformers keeps a head that is stored and differs though the config says tied. Engines, and
    `tie_weights`, go by the config alone and would lose it.
    """
    for part in (config, text_config(config)):
        part.tie_word_embeddings = False


@torch.no_grad()
def without_weights(config: PreTrainedConfig) -> Any:
    """The model of a config in evaluation mode, on the meta device but for what is computed."""
    model = without_tensors(config)
    owners: dict[nn.Module, PreTrainedModel] = {}
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel):  # the innermost one, which comes last, decides
            owners |= dict.fromkeys(owner.modules(), owner)
    for module, owner in owners.items():
        _compute_buffers(owner, module)
    for owner in set(owners.values()):  # some families' models fill in buffers of their layers
        owner._init_weights(owner)
    return model.eval()


def _compute_buffers(owner: Any, module: nn.Module) -> None:
    """Buffers that no checkpoint has, as transformers computes them when it loads one."""
    computed = module._non_persistent_buffers_set
    for name in computed:
        buffer = getattr(module, name)
        if isinstance(buffer, Tensor) and buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    if computed:
        owner._init_weights(module)
