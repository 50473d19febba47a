"""Choices scored in rows: those of lm-eval's own model, for every family and method that takes it.

Shapes: B rows, T tokens of a row.
"""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.family_cases import CASES as FAMILIES
from cases.family_cases import Case, random_case_plan
from cases.method_cases import CASES as METHODS
from cases.method_cases import MethodCase
from cases.models import MAX_POSITIONS, random_tokens, tiny_model
from rap.calibration.registry import STATISTICS, WINDOWS
from rap.evaluation.quality import choices
from rap.evaluation.quality.choices import (
    MASKED,
    Request,
    choice_scorer,
    pack,
    packable_tokens,
    score_rows,
)
from rap.methods.palu import Palu
from rap.surgery.apply import apply

# Each is a context and a continuation; two with one answer ask which context suits it.
TEXTS = [
    *(("It was a dark evening, and the old", end) for end in (" man", " zebra crossing", " house")),
    *(("She looked at him with her", end) for end in (" eyes and went away", " ox", " eyes")),
    ("The trophy did not fit into the case, for the trophy", " was too large."),
    ("The trophy did not fit into the case, for the case", " was too large."),
    ("", " the"),
    *(("Which is it? A. a man. B. a room. Answer:", end) for end in (" A", " B")),
]
# Layers' norms, routers and linear attention round to float32 whatever the dtype is.
BOUND = 1e-4
# Sums of some float32 log-probabilities, in another order of additions.
ROUNDING = 2e-4


def request(context: list[int], continuation: list[int]) -> Request:
    return ("", ""), context, continuation


def questions(seed: int = 0) -> list[Request]:
    """Two questions of three choices, and one whose contexts differ before the answer, as tokens.

    Continuations of one token end with their context: nothing of them is read.
    """
    ids = random_tokens(8, 20, seed).tolist()
    first = [request(ids[0][:9], ids[n][:size]) for n, size in ((1, 4), (2, 1), (3, 6))]
    second = [request(ids[4][:5], ids[n][:size]) for n, size in ((5, 1), (6, 1), (7, 3))]
    partial = [request([*ids[0][:8], *ids[n][:2]], ids[3][:5]) for n in (5, 6)]
    return [*first, *second, *partial]


@torch.no_grad()
def one_by_one(model: Any, asked: list[Request]) -> list[float]:
    """Every request by a pass of its own."""
    found = []
    for _, context, continuation in asked:
        logits = model(torch.tensor([context + continuation]), use_cache=False).logits[0]
        scored = logits[len(context) - 1 : -1].log_softmax(-1)
        found.append(float(scored.gather(1, torch.tensor(continuation)[:, None]).sum()))
    return found


def in_rows(model: Any, asked: list[Request], limit: int = MAX_POSITIONS) -> list[float]:
    """Every request in rows, all in one pass."""
    rows = pack(asked, limit)
    assert sum(len(row.members) for row in rows) == len(asked) > len(rows)
    scores = dict(score_rows(model, asked, rows))
    return [scores[index][0] for index in range(len(asked))]


def difference(model: Any) -> float:
    asked = questions()
    pairs = zip(in_rows(model, asked), one_by_one(model, asked), strict=True)
    return max(abs(found - expected) for found, expected in pairs)


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, Any]:
    """A tiny biased model in float64 and every statistic there is."""
    model = tiny_model("qwen2", dtype=torch.float64, heads=4, kv_heads=2, hidden=80)
    return model, rap.calibrate(model, random_tokens(4, 48), {*STATISTICS, WINDOWS})


# Tokens that the longest of `questions()` reads; windows of one less would hide the first.
LONGEST = 14
WINDOWED = ("sliding_window", "attention_chunk_size")


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_families_are_exact_or_not_packed(case: Case):
    """Dense and pruned; what is packed has layers of attention alone, and windows that suffice."""
    windows = {name: LONGEST for name in WINDOWED if case.fields.get(name) is not None}
    model = case.model(**windows)
    small = apply(model, random_case_plan(model, case))
    if not {*case.fields.get("layer_types", ["full_attention"])} <= ATTENTION_LAYERS:
        assert not packable_tokens(model)
    if packable_tokens(model):
        assert (
            packable_tokens(model)
            == packable_tokens(small)
            == (LONGEST if windows else sys.maxsize)
        )
        for one in (model, small):
            for implementation in MASKED if one._supports_sdpa else ("eager",):
                one.set_attn_implementation(implementation)
                assert difference(one) < BOUND


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Rows may be longer than the window; a request may not.
short = [
    case for case in FAMILIES if {*WINDOWED} & {*case.fields} and packable_tokens(case.model())
]


