"""The decision as data: what every layer keeps, checked, saved and loaded without pickle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.files import PLAN_FILE
from ..checkpoint.tensor_file import TensorFile
from ..model.cache_layout import CacheLayout, dense_layout
from ..model.errors import PlanError
from ..model.kinds import plan_forms
from ..model.kinds.base import LayerPlan as LayerPlan
from ..model.kinds.base import WeightsPlan
from ..model.kinds.heads import HeadsPlan
from ..model.kinds.pairs import PairPlan as PairPlan
from ..model.rope import AttentionShape, HeadGeometry
from ..model.specs import NORM_MODES
from .kv_sharing import check_reader

REMEDY = "make a new plan for this model"
FILE = TensorFile("plan", 2, "a plan", PlanError, "write one with `rap plan`")
# What methods with attention of their own wrote before plans had layers of any kind.
REPLACEMENT = TensorFile("replacement", 1, "a plan", PlanError, FILE.remedy)


@dataclass(frozen=True, eq=False)
class Plan:
    """One LayerPlan per decoder layer (None: left dense), and the model and method it came from.

    `retain` is what was asked for; `kept_fraction` what this plan keeps. `shapes` describes the
    dense layers, `dense_fingerprint` their weights. `qk_norm` is a mode of rap.model.norms.
    `spared` layers were left dense because a sliding window bounds their cache: neither `retain`
    nor `kept_fraction` counts them.
    """

    layers: tuple[LayerPlan | None, ...]
    shapes: tuple[AttentionShape | None, ...]
    model_type: str
    retain: float
    dense_fingerprint: str = ""
    method: dict[str, Any] = field(default_factory=dict)
    qk_norm: str = "constant"
    spared: tuple[int, ...] = ()

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
    def caches(self) -> list[CacheLayout | None]:
        """What every layer caches; None of a layer without attention."""
        return [
            None if shape is None else dense_layout(shape) if layer is None else layer.cache(shape)
            for layer, shape in zip(self.layers, self.shapes, strict=True)
        ]

    @property
    def pairs(self) -> tuple[PairPlan | None, ...]:
        """The layers of a plan of pairs; PlanError for one with layers of another kind."""
        found: list[PairPlan | None] = []
        for index, layer in enumerate(self.layers):
            if layer is not None and not isinstance(layer, PairPlan):
                raise PlanError(
                    f"layer {index} has attention of another kind: plan with a pair method"
                )
            found.append(layer)
        return tuple(found)

    @property
    def kept_fraction(self) -> float:
        """Cached elements of a token over those of the dense model, in all but spared layers."""
        counted = [
            (cache.elements, dense_layout(shape).elements)
            for index, (cache, shape) in enumerate(zip(self.caches, self.shapes, strict=True))
            if cache is not None and shape is not None and index not in self.spared
        ]
        return sum(kept for kept, _ in counted) / sum(dense for _, dense in counted)

    def about(self) -> list[str]:
        """The entries of `LayerPlan.about`, one line for all layers with the same entry."""
        said: dict[str, list[int]] = {}
        for index, (layer, shape) in enumerate(zip(self.layers, self.shapes, strict=True)):
            line = layer.about(shape) if layer is not None and shape is not None else ""
            if line:
                said.setdefault(line, []).append(index)
        if self.spared:
            said["dense, because a sliding window bounds their cache"] = list(self.spared)
        return [f"layers {ranges(places)}: {line}" for line, places in said.items()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

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

    def save(self, path: str | Path) -> None:
        """Write one file: tensors in safetensors format, everything else as JSON in its header."""
        about = {
            "layers": [layer and {"form": layer.form, **layer.record()} for layer in self.layers],
            "qk_norm": self.qk_norm,
            "shapes": write_shapes(self.shapes),
            "model_type": self.model_type,
            "retain": self.retain,
            "dense_fingerprint": self.dense_fingerprint,
            "method": self.method,
        }
        if self.spared:
            about["spared"] = list(self.spared)
        FILE.save(path, [layer.tensors() if layer else None for layer in self.layers], about)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read the plan at `path`, a file that `save` wrote or a pruned checkpoint.

        PlanError if it is no plan, of a newer version, or of a kind that this release does not
        know.
        """
        path = Path(path)
        if path.is_dir():
            path /= PLAN_FILE
        if not FILE.wrote(path) and REPLACEMENT.wrote(path):
            return REPLACEMENT.load(path, _of_replacement)
        return FILE.load(path, _of_plan)


Tensors = Callable[[int], dict[str, Tensor]]


def _of_plan(about: dict[str, Any], tensors: Tensors) -> Plan:
    records = about["layers"] if about["version"] > 1 else _records_of_first_version(about)
    return _plan(about, [record and _layer(record, tensors(i)) for i, record in enumerate(records)])


def _records_of_first_version(about: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Of files that had pairs alone."""
    planned = set(about["planned"])
    return [{"form": PairPlan.form} if i in planned else None for i in range(about["num_layers"])]


def _layer(record: Mapping[str, Any], tensors: dict[str, Tensor]) -> LayerPlan:
    forms = plan_forms()
    if record["form"] not in forms:
        raise PlanError(
            f"the plan has a layer of form {record['form']!r}, which this release does not know: "
            "use the release that made it"
        )
    return forms[record["form"]].read(record, tensors)


def _of_replacement(about: dict[str, Any], tensors: Tensors) -> Plan:
    layers: list[LayerPlan | None] = []
    for index, layer in enumerate(about["layers"]):
        if layer is None:
            layers.append(None)
        elif "kept_heads" in layer["widths"]:
            layers.append(HeadsPlan.read(layer["widths"], {}))
        else:
            entry = {"kind": PairPlan.form, **layer["widths"]}
            layers.append(WeightsPlan.read({"entry": entry}, tensors(index)))
    return _plan(about, layers)


def _plan(about: dict[str, Any], layers: Sequence[LayerPlan | None]) -> Plan:
    return Plan(
        layers=tuple(layers),
        shapes=read_shapes(about["shapes"]),
        model_type=about["model_type"],
        retain=about["retain"],
        dense_fingerprint=about["dense_fingerprint"],
        method=about["method"],
        qk_norm=about.get("qk_norm", "constant"),
        spared=tuple(about.get("spared", ())),
    )


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


def ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2 5"."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
