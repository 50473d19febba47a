"""What the fit costs a layer: seconds and memory, and with them the whole of a large model.

    python benchmarks/fit.py [--device cpu] [--retain 0.5] [--scope block] [--whole]
        [--shapes SmolLM2-135M Llama-3-8B]

One layer of Llama-3-8B's shape, and one of SmolLM2-135M's as a check against a real run, with
random weights in float32. The fit's time is a number of steps and a number of windows: three short
runs tell what one of each takes, and the defaults of `--recover fit` are added up from that. It is
an upper bound: a layer may try learning rates that it then discards, and as many steps as those
take at most are counted. Peak memory is the process's (Linux) or the device's, beyond the weights
that are there before.
With `--whole` (for a GPU, where short runs differ by their launches alone) nothing is computed: all
layers of SmolLM2's shape and one of the 8B's are distilled with the default settings.
"""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any, get_args

import torch
from speed import LLAMA_3_8B, SMOLLM2, clock_note, clock_of, figure, is_cuda, parser, write
from transformers import LlamaConfig

from rap.evaluation.cost.latency import synchronize
from rap.evaluation.cost.random_models import random_model, uniform_config
from rap.recovery.fit import fit_layers
from rap.recovery.layer_fit import TRIAL_STEPS, FitConfig, Scope

