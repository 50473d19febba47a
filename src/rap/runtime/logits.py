"""A causal LM in two halves, so that logits can be made for a chunk of tokens at a time.

Shapes: B batch, T tokens, C tokens of a chunk, E model dim, V vocabulary.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..model.errors import RapError
from ..model.layers import text_decoder

CHUNK_LOGITS = 2**25  # logits held at once, tokens x vocabulary: 128 MiB of float32


def decoder_of(model: Any) -> tuple[str, nn.Module]:
    """The module below the language-model head, and its name in the model.

    It holds the decoder or, in multimodal models, the decoder and what looks at images. Of a model
    that peft wraps, it is the one with the adapters in it. Raises RapError if the model has no such
    part, or learned prompts, which the wrapper alone puts before the tokens.
    """
    model = _headed(model)
    decoder = text_decoder(model)
    for name, child in model.named_children():
        if any(part is decoder for part in child.modules()):
            return name, child
    raise RapError(
        f"{type(model).__name__} has no decoder directly below its head: use the causal LM itself"
    )


def chunk_tokens(model: Any) -> int:
    """How many tokens logits are made for at a time."""
    return max(1, CHUNK_LOGITS // vocabulary(model))


def vocabulary(model: Any) -> int:
    """Rows of the embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


class Head:
    """A causal LM above its decoder, to make logits of outputs that are kept.

    Some families scale or cap logits after the head's matrix, which this keeps: it runs the class's
    own forward on a shallow copy whose decoder is a constant. It holds no part of the decoder: a
    model that is not needed otherwise is freed but for its head.
    """

    def __init__(self, model: Any) -> None:
        self.name, _ = decoder_of(model)
        headed = _headed(model)
        self._read = _plain(getattr(headed, self.name))
        self._model = _view(headed, self.name, None)

    def chunks(self, output: Any, hidden_NE: Tensor, step: int) -> Iterator[Tensor]:
        """Logits [C, V] of hidden states, `step` tokens at a time; `output` is overwritten."""
        for hidden_CE in hidden_NE.split(step):
            output.last_hidden_state = hidden_CE.unsqueeze(0)
            yield self._logits(output)

    def __call__(self, hidden_CE: Tensor) -> Tensor:
        """Logits [C, V] of hidden states [C, E] alone."""
        hidden: Any = hidden_CE.unsqueeze(0)
        return self._logits(BaseModelOutputWithPast(last_hidden_state=hidden))

    def _logits(self, output: Any) -> Tensor:
        view = _view(self._model, self.name, _Constant(_Complete(output), self._read))
        logits: Tensor = type(self._model).forward(view, input_ids=None, use_cache=False).logits
        return logits[0]


def _view(headed: Any, name: str, decoder: nn.Module | None) -> Any:
    """A shallow copy with another decoder, or with none."""
    view = copy.copy(headed)
    view._modules = {**headed._modules, name: decoder}
    return view


def _headed(model: Any) -> Any:
    """The part that is a causal LM by itself: a child of some multimodal models (llama4).

    Raises RapError for learned prompts.
    """
    if hasattr(model, "get_base_model"):
        if model.active_peft_config.is_prompt_learning:
            raise RapError("a model with learned prompts cannot be read: use one without, or LoRA")
        model = model.get_base_model()
    head = model.get_output_embeddings()
    for child in model.children():
        if hasattr(child, "get_decoder") and any(part is head for part in child.modules()):
            return child
    return model


class _Complete:
    """Decoder outputs with None for what they lack: heads of some families pass more on."""

    def __init__(self, output: Any):
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name, None)

    def __getitem__(self, index: Any) -> Any:
        return self._output[index]


def _plain(decoder: nn.Module) -> dict[str, Any]:
    """What a head may read of its decoder besides the output, such as a multiplier: no tensors.

    Nor functions, such as the forward that accelerate puts into a module.
    """
    return {
        name: value
        for name, value in vars(decoder).items()
        if not name.startswith("_") and not isinstance(value, Tensor) and not callable(value)
    }


class _Constant(nn.Module):
    def __init__(self, output: Any, attributes: dict[str, Any]):
        super().__init__()
        vars(self).update(attributes)
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output given at construction, whatever is asked."""
        return self.output
