"""Time of a decode step and of prefill, dense and pruned interleaved, and bytes read per step.

A step is one token for each sequence of a batch, the logits included. The cache is filled with
random states: what prefill would have written costs the same to read. Prefill is the time to read a
prompt: most of the wait for the first token.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, StaticCache

from ...model.errors import UnsupportedModelError, out_of_memory
from ...model.kernels.growing_cache import GrowingCache
from ...model.layers import text_config, text_decoder
from ...runtime.state import evaluating

Found = TypeVar("Found")
# How configs of families with experts say how many there are.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def weight_bytes(model: Any, batch: int = 1) -> int:
    """Bytes of the weights that a decode step reads: of the language model and its head.

    Of embeddings a step reads a row, so that only one which is tied to the head counts. Of experts,
    those that `batch` tokens choose if no two choose the same.
    """
    decoder, output = text_decoder(model), model.get_output_embeddings()
    tables = {id(m.weight) for m in decoder.modules() if isinstance(m, nn.Embedding)}
    read = {name: p for name, p in decoder.named_parameters() if id(p) not in tables}
    head = sum(p.nbytes for p in output.parameters()) if output is not None else 0
    experts = sum(p.nbytes for name, p in read.items() if ".experts." in name)
    unread = round(experts * (1 - _read_share(model, batch))) if experts else 0
    return sum(p.nbytes for p in read.values()) + head - unread


def _read_share(model: Any, batch: int) -> float:
    config = text_config(model.config)
    number, chosen = (_first(config, names) for names in (_EXPERTS, _CHOSEN))
    return min(1.0, batch * chosen / number) if number and chosen else 1.0


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def if_it_fits(measure: Callable[..., Found], *given: Any, **named: Any) -> Found | None:
    """What `measure` returns, or None if memory did not suffice."""
    try:
        return measure(*given, **named)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error)):
            raise
        # The error holds on to what was built, so the next attempt must wait until it is gone.
        return None


WARM_UP = 2


@dataclass(frozen=True)
class Variant:
    """A way to run a decode step: attention implementation, cache, and how it is launched.

    `launch` is one by one (`eager`), as a captured CUDA graph, or by torch.compile.
    """

    name: str
    attention: str
    cache: Literal["dynamic", "growing", "static"]
    launch: Literal["eager", "graph", "compile"] = "eager"


# SDPA, or the family's own attention where there is no SDPA for it.
PLAIN = Variant("sdpa", "sdpa", "dynamic")
CPU_VARIANTS = (PLAIN, Variant("rap", "rap", "growing"))
CUDA_VARIANTS = (
    PLAIN,
    Variant("sdpa, graph", "sdpa", "static", "graph"),
    Variant("rap", "rap", "growing"),
    Variant("rap, graph", "rap", "static", "graph"),
)
COMPILED = (
    Variant("sdpa, compiled", "sdpa", "static", "compile"),
    Variant("rap, compiled", "rap", "static", "compile"),
)


def default_variants(device: str) -> tuple[Variant, ...]:
    """The variants that dense and pruned are timed with; the best of each counts."""
    return CUDA_VARIANTS if torch.device(device).type == "cuda" else CPU_VARIANTS


class DecodeStep:
    """A model, a batch and a cache of `context` tokens; calling it decodes one more token.

    At most `steps` calls, for which room is made.
    """

    def __init__(self, model: Any, variant: Variant, *, batch: int, context: int, steps: int):
        self.model, self.variant, self.left = model, variant, steps
        self.device = model.get_input_embeddings().weight.device
        self.ids_B1 = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        # Capturing and compiling run a few steps of their own.
        self.cache = _empty_cache(variant, model.config, context + steps + 8)
        self.kv_bytes = fill_cache(model, self.cache, batch, context)
        self.logits: torch.Tensor | None = None
        self._forward: Callable[..., Any] = model
        # No reference to a method of its own: a cycle would keep the cache until collected.
        self._graph: Callable[[], None] | None = None
        self.choose()
        before = _allocated(self.device)
        if variant.launch == "compile":
            self._forward = torch.compile(
                model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False
            )
        elif variant.launch == "graph":
            self._graph = captured(self._decode)
        self._decode()
        synchronize(self.device)
        # A graph keeps what its capture allocated, so that comes before the first replay.
        self.transient_bytes = _allocated(self.device, peak=True) - before

    def choose(self) -> None:
        """Switch the model to this variant's attention; several steps may share a model."""
        attend_by(self.model, self.variant.attention)

    def __call__(self) -> None:
        """Decode one token per sequence and wait for the device."""
        assert self.left > 0, "no room was made for more steps"
        self.left -= 1
        self._decode()
        synchronize(self.device)

    @torch.no_grad()
    def _decode(self) -> None:
        if self._graph is not None:
            self._graph()
            return
        output = self._forward(input_ids=self.ids_B1, past_key_values=self.cache, use_cache=True)
        self.logits = output.logits


