"""How the tensors of a stored checkpoint become those of its model, by transformers' own rules.

Checkpoints on the hub keep older names (gpt_neox's head, the parts of multimodal models) and store
the experts of a layer one by one, where the model holds them joined.
"""

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


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
