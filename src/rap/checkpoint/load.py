"""Checkpoint directories and models: reading them, with clear errors."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..model.errors import CheckpointError, RapError
from ..model.fingerprint import fingerprint_model
from ..model.layers import PREFIX, attention_spec, refuse_pruned
from ..model.modeling import auto_class, register
from .files import check_safetensors

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def load_config(source: str | Path) -> Any:
    """The config of a checkpoint directory or hub name; CheckpointError if there is none."""
    register()
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{source} is a directory without a model: config.json is missing")
    if not path.is_dir() and (path.is_absolute() or str(source).startswith(".")):
        raise CheckpointError(f"there is no directory {source}: check the path")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read a model config from {source}: {_first(error)}"
        ) from error


def load_dense(source: str | Path, **kwargs: Any) -> Any:
    """A dense causal LM to compress, in eval mode; refused before its weights are read.

    Keyword arguments go to `from_pretrained` (dtype, device_map, ...).
    Raises UnsupportedModelError or CheckpointError.
    """
    config = load_config(source)
    refuse_pruned(config)
    attention_spec(config)
    return _load(source, config, **kwargs)


def load(source: str | Path, *, verify: bool = True, **kwargs: Any) -> Any:
    """Any causal LM, dense or pruned, in eval mode.

    `source` is a checkpoint directory or a hub name; `kwargs` (dtype, device_map, ...) go to
    `from_pretrained`. A pruned checkpoint's weights are checked against the fingerprint
    in its config, which hashes all of them once, unless `verify` is off or the requested dtype
    cannot represent the stored values.

    Raises CheckpointError for a source without a model, files that are missing, truncated or
    damaged, an unknown dtype, or weights that are not those the config describes.
    """
    config = load_config(source)
    model = _load(source, config, **kwargs)
    stored = (getattr(config, "rap", None) or {}).get("fingerprint")
    exact = model.dtype in (config.dtype, torch.float32, torch.float64)
    if verify and exact and stored and stored != fingerprint_model(model):
        raise CheckpointError(
            f"the weights in {source} are not the ones its config describes (fingerprint "
            f"{stored[:12]}): the checkpoint was changed or mixed with another one"
        )
    return model


def is_pruned(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether a model or config is of a pruned family."""
    config = getattr(model, "config", model)
    return str(config.model_type).startswith(PREFIX)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a checkpoint; CheckpointError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load a tokenizer from {source}: {_first(error)}") from error


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy what prepares images for a multimodal model, as it is, from a checkpoint that has it."""
    for name in _PROCESSOR_FILES:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            shutil.copyfile(path, folder / name)


def _load(source: str | Path, config: PreTrainedConfig, **kwargs: Any) -> Any:
    check_dtype(kwargs.get("dtype", "auto"))
    if Path(source).is_dir():
        for shard in sorted(Path(source).glob("*.safetensors")):
            check_safetensors(shard)
    try:
        return auto_class(config).from_pretrained(source, **kwargs).eval()
    except RapError:
        raise
    # ValueError also for a broken shard index, ImportError for a quantizer that is not installed.
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"cannot load weights from {source}: {_first(error)}") from error


def check_dtype(dtype: object) -> None:
    """Raise CheckpointError unless `dtype` is "auto", or a torch type or the name of one."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and not isinstance(named, torch.dtype):
        raise CheckpointError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16 or float16")


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
