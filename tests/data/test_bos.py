"""Windows that begin with BOS: when they do, what they hold, what is scored, and what is said."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import rap
from cases.characters import Characters
from cases.command import run
from cases.models import VOCABULARY, random_tokens, tiny_model
from rap import assets
from rap.data.bos import bos_token
from rap.data.text import windows_from_text
from rap.evaluation.cache.compressed import CacheCompression, compressed_perplexity
from rap.evaluation.quality.perplexity import perplexity
from rap.evaluation.retrieval import needle, recall
from rap.model.errors import RapError
from rap.recovery.config import RecoveryConfig
from rap.recovery.data import recovery_windows
from rap.studies.compare.grid import Grid
from rap.studies.compare.measurement import Measures

BOS = 7
WINDOW = 20
SMALL = ("--windows", "2", "--window", "64")


@pytest.fixture(scope="module")
def adding(tokenizer):
    """The bundled tokenizer, made to put its BOS (token 0) before a text as Llama-3's does."""
    made = copy.deepcopy(tokenizer)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert made("a").input_ids == [0, *tokenizer("a").input_ids]
    return made


def test_the_default_is_what_the_tokenizer_does_or_the_family_needs(tokenizer, adding):
    llama, gemma = (tiny_model(name, bos_token_id=2).config for name in ("llama", "gemma2"))
    bare = SimpleNamespace(bos_token_id=None)
    assert bos_token("auto", tokenizer, llama) is None
    assert bos_token("auto", adding, llama) == 0
    assert bos_token("auto", tokenizer, gemma) == 0
    assert bos_token("auto", bare, gemma) == 2
    assert bos_token("auto", bare, llama) is None
    # Without a tokenizer only the family can tell.
    assert (bos_token("auto", config=gemma), bos_token("auto", config=llama)) == (2, None)
    assert bos_token("auto") is None
    pruned = SimpleNamespace(model_type="rap_gemma2", bos_token_id=2)
    assert bos_token("auto", config=pruned) == 2
    around = SimpleNamespace(model_type="gemma3", text_config=gemma_text())
    assert bos_token("auto", config=around) == 2


def test_windows_for_a_model_begin_as_its_family_needs(tokenizer):
    gemma = tiny_model("gemma2", bos_token_id=2, vocab_size=len(tokenizer))
    plain = rap.load_windows("bundled", tokenizer, num_windows=2, window=16)
    begun = rap.load_windows("bundled", tokenizer, num_windows=2, window=16, model=gemma)
    assert begun[:, 0].tolist() == [0, 0]
    assert 0 not in plain[:, 0]


def gemma_text():
    return SimpleNamespace(model_type="gemma3_text", bos_token_id=2)


def test_it_can_be_asked_for_and_refused(tokenizer, adding):
    assert bos_token("always", tokenizer) == 0
    assert bos_token("never", adding) is None
    assert (bos_token(5, adding), bos_token(None, adding)) == (5, None)
    with pytest.raises(RapError, match="no BOS token: use auto or never"):
        bos_token("always", SimpleNamespace(bos_token_id=None), tiny_model().config)
    with pytest.raises(RapError, match="unknown bos 'often': use auto, always, never"):
        bos_token("often", tokenizer)


@pytest.mark.parametrize("repeats", [1, 40])
def test_windows_of_text_begin_with_it_and_lose_no_text(repeats):
    text = "abcdefghijklmnopqrstuvwxyz " * repeats
    rows = windows_from_text(text, Characters(BOS), num_windows=9, window=4)
    assert rows.shape == (9, 4)
    assert rows[:, 0].tolist() == [BOS] * 9
    found = ["".join(map(chr, row)) for row in rows[:, 1:].tolist()]
    if repeats == 1:  # tokenized whole, not by drawn stretches
        assert "".join(found) == text
    assert all(part in text for part in found)
    without = windows_from_text(text, Characters(BOS), num_windows=6, window=4, bos="never")
    assert BOS not in without


def test_the_bundled_windows_have_none(tokenizer):
    rows = rap.load_windows("bundled", tokenizer, num_windows=4, window=64)
    assert torch.equal(
        rows, rap.load_windows("bundled", tokenizer, num_windows=4, window=64, bos=None)
    )


@torch.no_grad()
def mean_loss(model, windows_NT):
    """Hugging Face's own loss, window by window: every token but the first is predicted."""
    losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows_NT]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_perplexity_reads_it_and_never_predicts_it(batch_size):
    model, ids = tiny_model(), random_tokens(1, 3 * (WINDOW - 1) + 5)[0]
    ids[ids == BOS] = 8
    found = perplexity(model, ids, window=WINDOW, bos=BOS, batch_size=batch_size)
    text = ids[: 3 * (WINDOW - 1)].view(3, WINDOW - 1)
    windows = torch.cat([torch.full((3, 1), BOS), text], 1)
    assert found.nats_per_token == pytest.approx(mean_loss(model, windows), rel=3e-6)
    assert (found.num_tokens, found.num_left_out, found.bos) == (3 * (WINDOW - 1), 5, BOS)
    # The tokenizer may have put one before the text: it is not read twice, nor predicted.
    again = perplexity(model, torch.cat([torch.tensor([BOS]), ids]), window=WINDOW, bos=BOS)
    assert again.nats_per_token == pytest.approx(found.nats_per_token, rel=1e-6)
    assert again.num_left_out == 5
    # Windows that were made with it are those windows.
    made = perplexity(model, windows.flatten(), window=WINDOW, bos=BOS)
    assert made.nats_per_token == pytest.approx(found.nats_per_token, rel=1e-6)
    assert perplexity(model, ids, window=WINDOW).bos is None


