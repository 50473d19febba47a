"""A pruned model as a plain checkpoint of its family, which engines run unmodified.

When all heads of all layers keep one list of slots and K is as wide as V, a pruned model is a dense
one with heads of 2m channels, up to its frequencies and its softmax scale. The frequencies are
written as longrope factors, the scale goes into W_q:

    factor_i = 1 / (theta_i base^(2i / 2m)),    W_q <- sqrt(2m / D) W_q

with theta_i the dense frequency of slot i, whatever scaling (llama3, yarn, linear) it came from.
Families whose config states the softmax scale (Gemma 2, Granite) need no factor on W_q. Merged
heads are fewer KV heads, and may be wider than the dense ones; where they keep every dense
frequency once, only `num_key_value_heads` differs from the dense config. Qwen2 becomes a Llama with
biases (that of W_o zero), Phi-3 a Llama with linears of their own: `families` says why, and
`plain_forms` which families have no such form.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..checkpoint.card import CARD_FILE, model_card, plain_report
from ..checkpoint.files import (
    PLAN_FILE,
    REPORT_FILE,
    check_output,
    read_json,
    whole_directory,
    write_json,
    write_model,
)
from ..checkpoint.load import is_pruned, load, load_tokenizer
from ..checkpoint.source import check_apart
from ..model.cache_layout import PairEntry
from ..model.errors import CheckpointError
from ..model.layers import base_model_type, rotary_module
from ..model.modeling import layer_entries
from ..model.rope import read_frequencies
from .families import support
from .plain_forms import check_stock, plain_family

_NOT_STOCK = "a plain checkpoint needs the same for every head and layer; use `--profile stock`"


def export_stock(source: Any, output: str | Path, *, force: bool = False) -> Any:
    """Write `source` (a pruned model, or its checkpoint) as a plain checkpoint; return that model.

    The logits are those of the pruned model up to rounding: exact in float32 but for the order of
    operations, one rounding of W_q in half precision. Raises CheckpointError if the model is not of
    the stock profile, UnsupportedModelError for another family.
    """
    check_output(output, force=force)
    is_path = isinstance(source, (str, Path))
    check_apart(output, *([source] if is_path else []))
    model = stock_model(load(source) if is_path else source)
    with whole_directory(output, force=force) as folder:
        write_model(model, folder)
        if is_path:
            _copy_tokenizer(source, folder)
            _copy_record(Path(source), folder, Path(output).resolve().name)
    return model


def stock_model(small: PreTrainedModel) -> Any:
    """The plain dense model that equals a pruned model of the uniform layout."""
    slots = slots_of_all_heads(small)
    config = stock_config(small, slots)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config)
    # The rotary frequencies are no weights: the stock class makes them.
    fresh = type(stock.model.rotary_emb)(config=config)
    stock.model.rotary_emb = fresh.to(small.device)
    stock.load_state_dict(_stock_state(small, stock), assign=True, strict=True)
    for name, buffer in stock.named_buffers():
        if buffer.device.type == "meta":  # others that no checkpoint stores (Gemma's scale)
            parent, _, leaf = name.rpartition(".")
            stock.get_submodule(parent)._buffers[leaf] = small.get_buffer(name).clone()
    stock.tie_weights()
    stock.generation_config = small.generation_config
    return stock.eval()


def slots_of_all_heads(small: PreTrainedModel) -> list[int]:
    """The one list of dense pair indices that every head of every layer rotates at.

    Raises CheckpointError, naming the layer and head that differ, and UnsupportedModelError for a
    family that has no plain form.
    """
    check_stock(small.config)
    if not is_pruned(small):
        raise CheckpointError(
            "this model is dense; prune it first: `rap compress MODEL --profile stock -o out`"
        )
    entries = layer_entries(small.config, small.config.num_hidden_layers, "plain")
    first = entries[0]
    for layer, entry in enumerate(entries):
        if entry is None:
            raise CheckpointError(f"layer {layer} was left dense; {_NOT_STOCK}")
        if entry != first:
            raise CheckpointError(
                f"layer {layer} keeps {_describe(entry)}, layer 0 {_describe(first)}; {_NOT_STOCK}"
            )
        assert isinstance(entry, PairEntry)
        if entry.values != 2 * entry.pairs or entry.free:
            raise CheckpointError(
                f"layer {layer} keeps {_describe(entry)}, but a plain checkpoint needs keys as "
                "wide as values, all of them rotating; use `--profile stock`"
            )
    return _shared_index(small)


def _shared_index(small: PreTrainedModel) -> list[int]:
    expected: list[int] = []
    for layer, module in enumerate(small.model.layers):
        for head, row in enumerate(module.self_attn.frequency_index.tolist()):
            expected = expected or row
            if row != expected:
                raise CheckpointError(
                    f"KV head {head} of layer {layer} keeps other pairs than head 0 of layer 0; "
                    f"{_NOT_STOCK}"
                )
    return expected


def stock_config(small: PreTrainedModel, slots: list[int]) -> Any:
    """The plain config: heads of 2m channels, and longrope factors that give the slots' theta.

    Raises UnsupportedModelError for a rope that depends on the text's length, and for Qwen2 with a
    sliding window.
    """
    config = small.config
    check_stock(config)
    other, rope = support(base_model_type(config)).written_as, config.rope_parameters
    kept, merged = config.to_dict(), small.model.layers[0].self_attn.num_kept_heads
    dropped = ["rap", "model_type", "architectures", "auto_map", "transformers_version"]
    for key in [*dropped, *(other.dropped if other is not None else ())]:
        kept.pop(key, None)
    if other is not None:
        kept |= other.added
    kept |= {"head_dim": 2 * len(slots), "num_key_value_heads": merged}
    if not _every_pair_once(small, slots):
        theta = read_frequencies(rotary_module(small))[slots]
        factors = longrope_factors(theta, rope["rope_theta"])
        kept["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": rope["rope_theta"],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
            "short_factor": factors,
            "long_factor": factors,
        }
    return AutoConfig.for_model(plain_family(config), **kept)


def _every_pair_once(small: PreTrainedModel, slots: list[int]) -> bool:
    """Whether heads keep the dense frequencies as they are: then RoPE needs no list."""
    geometry = small.model.layers[0].self_attn.dense_shape.geometry
    return geometry.num_free == 0 and slots == [*range(geometry.num_pairs)]


def longrope_factors(theta: Tensor, base: float) -> list[float]:
    """Factors f_i for which 1 / (f_i base^(2i / 2m)) is theta_i in float32, as engines compute it.

    Of the float32 numbers around the exact factor, the one whose result is nearest is taken: at
    position t an error of one unit in the last place turns a pair by t theta 2^-24 too much.
    """
    steps = torch.arange(0, 2 * len(theta), 2, dtype=torch.float32) / (2 * len(theta))
    powers = base**steps
    exact = (1 / (theta.double() * base ** steps.double())).float()
    units = torch.arange(-4, 5, dtype=torch.int32)[:, None]
    candidates = (exact.view(torch.int32) + units).view(torch.float32)
    errors = (1.0 / (candidates * powers) - theta).abs()
    best: list[float] = candidates.gather(0, errors.argmin(0, keepdim=True))[0].tolist()
    return best


def _stock_state(small: PreTrainedModel, stock: PreTrainedModel) -> dict[str, Tensor]:
    """The pruned weights with W_q scaled and no frequency indices, by the stock model's names."""
    scale = _query_scale(small, stock)
    state = {}
    for name, tensor in _own_linears(small):
        if name.endswith(".frequency_index"):
            continue
        tensor = tensor.detach().clone()
        if ".q_proj." in name:
            tensor = (tensor.double() * scale).to(tensor.dtype)
        state[name] = tensor
    for name, parameter in stock.named_parameters():
        if name.endswith(".o_proj.bias") and name not in state:
            state[name] = torch.zeros(parameter.shape, dtype=small.dtype, device=small.device)
    return state


