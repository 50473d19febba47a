"""The generated Rap<Family>Config and Rap<Family>ForCausalLM classes.

Every class is derived from the family's own and inherits generation, gradient checkpointing and
output capture (not tensor parallelism, which would split no frequencies). The `rap` section of the
config holds the widths, the frequency index of every layer is a persistent buffer. This file, with
its siblings, is copied into checkpoints: they may import torch, transformers and each other.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from .attention import ATTENTION, RapAttention
from .cache_layout import Entry, FactoredEntry, PairEntry
from .errors import CheckpointError, UnsupportedModelError
from .factored import FactoredAttention
from .families import FAMILIES, WRAPPERS
from .fingerprint import fingerprint_saved
from .kv_sharing import SharingAttention, plain_attention
from .layers import (
    PREFIX,
    SOFT_CAP,
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    layer_rotary,
    rotary_module,
    text_config,
)
from .refusals import NO_BATCHING
from .specs import NORM_MODES, AttentionSpec, QKNorm

# Version 1 stored the weight of a cut norm with the family's offset added, and so rounded.
CONFIG_VERSION = 2


@dataclass(frozen=True)
class KindOfAttention:
    """What building a model needs of one kind: the type of its entry, and its module.

    `attention` is None for pairs, whose module depends on the family, and for a kind that leaves
    the family's own module. `normed` says that it takes normalised queries and keys, as pairs do.
    `unsupported` says, by engine, why that engine does not run it.
    """

    entry: type[Entry]
    attention: type[RapAttention] | None = None
    normed: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)


# By name, as a checkpoint ships them: `kinds.register_kinds` adds the package's.
KINDS: dict[str, KindOfAttention] = {
    PairEntry.kind: KindOfAttention(PairEntry),
    FactoredEntry.kind: KindOfAttention(FactoredEntry, FactoredAttention, normed=True),
}


if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model
else:
    # The family's own class stands behind the mixin; a base of its own would come before it.
    _Model = object


class RapModelMixin(_Model):
    """Replaces the attention of every layer the config's `rap` section gives widths for."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        spec, layers = attention_spec(config), attention_layers(self)
        for layer, entry in zip(layers, layer_entries(config, len(layers)), strict=True):
            if entry is None:
                continue
            if layer.shape is None or not entry.fits(layer.shape):
                raise CheckpointError(
                    f"layer {layer.index} has impossible widths in the `rap` section: "
                    f"{entry.fields()} of a dense {layer.shape}"
                )
            norm = _norm_as_stored(layer, config)
            pruned = build_attention(self, layer, spec, entry, norm, norm_mode(config))
            if pruned.frequency_index.device.type != "meta":
                pruned.apply(self._init_weights)
            parent, _, name = layer.path.rpartition(".")
            setattr(self.get_submodule(parent), name, pruned)

    def init_parallel_plans(self) -> None:
        """No plan of tensor parallelism: it would split heads, and no frequencies with them."""
        super().init_parallel_plans()
        self._tp_plan = {}

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: custom code may not fill in what checkpoints do not store, as families do."""
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the family's class: the base class looks into the source of the class's own module."""
        family: Any = cls.__mro__[cls.__mro__.index(RapModelMixin) + 1]
        return bool(family._can_set_experts_implementation())

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class; the config records the fingerprint of exactly these weights."""
        weights = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
        self.config.rap["fingerprint"] = fingerprint_saved(self, weights)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """As the base class; where nobody asked and SDPA would be taken, "rap" if there is one.

        It is SDPA for prefill, and reads the cache once for all queries of a head in decoding.
        Loaded as remote code, without the package, there is none; then models that cap their scores
        take eager attention, for SDPA would leave the cap out.
        """
        chosen: str = super().get_correct_attn_implementation(requested_attention, is_init_check)
        if requested_attention is not None or chosen != "sdpa":
            return chosen
        if ATTENTION in ALL_ATTENTION_FUNCTIONS.valid_keys():
            return ATTENTION
        return "eager" if getattr(text_config(self.config), SOFT_CAP, None) is not None else chosen

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedModelError: its paged cache has one head size for all layers."""
        raise UnsupportedModelError(NO_BATCHING)

    def _get_static_cache_init_shape(self) -> None:
        """Head widths differ from config.head_dim: a static cache takes them from the tensors."""