SHAPES = {"SmolLM2-135M": SMOLLM2, "Llama-3-8B": LLAMA_3_8B}
WHOLE = {"SmolLM2-135M": 30, "Llama-3-8B": 1}  # layers that --whole distils
TINY = {"hidden_size": 288, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL = {"num_hidden_layers": 1, "vocab_size": 512}
# Windows and steps of the runs that are timed: one more of each than in the first.
RUNS = ((4, 1), (4, 2), (8, 1))


def measure(arguments: Any, shape: str) -> dict[str, Any]:
    """Seconds of a step, of a window and of the rest, and bytes, for one layer of a shape."""
    device = arguments.device
    config = LlamaConfig(**(SHAPES[shape] | SMALL))
    dense = random_model(config, dtype=torch.float32, device=device)
    narrow = uniform_config(config, arguments.retain)
    clock, seconds = clock_of(arguments), []
    settings = FitConfig(scope=arguments.scope)
    before = peak(device)
    for number, steps in (RUNS[0], *RUNS):  # the first warms up
        small = random_model(narrow, dtype=torch.float32, device=device)
        windows = torch.randint(0, SMALL["vocab_size"], (number, settings.window))
        started = clock()
        fit_layers(small, dense, windows, replace(settings, steps=steps))
        synchronize(torch.device(device))
        seconds.append(clock() - started)
    first, more_steps, more_windows = seconds[1:]
    step, window = more_steps - first, (more_windows - first) / (RUNS[2][0] - RUNS[0][0])
    return {
        "shape": shape,
        "step": step,
        "window": window,
        "rest": max(0.0, first - RUNS[0][0] * window - step),
        "peak": peak(device) - before,
        "runs": seconds[1:],
    }


def measure_whole(arguments: Any, shape: str) -> dict[str, Any]:
    """Seconds and bytes of all the fit with the default settings, in which models warm up."""
    device, layers = arguments.device, WHOLE[shape]
    fields = SHAPES[shape] | {"num_hidden_layers": layers, "vocab_size": SMALL["vocab_size"]}
    settings = FitConfig(scope=arguments.scope)
    if arguments.quick:
        fields |= TINY
        settings = replace(settings, window=16, num_windows=4, steps=1)
    config = LlamaConfig(**fields)
    dense = random_model(config, dtype=torch.float32, device=device)
    small = random_model(
        uniform_config(config, arguments.retain), dtype=torch.float32, device=device
    )
    windows = torch.randint(0, SMALL["vocab_size"], (settings.num_windows, settings.window))
    before, started = peak(device), clock_of(arguments)()
    found = fit_layers(small, dense, windows, settings)
    synchronize(torch.device(device))
    seconds = clock_of(arguments)() - started
    return {
        "shape": shape,
        "layers": len(found),
        "seconds": seconds,
        "peak": peak(device) - before,
        "settings": asdict(settings),
    }


def whole_table(rows: list[dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """The table of what was measured with `--whole`."""
    settings = FitConfig(**rows[0]["settings"])
    return {
        "title": f"The whole fit at retain {arguments.retain:g}, {arguments.scope}",
        "note": f"{settings.num_windows} windows of {settings.window} tokens, {settings.steps} "
        f"steps a layer; float32, random weights; {clock_note(arguments)}.",
        "header": ["shape", "layers", "seconds", "seconds a layer", "peak memory"],
        "rows": [
            [
                row["shape"],
                row["layers"],
                figure(row["seconds"], ",.0f"),
                figure(row["seconds"] / row["layers"], ",.1f"),
                figure(row["peak"] / 2**30, ".2f", " GiB"),
            ]
            for row in rows
        ],
    }


def peak(device: str) -> int:
    """Most bytes this process (or the device) has held so far."""
    if is_cuda(device):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def most_steps(settings: FitConfig) -> int:
    """Steps of a layer that discards every learning rate but the last."""
    trials = settings.rate_choices - 1 if settings.steps > TRIAL_STEPS else 0
    return settings.steps + trials * TRIAL_STEPS


def row(found: dict[str, Any], settings: FitConfig) -> list[str]:
    """Of the table; what is added up follows what was measured."""
    layers = SHAPES[found["shape"]]["num_hidden_layers"]
    steps = most_steps(settings)
    layer = found["rest"] + settings.num_windows * found["window"] + steps * found["step"]
    return [
        found["shape"],
        figure(found["step"], ".2f", " s"),
        figure(found["window"], ".2f", " s"),
        figure(found["peak"] / 2**30, ".2f", " GiB"),
        figure(layer, ",.0f", " s"),
        figure(layers * layer / 3600, ",.1f", " h"),
    ]


def main() -> None:
    """Measure each shape in a process of its own, print the table, write the result file."""
    made = parser(__doc__, rounds=1)
    made.add_argument("--retain", type=float, default=0.5)
    made.add_argument("--scope", choices=get_args(Scope), default=FitConfig.scope)
    made.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    made.add_argument("--shape", choices=tuple(SHAPES), help="measure one, print JSON")
    made.add_argument("--whole", action="store_true", help="time all of it: SmolLM2, an 8B layer")
    made.add_argument("--quick", action="store_true", help="--whole, at tiny sizes")
    arguments = made.parse_args()
    arguments.whole |= arguments.quick
    if arguments.shape:
        measured = measure_whole if arguments.whole else measure
        print(json.dumps(measured(arguments, arguments.shape)))
        return
    rows = []
    for shape in arguments.shapes:
        if arguments.quick:  # peaks then are of no interest
            rows.append(measure_whole(arguments, shape))
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--shape", shape]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    if arguments.whole:
        table = whole_table(rows, arguments)
        write("fit-whole", {"rows": rows, "table": table}, arguments)
        return
    settings = FitConfig(scope=arguments.scope)
    table = {
        "title": "Layer-wise distillation of one layer at retain "
        f"{arguments.retain:g}, {arguments.scope}",
        "note": (
            f"Measured: a step of {settings.batch} windows of {settings.window} tokens, what one "
            "window adds (streams of both models; not its judging), and peak memory with eight "
            "windows. "
            f"Computed from them, an upper bound: a layer with {settings.num_windows} windows, "
            f"{settings.steps} steps and {most_steps(settings) - settings.steps} of discarded "
            "learning rates, and all layers. Float32, random weights, "
            f"{torch.get_num_threads()} thread."
        ),
        "header": [
            *("shape", "step", "window", "peak memory"),
            *("a layer (computed)", "model (computed)"),
        ],
        "rows": [row(found, settings) for found in rows],
    }
    write("fit", {"rows": rows, "settings": asdict(settings), "table": table}, arguments)


if __name__ == "__main__":
    main()
