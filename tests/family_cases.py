"""One tiny configuration per family, and the dense model a plan describes, masked by hooks.

What a case says of a family (which channels pair up, which layers rotate, how projections are laid
out) is written down here from the family's own code, not read from the package, so that a mistake
in the package's table cannot appear on both sides of a comparison.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models import tiny_model
from plans import plan_of
from rap.families import attention_layers
from rap.plan import LayerPlan, Plan

HEAD_DIM = 16
WINDOW = {"sliding_window": 4}


@dataclass(frozen=True)
class Case:
    """A family with the features it has switched on.

    `rotated` channels at the front of a head rotate, except in the layers `still`. `absent` layers
    have no attention. `in_float32` says that the family computes in float32 inside.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    rotated: int = HEAD_DIM
    still: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    in_float32: bool = False
    output: str = "o_proj"

    @property
    def model_type(self) -> str:
        """The family: a name may say more after a colon."""
        return self.name.partition(":")[0]

    def model(self, **overrides: Any) -> Any:
        """The dense model, in float64 unless overridden: six query heads on two KV heads."""
        shape = {"heads": 6, "kv_heads": 2, "hidden": 36, "head_dim": HEAD_DIM, "layers": 3}
        fields = shape | {"dtype": torch.float64} | self.fields | overrides
        model = tiny_model(self.model_type, **fields)
        # The grouped products that experts use by default take no float64.
        model.config._experts_implementation = "eager"
        return model


def partial(fraction: float, **fields: Any) -> dict[str, Any]:
    """Fields of a configuration that rotates a fraction of each head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": fraction}
    return {"rope_parameters": rope, "partial_rotary_factor": fraction, **fields}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CASES = [
    Case("llama", {"attention_bias": True}),
    Case("mistral", WINDOW),
    Case("ministral", WINDOW | _TYPES),
    Case(
        "ministral3",
        WINDOW
        | {
            "rope_parameters": _YARN
            | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    Case("mixtral", WINDOW | _MOE),
    Case("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    Case(
        "qwen2_moe",
        WINDOW
        | {"use_sliding_window": True, "max_window_layers": 1, "num_experts": 4}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    Case("gemma", {"attention_bias": True}),
    Case("gemma2", WINDOW | _TYPES | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}),
    Case("gpt_oss", WINDOW | _TYPES | _MOE | {"rope_parameters": _YARN | {"truncate": False}}),
    Case("glm", partial(0.5, attention_bias=True), interleaved=True, rotated=8),
    Case("glm4", partial(0.5, attention_bias=True), interleaved=True, rotated=8),
    Case(
        "glm4_moe",
        partial(0.5, attention_bias=True, n_routed_experts=4, moe_intermediate_size=24)
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        rotated=8,
    ),
    Case("phi", partial(0.5, hidden=96), rotated=8, output="dense"),
    Case("olmo", {"clip_qkv": 1.5, "hidden": 96}),
    Case(
        "smollm3",
        WINDOW
        | {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "layer_types": _TYPES["layer_types"],
        },
        still=(1,),
    ),
    Case("cohere", {"attention_bias": True, "hidden": 96}, interleaved=True, in_float32=True),
    Case("cohere2", WINDOW | _TYPES, interleaved=True, still=(1,), in_float32=True),
    Case("granite", {"attention_multiplier": 0.2, "hidden": 96}),
    Case("starcoder2", WINDOW | {"hidden": 96}),
    Case("stablelm", partial(0.25, use_qkv_bias=True, hidden=96), rotated=4),
    Case("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    Case(
        "solar_open",
        {"attention_bias": True, "n_routed_experts": 4, "moe_intermediate_size": 24}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    Case("ernie4_5", {"use_bias": True}, interleaved=True, in_float32=True),
    Case("nemotron", partial(0.5, attention_bias=True), rotated=8),
    Case("helium", {"attention_bias": True, "hidden": 96}, interleaved=True),
]


def random_case_plan(model: Any, case: Case, *, seed: int = 0) -> Plan:
    """About half of every layer's pairs, free channels and values; layer 0 stays dense."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[LayerPlan | None] = []
    for index, layer in enumerate(attention_layers(model)):
        if index in case.absent or index == 0:
            layers.append(None)
            continue
        rotated = 0 if index in case.still else case.rotated
        kept = [
            [_choose(size, count, generator) for _ in range(layer.shape.num_kv_heads)]
            for size, count in (
                (rotated // 2, rotated // 4 + rotated // 8),
                (HEAD_DIM, 7 if index == 1 else 11),
                (HEAD_DIM - rotated, (HEAD_DIM - rotated) // 2),
            )
        ]
        layers.append(LayerPlan.of_indices(*kept))
    return plan_of(model, layers)


def masked_by_hooks(model: Any, plan: Plan, case: Case) -> Any:
    """A copy of a stock model in which hooks zero the dropped channels of q, k and v."""
    model = copy.deepcopy(model)
    layers = model.get_decoder().layers
    for index, (layer, planned) in enumerate(zip(layers, plan.layers, strict=True)):
        if planned is not None:
            rotated = 0 if index in case.still else case.rotated
            keys = torch.tensor([_kept_keys(planned, g, rotated, case) for g in range(2)])
            values = torch.tensor(
                [[c in planned.channels_GC[g].tolist() for c in range(HEAD_DIM)] for g in range(2)]
            )
            _hook(layer.self_attn, keys, values)
    return model


def _hook(attention: Any, keys_GD: Tensor, values_GD: Tensor) -> None:
    repeats = attention.q_proj.out_features // attention.k_proj.out_features
    attention.q_proj.register_forward_hook(_multiply(keys_GD.repeat_interleave(repeats, 0)))
    attention.k_proj.register_forward_hook(_multiply(keys_GD))
    attention.v_proj.register_forward_hook(_multiply(values_GD))


def _kept_keys(planned: LayerPlan, head: int, rotated: int, case: Case) -> list[bool]:
    kept = set()
    for pair in planned.frequency_GM[head].tolist():
        first = 2 * pair if case.interleaved else pair
        kept |= {first, first + 1 if case.interleaved else first + rotated // 2}
    kept |= {rotated + free for free in planned.free_GN[head].tolist()}
    return [channel in kept for channel in range(HEAD_DIM)]


def _multiply(mask_HD: Tensor) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output * mask_HD.flatten().to(output.dtype)

    return hook


def _choose(size: int, count: int, generator: torch.Generator) -> list[int]:
    return sorted(torch.randperm(size, generator=generator)[:count].tolist())
