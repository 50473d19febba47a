"""The bundled model is trained, whole and loadable; the bundled text is the stated one."""

import pytest
import torch

from cases.positions import perplexity_by_position
from rap import assets
from rap.model.errors import RapError


def test_model_loads_in_the_stored_and_in_an_asked_dtype(reference_model):
    assert assets.reference_model().dtype == torch.bfloat16
    assert reference_model.dtype == torch.float32
    assert not reference_model.training


def test_each_call_gives_its_own_copy(reference_model):
    other = assets.reference_model(torch.float32)
    assert other.lm_head.weight.data_ptr() != reference_model.lm_head.weight.data_ptr()


def test_model_has_the_stated_shape(reference_model):
    config = reference_model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (6, 4, 2)
    assert config.head_dim == 64
    assert sum(parameter.numel() for parameter in reference_model.parameters()) == 4_590_848


@pytest.mark.parametrize(
    ("split", "size", "phrase"),
    [
        ("calibration", 5_926_702, "LORNA DOONE"),
        ("validation", 1_388_259, "A ROOM WITH A VIEW"),
        ("test", 2_519_571, "The Hound of the Baskervilles"),
    ],
)
def test_text_is_the_stated_one(split, size, phrase):
    text = assets.reference_text(split)
    assert len(text.encode("utf-8")) == size
    assert phrase in text


def test_encyclopedia_is_articles_of_many_fields():
    articles = assets.encyclopedia_text().strip().split("\n\n")
    assert [article.split(" ", 1)[0].rstrip(",") for article in articles][:3] == [
        "ABBEY",
        "ACACIA",
        "ACCUMULATOR",
    ]
    assert len(articles) == 15
    assert all(1_000 < len(article) <= 120_000 for article in articles)


def test_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(RapError, match=r"'train'.*calibration, validation, test"):
        assets.reference_text("train")


def test_tokenizer_round_trips_and_adds_no_token(tokenizer):
    text = "It was 1867; she said: \u201cno\u201d."
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer(text + text).input_ids[: len(ids) - 1] == ids[:-1]
    assert max(ids) < 4096


def test_model_is_trained(reference_model, test_tokens):
    """The README's figure, 42.2 over 48 windows; 0.1 covers its rounding and float32 kernels."""
    windows_NT = test_tokens[: 48 * 512].view(48, 512)
    with torch.inference_mode():
        losses = [
            reference_model(windows_BT, labels=windows_BT).loss
            for windows_BT in windows_NT.split(8)
        ]
    assert torch.stack(losses).mean().exp().item() == pytest.approx(42.2, abs=0.1)


def test_model_gains_from_a_longer_context(reference_model, test_tokens):
    """docs/reference-model.md says by how much."""
    found = perplexity_by_position(reference_model, test_tokens[: 6 * 1024].view(6, 1024))
    assert list(found)[:3] == [(1, 1), (2, 3), (4, 7)]
    assert list(found)[-1] == (512, 1023)
    assert found[512, 1023] < 0.8 * found[32, 63]
