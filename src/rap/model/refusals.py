"""Why a model that no row of `families` is for is refused: the reason that its user is told.

What follows from a property of the config is read off it; all else is listed by model type.
"""

from typing import Any

from .families import FAMILIES, WRAPPERS

LEARNED = "it adds learned absolute positions, there is no rotation to prune in pairs"
ALIBI = "it biases attention by distance (ALiBi) and rotates nothing"
MLA = "it caches one latent for all heads (MLA), so cutting head channels would save nothing"
UNROTATED = "its config has no rope_parameters: nothing rotates, so there are no pairs to prune"
STILL = "its attention layers rotate nothing, so there are no pairs to prune"
SHARED = "no test has compared its shared keys and values after a cut with its own"
OLD = (
    "its attention, of an older form, calls none of transformers' attention functions, through "
    "which pruned heads run"
)
NO_BATCHING = (
    "continuous batching caches heads of one size for all layers, and pruned ones differ: use "
    "generate, or vLLM"
)
CHOSEN = "an indexer of its own chooses the keys that each query sees, and nothing here tested that"
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
        ("its layers rotate at bases of their own (layer_rope_theta), each by a module of its own"),
    ),
    **dict.fromkeys(
        ("bamba", "minimax"),
        "its cached steps differ from its whole pass in transformers, before any cut",
    ),
    "bitnet": "it normalises the output of all heads at once, so values cannot lose channels",
    "diffllama": "it subtracts two attentions, whose output it normalises over pairs of heads",
    "doge": "its attention mask is computed from the values of all channels",
    "zaya": "its queries, keys and values come out of a convolution over all channels",
    "hrm_text": "it runs its layers several times, each time with another slot of the cache",
    "jetmoe": "its queries come from a mixture of experts, each with a projection of its own",
    "laguna": "its gate is a softplus, per head or per channel, which no row describes yet",
    "mimo_v2_flash": "its values are narrower than its keys, and a plan knows one width of heads",
    "dbrx": "its attention lies two modules deep in a layer, where none is looked for",
    "zamba2": "one block of attention serves several layers, each with adapters of its own",
    "recurrent_gemma": "every attention layer makes its own cos and sin instead of the model",
    **dict.fromkeys(
        ("cohere_compass_text", "modernbert-decoder"),
        "no test has compared its attention after a cut with its own",
    ),
    "deepseek_v4": "all heads share one key, which is the value as well",
    "phi4_multimodal": "its images and speech come with adapters on the linears that a cut narrows",
    "roformer": "its attention, of an older form, looks up the sines of positions by itself",
    "musicgen": "its decoder makes sound by positions that are added, and rotates nothing",
    "musicgen_melody": "its decoder makes sound by positions that are added, and rotates nothing",
    "moshi": "it generates speech and text by two decoders at once",
    "blt": "it reads bytes by three models, the patches of one being the tokens of the next",
}


def refusal(config: Any, text: Any, model_type: str) -> str:
    """The reason why a model is refused that has no row; `text` is the config of its text model.

    Only the last reason is none: a model type that this package knows nothing of.
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
            f"it is a multimodal model around {inner.model_type}; those that are taken are "
            f"{', '.join(WRAPPERS)}, around a text model of docs/models.md"
        )
    if not hasattr(config, "rope_parameters"):
        return UNROTATED
    return f"no row for it among the {len(FAMILIES)} families that docs/models.md lists"