@pytest.mark.parametrize("case", short, ids=lambda case: case.name)
def test_a_window_of_one_token_less_is_not_enough(case: Case):
    model = case.model(**dict.fromkeys({*WINDOWED} & {*case.fields}, LONGEST - 1))
    assert packable_tokens(model) == LONGEST - 1
    assert difference(model) > 10 * BOUND


@pytest.mark.parametrize("tokens", [LONGEST, LONGEST - 1])
def test_a_chunk_is_a_window(tokens: int):
    """Of a Llama 4 that scales no queries by their position, which rows would not know."""
    [case] = [case for case in FAMILIES if case.name == "llama4_text"]
    assert not packable_tokens(case.model())
    model = case.model(attn_temperature_tuning=False, attention_chunk_size=tokens)
    assert packable_tokens(model) == tokens
    assert (difference(model) < BOUND) is (tokens == LONGEST)


# Their windows are a setting, off in what is published of most.
OPTIONAL = ("mistral", "mixtral", "ministral3", "qwen2", "qwen3", "starcoder2", "phi3", "exaone4")
windowed = [case for case in FAMILIES if case.name in OPTIONAL]


@pytest.mark.parametrize("case", windowed, ids=lambda case: case.name)
def test_families_without_their_window_are_packed(case: Case):
    layers = case.fields.get("layers", 3)
    model = case.model(sliding_window=None, layer_types=["full_attention"] * layers)
    assert packable_tokens(model) == sys.maxsize
    assert difference(model) < BOUND


def test_most_families_are_packed():
    packed = {case.model_type for case in FAMILIES if packable_tokens(case.model())}
    assert packed >= {"llama", "gemma", "glm", "phi", "olmo2", "granite", "gpt_neox", "apertus"}
    assert packed >= {"mistral", "gemma2", "gemma3_text", "cohere2", "olmo3"}
    assert not packed & {"lfm2", "qwen3_next"}


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_methods_are_exact_or_not_packed(case: MethodCase, calibrated: tuple[Any, Any]):
    model, statistics = calibrated
    method = case.method(0.6)
    small = method.apply(model, method.plan(model, statistics))
    # It gives its slots the frequencies of a narrower head, at places of its own.
    by_slot = case.name == "kvpruner" and case.settings.get("rotation") != "first"
    assert bool(packable_tokens(small)) is not by_slot
    if not by_slot:
        assert difference(small) < BOUND


@pytest.mark.parametrize(
    "setting",
    [
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"attn_implementation": "flex_attention"},
    ],
    ids=lambda setting: next(reversed(setting)),
)
def test_what_rows_would_change_is_not_packed(setting: dict[str, Any]):
    assert packable_tokens(tiny_model())
    implementation = setting.pop("attn_implementation", None)
    model = tiny_model(**setting)
    if implementation is not None:
        model.config._attn_implementation = implementation
    assert not packable_tokens(model)


def test_a_branch_that_sees_its_sibling_is_noticed(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model(dtype=torch.float64)
    assert difference(model) < BOUND
    monkeypatch.setattr(choices, "visible", causal)
    assert difference(model) > 100 * BOUND


def causal(branches_BT: Tensor) -> Tensor:
    """A mask that keeps no branches apart."""
    return torch.ones(*branches_BT.shape, branches_BT.shape[1], dtype=torch.bool).tril()


def test_rows_share_contexts_and_stay_below_the_limit():
    asked = questions()
    rows = pack(asked, MAX_POSITIONS)
    assert sorted(row.members for row in rows) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    by_member = {row.members[0]: row for row in rows}
    # Nine tokens of context, and all but the last of four, one and six.
    assert by_member[0].branches == [0] * 9 + [1] * 3 + [2] * 5
    assert by_member[0].positions == [*range(9), *range(9, 12), *range(9, 14)]
    assert by_member[0].slots[1] == [8]
    # The contexts of the last question part after eight tokens.
    assert by_member[6].positions == [*range(8), *range(8, 14), *range(8, 14)]
    tight = pack(asked, 14)
    assert max(len(row.tokens) for row in tight) <= 14
    assert sorted(member for row in tight for member in row.members) == list(range(8))


def test_one_branch_alone_needs_no_mask():
    like = torch.zeros(0)
    asked = [request([1, 2, 3], [4]), request([1, 2, 3], [5, 6])]
    assert "attention_mask" not in choices.packed_inputs(pack(asked, 64), like)
    both = [*asked, request([1, 2, 3], [7, 8])]
    assert choices.packed_inputs(pack(both, 64), like)["attention_mask"].shape == (1, 1, 5, 5)
    longer = pack([request([9] * 20, [4]), *both], 64)
    assert choices.packed_inputs(longer, like)["attention_mask"].shape == (2, 1, 20, 20)


def test_few_logits_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Of places that siblings share, whose scores come in another order than their logits."""
    model = tiny_model(dtype=torch.float64)
    monkeypatch.setattr(choices, "chunk_tokens", lambda _: 3)
    assert difference(model) < BOUND


def test_softmax_is_in_the_dtype_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    dtypes = []
    own = choices._token_scores
    monkeypatch.setattr(
        choices, "_token_scores", lambda *a: dtypes.append(own(*a)[0].dtype) or own(*a)
    )
    model, asked = tiny_model(), questions()
    for dtype in (None, torch.float64):
        dict(score_rows(model, asked, pack(asked, MAX_POSITIONS), dtype))
    assert dtypes == [torch.float32, torch.float64]


def harness_answers(scorer: Any, model: Any, tokenizer: Any, **settings: Any) -> tuple[list, Any]:
    """What a class of lm-eval's models answers, and what it put into its cache."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    wrapped = scorer(pretrained=model, tokenizer=tokenizer, device="cpu", **settings)
    cached: list[Any] = []
    wrapped.cache_hook.add_partial = lambda *entry: cached.append(entry)
    asked = [instance("loglikelihood", {}, text, n) for n, text in enumerate(TEXTS)]
    return wrapped.loglikelihood(asked, disable_tqdm=True), sorted(cached)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"max_length": 7, "batch_size": 2}])
