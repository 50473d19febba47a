"""What distillation trains of a pruned model: put on it, merged, and proven to have been merged."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.attention import pruned_attention
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model, fingerprint_tensors, tied_names
from ..model.layers import AttentionLayer, attention_layers, attention_spec, projections
from .config import RecoveryConfig

PROOF_TOKENS = 64
# Merged and unmerged logits are two float32 sums of the same numbers in another order.
PROOF_TOLERANCE = 1e-5
_TRAINED = (".lora_", ".modules_to_save.")


def add_adapters(student: PreTrainedModel, config: RecoveryConfig) -> PeftModel:
    """What `config.tune` names, on q, k, v and o of every attention layer of `student`, in place.

    The rest is frozen. Where keys or values are products of two factors, both are trained.
    LoRA adapters are float32 whatever the weights are, and seeded with `config.seed`. Matrices
    ("full") are copied and trained in float32, so that `student` is made float32, 4 bytes a
    parameter; biases stay as they are.
    """
    torch.manual_seed(config.seed)
    if config.tune == "full":
        copies = LoraConfig(
            target_modules=DUMMY_TARGET_MODULES,
            modules_to_save=[*_targets(student), *_maps(student)],
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(student.float(), copies)
        for name, parameter in adapted.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.endswith(".bias"))
        return adapted
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(student),
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(student, lora, autocast_adapter_dtype=True)


def merge(
    adapted: PeftModel, window_T: Tensor, dtypes: dict[str, torch.dtype] | None = None
) -> Any:
    """The model with what was trained merged into the weights, without any wrapper.

    Proof in float32: the logits on `window_T` before and after the merge agree within 1e-5 of the
    largest logit, and weights rounded back to their own `dtypes`, by name (None: those that they
    have), differ from those before the merge by fingerprint. Weights pass through float32, 4 bytes
    a parameter while it lasts.

    Raises RapError if either fails.
    """
    model = adapted.get_base_model()
    dtypes = dtypes or {_plain(name): p.dtype for name, p in model.named_parameters()}
    with adapted.disable_adapter():
        before = fingerprint_adapted(adapted, dtypes)
    model.eval().float()
    with_adapters = _logits(model, window_T)
    if not with_adapters.isfinite().all():
        raise RapError("training diverged, the logits are not finite: lower learning_rate")
    merged = adapted.merge_and_unload(safe_merge=True)
    difference = float((_logits(merged, window_T) - with_adapters).abs().max())
    bound = PROOF_TOLERANCE * max(1.0, float(with_adapters.abs().max()))
    if not difference <= bound:
        raise RapError(
            f"merging changed the logits by {difference:.2e}, at most {bound:.2e} was expected: "
            "this is a fault, the adapters were not merged as trained"
        )
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
        parameter.requires_grad_(True)
    for attribute in ("peft_config", "active_adapter"):
        vars(merged).pop(attribute, None)
    if fingerprint_model(merged) == before:
        raise RapError(
            "the weights after recovery are the ones before it: the adapters were never applied, "
            "or too small for the weights' precision; train longer, or recover in float32"
        )
    return merged


def fingerprint_adapted(adapted: PeftModel, dtypes: dict[str, torch.dtype]) -> str:
    """The fingerprint that the model below has without what is trained, in `dtypes` by name."""
    model = adapted.get_base_model()
    skip = tied_names(model)
    return fingerprint_tensors(
        (_plain(name), tensor.to(dtypes.get(_plain(name), tensor.dtype)))
        for name, tensor in model.state_dict().items()
        if not any(part in name for part in _TRAINED) and name not in skip
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
                spec.of(layer.module).projection_names()[projection]
                for projection in projections(layer, spec)
            ),
            *_reconstructing(layer),
        )
    ]


def _maps(student: PreTrainedModel) -> list[str]:
    """Factors that are no linears (maps of every head), and so beyond LoRA."""
    return [
        f"{layer.path}.{name}"
        for layer in attention_layers(student)
        if (own := pruned_attention(layer)) is not None
        for names in own.factors.values()
        for name in names
        if not isinstance(own.get_submodule(name), nn.Linear)
    ]


def _reconstructing(layer: AttentionLayer) -> tuple[str, ...]:
    own = pruned_attention(layer)
    return () if own is None else own.reconstruction


def _plain(name: str) -> str:
    """A parameter's name without the wrappers that peft puts around its module."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


@torch.no_grad()
def _logits(model: Any, window_T: Tensor) -> Tensor:
    device = model.get_input_embeddings().weight.device
    ids_1T = window_T[:PROOF_TOKENS].unsqueeze(0).to(device)
    return model(input_ids=ids_1T, use_cache=False).logits.float()
