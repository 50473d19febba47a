"""Every attention implementation on every family, where no row is padded.

Without padding most steps come without a mask, and what its absence means is the implementation's
to know: a prompt's tokens see the slots up to their own, a single token sees them all.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, Case, random_case_plan
from cases.models import random_tokens
from rap.model.kernels.decode_attention.reference import attend
from rap.model.kernels.interface import register_attention
from rap.surgery.apply import apply

TOKENS, PROMPT = 7, 4
# Families' layer norms, routers and linear attention round to float32 whatever the dtype is.
LOGIT_BOUND = 1e-5
NEVER_REFUSED = ("eager", "rap")
# They know no dropout of attention.
WITHOUT_DROPOUT = ("ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe")
IMPLEMENTATIONS = (*NEVER_REFUSED, "sdpa", "flex_attention")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_attention()


@pytest.fixture(autouse=True)
def _without_compilation():
    """Flex attention compiles itself for every width, minutes in all; its sums are the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _whole_and_steps(model: Any, implementation: str) -> tuple[Tensor, Tensor]:
    """Logits of one pass without a cache, and of a prompt and single tokens after it."""
    model.set_attn_implementation(implementation)
    tokens = random_tokens(2, TOKENS)
    whole = model(tokens, use_cache=False).logits
    output = model(tokens[:, :PROMPT], use_cache=True)
    parts = [output.logits]
    for position in range(PROMPT, TOKENS):
        output = model(tokens[:, position : position + 1], past_key_values=output.past_key_values)
        parts.append(output.logits)
    return whole, torch.cat(parts, dim=1)


@every_case
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_cached_steps_equal_the_whole_pass(case: Case):
    """Of a model with pruned and dense layers, and the whole pass is that of eager attention.

    SDPA leaves out soft caps in transformers, so there only its own whole pass counts.
    """
    model = case.model()
    small = apply(model, random_case_plan(model, case))
    expected, differences = {}, {}
    for implementation in IMPLEMENTATIONS:
        try:
            expected[implementation], steps = _whole_and_steps(small, implementation)
        except ValueError:
            assert implementation not in NEVER_REFUSED
            with pytest.raises(ValueError, match="attention"):
                _whole_and_steps(model, implementation)
            continue
        capped = implementation == "sdpa" and "attn_logit_softcapping" in case.fields
        whole = expected[implementation if capped else "eager"]
        differences[implementation] = (
            _difference(steps, expected[implementation]),
            _difference(expected[implementation], whole),
        )
    assert all(max(found) < LOGIT_BOUND for found in differences.values()), differences


@every_case
@torch.no_grad()
def test_attention_dropout_is_drawn_in_training(case: Case):
    """Two seeds differ where those of eager attention do: wherever a family drops attention.

    No other dropout is above zero, so nothing else can differ.
    """
    model = case.model(attention_dropout=0.5)
    small = apply(model, random_case_plan(model, case)).train()
    for length in (TOKENS, 1):
        tokens, differences = random_tokens(2, length), {}
        for implementation in NEVER_REFUSED:
            small.set_attn_implementation(implementation)
            logits = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                logits.append(small(tokens, use_cache=False).logits)
            differences[implementation] = _difference(*logits)
        drawn = {name: found > 0 for name, found in differences.items()}
        assert drawn["rap"] == drawn["eager"], differences
        assert drawn["eager"] == (case.model_type not in WITHOUT_DROPOUT), differences


def test_dropout_zeroes_weights_and_scales_the_others():
    """With unit vectors for values the output is the weights themselves."""
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(2, n, 50, 8, generator=generator).double() for n in (6, 2))
    values = torch.eye(50, dtype=torch.float64).expand(2, 2, -1, -1)
    settings = {"scale": 0.3, "softcap": 2.0, "sinks_H": torch.ones(6)}
    weights = attend(q, keys, values, **settings)
    torch.manual_seed(0)
    found = attend(q, keys, values, **settings, dropout=0.25)
    torch.testing.assert_close(found, torch.where(found == 0, 0, weights / 0.75))
    # 30,000 draws: the standard deviation of the share is 0.0025.
    assert abs(float((found == 0).double().mean()) - 0.25) < 0.01
