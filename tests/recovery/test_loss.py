"""The chunked loss against the plain one, and its parts against distributions worked by hand."""

import math

import pytest
import torch

from cases.models import random_tokens, tiny_model
from rap.model.errors import RapError
from rap.recovery import loss as module
from rap.recovery.config import PRESETS, RecoveryConfig, recovery_config
from rap.recovery.loss import distillation_loss, matching_loss, token_loss
from rap.runtime.logits import Head

VARIANTS = {
    "paper": RecoveryConfig(),
    "forward": RecoveryConfig(divergence="forward", temperature=1.0),
    "top-k": RecoveryConfig(top_k=5, divergence="forward"),
    "reverse top-k": RecoveryConfig(top_k=3),
    "cross-entropy only": RecoveryConfig(kl_weight=0.0),
    "distillation only": RecoveryConfig(ce_weight=0.0, kl_weight=0.7),
}
NUM, WIDTH, VOCABULARY = 37, 6, 29


def _case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden, teacher = torch.randn(2, NUM, WIDTH, generator=generator, dtype=dtype)
    heads = torch.randn(2, VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets = torch.randint(VOCABULARY, (NUM,), generator=generator)
    return hidden.requires_grad_(), teacher, targets, heads


def _plain(hidden, teacher, targets, heads, config):
    return token_loss(hidden @ heads[0].T, teacher @ heads[1].T, targets, config).mean()


def _chunked(hidden, teacher, targets, heads, config):
    maps = (lambda x: x @ heads[0].T, lambda x: x @ heads[1].T)
    return distillation_loss(hidden, teacher, targets, maps, config)


@pytest.mark.parametrize("chunk", [1, 5, NUM, 100, None])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_change_neither_loss_nor_gradient(name, chunk, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr(module, "LOSS_LOGITS", chunk * VOCABULARY)
    hidden, *rest = _case()
    plain = _plain(hidden, *rest, VARIANTS[name])
    (expected,) = torch.autograd.grad(3 * plain, hidden)
    found = _chunked(hidden, *rest, VARIANTS[name])
    (gradient,) = torch.autograd.grad(3 * found, hidden)
    # Sums of the same float64 terms in another order.
    assert abs(found - plain) < 1e-13 * abs(plain)
    assert (gradient - expected).abs().max() < 1e-13 * expected.abs().max()


def test_chunks_bound_what_exists_at_once(monkeypatch):
    hidden, teacher, targets, heads = _case()
    seen = []

    def head(states):
        seen.append(len(states))
        return states @ heads[0].T

    for most in (8, 5):
        seen.clear()
        monkeypatch.setattr(module, "LOSS_LOGITS", most * VOCABULARY + 3)
        distillation_loss(hidden, teacher, targets, (head, head), RecoveryConfig())
        assert max(seen) == most
        assert sum(seen) == 1 + 2 * NUM  # one token shows how many logits a token has


def test_a_model_that_is_its_own_teacher_has_no_divergence(monkeypatch):
    monkeypatch.setattr(module, "LOSS_LOGITS", 4 * VOCABULARY)
    hidden, _, targets, heads = _case()
    both = (hidden, hidden.detach(), targets, heads[:1].expand(2, -1, -1))
    for divergence in ("reverse", "forward"):
        loss = _chunked(*both, RecoveryConfig(ce_weight=0.0, divergence=divergence))
        assert abs(loss) < 1e-14


def test_the_divergences_are_the_ones_of_their_names():
    student = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    teacher = torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.float64)
    reverse = sum(p * math.log(p / q) for p, q in zip(student[0], teacher[0], strict=True))
    forward = sum(q * math.log(q / p) for p, q in zip(student[0], teacher[0], strict=True))
    target = torch.tensor([1])
    for name, expected in (("reverse", reverse), ("forward", forward)):
        config = RecoveryConfig(ce_weight=0.0, temperature=1.0, divergence=name)
        found = token_loss(student.log(), teacher.log(), target, config)
        assert abs(found - expected) < 1e-14
    paper = token_loss(2 * student.log(), 2 * teacher.log(), target, RecoveryConfig())
    squared = student**2 / (student**2).sum()
    # At temperature 2 the distributions are those of the halved logits; the factor T^2 is 4.
    assert abs(paper - (4 * reverse - squared[0, 1].log())) < 1e-14
    weighted = RecoveryConfig(ce_weight=0.3, kl_weight=0.7)
    found = token_loss(2 * student.log(), 2 * teacher.log(), target, weighted)
    assert abs(found - (0.7 * 4 * reverse - 0.3 * squared[0, 1].log())) < 1e-14


def test_top_k_lumps_the_rest_and_is_exact_with_every_token():
    student, teacher = torch.randn(2, 11, 7, dtype=torch.float64, generator=torch.manual_seed(0))
    targets = torch.zeros(11, dtype=torch.long)

    def found(k):
        return token_loss(student, teacher, targets, RecoveryConfig(ce_weight=0.0, top_k=k))

    assert torch.equal(found(7), found(None))
    # Six kept tokens and one left are the same seven outcomes.
    assert (found(6) - found(None)).abs().max() < 1e-13
    # Lumping outcomes together cannot raise a divergence.
    assert bool((found(2) <= found(None) + 1e-15).all())
    assert float((found(None) - found(2)).max()) > 1e-3
    # The kept ones are the teacher's: at its best token alone, two outcomes a row.
    best = teacher.argmax(-1, keepdim=True)
    p, q = ((x / 2).softmax(-1).gather(-1, best)[:, 0] for x in (student, teacher))
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert (found(1) - 4 * expected).abs().max() < 1e-13


def test_a_low_precision_head_is_scored_in_float32():
    hidden, teacher, targets, heads = _case(torch.float32)
    config = RecoveryConfig()
    half = (hidden.bfloat16() @ heads[0].bfloat16().T, teacher.bfloat16() @ heads[1].bfloat16().T)
    loss = token_loss(*half, targets, config)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, token_loss(half[0].float(), half[1].float(), targets, config))