def test_a_family_that_needs_it_has_it_by_default():
    model, ids = tiny_model("gemma2", bos_token_id=BOS), random_tokens(1, 3 * WINDOW)
    found = perplexity(model, ids, window=WINDOW)
    assert found == perplexity(model, ids, window=WINDOW, bos=BOS)
    assert found.bos == BOS
    without = perplexity(model, ids, window=WINDOW, bos=None)
    assert (without.bos, without.num_tokens) == (None, 3 * (WINDOW - 1))
    assert without.value != pytest.approx(found.value, rel=1e-3)


def test_a_text_of_one_token_less_fills_a_window():
    model, ids = tiny_model(), random_tokens(1, WINDOW - 1)
    assert perplexity(model, ids, window=WINDOW, bos=BOS).num_windows == 1
    with pytest.raises(RapError, match="less than one window of 20"):
        perplexity(model, ids, window=WINDOW, bos=None)
    with pytest.raises(RapError, match=f"token id {VOCABULARY} is outside"):
        perplexity(model, ids, window=WINDOW, bos=VOCABULARY)


def test_continuations_of_a_compressed_cache_are_scored_after_it():
    model, ids = tiny_model(), random_tokens(1, 4 * WINDOW)[0]
    sizes = {"window": WINDOW, "prefix": 1, "piece": 4}
    found = compressed_perplexity(model, ids, CacheCompression(), bos=BOS, **sizes)
    rows = ids[: 4 * (WINDOW - 1)].view(4, WINDOW - 1)
    rows = torch.cat([torch.full((4, 1), BOS), rows], 1)
    wanted = compressed_perplexity(model, rows.flatten(), CacheCompression(), bos=None, **sizes)
    assert found.nats_per_token == wanted.nats_per_token
    assert (found.bos, wanted.bos) == (BOS, None)


@pytest.mark.parametrize("num_windows", [4, None])
def test_recovery_trains_and_validates_on_windows_with_it(adding, tmp_path, num_windows):
    path = tmp_path / "text.txt"
    path.write_text(assets.reference_text("validation")[:20_000])
    config = RecoveryConfig(window=32, num_windows=num_windows, validation_windows=2)
    for source in ("bundled", str(path)):
        if source == "bundled" and num_windows is None:
            continue
        train, validation = recovery_windows([source], adding, config)
        for rows in (train, validation):
            assert rows.shape[1] == 32
            assert (rows[:, 0] == 0).all()
            assert not (rows[:, 1:] == 0).any()
        plain, _ = recovery_windows([source], adding, config, bos="never")
        assert not (plain[:, 0] == 0).all()


def look_up(prefix):
    """The number that a prefix asks for, where it stands in it."""
    question = "What is the number of "
    if question not in prefix or "?" not in prefix[prefix.rindex(question) :]:
        return None
    name, _, said = prefix[prefix.rindex(question) + len(question) :].partition("?")
    stated = f"The number of {name} is"
    if stated not in prefix or len(said) > 5:
        return None
    start = prefix.index(stated) + len(stated)
    return ord(prefix[start + len(said)])


