"""Error messages for unsupported model families.

What follows from a property of the config is read off it; all else is listed by model type.
"""

from typing import Any

from .families import FAMILIES, WRAPPERS

LEARNED = "it adds learned absolute positions and rotates nothing"
ALIBI = "it biases attention by distance (ALiBi) and rotates nothing"
MLA = "it caches one latent for all heads (MLA), so pruned head channels would save nothing"
UNROTATED = "its config has no rope_parameters: nothing rotates, so there are no pairs to prune"
STILL = "its attention layers rotate nothing, so there are no pairs to prune"
SHARED = "its shared keys and values are untested after pruning"
OLD = (
    "its attention has an older form, without the attention functions of transformers that "
    "pruned heads use"
)
NO_BATCHING = (
    "continuous batching requires one head size for all layers, and pruned layers differ; use "
    "generate, or vLLM"
)
CHOSEN = "a separate indexer chooses the keys that each query attends to, which is untested"
REASONS = {
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), SHARED),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), SHARED),
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "opt", "xglm", "biogpt"), LEARNED),
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("codegen", "falcon", "gpt_neox_japanese", "gptj"), OLD),
    **dict.fromkeys(("inkling_text", "jamba", "nemotron_h", "zamba"), STILL),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "minimax_m3_vl_text"), CHOSEN),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"),
        ("every layer has a separate RoPE base (layer_rope_theta) and rotary module"),
    ),
    **dict.fromkeys(
        ("bamba", "minimax"),
        "cached decoding differs from the full forward pass in transformers, before pruning",
    ),
    "bitnet": "it normalizes the output of all heads at once, so value channels cannot be pruned",
    "diffllama": "it subtracts two attentions and normalizes the output over pairs of heads",
    "doge": "its attention mask is computed from the values of all channels",
    "zaya": "its queries, keys and values are the output of a convolution over all channels",
    "hrm_text": "it runs its layers several times, each time with another slot of the cache",
    "jetmoe": "its queries come from a mixture of experts with separate projections",
    "laguna": "its gate is a softplus, which is not implemented",
    "mimo_v2_flash": "its values have a smaller head dimension than its keys",
    "dbrx": "its attention is two modules deep in a layer, which is not implemented",
    "zamba2": "one block of attention is shared by several layers with separate adapters",
    "recurrent_gemma": "every attention layer computes cos and sin itself",
    **dict.fromkeys(
        ("cohere_compass_text", "modernbert-decoder"),
        "its attention is untested after pruning",
    ),
    "deepseek_v4": "all heads share one key, which is the value as well",
    "phi4_multimodal": "its images and speech use adapters on the projections that are pruned",
    "roformer": "its attention has an older form that computes the positions itself",
    "musicgen": "its decoder adds absolute positions and rotates nothing",
    "musicgen_melody": "its decoder adds absolute positions and rotates nothing",
    "moshi": "it generates speech and text with two decoders at once",
    "blt": "it reads bytes with three nested models",
}


def refusal(config: Any, text: Any, model_type: str) -> str:
    """The reason why a model without a row is unsupported; `text` is its text model's config.

    The last reason is for an unknown model type.
    """
    if model_type in REASONS:
        return REASONS[model_type]
    if getattr(text, "kv_lora_rank", None):
        return MLA
    if getattr(config, "alibi", False):
        return ALIBI
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder: cross-attention has no rotary positions"
    inner = getattr(config, "text_config", None)
    if inner is not None:
        return (
            f"it is a multimodal model around {inner.model_type}; supported multimodal models are "
            f"{', '.join(WRAPPERS)}, around a text model of docs/models.md"
        )
    if not hasattr(config, "rope_parameters"):
        return UNROTATED
    return f"no row for it among the {len(FAMILIES)} families that docs/models.md lists"
