"""Decode steps: compiled without breaks, by the fused kernel, with a cache that grows in place."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from cases.merged_plans import merged_layer
from cases.models import ROPES, random_tokens, tiny_model
from cases.plans import plan_of, random_plan
from rap import GrowingCache
from rap.model.kernels import decode_attention, interface
from rap.model.kernels.growing_cache import GrowingLayer, grow
from rap.model.kinds.factored import FactoredPlan
from rap.model.rope import gather_pairs, rotate_pairs, rotate_step
from rap.surgery.apply import apply

WIDTHS = [(3, 5), None, (5, 9)]
SHAPE = {"heads": 6, "kv_heads": 2, "hidden": 36, "layers": 3}
NEW = 6


def _pruned(model_type="llama", dtype=torch.float64, widths=WIDTHS, **fields):
    model = tiny_model(model_type, dtype=dtype, **SHAPE, **fields)
    return apply(model, random_plan(model, widths))


def _generate(model, tokens, mask=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    mask = torch.ones_like(tokens) if mask is None else mask
    return model.generate(tokens, attention_mask=mask, **options)


def _steps(model, cache, run=None, count=4):
    """Logits of a left-padded prompt's last token and of `count` steps, the mask of one length."""
    run = model if run is None else run
    tokens, mask = random_tokens(3, 7 + count), torch.ones(3, 20, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        first = model(tokens[:, :7], attention_mask=mask[:, :7], past_key_values=cache).logits
        logits = [first[:, -1:]]
        for step in range(7, 7 + count):
            ids = tokens[:, step : step + 1]
            logits.append(run(ids, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "rap"])
def test_a_compiled_step_has_no_break_and_is_compiled_once(attention):
    small = _pruned(dtype=torch.float32)
    small.set_attn_implementation(attention)
    expected = _steps(small, StaticCache(config=small.config, max_cache_len=20))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(small, backend=counter, fullgraph=True)
    found = _steps(small, StaticCache(config=small.config, max_cache_len=20), compiled)
    assert counter.frame_count == 1
    assert torch.equal(found, expected)


class _Recorder(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "rap"])
def test_a_step_with_a_static_cache_never_waits_for_the_device(attention):
    """Nothing reads a number back or brings one over, so a CUDA graph can hold the step."""
    small = _pruned(dtype=torch.float32)
    small.set_attn_implementation(attention)
    cache = StaticCache(config=small.config, max_cache_len=20)
    with torch.no_grad():
        small(random_tokens(2, 7), past_key_values=cache)
        with _Recorder() as recorder:
            small(random_tokens(2, 1), past_key_values=cache)
    assert "mm" in recorder.names or "addmm" in recorder.names, recorder.names
    assert not recorder.names & {"_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero"}


@pytest.mark.parametrize("cache", [None, "static", "growing"])
def test_generation_with_attention_rap_equals_sdpa(cache):
    small, tokens = _pruned(), random_tokens(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, :1] = 0
    options = {"past_key_values": GrowingCache(small.config)} if cache == "growing" else {}
    if cache == "static":
        options = {"cache_implementation": "static"}
    expected = _generate(small, tokens, mask)
    small.set_attn_implementation("rap")
    assert torch.equal(_generate(small, tokens, mask, **options), expected)


