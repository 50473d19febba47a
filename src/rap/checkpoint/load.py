"""Checkpoint directories and models: reading them, with clear errors."""

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .. import assets
from ..model.errors import CheckpointError
from ..model.fingerprint import fingerprint_model
from ..model.layers import PREFIX, SOFT_CAP, attention_spec, check_dense, text_config
from ..model.modeling import auto_class, register
from .reading import reading
from .shards import INDEX_FILE, WEIGHTS_FILE, check_depth, find_shards
from .source import resolve_source

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_ADAPTER_FILE = "adapter_config.json"


def load_config(source: str | Path) -> Any:
    """The config of what `source.resolve_source` resolves; CheckpointError if there is none, or a
    senseless one."""
    register()
    source = resolve_source(source)
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{source} is a directory without a model: config.json is missing")
    if not path.is_dir() and (path.is_absolute() or str(source).startswith(".")):
        raise CheckpointError(f"there is no directory {source}: check the path")
    with reading(f"read a model config from {source}"):
        config = AutoConfig.from_pretrained(source)
    _check_positions(config, source)
    return config


def load_dense(source: str | Path, **kwargs: Any) -> Any:
    """A dense causal LM to compress, in eval mode; rejected before its weights are read.

    Keyword arguments go to `from_pretrained` (dtype, device_map, ...).
    Raises UnsupportedModelError or CheckpointError.
    """
    source = resolve_source(source)
    config = load_config(source)
    check_dense(config)
    attention_spec(config)
    check_no_adapter(Path(source))
    return _load(source, config, **kwargs)


def load(source: str | Path, *, verify: bool = True, **kwargs: Any) -> Any:
    """Any causal LM, dense or pruned, in eval mode.

    `source` is a checkpoint directory, a hub name, `bundled`, a model that `rap fetch` brought, or
    a .gguf file; `kwargs` (dtype, device_map, ...) go to `from_pretrained`. A pruned checkpoint's
    weights are checked against the fingerprint in its config, which hashes all of them once, unless
    `verify` is off, some are offloaded, or the requested dtype or quantization cannot represent the
    stored values.
    Attention is eager, if nothing else is asked for, in models that cap their scores: SDPA would
    leave the cap out.

    Raises CheckpointError for a source without a model, files that are missing, truncated or
    damaged, an unknown dtype, or weights that are not those the config describes.
    """
    source = resolve_source(source)
    config = load_config(source)
    model = _load(source, config, **kwargs)
    stored = (getattr(config, "rap", None) or {}).get("fingerprint")
    exact = model.dtype in (config.dtype, torch.float32, torch.float64)
    exact &= not getattr(model, "is_quantized", False)
    here = exact and not is_offloaded(model)
    if verify and here and stored and stored != fingerprint_model(model):
        raise CheckpointError(
            f"the weights in {source} are not the ones its config describes (fingerprint "
            f"{str(stored)[:12]}): the checkpoint was changed or mixed with another one"
        )
    return model


def is_offloaded(model: PreTrainedModel) -> bool:
    """Whether some weights are on disk or in another place that only a forward pass reads."""
    return any(parameter.is_meta for parameter in model.parameters())


def is_pruned(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether a model or config is of a pruned family."""
    config = getattr(model, "config", model)
    return str(config.model_type).startswith(PREFIX)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a `source` that `load` takes; CheckpointError if there is none."""
    source = resolve_source(source)
    remedy = "copy the tokenizer's files there, or download them again"
    with reading(f"load a tokenizer from {source}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(source)
        # Without any file, transformers makes one of special tokens alone for some families.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise CheckpointError(f"there is no tokenizer in {source}: {remedy}")
    return tokenizer


def check_generation_config(folder: Path) -> None:
    """Raise CheckpointError for a generation config, where there is one, that nothing can load.

    What is copied unread would make a checkpoint that does not load either.
    """
    path = folder / GENERATION_CONFIG_NAME
    if path.is_file():
        with reading(f"read {path}", "download it again, or remove it"):
            GenerationConfig.from_pretrained(folder)


def check_no_adapter(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint with an adapter, which loading would add."""
    if (folder / _ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{folder} has an adapter ({_ADAPTER_FILE}): merge it into the weights first"
        )


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy what prepares images for a multimodal model, as it is, from a checkpoint that has it.

    Nothing where it cannot be had: of a model made in memory, or a hub name out of reach.
    """
    for name in _PROCESSOR_FILES if str(source) else ():
        try:
            path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        except OSError:
            return
        if path is not None:
            shutil.copyfile(path, folder / name)


def _load(source: str | Path, config: PreTrainedConfig, **kwargs: Any) -> Any:
    check_dtype(kwargs.get("dtype", "auto"))
    folder = Path(source)
    if any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        check_depth(find_shards(folder), config)
    kwargs = _obeying(config) | kwargs
    with reading(f"load weights from {source}"):
        model, found = auto_class(config).from_pretrained(
            source, output_loading_info=True, **kwargs
        )
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers fills them with random numbers, and warns.
        raise CheckpointError(
            f"the checkpoint {source} lacks {len(missing)} of the tensors that its config asks for "
            f"({missing[0]}, ...): it is incomplete, download it again"
        )
    return model.eval()


def _obeying(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model must be loaded with to do what its config says."""
    capped = getattr(text_config(config), SOFT_CAP, None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def without_tensors(config: PreTrainedConfig, **kwargs: Any) -> Any:
    """The model of a config on the meta device; CheckpointError for a config that makes none."""
    with reading("build the model that the config describes"), torch.device("meta"):
        return auto_class(config).from_config(config, **(_obeying(config) | kwargs))


def check_dtype(dtype: object, others: Collection[str] = ()) -> None:
    """Raise CheckpointError unless `dtype` is "auto", or a torch type or the name of one.

    `others` are names that may be asked for too.
    """
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto", *others) and not isinstance(named, torch.dtype):
        known = ", ".join(["auto", "float32", "bfloat16", *others])
        raise CheckpointError(f"unknown dtype {dtype!r}: use {known} or float16")


def _check_positions(config: Any, source: str | Path) -> None:
    """Raise CheckpointError for positions that no model can have been trained on."""
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    found = [("max_position_embeddings", getattr(text, "max_position_embeddings", None))]
    found += [("rope_theta", kind.get("rope_theta")) for kind in kinds]
    for name, value in found:
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise CheckpointError(
                f"{name} {value!r} in the config of {source} is not a positive number: correct it"
            )


_PASSING = ("truncation", "padding")  # of a call, and no part of the tokenizer
_PROBE = 20_000  # characters


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """64 hexadecimal digits of the rules, the vocabulary and the special tokens.

    Of a tokenizer without rules that can be read, one in plain Python, the tokens that it makes of
    a stretch of the bundled novels stand for them.
    """
    known: dict[str, Any] = {"special": _special(tokenizer)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        known["rules"] = {name: x for name, x in rules.items() if name not in _PASSING}
    else:
        text = assets.reference_text("test")[:_PROBE]
        known["tokens"] = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        vocabulary = getattr(tokenizer, "get_vocab", dict)
        known["vocabulary"] = sorted(vocabulary().items())
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _special(tokenizer: Any) -> dict[str, str]:
    found = getattr(tokenizer, "special_tokens_map", {})
    return {name: str(token) for name, token in found.items()}
