"""The stock export in mlx-lm, on MLX's CPU backend: a process that cannot import this package."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from rap.checkpoint.files import write_legacy_rope
from rap.serving.stock import export_stock

from .test_gguf import PAIRS
from .test_stock import stock_profile

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

_RUN = """
import json, sys
from pathlib import Path
sys.modules["rap"] = None
import mlx.core as mx
from mlx_lm.utils import load_model
model = load_model(Path(sys.argv[1]))[0]
ids = json.load(open(sys.argv[2]))
json.dump(model(mx.array([ids]))[0].astype(mx.float32).tolist(), open(sys.argv[2], "w"))
"""


def furthest(model, folder, ids, tmp_path):
    """The largest difference of a log-probability between mlx-lm and transformers."""
    (tmp_path / "job").write_text(json.dumps(ids))
    words = [sys.executable, "-c", _RUN, str(folder), str(tmp_path / "job")]
    subprocess.run(words, check=True, capture_output=True)
    found = torch.tensor(json.loads((tmp_path / "job").read_text())).double().log_softmax(-1)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float((found - expected).abs().max())


def test_mlx_reads_the_frequencies(reference_model, prompts, tmp_path, monkeypatch):
    small = stock_profile(copy.deepcopy(reference_model), PAIRS)
    export_stock(small, tmp_path / "plain")
    # Float32 in both; MLX's CPU kernels sum in another order.
    assert furthest(small, tmp_path / "plain", prompts[-1], tmp_path) <= 2e-4
    # Without the old keys it takes the base 10,000, as it did before they were written.
    monkeypatch.setattr("rap.checkpoint.files.write_legacy_rope", lambda file: None)
    export_stock(small, tmp_path / "without")
    assert furthest(small, tmp_path / "without", prompts[-1], tmp_path) > 0.1
    write_legacy_rope(tmp_path / "without" / "config.json")
    assert furthest(small, tmp_path / "without", prompts[-1], tmp_path) <= 2e-4
