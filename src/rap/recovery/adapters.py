"""LoRA adapters on a pruned model: put on, merged, and proven to have been merged."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model, fingerprint_tensors, tied_names
from ..model.layers import attention_layers, attention_spec, projections
from .config import RecoveryConfig

PROOF_TOKENS = 64
# Merged and unmerged logits are two float32 sums of the same numbers in another order.
PROOF_TOLERANCE = 1e-5


def add_adapters(student: PreTrainedModel, config: RecoveryConfig) -> PeftModel:
    """LoRA on q, k, v and o of every attention layer of `student`, in place; the rest is frozen.

    Where keys or values are products of two factors, both have adapters.
    The adapters are float32 whatever the weights are. Seeded with `config.seed`.
    """
    torch.manual_seed(config.seed)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(student),
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(student, lora, autocast_adapter_dtype=True)


def merge(adapted: PeftModel, window_T: Tensor) -> Any:
    """The model with its adapters merged into the weights, without any wrapper.

    Proof in float32: the logits on `window_T` before and after the merge agree within 1e-5 of the
    largest logit, and weights rounded back to their own dtypes differ from those before the merge
    by fingerprint. Weights pass through float32, 4 bytes a parameter while it lasts.

    Raises RapError if either fails.
    """
    model = adapted.get_base_model()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    with adapted.disable_adapter():
        before = fingerprint_adapted(adapted)
    model.eval().float()
    with_adapters = _logits(model, window_T)
    merged = adapted.merge_and_unload(safe_merge=True)
    difference = float((_logits(merged, window_T) - with_adapters).abs().max())
    bound = PROOF_TOLERANCE * max(1.0, float(with_adapters.abs().max()))
    if not difference <= bound:
        raise RapError(
            f"merging changed the logits by {difference:.2e}, at most {bound:.2e} was expected: "
            "this is a fault, the adapters were not merged as trained"
        )
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtypes[_adapted_name(name, dtypes)])
        parameter.requires_grad_(True)
    for attribute in ("peft_config", "active_adapter"):
        vars(merged).pop(attribute, None)
    if fingerprint_model(merged) == before:
        raise RapError(
            "the weights after recovery are the ones before it: the adapters were never applied, "
            "or too small for the weights' precision; train longer, or recover in float32"
        )
    return merged


def fingerprint_adapted(adapted: PeftModel) -> str:
    """The fingerprint that the model below the adapters has without them."""
    model = adapted.get_base_model()
    skip = tied_names(model)
    return fingerprint_tensors(
        (name.replace(".base_layer.", "."), tensor)
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and name not in skip
    )


def _targets(student: PreTrainedModel) -> list[str]:
    spec = attention_spec(student.config)
    return [
        f"{layer.path}.{name}"
        for layer in attention_layers(student)
        if layer.shape is not None
        for name in (
            # Values may be of the linear of keys.
            *dict.fromkeys(
                spec.of(layer.module).projection_names()[role] for role in projections(layer, spec)
            ),
            *getattr(layer.module, "reconstruction", ()),
        )
    ]


def _adapted_name(name: str, known: dict[str, Any]) -> str:
    if name in known:
        return name
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.base_layer.{leaf}"


@torch.no_grad()
def _logits(model: Any, window_T: Tensor) -> Tensor:
    device = model.get_input_embeddings().weight.device
    ids_1T = window_T[:PROOF_TOKENS].unsqueeze(0).to(device)
    return model(input_ids=ids_1T, use_cache=False).logits.float()
