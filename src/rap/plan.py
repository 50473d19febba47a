"""The decision as data: what every layer keeps, checked, saved and loaded without pickle."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import PlanError
from .layer_plan import LayerPlan as LayerPlan
from .rope import AttentionShape, HeadGeometry
from .specs import NORM_MODES

FORMAT = "rap-plan"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """One LayerPlan per decoder layer (None: left dense), and the model and method it came from.

    `retain` is what was asked for; `kept_fraction` what this plan keeps. `shapes` describes the
    dense layers, `dense_fingerprint` their weights. `qk_norm` is a mode of module `norms`.
    """

    layers: tuple[LayerPlan | None, ...]
    shapes: tuple[AttentionShape | None, ...]
    model_type: str
    retain: float
    dense_fingerprint: str = ""
    method: dict[str, Any] = field(default_factory=dict)
    qk_norm: str = "constant"

    def __post_init__(self) -> None:
        if self.qk_norm not in NORM_MODES:
            raise PlanError(f"unknown QK-norm mode {self.qk_norm!r}: use one of {NORM_MODES}")
        if len(self.layers) != len(self.shapes):
            raise PlanError(f"{len(self.layers)} layers planned for {len(self.shapes)} shapes")
        for index, (layer, shape) in enumerate(zip(self.layers, self.shapes, strict=True)):
            if layer is not None:
                if shape is None:
                    raise PlanError(f"layer {index} has no attention to prune")
                layer.check(index, shape)

    @property
    def kept_fraction(self) -> float:
        """Kept KV channels over dense KV channels, all planned or eligible layers counted."""
        kept = dense = 0
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape is not None:
                width = 2 * shape.head_dim
                kept += shape.num_kv_heads * (
                    layer.key_width + layer.value_width if layer else width
                )
                dense += shape.num_kv_heads * width
        return kept / dense

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def check_model(
        self,
        model_type: str,
        shapes: Sequence[AttentionShape | None],
        fingerprint: str | None = None,
    ) -> None:
        """Raise PlanError unless the plan was made for a model of these shapes and weights."""
        if model_type != self.model_type:
            raise PlanError(f"the plan is for a {self.model_type} model, this one is {model_type}")
        if len(shapes) != len(self.shapes):
            raise PlanError(f"the plan has {len(self.shapes)} layers, the model {len(shapes)}")
        for index, (mine, theirs) in enumerate(zip(self.shapes, shapes, strict=True)):
            if mine != theirs:
                what = f"planned for {mine}, the model has {theirs}"
                raise PlanError(f"layer {index} differs: {what}")
        if fingerprint and self.dense_fingerprint and fingerprint != self.dense_fingerprint:
            raise PlanError(
                f"the plan was made from other weights ({self.dense_fingerprint[:12]}) than this "
                f"model's ({fingerprint[:12]}): make a new plan for this model"
            )

    def save(self, path: str | Path) -> None:
        """Write one file: tensors in safetensors format, everything else as JSON in its header."""
        tensors = {
            # A copy: one tensor may be both the query's and the key's mixing.
            f"layers.{index}.{name}": tensor.clone(memory_format=torch.contiguous_format)
            for index, layer in enumerate(self.layers)
            if layer is not None
            for name, tensor in layer.tensors().items()
        }
        about = {
            "version": VERSION,
            "num_layers": len(self.layers),
            "planned": [index for index, layer in enumerate(self.layers) if layer is not None],
            "shapes": [asdict(shape) if shape else None for shape in self.shapes],
            "model_type": self.model_type,
            "retain": self.retain,
            "dense_fingerprint": self.dense_fingerprint,
            "method": self.method,
            "qk_norm": self.qk_norm,
        }
        save_file(tensors, path, metadata={"format": FORMAT, "plan": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan written by `save`; PlanError if it is no plan or of a newer version."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise PlanError(f"cannot read a plan from {path}: {error}") from error
        if header.get("format") != FORMAT:
            raise PlanError(f"{path} is not a plan file: write one with `rap plan`")
        try:
            about = json.loads(header["plan"])
            version = about["version"]
            if version <= VERSION:
                return cls._of(about, tensors)
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise PlanError(f"{path} is damaged ({error}): make the plan again") from error
        known = f"this release reads up to {VERSION}: upgrade the package"
        raise PlanError(f"{path} has plan version {version}, {known}")

    @classmethod
    def _of(cls, about: dict[str, Any], tensors: dict[str, Tensor]) -> "Plan":
        names = [item.name for item in fields(LayerPlan)]
        layers: list[LayerPlan | None] = [None] * about["num_layers"]
        for index in about["planned"]:
            named = {name: tensors.get(f"layers.{index}.{name}") for name in names}
            layers[index] = LayerPlan(**named)  # type: ignore[arg-type]
        shapes = tuple(_shape_of(entry) for entry in about["shapes"])
        kept = ("model_type", "retain", "dense_fingerprint", "method")
        header = {key: about[key] for key in kept} | {"qk_norm": about.get("qk_norm", "constant")}
        return cls(layers=tuple(layers), shapes=shapes, **header)


def _shape_of(entry: dict[str, Any] | None) -> AttentionShape | None:
    if entry is None:
        return None
    return AttentionShape(**{**entry, "geometry": HeadGeometry(**entry["geometry"])})
