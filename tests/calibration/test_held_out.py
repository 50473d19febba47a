"""Names of datasets stand for the split that nothing is trained on, in every command."""

import pytest

from rap.calibration import held_out, text

WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1"


@pytest.mark.parametrize(
    ("name", "judged", "calibrated"),
    [
        ("c4", "allenai/c4:en:validation", "allenai/c4:en:train"),
        ("paper", "Salesforce/wikitext:wikitext-2-raw-v1:test", None),
        ("wikitext-2-raw-v1", "Salesforce/wikitext:wikitext-2-raw-v1:test", None),
        ("wikitext2", f"{WIKITEXT}:test", f"{WIKITEXT}:validation"),
        ("wikitext2-test", f"{WIKITEXT}:test", f"{WIKITEXT}:test"),
        ("wikitext2-validation", f"{WIKITEXT}:validation", f"{WIKITEXT}:validation"),
        ("some/data:a:b", "some/data:a:b", "some/data:a:b"),
    ],
)
def test_a_text_to_judge_on_is_another_split(monkeypatch, tokenizer, name, judged, calibrated):
    read = []

    def dataset(source, most):
        read.append(source)
        return "some words"

    monkeypatch.setattr(text, "read_dataset", dataset)
    assert len(held_out.evaluation_tokens(name, tokenizer)) > 0
    text.read_text(name)
    assert read == [judged, calibrated or "Salesforce/wikitext:wikitext-2-raw-v1:train"]


def test_a_repeated_text_to_judge_on_is_of_the_same_split(monkeypatch, tokenizer):
    found = held_out.evaluation_tokens("repeated:bundled", tokenizer)
    plain = held_out.evaluation_tokens("bundled", tokenizer)
    assert len(found) > 1.9 * len(plain)
    assert found[:100].tolist() == plain[:100].tolist()
    read = []
    monkeypatch.setattr(text, "read_dataset", lambda source, most: read.append(source) or "words")
    held_out.evaluation_tokens("repeated:c4", tokenizer)
    assert read == ["allenai/c4:en:validation"]
