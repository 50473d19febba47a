"""The contract of a kind of attention: the plan of a layer, and the tensors made from it.

A kind is one file that ends in its row, a `Kind`: the type of its entry in config.json
(`cache_layout.Entry`), its module, what a plan says of a layer (`LayerPlan`) and, for every engine
that does not run it, one sentence why.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..cache_layout import CacheLayout, Entry
from ..errors import PlanError
from ..layers import AttentionLayer, projection_tensors
from ..modeling import KINDS, KindOfAttention
from ..rope import AttentionShape
from ..specs import AttentionSpec

ENGINES = ("vllm", "plain")


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """One dense layer's attention, the source of the pruned layer's tensors.

    `tensors` are all its parameters and buffers by their names inside the module, `norm_mode` how
    the norms of queries and keys are to be kept (rap.model.norms).
    """

    layer: AttentionLayer
    spec: AttentionSpec
    tensors: Mapping[str, Tensor]
    norm_mode: str = "constant"

    @property
    def shape(self) -> AttentionShape:
        """The layer's shape, which has attention."""
        assert self.layer.shape is not None
        return self.layer.shape

    def projections(self) -> dict[str, str]:
        """The projection of every tensor that pruning changes, as `projection_tensors` has it."""
        inside = len(self.layer.path) + 1
        found = projection_tensors([self.layer], self.spec)
        return {name[inside:]: projection for name, (_, projection) in found.items()}

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """New tensors by name: `change(projection, tensor)` where pruning changes it, or a copy."""
        which = self.projections()
        return {
            name: change(which[name], x.detach()) if name in which else x.detach().clone()
            for name, x in self.tensors.items()
        }


class LayerPlan(ABC):
    """The plan of one layer: enough to make its attention from the dense layer.

    `form` is its name in plan files. Plans are compared by their records and tensors.
    """

    form: ClassVar[str]

    @abstractmethod
    def entry(self, norm_mode: str = "constant") -> Entry:
        """The layer's entry in config.json."""

    @abstractmethod
    def check(self, layer: int, shape: AttentionShape) -> None:
        """Raise PlanError, naming the layer, if it cannot be of a dense layer of that shape."""

    @abstractmethod
    def convert(self, dense: DenseAttention) -> dict[str, Tensor]:
        """The tensors of the layer's attention by name inside the module, new ones.

        On the devices of the dense ones, the meta device included: names, types and shapes are
        known without any weight.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a plan file keeps as tensors, by name."""

    def record(self) -> dict[str, Any]:
        """What it keeps as JSON."""
        return {}

    @classmethod
    @abstractmethod
    def read(cls, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Self:
        """The plan that wrote `record` and `tensors`; PlanError if none did."""

    @classmethod
    def family_config(
        cls,
        config: PreTrainedConfig,
        layers: Sequence["LayerPlan | None"],
        shapes: Sequence[AttentionShape | None],
    ) -> Any:
        """The dense family's own config for a model with these layers, None if it has none.

        Called for every kind among the layers. Raises UnsupportedModelError if it describes only
        some of them.
        """
        return None

    def about(self, shape: AttentionShape) -> str:
        """One line for people on what the sizes do not show; "" if they show everything."""
        return ""

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """What the layer caches."""
        return self.entry().cache(shape)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, LayerPlan)
        mine, theirs = self.tensors(), other.tensors()
        return (
            self.record() == other.record()
            and mine.keys() == theirs.keys()
            and all(torch.equal(mine[name], theirs[name]) for name in mine)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class WeightsPlan(LayerPlan):
    """A layer whose new attention exists only as numbers: low-rank factors, rotated bases.

    `weights` are its projections and buffers by name inside the module, as large as the attention
    that they describe; all else of the dense attention stays.
    """

    form: ClassVar[str] = "weights"

    layer_entry: Entry
    weights: Mapping[str, Tensor]

    def entry(self, norm_mode: str = "constant") -> Entry:
        """As it was given."""
        return self.layer_entry

    def check(self, layer: int, shape: AttentionShape) -> None:
        """As of every plan: PlanError for an entry that no such layer can have."""
        if not self.layer_entry.fits(shape):
            fields = self.layer_entry.fields()
            raise PlanError(f"layer {layer}: {fields} cannot be of a layer of {shape}")

    def convert(self, dense: DenseAttention) -> dict[str, Tensor]:
        """The weights, in the precision of the dense ones; norms stay those of the dense layer."""
        replaced = {name for name, which in dense.projections().items() if "norm" not in which}
        kept = {n: x.detach().clone() for n, x in dense.tensors.items() if n not in replaced}
        like = next(x for n, x in dense.tensors.items() if n in replaced)
        made = {
            name: x.to(like.device, like.dtype if x.is_floating_point() else x.dtype, copy=True)
            for name, x in self.weights.items()
        }
        return kept | made

    def tensors(self) -> dict[str, Tensor]:
        """The weights."""
        return dict(self.weights)

    def record(self) -> dict[str, Any]:
        """The entry."""
        return {"entry": {"kind": self.layer_entry.kind, **self.layer_entry.fields()}}

    @classmethod
    def read(cls, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Self:
        """As of every plan; PlanError for an entry of a kind that this release does not know."""
        fields = record["entry"]
        if fields["kind"] not in KINDS:
            raise PlanError(
                f"the plan has attention of kind {fields['kind']!r}, which this release does not "
                "know: use the release that made it"
            )
        return cls(KINDS[fields["kind"]].entry.read(fields), tensors)


@dataclass(frozen=True)
class Kind(KindOfAttention):
    """A row of the registry: what building a model needs of a kind, and its plan class.

    `unsupported` maps each of ENGINES that does not run the kind to one sentence that says why.
    """

    plan: type[LayerPlan] = WeightsPlan

    def __post_init__(self) -> None:
        unknown = sorted(set(self.unsupported) - set(ENGINES))
        assert not unknown, f"{self.entry.kind}: unknown engines {unknown}"
