"""Scripts of experiments, benchmarks and examples: each imports what exists, and nothing runs."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cases.scripts import REPOSITORY, load_script
from rap import assets

FOLDERS = ("experiments", "benchmarks", "examples")
SCRIPTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in FOLDERS
    for path in (REPOSITORY / folder).rglob("*.py")
)
# Modules of optional packages, of which a script may import one.
EXTRAS = {
    *("bitsandbytes", "hqq", "kvpress", "lm_eval", "optimum"),
    *("torchao", "triton", "vllm", "xllamacpp"),
}


def beside_scripts() -> list[str]:
    """Names of the loaded modules that are scripts, or lie beside one."""
    places = [REPOSITORY / folder for folder in (*FOLDERS, "docs")]
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [
        name
        for name, file in files.items()
        if file and any(Path(file).is_relative_to(place) for place in places)
    ]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No module of another script is loaded, before or after: folders have some of one name."""
    for name in beside_scripts():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in beside_scripts():
        del sys.modules[name]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported_and_does_not_run_then(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        pytest.fail(f"{name} reads its arguments when it is imported")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", run)
    try:
        load_script(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"could not import {error.name!r}: an extra that is not installed")


def test_the_reference_model_is_trained_on_rows_of_every_kind() -> None:
    script = load_script("examples/train_reference_model.py")
    stream = np.arange(8192, dtype=np.uint16) % 4096
    rows = script.Rows(stream, assets.reference_tokenizer(), script.Recipe(batch=16384))
    ids, kinds = rows.batch(step=0, progress=0.1)
    assert ids.shape == kinds.shape == (64, 257)
    documents = script.documents
    wanted = {documents.TEXT, documents.STATED, documents.ANSWER, script.COPIED, script.NOISE}
    assert set(kinds.unique().tolist()) == wanted
    again, _ = rows.batch(step=0, progress=0.1)
    assert again.equal(ids)