def build_attention(
    model: nn.Module,
    layer: AttentionLayer,
    spec: AttentionSpec,
    entry: Entry,
    norm: QKNorm | None = None,
    mode: str = "constant",
) -> RapAttention:
    """The attention with this entry for a dense layer of the model, its weights not yet set.

    `norm` and its `mode` say how queries and keys are normalised. Kinds that are not `normed`
    support no such model, and methods refuse it before.
    """
    row, dense = KINDS[entry.kind], cast(nn.Module, layer.module)
    base, module = cast(Any, type(dense)), cast(Any, row.attention or plain_attention(spec))
    build: Any = attention_class(base, module)
    normed = (norm, mode) if row.attention is None or row.normed else ()
    built: RapAttention = build(dense, spec, layer.shape, entry, *normed)
    if built.rotates_cache:
        # Not a submodule: the model has it already.
        vars(built)["rotary"] = layer_rotary(rotary_module(model), dense)
    return built


@functools.cache
def attention_class(base: type[nn.Module], kind: type[RapAttention]) -> type[RapAttention]:
    """A kind of attention as a subclass of the family's own, so that isinstance checks hold."""
    plain = issubclass(SharingAttention, kind)
    name = ("Rap" if plain else kind.__name__.removesuffix("Attention")) + base.__name__
    return type(name, (kind, base), {"__module__": __name__})


@functools.cache
def config_class(base_type: str) -> type:
    """Rap<Family>Config: the family's own config plus the `rap` section."""
    base = CONFIG_MAPPING[base_type]
    body = {
        "__module__": __name__,
        "__annotations__": {"rap": dict | None},
        "__init__": _registering_init(base_type),
        # Configs of custom code have their layer types renamed, which the base's code may not know.
        "is_custom_code": classmethod(lambda cls: False),
        "model_type": PREFIX + base_type,
        "rap": None,
    }
    made: Any = type(f"Rap{base.__name__}", (base,), body)
    made.register_for_auto_class()
    return made


@functools.cache
def model_class(base_type: str) -> type:
    """Rap<Family>ForCausalLM, registered with AutoModelForCausalLM.

    Of a multimodal family, Rap<Family>ForConditionalGeneration, registered with
    AutoModelForImageTextToText as well.
    """
    multimodal = base_type in WRAPPERS
    models: Any = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if multimodal else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    base: Any = models[CONFIG_MAPPING[base_type]]
    config = config_class(base_type)
    body = {"__module__": __name__, "config_class": config, "config": config}
    made: Any = type(f"Rap{base.__name__}", (RapModelMixin, base), body)
    made.register_for_auto_class(
        "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"
    )
    AutoModelForCausalLM.register(config, made, exist_ok=True)
    if multimodal:
        AutoModelForImageTextToText.register(config, made, exist_ok=True)
    _register_conversions(base_type, base, made)
    return made