def _query_scale(small: PreTrainedModel, stock: PreTrainedModel) -> float:
    """What the stock model's scores lack: softmax scale, and what cos and sin carry (yarn)."""
    (own, rotary), (other, plain) = (
        (model.model.layers[0].self_attn, rotary_module(model)) for model in (small, stock)
    )
    scaling: Any = (own.scaling, rotary.attention_scaling, other.scaling, plain.attention_scaling)
    pruned, carried, dense, remaining = scaling
    return float(pruned / dense * (carried / remaining) ** 2)


def _own_linears(small: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor; of linears that several share (Phi-3), a linear each."""
    for name, tensor in small.state_dict().items():
        path, _, last = name.rpartition(".")
        parent, _, linear = path.rpartition(".")
        if linear == "qkv_proj":
            attention: Any = small.get_submodule(parent)
            rows = [
                attention.projection_heads[projection] * attention.projection_widths[projection]
                for projection in "qkv"
            ]
            for projection, part in zip("qkv", tensor.split(rows), strict=True):
                yield f"{parent}.{projection}_proj.{last}", part
        elif linear == "gate_up_proj" and tensor.ndim == 2:
            for part_name, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{parent}.{part_name}_proj.{last}", part
        else:
            yield name, tensor


def _describe(entry: Any) -> str:
    return f"{entry.pairs} pairs and {entry.values} value channels"


def _copy_record(source: Path, folder: Path, title: str) -> None:
    """The plan and the report of the pruned checkpoint, and a card that needs no package."""
    if (source / PLAN_FILE).is_file():
        shutil.copyfile(source / PLAN_FILE, folder / PLAN_FILE)
    if (source / REPORT_FILE).is_file():
        report = plain_report(read_json(source / REPORT_FILE, "remove it, or compress again"))
        write_json(folder / REPORT_FILE, report)
        try:
            card = model_card(report, title)
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{source / REPORT_FILE} is damaged (it lacks {error}): remove it, or compress "
                "again"
            ) from error
        (folder / CARD_FILE).write_text(card, encoding="utf-8")


def _copy_tokenizer(source: str | Path, folder: Path) -> None:
    try:
        load_tokenizer(source).save_pretrained(folder)
    except CheckpointError:
        return