def attend_by(model: Any, attention: str) -> None:
    """Switch a model to an attention implementation, to `eager` for an SDPA that it has not."""
    if attention == "sdpa" and not getattr(model, "_supports_sdpa", True):
        attention = "eager"
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


@contextmanager
def _own_attention(models: Iterable[Any]) -> Iterator[None]:
    """Give models their attention implementation back: under SDPA Gemma 2 has no soft cap."""
    own = [(model, model.config._attn_implementation) for model in models]
    try:
        yield
    finally:
        for model, name in own:
            attend_by(model, name)


def _empty_cache(variant: Variant, config: PreTrainedConfig, room: int) -> Any:
    if variant.cache == "static":
        return StaticCache(config=config, max_cache_len=room)
    if variant.cache == "growing":
        return GrowingCache(config, capacity=room)
    return DynamicCache(config=config)


@torch.no_grad()
def fill_cache(model: Any, cache: Any, batch: int, context: int) -> int:
    """Random states for `context` tokens in every layer; the bytes they take.

    Raises UnsupportedModelError for a model whose cache is not keys and values of every layer.
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    shapes = model(input_ids=ids, past_key_values=DynamicCache(config=model.config)).past_key_values
    total = 0
    for index, layer in enumerate(shapes.layers):
        if getattr(layer, "keys", None) is None:
            raise UnsupportedModelError(
                f"layer {index} caches no keys: decode can only be timed where all layers attend"
            )
        states = [
            torch.randn(batch, x.shape[1], context, x.shape[-1], dtype=x.dtype, device=x.device)
            for x in (layer.keys, layer.values)
        ]
        cache.update(*states, index)
        kept = min(context, getattr(layer, "sliding_window", None) or context)
        total += sum(state.nbytes for state in states) // context * kept
    return total


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as a CUDA graph, captured after a few runs on a side stream, as PyTorch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _allocated(device: torch.device, *, peak: bool = False) -> int:
    """Bytes of tensors on a CUDA device now, or the most since this was last asked; else 0."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; nothing elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    tasks: Mapping[Any, Callable[[], None]],
    rounds: int,
    prepare: Callable[[Any], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of every task in every round, interleaved; `prepare(name)` is not timed.

    Load that comes and goes meets all tasks alike. `WARM_UP` rounds before are not counted. On a
    CPU shared with others, `clock=time.process_time` counts what the tasks themselves took.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in tasks}
    for number in range(WARM_UP + rounds):
        for name, task in tasks.items():
            if prepare is not None:
                prepare(name)
            start = clock()
            task()
            spent = clock() - start
            if number >= WARM_UP:
                seconds[name].append(spent)
    return seconds


