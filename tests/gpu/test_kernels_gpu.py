"""The cases of `test_kernels` compiled, larger ones, and what only a GPU can show.

make test-gpu
"""

import os
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from cases.kernel_cases import (
    DECODE_CASES,
    ROPE_SHAPES,
    STEP_CASES,
    Decode,
    Layer,
    Shape,
    check_decode,
    check_rotation,
    check_step,
)
from cases.scripts import load_script
from rap.evaluation.cost.latency import CUDA_VARIANTS, DecodeStep
from rap.evaluation.cost.random_models import random_model, uniform_config
from rap.model.kernels.decode_attention import decode_step
from rap.model.kernels.rope_pairs import rope_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1",
        reason="kernels would be interpreted: set TRITON_INTERPRET=0, as make test-gpu does",
    ),
]

LAYOUTS, ROOFLINE = (load_script(f"benchmarks/{name}.py") for name in ("layouts", "roofline"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LLAMA = Shape(groups=8, per_group=4, slots=44, value_width=88, tokens=1000, cached=8192)
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [*ROPE_SHAPES, LLAMA], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(shape, dtype, strided):
    layer = Layer(shape, dtype, "cuda", strided)
    check_rotation(rope_pairs, layer, clockwise=strided)


LONG = [
    Decode("8k", LLAMA, splits=32),
    Decode("8k lengths", LLAMA, lengths=(8191, 100), splits=32),
    Decode("8k mask", LLAMA, hidden=0.5, splits=7),
]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", [*DECODE_CASES, *LONG], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(case, dtype, strided):
    if case.quantized and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8: the reference runs in its place")
    check_decode(case, Layer(replace(case.shape, tokens=1), dtype, "cuda", strided))


@pytest.mark.parametrize(("case", "positions", "clockwise"), STEP_CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_step(case, positions, clockwise, dtype):
    layer = Layer(replace(case.shape, tokens=1), dtype, "cuda")
    check_step(layer, case, positions, clockwise=clockwise)


@torch.no_grad()
def test_step_in_a_cuda_graph_follows_the_length():
    """One capture serves every length: the position is read on the device."""
    layer = Layer(replace(LLAMA, tokens=1), torch.bfloat16, "cuda")
    states = tuple(state[:, :, 0] for state in layer.states())
    tables, index, cache = layer.tables(), layer.index(), layer.cache()
    position = torch.tensor([10], device="cuda")

    def step(held):
        return decode_step(states, tables, index, held, position, scale=0.1)

    step(tuple(tensor.clone() for tensor in cache))  # compiles
    held = tuple(tensor.clone() for tensor in cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(held)
    for length in (10, 4000, 8191):
        position.fill_(length)
        for now, was in zip(held, cache, strict=True):
            now.copy_(was)
        graph.replay()
        expected = step(tuple(tensor.clone() for tensor in cache))
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_model_decodes_the_same_with_the_kernels(compiled):
    """Fused steps over a static cache against SDPA, left padding included, in float32."""
    model = random_model(uniform_config(CONFIG, 0.7), dtype=torch.float32, device="cuda")
    ids = torch.randint(512, (3, 24), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    logits = {}
    for attention in ("sdpa", "rap"):
        model.set_attn_implementation(attention)
        cache = StaticCache(config=model.config, max_cache_len=32)
        padded = torch.nn.functional.pad(mask, (0, 8), value=1)
        run = torch.compile(model, fullgraph=True) if compiled else model
        model(input_ids=ids[:, :16], attention_mask=mask[:, :16], past_key_values=cache)
        steps = [
            run(input_ids=ids[:, t : t + 1], attention_mask=padded, past_key_values=cache).logits
            for t in range(16, 24)
        ]
        logits[attention] = torch.cat(steps, dim=1)
    difference = (logits["rap"] - logits["sdpa"]).abs().max()
    # float32 through three layers; a wrong slot or angle is a thousand times that.
    assert difference < 1e-4 * logits["sdpa"].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("variant", CUDA_VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_of_the_benchmark_runs(variant):
    model = random_model(uniform_config(CONFIG, 0.5), dtype=torch.bfloat16, device="cuda")
    step = DecodeStep(model, variant, batch=2, context=100, steps=3)
    for _ in range(3):
        step()
    assert step.logits is not None
    assert step.logits.isfinite().all()
    assert step.transient_bytes > 0


@torch.no_grad()
@pytest.mark.parametrize("name", ROOFLINE.METHODS["cuda"])
def test_every_layout_of_the_benchmark_runs(name):
    """Merged and latent layers too, as CUDA graphs where they can be captured."""
    config = LlamaConfig(**CONFIG.to_dict() | {"num_attention_heads": 16, "num_key_value_heads": 8})
    made = LAYOUTS.pruned_config(config, name)
    for variant in ROOFLINE.variants_of(name, "cuda"):
        model = random_model(made, dtype=torch.float32, device="cuda")
        step = DecodeStep(model, variant, batch=2, context=100, steps=3)
        step()
        assert step.logits.isfinite().all()
        assert int(step.cache.get_seq_length()) > 100
