"""Which way into vLLM a pruned checkpoint takes, read from its config, and why another takes none.

`native` is a model class of this package, written for vLLM's own layers. `transformers` is vLLM's
backend for models of transformers, which runs the model itself with vLLM's attention and cache.
"""

from typing import Any, Literal

from transformers import PreTrainedConfig

from ..model.cache_layout import PairEntry
from ..model.errors import UnsupportedModelError
from ..model.families import INNER, WRAPPERS
from ..model.layers import base_model_type
from ..model.modeling import layer_entries, norm_mode
from .layout import cache_layouts

Path = Literal["native", "transformers"]

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
STATES = (
    "vLLM runs no layers with a state of their own (linear attention, convolution) through its "
    "transformers backend"
)
SLOTS = (
    "its queries are scaled by their place in a forward pass, which in vLLM holds many requests, "
    "and vLLM's transformers backend knows no chunked attention and fails to load experts that "
    "are stored like these, of a dense model too"
)
BESIDE = (
    "vLLM's transformers backend looks for their number per token under other names than "
    "top_k_experts, and gives all experts but gpt-oss's SiLU"
)
IMAGES = "the text model of a multimodal one is not served by itself yet"
_WITH_STATES = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
REFUSED = {
    **dict.fromkeys(_WITH_STATES, STATES),
    "llama4_text": SLOTS,
    **dict.fromkeys((*WRAPPERS, *INNER), IMAGES),
}


def family_path(model_type: str) -> Path | None:
    """The way of a dense family's pruned checkpoints; None if `REFUSED` says why there is none."""
    if model_type in REFUSED:
        return None
    return "native" if model_type in NATIVE else "transformers"


def serving_path(config: PreTrainedConfig) -> Path:
    """The way a pruned checkpoint takes into vLLM.

    Raises UnsupportedModelError for a family or a setting that is not served, CheckpointError for a
    wrong `rap` section.
    """
    family = base_model_type(config)
    path = family_path(family)
    if path is None:
        raise UnsupportedModelError(f"vLLM does not serve pruned {family}: {REFUSED[family]}")
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedModelError(f"vLLM does not serve pruned {family} with experts: {BESIDE}")
    cache_layouts(config)
    if path == "native" and config.rope_parameters.get("rope_type") == "longrope":
        return "transformers"  # vLLM's own class has a table for short and one for long texts
    if path == "native":
        _check_native(config)
    return path


def overrides(config: PreTrainedConfig) -> dict[str, Any]:
    """What vLLM must be told of a pruned config whose family has a class that cannot run it.

    Raises as `serving_path`.
    """
    if serving_path(config) == family_path(base_model_type(config)):
        return {}
    return {"architectures": ["RapForCausalLM"]}


def _check_native(config: Any) -> None:
    for index, entry in enumerate(layer_entries(config, config.num_hidden_layers, "vllm")):
        if isinstance(entry, PairEntry) and entry.free:
            raise UnsupportedModelError(
                f"layer {index} keeps {entry.free} key channels that do not rotate: the class "
                f"for {base_model_type(config)} takes heads that rotate as a whole"
            )
    if base_model_type(config) == "qwen3" and norm_mode(config) == "rows":
        raise UnsupportedModelError(
            "vLLM serves QK-norm of qwen3 in the modes constant and exact: plan with one of them"
        )
