"""The kernels in Triton's interpreter: every shape, dtype and option against float64."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import library

from cases.kernel_cases import (
    DECODE_CASES,
    ROPE_SHAPES,
    STEP_CASES,
    Layer,
    Shape,
    check_decode,
    check_rotation,
    check_step,
)
from rap.model.kernels import availability, decode_attention, rope_pairs

pytest.importorskip("triton", reason="Triton has no build for this platform")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """What a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """The interpreter keeps bfloat16 as bits and multiplies them as integers: widen them first."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def widened(builder, operand):
        is_bits = operand.dtype.scalar == tl.bfloat16
        return builder.cast_impl(operand, tl.float32) if is_bits else operand

    def create_dot(builder, a, b, *rest):
        return multiply(builder, widened(builder, a), widened(builder, b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _names(cases):
    return [case.name for case in cases]


@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(shape, dtype):
    from rap.model.kernels.rope_pairs import triton

    strided = dtype == torch.float32
    check_rotation(triton.rotate, Layer(shape, dtype, strided=strided), clockwise=strided)


@pytest.mark.parametrize("clockwise", [False, True])
def test_the_reference_rounds_once(clockwise):
    layer = Layer(Shape(), torch.bfloat16)
    given, index = (*layer.states()[:2], *layer.tables()), layer.index()
    found = rope_pairs.reference.rotate(*given, index, clockwise)
    wide = rope_pairs.reference.rotate(*(x.float() for x in given), index, clockwise)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, wide, strict=True))


def test_rotation_with_tables_of_every_sequence():
    from rap.model.kernels.rope_pairs import triton

    check_rotation(triton.rotate, Layer(Shape(), torch.float32), clockwise=False, batch=2)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Triton takes the current one, which is another for layers that are spread over several."""
    from rap.model.kernels.rope_pairs import triton

    guarded, guard = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: guarded.append(x) or guard(x))
    layer = Layer(Shape(), torch.float32)
    check_rotation(triton.rotate, layer, clockwise=False)
    check_decode(DECODE_CASES[0], layer)
    assert [x.shape[-1] for x in guarded] == [layer.states()[0].shape[-1]] * 2


@pytest.mark.parametrize("case", DECODE_CASES, ids=_names(DECODE_CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode(case, dtype):
    check_decode(case, Layer(case.shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", [False, True])
def test_the_operation_reads_pages_and_float8(monkeypatch, kernels, dtype):
    """By the kernels and by the reference: unused pages hold NaN, tables name pages beyond all."""
    monkeypatch.setattr(decode_attention, "takes_triton", lambda tensor: kernels)

    def operation(q, cache, *, splits, **settings):
        return decode_attention.decode_attention(q, *cache, **settings)

    chosen = [case for case in DECODE_CASES if case.page or case.quantized]
    assert len(chosen) == 6
    for case in chosen:
        check_decode(case, Layer(case.shape, dtype), operation)


@pytest.mark.parametrize(
    ("dtype", "capability", "read"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.float8_e4m3fn, (8, 0), False),
        (torch.float8_e4m3fn, (8, 9), True),
        (torch.float8_e4m3fn, (9, 0), True),
        (torch.float8_e5m2, (9, 0), False),
        (torch.int8, (9, 0), False),
    ],
)
def test_caches_that_a_gpu_cannot_read_are_left_to_the_reference(
    monkeypatch, dtype, capability, read
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache = SimpleNamespace(dtype=dtype, is_cuda=True, device="cuda")
    assert availability.reads_cache(cache) == read


def test_decode_of_float16_with_any_strides():
    case = next(case for case in DECODE_CASES if case.name == "all")
    check_decode(case, Layer(case.shape, torch.float16, strided=True))


@pytest.mark.parametrize(("case", "positions", "clockwise"), STEP_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_step(case, positions, clockwise, dtype):
    layer = Layer(replace(case.shape, tokens=1), dtype, strided=dtype == torch.float32)
    check_step(layer, case, positions, clockwise=clockwise)


def _inputs():
    layer = Layer(Shape(slots=5, pairs=8, value_width=10, tokens=1), torch.float32)
    return layer.states(), layer.tables(), layer.index(), layer.cache()


def test_operations_are_what_torch_compile_needs():
    """Schema, shapes without data, and gradients of the registered operations."""
    (q, k, v), tables, index, cache = _inputs()
    q, k = q.requires_grad_(), k.requires_grad_()
    position = torch.tensor([3])
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    operations = torch.ops.rap
    step = (q[:, :, 0], k[:, :, 0], v[:, :, 0], *tables, index, *cache, position)
    step = tuple(tensor.detach() for tensor in step)
    for operation, arguments in [
        (operations.rope_pairs, (q, k, *tables, index, False)),
        (
            operations.decode_attention,
            (step[0], *cache, 0.3, None, None, None, None, None, 1.0, 1.0),
        ),
        (operations.decode_step, (*step, 0.3, None, None, None, False)),
    ]:
        library.opcheck(operation, arguments, test_utils=kinds)


@pytest.mark.parametrize("clockwise", [False, True])
def test_gradient_of_the_rotation(monkeypatch, clockwise):
    (q, k, _), tables, index, _ = _inputs()
    upstream = torch.randn_like(q), torch.randn_like(k)
    gradients = []
    for taken in (True, False):
        monkeypatch.setattr(rope_pairs, "takes_triton", lambda tensor, taken=taken: taken)
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        outputs = rope_pairs.rope_pairs(*inputs, *tables, index, clockwise=clockwise)
        gradients.append(torch.autograd.grad(outputs, inputs, upstream))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_operations_on_a_cpu_are_the_reference():
    """Without CUDA nothing of Triton runs: float64 goes through unrounded."""
    states, tables, index, cache = _inputs()
    q, k = (state.double() for state in states[:2])
    keys, values = (tensor.double() for tensor in cache)
    turned = rope_pairs.rope_pairs(q, k, *tables, index)
    expected = rope_pairs.reference.rotate(q, k, *tables, index)
    assert all(torch.equal(a, b) for a, b in zip(turned, expected, strict=True))
    given = {"scale": 0.3, "softcap": 9.0}
    found = decode_attention.decode_attention(q[:, :, 0], keys, values, **given)
    assert found.dtype == torch.float64
    assert torch.equal(found, decode_attention.reference.decode(q[:, :, 0], keys, values, **given))


def test_kernels_compile_for_a_gpu_with_wide_loads():
    """Without a GPU, to machine code for sm_90, at a width that is no multiple of 16.

    K and V arrive in copies of 16 bytes that run ahead; an alignment that the compiler cannot prove
    would make them loads of 2 bytes.
    """
    script = Path(__file__).parents[2] / "cases" / "compiled_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["llama"]["wide copies"] > 0
    assert found["llama"]["narrow copies"] == 0
    assert found["pages"]["wide copies"] > 0
    assert found["rotation"]["wide loads"] > 0
    # float8 at 96: a row is 96 bytes, and the table of pages costs no alignment.
    assert found["float8 pages"]["wide copies"] > 0
    assert all(kernel["bytes"] > 0 for kernel in found.values())
    # What a program of the least of today's GPUs (compute capability 8.6) may have.
    assert max(kernel["shared"] for kernel in found.values()) <= 99 * 1024