@pytest.mark.parametrize("method", [None, rap.Rap(retain=0.6), Palu(retain=0.6)], ids=repr)
def test_answers_are_those_of_lm_eval(reference_model, tokenizer, method, settings):
    """With little room some contexts are cut short, which is left to lm-eval."""
    plain = pytest.importorskip("lm_eval.models.huggingface").HFLM
    model = reference_model
    if method is not None:
        windows = rap.load_windows("bundled", tokenizer, num_windows=2, window=64)
        statistics = rap.calibrate(model, windows, method.needs_for(model))
        model = method.apply(model, method.plan(model, statistics))
    expected, expected_cache = harness_answers(plain, model, tokenizer, **settings)
    found, cache = harness_answers(choice_scorer(), model, tokenizer, **settings)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], abs=ROUNDING)
        assert one[1] == other[1]
    assert any(answer[1] for answer in expected) or method is not None
    assert [entry[:2] for entry in cache] == [entry[:2] for entry in expected_cache]


@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling"])
def test_running_text_is_left_to_lm_eval(reference_model, tokenizer, method: str):
    """Only the windows that it is read in have no string, by which choices are cached."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    wrapped = choice_scorer()(pretrained=reference_model, tokenizer=tokenizer, device="cpu")
    lengths: list[int] = []
    wrapped._scored = lambda asked, own=wrapped._scored: lengths.append(len(asked)) or own(asked)
    texts = TEXTS[:3] if method == "loglikelihood" else [(one,) for one, _ in TEXTS[:3]]
    asked = [instance(method, {}, text, n) for n, text in enumerate(texts)]
    assert len(getattr(wrapped, method)(asked, disable_tqdm=True)) == 3
    assert sum(lengths) == (3 if method == "loglikelihood" else 0)


@pytest.mark.parametrize(
    "settings", [{"mixed_precision_dtype": "bfloat16"}, {"batch_size": "auto"}]
)
def test_what_lm_eval_does_otherwise_is_left_to_it(reference_model, tokenizer, settings):
    pytest.importorskip("lm_eval")
    given = {"pretrained": reference_model, "tokenizer": tokenizer, "device": "cpu"}
    assert choice_scorer()(**given)._packable_tokens() == sys.maxsize
    assert choice_scorer()(**given, **settings)._packable_tokens() == 0


def test_rows_are_used_where_they_are_exact_and_only_there(
    reference_model, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    plain = pytest.importorskip("lm_eval.models.huggingface").HFLM
    calls: list[Any] = []
    own = plain._model_call
    monkeypatch.setattr(
        plain, "_model_call", lambda self, *a, **k: calls.append(a) or own(self, *a, **k)
    )
    expected, _ = harness_answers(plain, reference_model, tokenizer)
    assert calls
    calls.clear()
    harness_answers(choice_scorer(), reference_model, tokenizer)
    assert not calls
    windowed = tiny_model("mistral", sliding_window=8, vocab_size=len(tokenizer))
    found, _ = harness_answers(choice_scorer(), windowed, tokenizer)
    # Of requests longer than the window alone.
    assert {ids.shape[-1] > 8 for (ids,) in calls} == {True}
    expected, _ = harness_answers(plain, windowed, tokenizer)
    assert len(calls) > len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], abs=ROUNDING)
        assert one[1] == other[1]
