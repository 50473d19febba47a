"""`save_pretrained` that tolerates generation configs transformers can load but not save."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME


def write_model(model: Any, folder: Path) -> None:
    """`model.save_pretrained`, with the generation config as the model has it.

    transformers loads one that sets, say, a temperature without sampling, and raises ValueError
    where it is to be saved; the same settings are written as they are.
    """
    own = getattr(model, "generation_config", None)
    if own is None or _is_strict(own):
        model.save_pretrained(folder)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = own
    own.to_json_file(folder / GENERATION_CONFIG_NAME, use_diff=True)


def _is_strict(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True
