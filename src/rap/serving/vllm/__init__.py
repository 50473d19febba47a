"""vLLM plugin: `vllm serve OUT` and `LLM(OUT)` run a pruned checkpoint, without any flag.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every
process, before it reads a config; the model classes are imported only when one is needed.
"""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...model import modeling
from ...model.families import FAMILIES
from ...model.layers import PREFIX
from ..families import support

# The model classes: of families without experts, and with them.
GENERAL = ("RapForCausalLM", "RapMoEForCausalLM")
# Fields by which configs say how many experts they have.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def register() -> None:
    """Register the pruned architectures with vLLM. May be called any number of times."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from .chat import HarmonyConfig
    from .widths import WidthConvertor

    modeling.register()
    known = ModelRegistry.get_supported_archs()
    for name, place in architectures().items():
        if name not in known:
            ModelRegistry.register_model(name, f"{__name__}.{place}")
    for family in FAMILIES:
        if not support(family).unserved:
            MODEL_ARCH_CONFIG_CONVERTORS[PREFIX + family] = WidthConvertor
        if support(family).harmony:
            MODELS_CONFIG_MAP[modeling.model_class(family).__name__] = HarmonyConfig


def architectures() -> dict[str, str]:
    """Every pruned architecture, with the module and the class that runs it, or the reason why not.

    The general classes are registered under their own names too: `--hf-overrides` may name them.
    """
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    places = {name: f"backbone:{name}" for name in GENERAL}
    for family in FAMILIES:
        if family not in names:
            continue
        places[f"Rap{names[family]}"] = f"backbone:{GENERAL[_has_experts(family)]}"
    return places


def _has_experts(family: str) -> bool:
    config: Any = modeling.config_class(family)
    # None in families whose feed-forward may have experts beside it.
    return any(
        getattr(config, field, None) is not None or field in config.attribute_map
        for field in _EXPERTS
    )
