"""Session fixtures every test may use; they are shared, so no test may change what they return."""

import os

# Before transformers is imported: no test may reach a network, whoever starts pytest.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before triton is imported, which transformers does: kernels run on a CPU, in its interpreter.
# The tests of tests/gpu want them compiled and are started with 0 (`make test-gpu`).
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import torch

from rap import assets

# A first call of torch takes seconds, so a deadline per example would only measure that.
hypothesis.settings.register_profile("rap", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "rap")

# Parallel workers share the cores; without this each would start a thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_model():
    """The bundled model in float32 and eval mode. Never change it: copy it, or load another."""
    return assets.reference_model(torch.float32)


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the bundled model."""
    return assets.reference_tokenizer()


@pytest.fixture(scope="session")
def test_tokens(tokenizer) -> torch.Tensor:
    """The test split as token ids [T], about 697 thousand of them."""
    # verbose=False: the text is longer than the model's window on purpose.
    ids = tokenizer(assets.reference_text("test"), verbose=False).input_ids
    return torch.tensor(ids)