def test_a_dense_model_takes_attention_rap():
    model, tokens = tiny_model(dtype=torch.float64, **SHAPE), random_tokens(2, 7)
    expected = _generate(model, tokens)
    model.set_attn_implementation("rap")
    assert torch.equal(_generate(model, tokens), expected)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 5}),
        ("gpt_oss", {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
@pytest.mark.parametrize("taken", [False, True], ids=["fallback", "kernel"])
def test_soft_caps_and_sinks_are_obeyed(monkeypatch, model_type, fields, taken):
    """SDPA would leave them out without a word. In prefill by the fall-back, in decode by both."""
    # Eager attention has no float64: its softmax is float32, where the mask's least number is -inf.
    small = _pruned(model_type, torch.float32, **fields)
    small.config._experts_implementation = "eager"
    logits = []
    for attention in ("eager", "rap"):
        small.set_attn_implementation(attention)
        _run_kernels(monkeypatch, taken)
        logits.append(_steps(small, DynamicCache(config=small.config), count=2))
    difference = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    # Sums in another order; without cap or sinks the difference is a tenth and more.
    assert difference < 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_fused_step_leaves_dropout_to_others(monkeypatch, dropout):
    small = _pruned(attention_dropout=dropout).train()
    cache = StaticCache(config=small.config, max_cache_len=20)
    with torch.no_grad():
        small(random_tokens(2, 7), past_key_values=cache)
    _run_kernels(monkeypatch)
    states = torch.randn(3, 2, 2, 1, 6).unbind()
    attention = small.model.layers[0].self_attn
    fuses = interface.RapAttentionInterface().fuses(attention, states, cache, None)
    assert fuses == (dropout == 0)


def _run_kernels(monkeypatch, taken=True):
    """Let the Triton kernels take CPU tensors: they run in the interpreter."""
    for module in (interface, decode_attention):
        monkeypatch.setattr(module, "takes_triton", lambda tensor: taken)


_SCALED_QUERIES = {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
FUSED = [
    ({"model_type": "llama"}, True),
    ({"model_type": "glm"}, True),
    # A norm, or a scale on rotated queries, stands between.
    ({"model_type": "qwen3"}, False),
    ({"model_type": "ministral3", "rope_parameters": ROPES["yarn"] | _SCALED_QUERIES}, False),
]


@pytest.mark.parametrize(("fields", "fuses"), FUSED, ids=lambda value: str(value)[:28])
def test_the_fused_step_gives_the_same_logits(monkeypatch, fields, fuses):
    """Rotation, cache write and attention in one, with left padding and a dense layer between."""
    pytest.importorskip("triton")
    small = _pruned(dtype=torch.float32, **fields)
    expected = _steps(small, StaticCache(config=small.config, max_cache_len=20), count=2)
    small.set_attn_implementation("rap")
    _run_kernels(monkeypatch)
    launched = _launches(monkeypatch)
    cache = StaticCache(config=small.config, max_cache_len=20)
    found = _steps(small, cache, count=2)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert int(cache.get_seq_length()) == 9
    fused = 2 if fuses else 0  # of three layers one is dense, which attends only
    assert (launched.count("decode_step"), launched.count("decode_attention")) == (
        2 * fused,
        2 * (3 - fused),
    )


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"num_beams": 3}),
        ("llama", {"prompt_lookup_num_tokens": 2, "max_new_tokens": 12}),
        ("mistral", {}),
        ("mistral", {"num_beams": 3}),
    ],
)
def test_growing_cache_generates_what_the_dynamic_one_does(model_type, options):
    """Beams reorder the cache, assisted decoding crops it, sliding windows drop its start."""
    small = _pruned(model_type, **({"sliding_window": 5} if model_type == "mistral" else {}))
    tokens = random_tokens(1, 9).repeat(1, 2)
    expected = _generate(small, tokens, **options)
    cache = GrowingCache(small.config)
    assert torch.equal(_generate(small, tokens, past_key_values=cache, **options), expected)


@torch.no_grad()
def test_a_cache_that_the_model_made_grows_on_with_what_it_holds():
    small, tokens = _pruned(), random_tokens(2, 9)
    plain, made = (small(tokens, use_cache=True).past_key_values for _ in range(2))
    assert grow(made, 50) is made
    assert all(type(layer) is GrowingLayer for layer in made.layers)
    store = None
    for token in random_tokens(2, 20, seed=1).split(1, dim=1):
        expected, found = (small(token, past_key_values=cache).logits for cache in (plain, made))
        assert torch.equal(found, expected)
        assert store in (None, made.layers[0].keys.data_ptr())
        store = made.layers[0].keys.data_ptr()
    other = object()
    assert grow(other) is other