class Stub(torch.nn.Module):
    """Finds what `look_up` finds, but only in a document that begins with BOS."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.lengths = []

    def forward(self, input_ids, use_cache):
        self.lengths.append(input_ids.shape[1])
        logits = torch.zeros(*input_ids.shape, 128)
        for row, ids in enumerate(input_ids.tolist()):
            for position in range(len(ids)) if ids[0] == BOS else ():
                token = look_up("".join(map(chr, ids[1 : position + 1])))
                if token is not None:
                    logits[row, position, token] = 20.0
        return SimpleNamespace(logits=logits)


def test_documents_with_facts_begin_with_it():
    text, model = np.random.default_rng(0).integers(97, 123, 4000), Stub()
    few = {"num_documents": 2, "batch_size": 1}
    asked = {"distances": (80,), "facts": (1,), **few}
    found = [
        recall.recall_grid(model, Characters(BOS), text, **asked, bos=bos)[0].accuracy
        for bos in ("auto", "never")
    ]
    assert found == [1.0, 0.0]
    model.lengths.clear()
    cells = needle.needle_grid(
        model, Characters(BOS), text, lengths=(160,), depths=(0.0, 1.0), **few
    )
    assert [cell.accuracy for cell in cells] == [1.0, 1.0]
    assert set(model.lengths) == {160}


def test_copies_are_scored_on_the_same_tokens_after_it(monkeypatch):
    text = np.random.default_rng(0).integers(97, 123, 4000)
    sizes = {"passage": 16, "distance": 40, "num_documents": 2}
    seen = []

    def losses(model, documents, batch_size):
        for document in documents:
            seen.append(document.ids)
            # The loss is the token's own number, so that a mean tells which tokens were taken.
            yield document, document.ids[1:].astype(float), None

    monkeypatch.setattr(recall, "score_documents", losses)
    plain, opened = (recall.copy_loss(None, text, **sizes, bos=bos) for bos in (None, BOS))
    assert (opened.first, opened.second) == (plain.first, plain.second)
    assert [len(ids) for ids in seen] == [56, 56, 57, 57]
    assert [ids[0] == BOS for ids in seen] == [False, False, True, True]


def test_compress_says_which_was_used(adding, tmp_path):
    path = tmp_path / "held-out.txt"
    path.write_text(assets.reference_text("test")[:12_000])
    reports = {}
    for bos in ("auto", "never"):
        reports[bos] = rap.compress(
            assets.reference_model(torch.float32),
            tokenizer=adding,
            num_windows=2,
            window=64,
            evaluate=str(path),
            bos=bos,
            output=tmp_path / bos,
        ).report
    auto, never = reports["auto"], reports["never"]
    assert auto["calibration"] == (
        "2 windows of 64 tokens from bundled, each beginning with BOS (token 0)"
    )
    assert never["calibration"] == "2 windows of 64 tokens from bundled, without BOS"
    assert auto["calibration"] in (tmp_path / "auto" / "README.md").read_text()
    for side in ("dense", "pruned"):
        assert (auto[side]["evaluation"]["bos"], never[side]["evaluation"]["bos"]) == (0, None)
    assert auto["dense"]["perplexity"] != never["dense"]["perplexity"]
    assert auto["provenance"]["settings"]["bos"] == "auto"


def test_a_comparison_keeps_its_cells_apart(adding, tmp_path):
    measures = Measures(num_windows=1, window=64, recall_documents=0, decode_steps=0)
    grid = Grid(methods=("random",), retains=(0.5,), measures=measures, num_windows=2, window=64)
    names = {bos: [cell.name for cell in grid.cells("abc", "float32", bos)] for bos in (None, 0)}
    assert not set(names[None]) & set(names[0])
    # A cell without one is the cell it was before there was a choice.
    assert "bos" not in grid.cells("abc", "float32")[0].config
    model = assets.reference_model(torch.float32)
    settings = {"num_windows": 2, "window": 64, "measures": measures}
    result = rap.compare(
        model, output=tmp_path, methods=("random",), retain=(0.5,), tokenizer=adding, **settings
    )
    assert {cell["evaluation"]["bos"] for cell in result["cells"]} == {0}
    plain = rap.compare(
        model,
        output=tmp_path,
        methods=("random",),
        retain=(0.5,),
        tokenizer=adding,
        bos="never",
        **settings,
    )
    assert {cell["evaluation"]["bos"] for cell in plain["cells"]} == {None}
    assert "--bos never" in plain["cells"][1]["command"]


def test_the_flag_reaches_every_command(tmp_path):
    path, plan = tmp_path / "held-out.txt", tmp_path / "plan.rap"
    path.write_text(assets.reference_text("test")[:6_000])
    call = ("evaluate", "perplexity", "bundled", "--text", path, "--window", 64, "--json")
    values = {bos: run(*call, "--bos", bos).json for bos in ("auto", "always", "never")}
    assert [values[bos]["bos"] for bos in values] == [None, 0, None]
    assert values["auto"]["value"] == values["never"]["value"] != values["always"]["value"]
    made = run("plan", "bundled", "-o", plan, *SMALL, "--bos", "always", "--json").json
    settings = made["provenance"]["settings"]
    assert (settings["bos"], settings["bos_token"]) == ("always", 0)
    found = run(
        "evaluate",
        "retrieval",
        "bundled",
        "--task",
        "recall",
        "--documents",
        1,
        "--distance",
        64,
        "--facts",
        1,
        "--bos",
        "always",
        "--json",
    ).json
    assert found["bos"] == 0
    found = run(
        "evaluate",
        "retrieval",
        "bundled",
        "--task",
        "needle",
        "--documents",
        1,
        "--length",
        256,
        "--depth",
        0,
        "--bos",
        "always",
        "--json",
    ).json
    assert found["bos"] == 0
    assert json.loads(json.dumps(found))["needle"][0]["length"] == 256
    for command in (
        ("compress",),
        ("plan",),
        ("recover",),
        ("compare",),
        ("analyze",),
        *(("evaluate", one) for one in ("perplexity", "retrieval", "cache")),
    ):
        assert "--bos" in run(*command, "--help").out, command
    refused = run(*call, "--bos", "often")
    assert refused.code == 2
    assert "unknown bos 'often'" in refused.err
