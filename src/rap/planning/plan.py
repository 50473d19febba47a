"""The decision as data: what every layer keeps, checked, saved and loaded without pickle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.tensor_file import TensorFile
from ..model.errors import PlanError
from ..model.rope import AttentionShape, HeadGeometry
from ..model.specs import NORM_MODES
from .layer_plan import LayerPlan as LayerPlan
from .sharing import check_reader

REMEDY = "make a new plan for this model"
FILE = TensorFile("plan", 1, "a plan", PlanError, "write one with `rap plan`")


class PlanHeader:
    """What a plan of any method says beside its layers: the model it was made for, and by what."""

    shapes: tuple[AttentionShape | None, ...]
    model_type: str
    retain: float
    dense_fingerprint: str
    method: dict[str, Any]

    def header(self) -> dict[str, Any]:
        """These, as JSON-able data for a file."""
        return {
            "shapes": write_shapes(self.shapes),
            "model_type": self.model_type,
            "retain": self.retain,
            "dense_fingerprint": self.dense_fingerprint,
            "method": self.method,
        }

    @staticmethod
    def read_header(about: Mapping[str, Any]) -> dict[str, Any]:
        """What `header` wrote, as the fields of a plan."""
        kept = ("model_type", "retain", "dense_fingerprint", "method")
        return {"shapes": read_shapes(about["shapes"]), **{key: about[key] for key in kept}}

    def check_kind(self, model_type: str, num_layers: int) -> None:
        """Raise PlanError unless the plan is for models of this type with so many layers."""
        if model_type != self.model_type:
            raise PlanError(
                f"the plan is for a {self.model_type} model, this one is {model_type}: {REMEDY}"
            )
        if num_layers != len(self.shapes):
            raise PlanError(
                f"the plan has {len(self.shapes)} layers, the model {num_layers}: {REMEDY}"
            )

    def check_model(
        self,
        model_type: str,
        shapes: Sequence[AttentionShape | None],
        fingerprint: str | None = None,
    ) -> None:
        """Raise PlanError unless the plan was made for a model of these shapes and weights."""
        self.check_kind(model_type, len(shapes))
        for index, (mine, theirs) in enumerate(zip(self.shapes, shapes, strict=True)):
            if mine != theirs:
                what = f"planned for {mine}, the model has {theirs}"
                raise PlanError(f"layer {index} differs: {what}: {REMEDY}")
        if fingerprint and self.dense_fingerprint and fingerprint != self.dense_fingerprint:
            raise PlanError(
                f"the plan was made from other weights ({self.dense_fingerprint[:12]}) than this "
                f"model's ({fingerprint[:12]}): {REMEDY}"
            )


@dataclass(frozen=True, eq=False)
class Plan(PlanHeader):
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
            if shape is not None and shape.source is not None:
                check_reader(index, layer, shape.source, self.layers[shape.source])

    @property
    def kept_fraction(self) -> float:
        """Kept KV channels over dense KV channels, all planned or eligible layers counted."""
        kept = dense = 0
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape is not None:
                width = 2 * shape.head_dim
                kept += shape.num_cached_heads * (
                    layer.key_width + layer.value_width if layer else width
                )
                dense += shape.num_cached_heads * width
        return kept / dense

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: str | Path) -> None:
        """Write one file: tensors in safetensors format, everything else as JSON in its header."""
        layers = [layer.tensors() if layer is not None else None for layer in self.layers]
        about = {
            "num_layers": len(self.layers),
            "planned": [index for index, layer in enumerate(self.layers) if layer is not None],
            "qk_norm": self.qk_norm,
            **self.header(),
        }
        FILE.save(path, layers, about)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan written by `save`; PlanError if it is no plan or of a newer version."""
        return FILE.load(path, cls._of)

    @classmethod
    def _of(cls, about: dict[str, Any], tensors: Callable[[int], dict[str, Tensor]]) -> "Plan":
        layers: list[LayerPlan | None] = [None] * about["num_layers"]
        for index in about["planned"]:
            layers[index] = LayerPlan(**tensors(index))
        mode = about.get("qk_norm", "constant")
        return cls(layers=tuple(layers), qk_norm=mode, **cls.read_header(about))


def write_shapes(shapes: Sequence[AttentionShape | None]) -> list[dict[str, Any] | None]:
    """Shapes as JSON-able data; a layer with its own keys and values names no source."""
    entries = [asdict(shape) if shape else None for shape in shapes]
    return [e and {k: x for k, x in e.items() if (k, x) != ("source", None)} for e in entries]


def read_shapes(
    entries: Sequence[dict[str, Any] | None],
) -> tuple[AttentionShape | None, ...]:
    """What `write_shapes` wrote into a file."""
    return tuple(
        AttentionShape(**{**entry, "geometry": HeadGeometry(**entry["geometry"])})
        if entry
        else None
        for entry in entries
    )