def test_gradients_flow_through_a_growing_cache():
    small, tokens, found = _pruned(), random_tokens(1, 12), []
    for make in (DynamicCache, GrowingCache):
        small.zero_grad()
        cache = make(config=small.config)
        logits = [small(part, past_key_values=cache).logits for part in tokens.split(6, dim=1)]
        torch.cat(logits, 1).square().sum().backward()
        found.append(small.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.equal(*found)
    with torch.no_grad():  # and goes on without
        small(random_tokens(1, 3), past_key_values=cache)
    assert cache.layers[0]._stores


@torch.no_grad()
def test_what_is_evicted_stays_evicted():
    """Eviction keeps a view that begins where the store does, and skips through it."""
    small, tokens = _pruned(), random_tokens(1, 12)
    logits = []
    for make in (DynamicCache, GrowingCache):
        cache = make(config=small.config)
        small(tokens, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
        for token in random_tokens(1, 3, seed=1).split(1, dim=1):
            logits.append(small(token, past_key_values=cache).logits)
    assert all(torch.equal(*pair) for pair in zip(logits[:3], logits[3:], strict=True))


def test_a_cache_of_inference_mode_grows_on_outside_it():
    small, tokens, cache = _pruned(), random_tokens(1, 9), GrowingCache(_pruned().config)
    with torch.inference_mode():
        small(tokens, past_key_values=cache)
    with torch.no_grad():
        found = small(tokens[:, :1], past_key_values=cache).logits[:, -1]
        both = small(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, -1]
    torch.testing.assert_close(found, both)


@pytest.mark.parametrize("kind", ["numbers", "of every head"])
@torch.no_grad()
def test_masks_of_other_forms_are_taken_with_a_soft_cap(kind):
    model = tiny_model("gemma2", dtype=torch.float64, attn_logit_softcapping=2.0, **SHAPE)
    tokens = random_tokens(2, 7)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].expand(2, 1, 7, 7)
    added = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~keep, float("-inf"))
    model.set_attn_implementation("eager")
    expected = model(tokens, attention_mask=added).logits
    model.set_attn_implementation("rap")
    mask = added if kind == "numbers" else keep.expand(2, SHAPE["heads"], 7, 7)
    found = model(tokens, attention_mask=mask).logits
    # The eager softmax is in float32.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_growing_cache_moves_rarely_and_not_at_all_with_capacity():
    small = _pruned()
    for capacity, allowed in ((0, 3), (400, 0)):
        cache, moves, place = GrowingCache(small.config, capacity=capacity), -1, None
        small(random_tokens(2, 100), past_key_values=cache)
        for _ in range(200):
            if cache.layers[0].keys.data_ptr() != place:
                moves, place = moves + 1, cache.layers[0].keys.data_ptr()
            states = torch.randn(2, 2, 1, 6), torch.randn(2, 2, 1, 5)
            keys, _ = cache.update(states[0].double(), states[1].double(), 0)
            assert torch.equal(keys[:, :, -1:], states[0].double())
        assert moves <= allowed
        assert cache.layers[0].get_seq_length() == 300


