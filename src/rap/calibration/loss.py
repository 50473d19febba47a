"""The loss of a window and its gradient above the layers, the output layer in chunks of tokens.

Shapes: B batch, T tokens, C tokens of a chunk, E model dim, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..runtime.logits import Head, chunk_tokens


def next_token_loss(model: Any, ids_BT: Tensor) -> Tensor:
    """Mean next-token cross-entropy in float32."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten().to(logits_BTV.device))


@torch.enable_grad()
def output_gradient(model: Any, output: Any, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`next_token_loss`, and its gradient [B, T, E] by what the decoder gave.

    `output` is what the module below the head (`logits.decoder_of`) returned for the tokens; no
    layer is run or differentiated. Logits and their gradients are held for a chunk at a time.
    """
    hidden_BTE = output.last_hidden_state.detach().requires_grad_()
    hidden_NE, targets_N = hidden_BTE[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    step, loss = chunk_tokens(model), torch.zeros(())
    chunks = Head(model).chunks(output, hidden_NE, step)
    for logits_CV, targets_C in zip(chunks, targets_N.split(step), strict=True):
        logits_CV = logits_CV.float()
        total = cross_entropy(logits_CV, targets_C.to(logits_CV.device), reduction="sum")
        part = total / len(targets_N)
        part.backward()
        loss = loss.to(part.device) + part.detach()
    assert hidden_BTE.grad is not None
    return loss, hidden_BTE.grad
