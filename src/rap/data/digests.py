"""Content hashes of datasets and models, to detect changes since a measurement.

A folder of results keeps it of texts in `texts.sha256`, as `sha256sum` writes it, and of dense
models' configs in `dense.configs` and their tokenizers in `dense.tokenizers`, for results are named
by the weights alone.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..checkpoint.files import whole_file
from ..checkpoint.load import fingerprint_tokenizer
from ..model.errors import CalibrationError
from .splits import without_prefixes
from .text import named_sources

NOTED, CONFIGS, TOKENIZERS = "texts.sha256", "dense.configs", "dense.tokenizers"
# Of a config, what changes no logit, or is part of a result's name by itself.
_NAMES = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}


def check_digests(folder: str | Path, *texts: str | Path) -> None:
    """Raise CalibrationError for a file that is not as `note_digests` of the folder saw it.

    What was measured on it before would pass for a measurement of what it holds now.
    """
    noted = _noted(Path(folder))
    for name, digest in _digests(texts).items():
        if noted.get(name, digest) != digest:
            raise CalibrationError(
                f"{name} has changed since {folder} was measured on it: choose another output, or "
                "give the text another name"
            )


def note_digests(folder: str | Path, *texts: str | Path) -> None:
    """Keep the digests of all local files among the sources, in addition to those kept already."""
    noted = _noted(Path(folder))
    known = noted | _digests(texts)
    if known != noted:
        with whole_file(Path(folder) / NOTED) as partial:
            lines = (f"{digest}  {name}\n" for name, digest in sorted(known.items()))
            partial.write_text("".join(lines), encoding="utf-8")


def settle_config(folder: str | Path, fingerprint: str, config: Any) -> None:
    """Note the config of the dense model whose weights have `fingerprint`.

    Raises CalibrationError if the folder was measured with the same weights under another one, such
    as another base of rotation: what was measured before would pass for a measurement of this.
    """
    path = Path(folder) / CONFIGS
    noted = _of_models(path)
    given = {name: x for name, x in config.to_diff_dict().items() if name not in _NAMES}
    given = json.loads(json.dumps(given, sort_keys=True, default=str))
    before = noted.get(fingerprint, given)
    changed = sorted(n for n in {*before, *given} if before.get(n) != given.get(n))
    if changed:
        raise CalibrationError(
            f"{folder} was measured on this model with another config ({', '.join(changed)}): "
            "choose another output"
        )
    _note_model(path, fingerprint, given)


def settle_tokenizer(folder: str | Path, fingerprint: str, tokenizer: Any) -> None:
    """Note the tokenizer of the dense model whose weights have `fingerprint`.

    Raises CalibrationError if the folder was measured with the same weights and another one: the
    same text is other tokens then. A folder of an earlier release has noted none, and takes any.
    """
    path, given = Path(folder) / TOKENIZERS, fingerprint_tokenizer(tokenizer)
    if _of_models(path).get(fingerprint, given) != given:
        raise CalibrationError(
            f"{folder} was measured on this model with another tokenizer: choose another output"
        )
    _note_model(path, fingerprint, given)


def _of_models(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _note_model(path: Path, fingerprint: str, noted: Any) -> None:
    """Keep what is noted of a model, unless something is."""
    known = _of_models(path)
    if fingerprint not in known:
        with whole_file(path) as partial:
            text = json.dumps(known | {fingerprint: noted}, indent=1)
            partial.write_text(text + "\n", encoding="utf-8")


def _digests(texts: tuple[str | Path, ...]) -> dict[str, str]:
    found = {}
    for source in (name for text in texts for name in named_sources(text)):
        path = Path(without_prefixes(source))
        if path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _noted(folder: Path) -> dict[str, str]:
    path = folder / NOTED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
