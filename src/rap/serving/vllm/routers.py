"""Routers of experts that vLLM's backend for models of transformers would change, kept as they are.

It takes over a block of experts whose router scores and chooses, with the tensors of the router and
nothing else; and it replaces every linear by one that returns a product and nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

_MARK = "tensors_of_the_block"


@contextmanager
def routers_kept(model: nn.Module) -> Iterator[None]:
    """While vLLM replaces modules of `model`: their routing stays that of transformers.

    Blocks with tensors of their own (a bias on the choice: MiniMax-M2, HunYuan-V3) route outside of
    vLLM's experts, which take weights and choices then. Linears with a forward of their own
    (Phi-3.5-MoE) are put back, whole on every device.
    """
    blocks = [block for block in model.modules() if _has_own_tensors(block)]
    linears = {name: module for name, module in model.named_modules() if _has_own_forward(module)}
    for block in blocks:
        # vLLM looks at children: one with a tensor that it cannot account for keeps it away.
        block.add_module(_MARK, nn.ParameterList([torch.empty(0)]))
    yield
    for block in blocks:
        delattr(block, _MARK)
    for name, linear in linears.items():
        model.set_submodule(name, linear)


def _has_own_tensors(module: nn.Module) -> bool:
    own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return hasattr(module, "experts") and next(own, None) is not None


def _has_own_forward(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
