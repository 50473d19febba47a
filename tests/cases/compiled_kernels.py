"""Run as a script: compile the kernels for a GPU that need not be there, and count their loads."""

import json
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rap.model.kernels.decode_attention.triton import launch
from rap.model.kernels.rope_pairs.triton import rotate

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
TYPES |= {torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
OPTIONS = ("num_warps", "num_stages")
found: dict[str, dict[str, int]] = {}
ROTATION, SPLIT = "rope_pairs_kernel", "decode_split_kernel"


def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Stands for the launch: what the launcher would specialise on, compiled and counted."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for position, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, tuple):
            kinds = []
            for place, item in enumerate(value):
                kinds.append("constexpr" if item == 1 else "i32")
                if item == 1:
                    constants[position, place] = 1
                elif item % 16 == 0:
                    attributes[position, place] = [["tt.divisibility", 16]]
            signature[parameter.name] = tuple(kinds)
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options=options)
    ptx = made.asm["ptx"]
    found[kernel.fn.__name__] = {
        "bytes": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "wide copies": len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)),
        "narrow copies": len(re.findall(r"cp\.async\.ca\.", ptx)),
        "wide loads": len(re.findall(r"ld\.global\.v[24]", ptx)),
    }


def fused() -> None:
    """Both operations at Llama 3's shape with 88 of 128 channels; an odd number of cached slots."""
    groups, slots, width, cached = 8, 44, 88, 4097
    q, k = torch.zeros(1, 32, 1, width), torch.zeros(1, groups, 1, width)
    table, index = torch.zeros(1, 1, 64), torch.zeros(groups, slots, dtype=torch.int32)
    cache = torch.zeros(2, 1, groups, cached, width)
    q, k, table, cache = (tensor.bfloat16() for tensor in (q, k, table, cache))
    position, keep = torch.zeros(1, dtype=torch.int64), torch.ones(1, cached, dtype=torch.bool)
    prompt = [torch.zeros(1, 64, heads, width).bfloat16().transpose(1, 2) for heads in (32, 8)]
    tables = (table.expand(1, 64, -1),) * 2
    rotate(*prompt, *tables, index)
    new = (k[:, :, 0], k[:, :, 0], table[:, 0], table[:, 0], index)
    settings = {"new": new, "lengths_B": position, "keep_BS": keep, "softcap": 5.0}
    launch(q[:, :, 0], (cache[0], cache[1]), scale=0.1, splits=4, **settings)


def attention(
    heads: int, widths: tuple[int, int], dtype: torch.dtype, cached: torch.dtype, page: int = 0
) -> None:
    """Two merged heads, in one sequence or in pages."""
    cache = tuple(
        torch.zeros(9 if page else 1, 2, page or 4097, width, dtype=cached) for width in widths
    )
    settings: dict[str, torch.Tensor] = {}
    if page:
        settings["pages_BL"] = torch.zeros(1, 4, dtype=torch.int32)
        settings["lengths_B"] = torch.ones(1, dtype=torch.int32)
    q = torch.zeros(1, 2 * heads, widths[0], dtype=dtype)
    launch(q, (cache[0], cache[1]), scale=0.1, splits=4, **settings)


def main() -> None:
    """Llama 3, and the widths, dtypes and pages whose blocks are largest or least aligned."""
    JITFunction.run = compile_only
    narrow, wide, float8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    fused()
    every = {"llama": found.pop(SPLIT), "rotation": found.pop(ROTATION)}
    for name, *what in (
        ("odd widths", 9, (134, 98), narrow, narrow),
        ("pages", 16, (96, 96), narrow, narrow, 16),
        ("float8 pages", 16, (96, 96), narrow, float8, 16),
        ("float32", 32, (256, 256), wide, wide),
        ("tiles", 64, (512, 512), narrow, narrow),
    ):
        attention(*what)
        every[name] = found.pop(SPLIT)
    print(json.dumps(every | found))


if __name__ == "__main__":
    main()
