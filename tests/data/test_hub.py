"""WikiText-2 as `rap fetch` brings it: from the hub, from files put there, and where neither is."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases.command import run
from rap.cli.setup import NAMES
from rap.data.held_out import evaluation_tokens
from rap.data.hub import fetch_dataset
from rap.data.text import read_text
from rap.model.errors import CalibrationError
from rap.recovery.data import validation_text

ROWS = {
    "test": ["", " = A heading = \n", " Robert is an actor . \n"],
    "validation": ["", " = Another = \n", " It rained . \n"],
    "train": ["trained on"],
}


class Characters:
    """A tokenizer of one token a character."""

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(one) for one in text])


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that datasets are kept in, empty."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "data" / "wikitext2"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that gives ROWS; the splits that it was asked for."""
    import datasets

    asked: list[str] = []

    def load_dataset(path: str, config: str, *, split: str, streaming: bool) -> Any:
        assert (path, config, streaming) == ("Salesforce/wikitext", "wikitext-2-raw-v1", False)
        asked.append(split)
        return datasets.Dataset.from_dict({"text": ROWS[split]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_fetched_dataset_is_read_by_its_names_without_a_hub(
    hub: list[str], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("fetch", "wikitext2", "--json")
    assert result.json == {"name": "wikitext2", "path": str(kept)}
    assert "downloading Salesforce/wikitext" in result.err
    assert hub == ["test", "validation"]
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    joined = {split: "\n\n".join(rows) for split, rows in ROWS.items()}
    for name in ("wikitext2-test", "Salesforce/wikitext:wikitext-2-raw-v1:test"):
        assert read_text(name) == joined["test"]
    for name in ("wikitext2", "wikitext2-validation"):
        assert read_text(name) == joined["validation"]
    for name in ("wikitext2", "paper", "wikitext-2-raw-v1", "wikitext2-test"):
        tokens = evaluation_tokens(name, Characters())  # type: ignore[arg-type]
        assert tokens.tolist() == [ord(one) for one in joined["test"]]
    assert validation_text("paper") == joined["validation"]
    record = json.loads((kept / "PROVENANCE.json").read_text(encoding="utf-8"))
    assert record["rows"] == {"test": 3, "validation": 3}
    assert record["sha256"]["test"] == hashlib.sha256(joined["test"].encode()).hexdigest()
    again = run("fetch", "wikitext2")
    assert again.err == f"wikitext2 is already in {kept}\n"


def test_what_is_calibrated_on_is_not_validated_on() -> None:
    # Its only split here is trained on, so that windows of it are held out instead.
    assert validation_text("wikitext2") is None
    assert validation_text("wikitext2-test") is None


def test_the_split_that_is_not_fetched_still_comes_from_the_hub(hub: list[str]) -> None:
    fetch_dataset("wikitext2")
    assert read_text("paper") == "trained on"
    assert hub == ["test", "validation", "train"]


def test_force_downloads_again(hub: list[str], kept: Path) -> None:
    fetch_dataset("wikitext2")
    (kept / "wikitext2-test.txt").write_text("another", encoding="utf-8")
    fetch_dataset("wikitext2")
    assert read_text("wikitext2-test") == "another"
    fetch_dataset("wikitext2", force=True)
    assert read_text("wikitext2-test") == "\n\n".join(ROWS["test"])


# Without a stand-in: the tests' environment has no hub.
@pytest.mark.parametrize("asked", [("fetch", "wikitext2"), ("evaluate", "perplexity", "bundled")])
def test_without_a_hub_one_line_says_which_files_to_give(
    asked: tuple[str, ...], kept: Path
) -> None:
    more = () if asked[0] == "fetch" else ("--text", "wikitext2")
    result = run(*asked, *more)
    assert result.code == 2
    error = result.err.splitlines()[-1]
    assert error.startswith("error: cannot ")
    assert "run `rap fetch wikitext2` with a network" in error
    assert "or put wikitext2-test.txt and wikitext2-validation.txt (UTF-8, the rows joined" in error
    assert f"into {kept}; any other .txt or .jsonl file is given by its path" in error
    assert not kept.exists()


def test_files_that_were_put_there_do(kept: Path) -> None:
    kept.mkdir(parents=True)
    (kept / "wikitext2-test.txt").write_text("brought by hand", encoding="utf-8")
    assert read_text("wikitext2-test") == "brought by hand"
    with pytest.raises(CalibrationError, match=r"put wikitext2-test\.txt and wikitext2-valid"):
        read_text("wikitext2-validation")
    (kept / "wikitext2-test.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CalibrationError, match="as UTF-8 text"):
        read_text("wikitext2-test")


def test_a_wheel_and_another_name_are_refused(tmp_path: Path) -> None:
    result = run("fetch", "c4")
    assert result.err == f"error: cannot fetch 'c4': use one of {', '.join(NAMES)}\n"
    result = run("fetch", "wikitext2", "--wheel", tmp_path / "x.whl")
    assert result.err == "error: wikitext2 is in no wheel: remove --wheel\n"
    with pytest.raises(CalibrationError, match="cannot fetch the dataset 'c4': use wikitext2"):
        fetch_dataset("c4")
