"""vLLM plugin: `vllm serve OUT` and `LLM(OUT)` run a pruned checkpoint, without any flag.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every
process, before it reads a config; the model classes are imported only when one is needed.
"""

ARCHITECTURES = (
    "RapLlamaForCausalLM",
    "RapMistralForCausalLM",
    "RapQwen2ForCausalLM",
    "RapQwen3ForCausalLM",
)


def register() -> None:
    """Tell vLLM of the pruned architectures. May be called any number of times."""
    from vllm import ModelRegistry

    from ...model import modeling

    modeling.register()
    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"{__name__}.model:{name}")