def auto_class(config: PreTrainedConfig) -> Any:
    """The Auto class that makes the whole of a dense or pruned model of this config."""
    multimodal = base_model_type(config) in WRAPPERS
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def _register_conversions(base_type: str, base: type, made: type) -> None:
    """Checkpoints name and split weights otherwise than models do; custom code must ask for that.

    Experts are stored one by one, some heads and the parts of multimodal models under older names.
    """
    for dense, pruned in ((base_type, PREFIX + base_type), (base.__name__, made.__name__)):
        conversion = get_checkpoint_conversion_mapping(dense)
        if conversion is not None:
            register_checkpoint_conversion_mapping(pruned, conversion, overwrite=True)


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know every supported rap_<family>."""
    for base_type in _model_names():
        AutoConfig.register(PREFIX + base_type, config_class(base_type), exist_ok=True)


def _model_names() -> dict[str, str]:
    """Class of the model by type, where the installed transformers has one for it alone."""
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    wholes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = {name: causal[name] for name in FAMILIES if name in causal}
    return names | {name: wholes[name] for name in WRAPPERS if name in wholes}


def __getattr__(name: str) -> type:
    """RapLlamaConfig, RapLlamaForCausalLM, ... made on first use (also by remote-code loading)."""
    for base_type, model_name in _model_names().items():
        if name == f"Rap{CONFIG_MAPPING_NAMES[base_type]}":
            return config_class(base_type)
        if name == f"Rap{model_name}":
            return model_class(base_type)
    # Pickling and unpickling a model ask for the class of its attention by name.
    classes: list[Any] = [kind.attention for kind in KINDS.values() if kind.attention]
    kinds: dict[str, Any] = {x.__name__.removesuffix("Attention"): x for x in classes}
    for prefix, kind in ({"Rap": None} | kinds).items() if name.endswith("Attention") else ():
        for base_type in _model_names() if name.startswith(prefix) else ():
            family = sys.modules[model_class(base_type).__mro__[2].__module__]
            if dense := getattr(family, name.removeprefix(prefix), None):
                spec = FAMILIES.get(base_type)  # None of a multimodal whole
                kind = kind or (plain_attention(spec) if spec else RapAttention)
                return attention_class(dense, kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _registering_init(base_type: str) -> Callable[..., None]:
    # The model class imports the family's modeling file: wait until a config of it exists.
    def init(self: Any, **kwargs: Any) -> None:
        super(type(self), self).__init__(**kwargs)
        model_class(base_type)

    return init


def layer_entries(
    config: PreTrainedConfig, num_layers: int, engine: str | None = None
) -> list[Entry | None]:
    """The entry of every layer in the `rap` section (None: dense).

    Raises CheckpointError if the section is missing, wrong, or of a newer version, or names a kind
    that is not in KINDS; UnsupportedModelError for a kind that the `engine` does not run.
    """
    section = getattr(config, "rap", None)
    if not isinstance(section, dict) or "layers" not in section:
        raise CheckpointError(
            "config.json has no `rap` section with layer widths: this is not a complete pruned "
            "checkpoint, apply the plan again"
        )
    version = section.get("version", 0)
    if version > CONFIG_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, this release reads up to "
            f"{CONFIG_VERSION}: upgrade the package"
        )
    entries = section["layers"]
    if len(entries) != num_layers:
        raise CheckpointError(
            f"the `rap` section lists widths for {len(entries)} layers, the model has {num_layers}"
        )
    read = [None if fields is None else _read_entry(i, fields) for i, fields in enumerate(entries)]
    for index, entry in enumerate(read):
        reason = KINDS[entry.kind].unsupported.get(engine or "") if entry is not None else None
        if entry is not None and reason is not None:
            raise UnsupportedModelError(
                f"layer {index} has attention of kind {entry.kind!r}: {reason}; serve it with "
                "transformers, or prune with method rap"
            )
    return read


def _read_entry(index: int, fields: Any) -> Entry:
    kind = fields.get("kind", PairEntry.kind)
    if kind not in KINDS:
        raise CheckpointError(
            f"layer {index} has attention of kind {kind!r}, which only transformers with the rap "
            "package runs: import rap first, or take a checkpoint of method rap"
        )
    try:
        return KINDS[kind].entry.read(fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"layer {index} has impossible widths in the `rap` section: {fields}"
        ) from error


def norm_mode(config: PreTrainedConfig) -> str:
    """The QK-norm mode of a pruned model; CheckpointError for one this release does not know."""
    mode = config.rap.get("qk_norm", "constant")
    if mode not in NORM_MODES:
        raise CheckpointError(
            f"the `rap` section has QK-norm mode {mode!r}, but this release supports "
            f"{', '.join(NORM_MODES)}; upgrade the package"
        )
    return mode


def _norm_as_stored(layer: AttentionLayer, config: PreTrainedConfig) -> QKNorm | None:
    old = config.rap.get("version", 0) < 2 and norm_mode(config) != "exact"
    return replace(layer.norm, weight_offset=0.0) if layer.norm and old else layer.norm