@pytest.mark.parametrize(
    ("programs", "channels", "capability", "stages"),
    [(8, 256, (9, 0), 3), (9, 256, (9, 0), 2), (8, 128, (9, 0), 2), (8, 256, (8, 9), 2)],
)
def test_a_third_stage_is_for_wide_and_few_programs(
    monkeypatch, programs, channels, capability, stages
):
    """And for a device whose shared memory holds it; a CPU has none."""
    kernel = pytest.importorskip("rap.model.kernels.decode_attention.triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    blocks = {"BW": channels, "BC": channels}
    assert kernel.num_stages(programs, blocks, torch.device("cuda")) == stages
    assert kernel.num_stages(programs, blocks, torch.device("cpu")) == 2


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize(("free", "clockwise"), [(0, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_is_rotated_as_many_are(tables, free, clockwise, dtype):
    """Bit for bit, with an index that repeats and tables that are views."""
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([[0, 0, 3], [1, 4, 5]], dtype=torch.int32)
    q = torch.randn(3, 1, 4, 6 + free, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(3, 2, 1, 6 + free, generator=generator).to(dtype)
    angle = torch.randn(tables, 1, 12, generator=generator)
    cos, sin = (table.to(dtype)[..., ::2] for table in (angle.cos(), angle.sin()))
    found = rotate_step(q, k, cos, sin, index, clockwise=clockwise)
    picked = gather_pairs(cos, index), gather_pairs(-sin if clockwise else sin, index)
    for one, states in zip(found, (q, k), strict=True):
        assert torch.equal(one, rotate_pairs(states, *picked))


def _states_of_a_step(small):
    """Tables of one position and of two alike, queries and keys of one token."""
    tables = small.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.tensor([[9]]))
    pair = tuple(torch.cat([table, table], dim=1) for table in tables)
    generator = torch.Generator().manual_seed(0)
    sizes = {"dtype": torch.float64, "generator": generator}
    return tables, pair, [torch.randn(2, heads, 1, 6, **sizes) for heads in (6, 2)]


@torch.no_grad()
def test_a_step_follows_a_frequency_index_that_changes():
    """Whatever a layer kept for its steps must not outlive the index it was made from."""
    small, dense = _pruned(), tiny_model(dtype=torch.float64, **SHAPE)
    tables, pair, states = _states_of_a_step(small)

    def check(model, seen=[]):  # noqa: B006 - all results so far, which must differ
        attention = model.model.layers[0].self_attn
        one = attention.rotate(*states, tables)
        two = attention.rotate(*(torch.cat([x, x], dim=2) for x in states), pair)
        assert all(torch.equal(a, b[:, :, :1]) for a, b in zip(one, two, strict=True))
        assert not any(torch.equal(one[0], other) for other in seen)
        seen.append(one[0])

    check(small)
    copied = copy.deepcopy(small)
    small.load_state_dict(apply(dense, random_plan(dense, WIDTHS, seed=5)).state_dict())
    check(small)
    attention = copied.model.layers[0].self_attn
    attention.frequency_index = (attention.frequency_index + 1) % 8
    check(copied)


@pytest.mark.parametrize("way", ["inference tensor", "data", "address"])
def test_a_step_follows_an_index_that_torch_does_not_version(way):
    """Written to under inference mode or through `data`, or another one at the address of the last.

    The rotation of one token may in nothing differ from that of many.
    """
    with torch.inference_mode(way == "inference tensor"):
        small = _pruned()
        attention = small.model.layers[0].self_attn
        tables, pair, states = _states_of_a_step(small)
        place = attention.frequency_index.numpy().copy()
        for _ in range(3):
            one = attention.rotate(*states, tables)
            two = attention.rotate(*(torch.cat([x, x], dim=2) for x in states), pair)
            difference = max((a - b[:, :, :1]).abs().max() for a, b in zip(one, two, strict=True))
            assert difference == 0
            place[:] = (attention.frequency_index.numpy() + 1) % 8
            if way == "address":
                attention.frequency_index = torch.from_numpy(place)
            else:
                attention.frequency_index.data.copy_(torch.tensor(place))


# One cached head of nine queries, as SmolLM2 has it at 0.5 and 0.7, keys and values of two widths.
MERGED = {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 36, "layers": 2}


@pytest.mark.parametrize(("slots", "values"), [(48, 96), (67, 98)])
@pytest.mark.parametrize("factored", [False, True], ids=["absorbed", "factored"])
@pytest.mark.parametrize("kind", ["static", "dynamic", "growing"])
def test_merged_heads_decode_by_the_kernels(monkeypatch, kind, factored, slots, values):
    """Absorbed layers by the fused step where the cache is static; maps of heads come before it."""
    pytest.importorskip("triton")
    model = tiny_model(dtype=torch.float32, **MERGED)
    drawn = torch.Generator().manual_seed(0)
    sizes = {"merge": 3, "slots": slots, "width": values}
    layers = [merged_layer(3, 64, 64, drawn, **sizes) for _ in range(2)]
    if factored:
        layers = [FactoredPlan.of(layer, queries=True, outputs=True) for layer in layers]
    small = apply(model, plan_of(model, layers))

    def steps():
        cache = {
            "static": lambda: StaticCache(config=small.config, max_cache_len=20),
            "dynamic": lambda: DynamicCache(config=small.config),
            "growing": lambda: GrowingCache(small.config),
        }[kind]()
        logits = _steps(small, cache, count=2)
        held = [(layer.keys.shape[1::2], layer.values.shape[1::2]) for layer in cache.layers]
        assert held == [((1, 2 * slots), (1, values))] * 2
        return logits

    expected = steps()
    small.set_attn_implementation("rap")
    _run_kernels(monkeypatch)
    launched = _launches(monkeypatch)
    found = steps()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    fused = kind == "static" and not factored
    assert launched == ["decode_step" if fused else "decode_attention"] * 4


def _launches(monkeypatch):
    """The names of the operations that run, as they come."""
    launched = []
    for name in ("decode_step", "decode_attention"):
        real = getattr(interface, name)

        def counted(*args, _name=name, _real=real, **kwargs):
            launched.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(interface, name, counted)
    return launched