@dataclass(frozen=True)
class LatencyPoint:
    """Decode steps of several models at one batch and context.

    `seconds[model][variant]` are the rounds, interleaved, or None where memory did not suffice.
    `read_bytes[model]` is what a step must read: every weight but the input embedding's, and the
    cache of `kv_bytes`. `transient_bytes` (CUDA) came on top of weights and cache.
    """

    batch: int
    context: int
    seconds: dict[str, dict[str, list[float] | None]]
    transient_bytes: dict[str, dict[str, int]]
    kv_bytes: dict[str, int]
    read_bytes: dict[str, int]

    def best(self, model: str) -> str | None:
        """The variant of least median time."""
        spent = {name: seconds for name, seconds in self.seconds[model].items() if seconds}
        return min(spent, key=lambda name: statistics.median(spent[name]), default=None)

    def median(self, model: str, variant: str | None = None) -> float | None:
        """Median seconds of a step, by default of the best variant."""
        seconds = self.seconds[model].get(variant or self.best(model) or "")
        return statistics.median(seconds) if seconds else None

    def ratio(self, pruned: str, variant: str | None = None) -> float | None:
        """Dense over pruned time: the median over rounds, each at its best or at one variant."""
        pair = [
            self.seconds[name].get(variant or self.best(name) or "") for name in ("dense", pruned)
        ]
        if not all(pair):
            return None
        return statistics.median(a / b for a, b in zip(*pair, strict=True))  # type: ignore[arg-type]

    def roofline(self, pruned: str) -> float | None:
        """What the ratio would be if a step took as long as reading its bytes.

        None where memory did not hold the cache of both.
        """
        if not {pruned, "dense"} <= self.read_bytes.keys():
            return None
        return self.read_bytes["dense"] / self.read_bytes[pruned]


def measure_point(
    models: Mapping[str, Any],
    *,
    batch: int,
    context: int,
    rounds: int,
    variants: Sequence[Variant],
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyPoint:
    """Time a decode step of every model in every variant, interleaved.

    Where memory does not hold all caches at once, one after the other. The models keep the
    attention implementation that they came with.
    """
    names = [(name, variant) for name in models for variant in variants]
    kv_bytes: dict[str, int] = {}
    transient: dict[str, dict[str, int]] = {name: {} for name in models}

    def build(keys: Sequence[tuple[str, Variant]]) -> dict[tuple[str, Variant], list[float]]:
        steps = {
            key: DecodeStep(
                models[key[0]], key[1], batch=batch, context=context, steps=rounds + WARM_UP
            )
            for key in keys
        }
        for (name, variant), step in steps.items():
            kv_bytes[name] = step.kv_bytes
            transient[name][variant.name] = step.transient_bytes
        return interleaved(steps, rounds, lambda key: steps[key].choose(), clock)

    seconds: dict[tuple[str, Variant], list[float] | None] = dict.fromkeys(names)
    with _own_attention(models.values()):
        together = if_it_fits(build, names)
        if together is not None:
            seconds |= together
        else:
            for key in names:
                torch.cuda.empty_cache()
                seconds |= if_it_fits(build, [key]) or {}
    return LatencyPoint(
        batch=batch,
        context=context,
        seconds={
            name: {variant.name: seconds[name, variant] for variant in variants} for name in models
        },
        transient_bytes=transient,
        kv_bytes=kv_bytes,
        read_bytes={name: weight_bytes(models[name], batch) + kv_bytes[name] for name in kv_bytes},
    )


def time_prefill(
    models: Mapping[str, Any],
    *,
    tokens: int,
    rounds: int,
    batch: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds in which each model reads `batch` prompts of `tokens` tokens, of every round.

    One forward pass into a new cache, as `generate` begins: logits of the last position alone,
    where the model can leave out the others. Models read in turns, as `latency.interleaved` has it.
    """
    tasks = {name: _reading(model, batch, tokens) for name, model in models.items()}
    return interleaved(tasks, rounds, clock=clock)


def _reading(model: Any, batch: int, tokens: int) -> Callable[[], None]:
    device = model.get_input_embeddings().weight.device
    ids_BT = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    last = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if last else {}

    @torch.no_grad()
    def read() -> None:
        with evaluating(model):
            model(input_ids=ids_BT, use_cache=True, **options)
        synchronize(device)

    return read
