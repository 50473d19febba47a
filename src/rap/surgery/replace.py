"""What methods beside pair pruning decide: another attention for every layer, with its weights.

A pair plan is cut from any copy of the dense weights; low-rank factors and rotated bases exist only
as numbers, so a replacement carries the tensors of the new attention themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.files import PLAN_FILE
from ..checkpoint.load import load_config
from ..checkpoint.tensor_file import TensorFile
from ..model.errors import PlanError, UnsupportedModelError
from ..model.fingerprint import fingerprint_model
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    check_dense,
    projection_tensors,
    rotary_module,
)
from ..model.rope import AttentionShape
from ..planning.plan import FILE as PLAN_FORMAT
from ..planning.plan import Plan, PlanHeader
from .apply import assemble, config_with, pruned_state, rap_section, widths_of
from .stream import check_config

FILE = TensorFile(
    "replacement", 1, "a plan of such a method", PlanError, "write one with `rap plan`"
)


@dataclass(frozen=True, eq=False)
class ReplacedLayer:
    """The attention that takes the place of a dense layer's.

    `widths` is its entry in the `rap` section: its sizes, and a `kind` of modeling.KINDS unless it
    is RapAttention itself. `tensors` are all its projections and buffers by name inside the module.
    `cached` is what the cache holds of a token, in elements.
    """

    widths: dict[str, Any]
    tensors: dict[str, Tensor]
    cached: int


@dataclass(frozen=True, eq=False)
class Replacement(PlanHeader):
    """One ReplacedLayer per decoder layer (None: left dense), as Plan is for pair pruning.

    As large as the weights of attention it describes. `shapes`, `retain`, `dense_fingerprint` and
    `method` are those of Plan.
    """

    layers: tuple[ReplacedLayer | None, ...]
    shapes: tuple[AttentionShape | None, ...]
    model_type: str
    retain: float
    dense_fingerprint: str = ""
    method: dict[str, Any] = field(default_factory=dict)

    @property
    def kept_fraction(self) -> float:
        """Cached elements of a token over those of the dense model, all layers counted."""
        kept = dense = 0
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape is not None:
                width = 2 * shape.num_cached_heads * shape.head_dim
                kept += width if layer is None else layer.cached
                dense += width
        return kept / dense

    def section(self) -> dict[str, Any]:
        """The `rap` section of config.json."""
        widths = [layer.widths if layer is not None else None for layer in self.layers]
        return rap_section(self, widths, self.kept_fraction)

    def save(self, path: str | Path) -> None:
        """Write one file: tensors in safetensors format, everything else as JSON in its header."""
        about = {
            "layers": [
                {"widths": layer.widths, "cached": layer.cached} if layer is not None else None
                for layer in self.layers
            ],
            **self.header(),
        }
        FILE.save(path, [layer.tensors if layer else None for layer in self.layers], about)

    @classmethod
    def load(cls, path: str | Path) -> "Replacement":
        """Read what `save` wrote; PlanError if it is something else or of a newer version."""
        return FILE.load(path, cls._of)

    @classmethod
    def _of(
        cls, about: dict[str, Any], tensors: Callable[[int], dict[str, Tensor]]
    ) -> "Replacement":
        layers = tuple(
            None if entry is None else ReplacedLayer(tensors=tensors(index), **entry)
            for index, entry in enumerate(about["layers"])
        )
        return cls(layers, **cls.read_header(about))


def load_plan(path: str | Path) -> Plan | Replacement:
    """The plan of any method at `path`, a file or a pruned checkpoint; PlanError without one."""
    path = Path(path)
    if path.is_dir():
        path /= PLAN_FILE
    replaced = not PLAN_FORMAT.wrote(path) and FILE.wrote(path)
    return Replacement.load(path) if replaced else Plan.load(path)


def replace(model: PreTrainedModel, replacement: Replacement) -> Any:
    """A new Rap<Family>ForCausalLM with the attention of `replacement`; `model` stays untouched.

    Raises PlanError if the replacement was made for another model.
    """
    check_made_for(replacement, model)
    layers = attention_layers(model)
    replaced = [layer for layer in layers if replacement.layers[layer.index] is not None]
    gone = projection_tensors(replaced, attention_spec(model.config))
    dense = model.state_dict()
    state = {name: x.detach().clone() for name, x in dense.items() if name not in gone}
    like = {layer.path: dense[name] for name, (layer, _) in gone.items()}
    for layer in replaced:
        for name, tensor in (replacement.layers[layer.index] or _NOTHING).tensors.items():
            dtype = like[layer.path].dtype if tensor.is_floating_point() else tensor.dtype
            state[f"{layer.path}.{name}"] = tensor.to(like[layer.path].device, dtype, copy=True)
    return assemble(model, config_with(model.config, replacement.section()), state)


def replaced_layers(model: PreTrainedModel, plan: Plan) -> dict[int, ReplacedLayer]:
    """The layers that a pair plan cuts, by index, each as its attention with its weights."""
    layers = attention_layers(model)
    planned = [layer for layer in layers if plan.layers[layer.index] is not None]
    inside = tuple(f"{layer.path}." for layer in planned)
    dense = {name: x for name, x in model.state_dict().items() if name.startswith(inside)}
    state = pruned_state(dense, plan, layers, attention_spec(model.config))
    found = {}
    for layer, path in zip(planned, inside, strict=True):
        kept, shape = plan.layers[layer.index], layer.shape
        widths = widths_of(kept, plan.qk_norm)
        assert kept is not None
        assert shape is not None
        assert widths is not None
        tensors = {n.removeprefix(path): x for n, x in state.items() if n.startswith(path)}
        cached = shape.num_cached_heads * (kept.key_width + kept.value_width)
        found[layer.index] = ReplacedLayer(widths, tensors, cached)
    return found


def check_made_for(replacement: Replacement, model: PreTrainedModel) -> None:
    """Raise PlanError unless the replacement was made for this dense model."""
    check_dense(model)
    replacement.check_model(
        base_model_type(model.config),
        [layer.shape for layer in attention_layers(model)],
        fingerprint_model(model),
    )


def check_teacher(plan: PlanHeader, source: str) -> None:
    """Raise PlanError unless the plan is for models of this shape, by the config of `source`."""
    try:
        check_config(load_config(source), plan)
    except PlanError as error:
        raise PlanError(
            f"{source} is not of the kind that the checkpoint was cut from: name the dense model "
            "that it was"
        ) from error


def check_plain(model: PreTrainedModel, layers: Sequence[AttentionLayer], what: str) -> None:
    """Raise UnsupportedModelError unless attention is what the baselines were written for.

    That is separate q, k, v and o, without norms of queries and keys, gates, sinks, clipped
    states, or layers that rotate at frequencies of their own.
    """
    spec = attention_spec(model.config)
    missing = [
        (spec.fused is not None, "one linear for q, k and v"),
        (spec.gate is not None, "a gate on its output"),
        (any(layer.norm is not None for layer in layers), "norms of queries and keys"),
        (any(name == "s_aux" for name, _ in spec.arguments), "attention sinks"),
        (getattr(model.config, "clip_qkv", None) is not None, "clipped queries and keys"),
        (not hasattr(rotary_module(model), "inv_freq"), "several sets of rotary frequencies"),
        (spec.by_axis, "positions of several axes"),
    ]
    reasons = [reason for present, reason in missing if present]
    if reasons:
        raise UnsupportedModelError(
            f"method {what} is not made for attention with {' and '.join(reasons)}: use method rap"
        )


_NOTHING = ReplacedLayer({}, {}, 0)
