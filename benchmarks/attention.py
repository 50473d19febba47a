"""The attention module alone, prefill and decode, under every method at one retain ratio.

    python benchmarks/attention.py [--device cuda] [--retain 0.7] [--contexts 4096 16384]

One layer of Llama-3-8B's shape (of the scaled-down one on a CPU) with random weights, cut by each
method as it cuts any model. Decode is one token over a filled cache, prefill a whole prompt without
one. All methods take turns, each with the better of SDPA and this package's attention. Latent
methods rebuild keys from the whole cache at every step: that is theirs to pay.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from speed import clock_note, clock_of, config_of, dtype_of, figure, is_cuda, parser, write

from rap.calibration.run import calibrate
from rap.evaluation.cost.footprint import footprint
from rap.evaluation.cost.latency import WARM_UP, fill_cache, interleaved, synchronize
from rap.evaluation.cost.random_models import random_model
from rap.evaluation.quality.perplexity import in_precision
from rap.methods import METHODS, parse_method
from rap.model.errors import RapError
from rap.model.kernels.growing_cache import GrowingCache
from rap.model.layers import attention_layers, rotary_module

CONTEXTS = {"cpu": [1024, 4096], "cuda": [4096, 8192, 16384, 32768]}
PROMPTS = {"cpu": [512], "cuda": [4096, 16384]}
IMPLEMENTATIONS = ("sdpa", "rap")


def cut_models(arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """One-layer models, dense and by every method, and why a method has none."""
    config = config_of(arguments.device)
    config.num_hidden_layers, config.vocab_size = 1, 1024
    config.layer_types = None
    dense = random_model(config, dtype=torch.float32, device=arguments.device)
    # Widths do not depend on the text, so little of it will do.
    windows = torch.randint(config.vocab_size, (2, 64))
    models, refused = {"dense": dense}, {}
    for name in METHODS:
        method = parse_method(name, arguments.retain, merge=1)
        try:
            statistics_of_text = calibrate(dense, windows, method.needs_for(dense))
            models[name] = method.apply(dense, method.plan(dense, statistics_of_text))
        except RapError as error:
            refused[name] = str(error)
    dtype = dtype_of(arguments.device)
    return {name: in_precision(model, dtype) for name, model in models.items()}, refused


class AttentionCall:
    """A model's first attention module on `tokens` new tokens after `context` cached ones."""

    def __init__(self, model: Any, batch: int, tokens: int, context: int, calls: int):
        weight = model.get_input_embeddings().weight
        self.model, self.module = model, attention_layers(model)[0].module
        made: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.hidden = torch.randn(batch, tokens, weight.shape[1], **made)
        positions = torch.arange(context, context + tokens, device=weight.device)[None]
        self.tables = rotary_module(model)(self.hidden, positions)
        self.cache = GrowingCache(model.config, capacity=context + calls) if context else None
        if context:
            fill_cache(model, self.cache, batch, context)

    def __call__(self) -> None:
        """Run it once and wait."""
        with torch.no_grad():
            self.module(
                self.hidden,
                position_embeddings=self.tables,
                attention_mask=None,
                past_key_values=self.cache,
            )
        synchronize(self.hidden.device)


def measure(models: dict[str, Any], arguments: Any, tokens: int, context: int) -> dict[str, Any]:
    """Median seconds of every method, and dense over each, at its better implementation."""
    tasks: dict[tuple[str, str], Callable[[], None]] = {}
    for name, model in models.items():
        for implementation in IMPLEMENTATIONS:
            calls = arguments.rounds + WARM_UP
            tasks[name, implementation] = AttentionCall(
                model, arguments.batch, tokens, context, calls
            )
    found = interleaved(
        tasks,
        arguments.rounds,
        lambda key: models[key[0]].set_attn_implementation(key[1]),
        clock_of(arguments),
    )
    best = {
        name: min((found[name, each] for each in IMPLEMENTATIONS), key=statistics.median)
        for name in models
    }
    return {
        "tokens": tokens,
        "context": context,
        "milliseconds": {name: 1e3 * statistics.median(spent) for name, spent in best.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(best["dense"], spent, strict=True))
            for name, spent in best.items()
        },
    }


def main() -> None:
    """Measure all contexts and prompts, print, write."""
    options = parser(__doc__, rounds=15)
    options.add_argument("--retain", type=float, default=0.7)
    # On a GPU enough sequences that the kernels take longer than Python, which launches them here.
    options.add_argument("--batch", type=int, help="default: 1 on a CPU, 8 on a GPU")
    options.add_argument("--contexts", type=int, nargs="+")
    options.add_argument("--prompts", type=int, nargs="+")
    arguments = options.parse_args()
    kind = "cuda" if is_cuda(arguments.device) else "cpu"
    arguments.batch = arguments.batch or {"cpu": 1, "cuda": 8}[kind]
    models, refused = cut_models(arguments)
    places = [(1, context) for context in arguments.contexts or CONTEXTS[kind]]
    places += [(prompt, 0) for prompt in arguments.prompts or PROMPTS[kind]]
    points = [measure(models, arguments, *place) for place in places]
    names = {
        name: f"decode at {name[1]:,}" if name[1] else f"prefill {name[0]:,}" for name in places
    }
    kept = {name: footprint(model).kv_bytes_per_token for name, model in models.items()}
    table = {
        "title": f"The attention module under every method ({kind.upper()})",
        "note": f"Retain {arguments.retain}, batch {arguments.batch}; dense over pruned time, "
        f"medians of interleaved rounds; {clock_note(arguments)}.",
        "header": ["method", "KV bytes/token", *names.values()],
        "rows": [
            [
                name,
                figure(kept[name] / kept["dense"], ".2f", "x"),
                *(figure(point["ratio"][name], ".2f", "x") for point in points),
            ]
            for name in models
        ],
    }
    result = {"points": points, "kv_bytes_per_token": kept, "refused": refused, "table": table}
    write("attention", result, arguments)


if __name__ == "__main__":
    main()
