"""MatryoshkaKV's own training: the bases that keys and values are projected on, and nothing else.

Every head's basis is its PCA times a rotation, kept orthogonal by the Cayley transform. Each step
draws a width for every head, in eighths of the dense one, so that directions end up in the order of
their use (https://arxiv.org/abs/2410.14731). The frozen dense model is student and teacher: what
the student's attention reads has passed through the bases.

Shapes: N windows, T tokens, B windows of a micro batch, G KV heads, D head dim, V vocabulary.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..calibration.run import calibrate
from ..model.errors import RapError
from ..model.kinds.projected import ProjectedAttention, projected_tensors
from ..model.layers import AttentionLayer, attention_layers, attention_spec, projections
from ..model.specs import AttentionSpec
from ..runtime.progress import track
from ..runtime.state import evaluating, frozen
from .config import RecoveryConfig, recovery_config
from .loss import token_loss

WIDTH_STEPS = 8
CALIBRATION_WINDOWS = 32
# The original's loss and schedule; steps, rate and windows are our own, for a short run.
SETTINGS = replace(
    recovery_config("fast"),
    window=512,
    num_windows=320,
    steps=40,
    global_batch=4,
    learning_rate=5e-3,
    warmup_steps=4,
    ce_weight=0.75,
    kl_weight=0.25,
    temperature=1.0,
    divergence="forward",
)

# Settings of other ways to distil; a change of one would do nothing here.
UNREAD = (
    *("tune", "rank", "alpha", "dropout", "schedule", "weight_decay", "match_steps"),
    *("evaluate_every", "gradient_checkpointing", "report_to", "products", "refit"),
)


def train_projections(
    small: PreTrainedModel,
    dense: PreTrainedModel,
    windows: Tensor,
    config: RecoveryConfig = SETTINGS,
    *,
    progress: bool = False,
) -> Any:
    """A copy of `small` with trained bases, of the same widths; `small` and `dense` stay as is.

    `windows` [N, T]. The directions that `small` left out come after its own, by their share in the
    first windows. Raises RapError unless `small` is a projected model (method matryoshka) whose
    weights are still those of `dense`, and for a setting of `UNREAD` that is not as in `SETTINGS`.
    """
    check_read(config)
    trained, spec = copy.deepcopy(small), attention_spec(dense.config)
    pairs = _projected(trained, dense, spec)
    statistics = calibrate(dense, windows[:CALIBRATION_WINDOWS], {"rotated"}).layers
    bases = {x.index: Bases(x, statistics[x.index]).to(dense.device) for x, _ in pairs}
    with frozen(dense), evaluating(dense):
        _train(bases, dense, windows, config, progress)
    with torch.no_grad():
        for layer, original in pairs:
            _load(layer, original, bases[layer.index], spec)
    return trained


def check_read(config: RecoveryConfig) -> None:
    """Raise RapError for a setting that training projections does not read."""
    for name in UNREAD:
        if getattr(config, name) != getattr(SETTINGS, name):
            raise RapError(f"recovery 'projections' does not read {name}: remove it")


class Bases(nn.Module):
    """The trainable bases of one layer, and how keys and values look through some of each."""

    order: Tensor

    def __init__(self, layer: AttentionLayer, statistics: Any):
        super().__init__()
        module: Any = layer.module
        # Stock attention has keys in the dense order of channels, the bases in the canonical one.
        self.register_buffer("order", module.dense_shape.geometry.canonical_order().argsort())
        covariances = {
            "k": statistics["rotated_key_moment"],
            "v": statistics["value_moment_about_mean"],
        }
        for name, down in (("k", module.key_down), ("v", module.value_down)):
            leading = torch.stack([part.weight.detach().cpu().double().mT for part in down])
            start = _completed(leading, covariances[name].double())
            self.register_buffer(f"start_{name}", start.float())
        self.skew = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros_like(covariances[name])) for name in "kv"}
        )
        self.mean = nn.Parameter(statistics["value_mean"].clone())

    def basis(self, name: str) -> Tensor:
        """The orthogonal [G, D, D] basis of keys (canonical order) or of values."""
        skew = self.skew[name] - self.skew[name].mT
        eye = torch.eye(skew.shape[-1], device=skew.device)
        return self.get_buffer(f"start_{name}") @ torch.linalg.solve(eye - skew / 2, eye + skew / 2)

    def through(self, name: str, x_BGTD: Tensor, width_G: Tensor) -> Tensor:
        """Keys or values of unmodified attention, projected on the first `width_G` directions."""
        basis = self.basis(name)
        basis = basis[:, self.order] if name == "k" else basis
        kept = torch.arange(basis.shape[-1]) < width_G[:, None]
        kept_GD = kept.to(basis)[:, None]
        mean = self.mean[:, None] if name == "v" else torch.zeros_like(self.mean[:, None])
        coordinates = ((x_BGTD.float() - mean) @ basis) * kept_GD
        return (coordinates @ basis.mT + mean).to(x_BGTD.dtype)


def _completed(leading_GDR: Tensor, covariance_GDD: Tensor) -> Tensor:
    """Orthonormal directions and, after them, the principal ones of what they leave, [G, D, D]."""
    dim, width = leading_GDR.shape[1:]
    rest = torch.eye(dim, dtype=torch.float64) - leading_GDR @ leading_GDR.mT
    # Far above what the covariance has, so that the given directions come last in ascending order.
    top = covariance_GDD.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] + 1
    ordered = rest @ covariance_GDD @ rest + 2 * top * (leading_GDR @ leading_GDR.mT)
    others = torch.linalg.eigh(ordered).eigenvectors[..., : dim - width].flip(-1)
    return torch.cat([leading_GDR, others], -1)


class _Projecting(DynamicCache):
    """Hands attention what the bases leave of the keys and values it would cache."""

    def __init__(self, bases: Mapping[int, Bases], generator: torch.Generator):
        super().__init__()
        self.bases, self.generator = bases, generator

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.bases:  # a layer that was left dense
            return key_states, value_states
        bases, groups, dim = self.bases[layer_idx], key_states.shape[1], key_states.shape[-1]
        steps = torch.randint(1, WIDTH_STEPS + 1, (2, groups), generator=self.generator)
        keys, values = -(-steps * dim // WIDTH_STEPS)
        return bases.through("k", key_states, keys), bases.through("v", value_states, values)


@torch.enable_grad()
def _train(
    bases: Mapping[int, Bases],
    dense: PreTrainedModel,
    windows: Tensor,
    config: RecoveryConfig,
    progress: bool,
) -> None:
    passes = -(-config.epochs * len(windows) // config.global_batch)
    steps, generator = config.steps or passes, torch.Generator().manual_seed(config.seed)
    parameters = [parameter for layer in bases.values() for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    warmup = max(1, config.warmup_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    tokens = config.global_batch * windows.shape[1]
    for _ in track(range(steps), "training projections", "steps", tokens=tokens, shown=progress):
        chosen = torch.randint(len(windows), (config.global_batch,), generator=generator)
        batches = windows[chosen].split(config.micro_batch)
        for ids_BT in batches:
            loss = _loss(bases, dense, ids_BT.to(dense.device), config, generator)
            if not torch.isfinite(loss):
                raise RapError("the loss of the projections is not finite: lower learning_rate")
            (loss * len(ids_BT) / len(chosen)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _loss(
    bases: Mapping[int, Bases],
    dense: PreTrainedModel,
    ids_BT: Tensor,
    config: RecoveryConfig,
    generator: torch.Generator,
) -> Tensor:
    cache: Any = _Projecting(bases, generator)
    logits = dense(input_ids=ids_BT, past_key_values=cache, use_cache=True).logits[:, :-1]
    with torch.no_grad():
        wanted = dense(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return token_loss(
        logits.flatten(0, 1), wanted.flatten(0, 1), ids_BT[:, 1:].flatten(), config
    ).mean()


def _load(
    layer: AttentionLayer, dense_layer: AttentionLayer, bases: Any, spec: AttentionSpec
) -> None:
    """Put the leading directions of trained bases into a projected attention."""
    module: Any = layer.module
    key, value = (
        bases.basis(name).double().cpu()[..., : down[0].out_features]
        for name, down in (("k", module.key_down), ("v", module.value_down))
    )
    output = projections(dense_layer, spec)["o"]
    bias = None if output.bias is None else output.bias.double().cpu()
    tensors = projected_tensors(
        key,
        value,
        bases.mean.double().cpu(),
        output.weight.double().cpu(),
        bias,
        spec.projections[3],
    )
    for name, tensor in tensors.items():
        module.get_parameter(name).copy_(tensor)


def _projected(
    small: PreTrainedModel, dense: PreTrainedModel, spec: AttentionSpec
) -> list[tuple[AttentionLayer, AttentionLayer]]:
    """The projected layers of a model and the dense ones; RapError for none, or other weights."""
    pairs = [
        (layer, original)
        for layer, original in zip(attention_layers(small), attention_layers(dense), strict=True)
        if isinstance(layer.module, ProjectedAttention)
    ]
    if not pairs:
        raise RapError(
            "recovery 'projections' trains the bases of method matryoshka, this model has none"
        )
    for layer, original in pairs:
        mine, theirs = (projections(item, spec)["v"].weight for item in (layer, original))
        if not torch.equal(mine, theirs.to(mine)):
            raise RapError(
                "recovery 'projections' starts from the dense weights, these were trained: train "
                "the projections first"
            )
    return pairs