def test_matching_outputs_of_low_precision_is_done_in_float32():
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 2, 9, 6, generator=generator).bfloat16() for _ in range(2)]
    found = matching_loss(list(outputs[0]), list(outputs[1]))
    assert found.dtype == torch.float32
    expected = [
        float((mine - other).square().sum() / other.square().sum())
        for mine, other in zip(outputs[0].double(), outputs[1].double(), strict=True)
    ]
    assert float(found) == pytest.approx(sum(expected) / 2, rel=1e-6)
    mixed = matching_loss(list(outputs[0]), list(outputs[1].float()))
    assert float(mixed) == pytest.approx(sum(expected) / 2, rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"temperature": 0.0},
        {"schedule": "linear"},
        {"divergence": "sideways"},
        {"dropout": 1.0},
        {"window": 1},
        {"ce_weight": 0.0, "kl_weight": 0.0},
        {"steps": 0},
        {"report_to": "paper"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(RapError, match=f"recovery {[*wrong][-1]}"):
        RecoveryConfig(**wrong)


@pytest.mark.parametrize(
    ("name", "unread", "also"),
    [
        ("fast", {"epochs": 2}, {"steps": None}),
        ("paper", {"warmup_steps": 4}, {"schedule": "cosine"}),
        ("full", {"rank": 4}, {"tune": "lora"}),
        ("full", {"alpha": 4}, {"tune": "lora"}),
        ("full", {"dropout": 0.1}, {"tune": "lora"}),
        ("fast", {"temperature": 1.0, "kl_weight": 0.0}, {"kl_weight": 1.0}),
    ],
)
def test_a_setting_that_the_others_leave_unread_is_refused(name, unread, also):
    with pytest.raises(RapError, match=f"{name!r} would not read {next(iter(unread))}: "):
        recovery_config(name, **unread)
    assert vars(recovery_config(name, **unread | also)).items() >= (unread | also).items()


def test_the_paper_preset_is_the_paper():
    paper = recovery_config("paper")
    assert (paper.rank, paper.alpha, paper.dropout) == (8, 16, 0.05)
    assert (paper.learning_rate, paper.schedule, paper.global_batch) == (1e-4, "plateau", 128)
    assert (paper.window, paper.epochs, paper.steps) == (256, 20, None)
    assert (paper.temperature, paper.divergence, paper.top_k) == (2.0, "reverse", None)
    assert set(PRESETS) == {"fast", "full", "paper", "long"}
    assert recovery_config("fast", rank=4).rank == 4
    with pytest.raises(RapError, match="slow"):
        recovery_config("slow")
    with pytest.raises(RapError, match="ranks"):
        recovery_config("fast", ranks=4)


def test_hidden_states_and_head_of_a_model_give_its_own_loss(monkeypatch):
    model, tokens = tiny_model(tie_word_embeddings=True), random_tokens(2, 9)
    monkeypatch.setattr(module, "LOSS_LOGITS", 5 * model.config.vocab_size)
    hidden = model.model(input_ids=tokens, use_cache=False)[0]
    expected = model(input_ids=tokens, labels=tokens).loss
    head = Head(model)
    flat = hidden[:, :-1].flatten(0, 1).detach()
    found = distillation_loss(flat, flat, tokens[:, 1:].flatten(), (head, head), RecoveryConfig())
    assert abs(found - expected) < 1e-5 * expected
