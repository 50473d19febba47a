"""Prefill and decode in llama.cpp by layout of the heads and bits of the cache, over dense heads.

    python benchmarks/llamacpp.py [MODEL] [--lengths 2048 8000] [--caches f16 q8_0] [--rounds 5]
        [--methods rap:merge=all:profile=stock@0.5 48] [--threads 1] [--output FILE]

Models of MODEL's config with random weights, as F16 files: speed does not depend on the values. A
method is `METHOD@RETAIN` whose plain checkpoint is a Llama, or a number: as many KV heads, of so
many channels. Every round measures all of them in turns; medians of the rounds' ratios to dense
heads with a 16-bit cache.
"""

import argparse
import os
import shutil
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from layouts import DENSE, pruned_config
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from rap.checkpoint.files import write_json
from rap.checkpoint.load import load_config, load_tokenizer
from rap.checkpoint.provenance import installed_version, provenance
from rap.checkpoint.source import resolve_source
from rap.evaluation.cost.random_models import random_model
from rap.serving.engine import EngineError
from rap.serving.gguf.export import export_gguf
from rap.serving.llamacpp.verify import Asked, run_llamacpp
from rap.studies.report.report import markdown_table

DECODED = 64
PLAIN = "rap:merge=all:profile=stock"
METHODS = [f"{PLAIN}@0.67", f"{PLAIN}@0.5", f"{PLAIN}@0.35"]
RESULTS = Path(__file__).parent / "results"


def shaped(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """The config that a method, or a width of all heads, makes of a dense one."""
    if not name.isdecimal():
        assert isinstance(config, LlamaConfig), "methods are laid out for Llama alone"
        return pruned_config(config, name)
    fields = config.to_dict() | {"head_dim": int(name)}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def export(source: str, config: PreTrainedConfig, file: Path, pre: str | None) -> Path:
    """A file of random weights, with the tokenizer of `source`."""
    checkpoint = file.with_suffix("")
    random_model(config, dtype=torch.float16, device="cpu").save_pretrained(checkpoint)
    load_tokenizer(source).save_pretrained(checkpoint)
    export_gguf(checkpoint, file, kind="f16", pre=pre)
    shutil.rmtree(checkpoint)
    return file


def measure(files: dict[str, Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a length, method and cache: medians and ranges of ratios, dense being the first."""
    generator, base = torch.Generator().manual_seed(0), (DENSE, arguments.caches[0])
    rows = []
    for length in arguments.lengths:
        prompt = torch.randint(3, 1000, (length,), generator=generator).tolist()
        asked = Asked(prompts=[prompt], max_tokens=DECODED, alternatives=0)
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for number in range(arguments.rounds):
            for key in product(files, arguments.caches):
                settings: dict[str, Any] = {"cache": key[1], "threads": arguments.threads}
                settings |= {"context": length + DECODED + 1, "flash_attention": "enabled"}
                try:
                    run = run_llamacpp(files[key[0]], asked, **settings)
                except EngineError as error:
                    if key == base:
                        raise SystemExit(str(error)) from error
                    print(f"{key[0]}, {key[1]}: {error}")  # widths that no quantized cache takes
                    continue
                found.setdefault(key, []).append(run.completions[0].timings)
            print(f"{length:,} tokens, round {number + 1} of {arguments.rounds}", flush=True)
        dense = found[base]
        rows += [
            {"length": length, "method": name, "cache": cache, **ratios(timings, dense)}
            for (name, cache), timings in found.items()
        ]
    return rows


def ratios(timings: list[dict[str, float]], dense: list[dict[str, float]]) -> dict[str, Any]:
    """Median, lowest and highest ratio of every round, for prefill and decode."""
    result: dict[str, Any] = {}
    for what, key in (("prefill", "prompt_per_second"), ("decode", "predicted_per_second")):
        each = [one[key] / base[key] for one, base in zip(timings, dense, strict=True)]
        result[what] = {
            "median": statistics.median(each),
            "lowest": min(each),
            "highest": max(each),
        }
        result[f"{what}_per_second"] = [one[key] for one in timings]
    return result


def table(rows: list[dict[str, Any]], heads: dict[str, str], about: dict[str, Any]) -> Any:
    """A row a length, method and cache, as `rap report` reads it."""

    def shown(value: dict[str, float]) -> str:
        return f"{value['median']:.2f} ({value['lowest']:.2f} to {value['highest']:.2f})"

    threads = about["threads"]
    return {
        "title": f"llama.cpp by heads and cache, {about['model']} (CPU)",
        "note": (
            f"Throughput over the dense model with a 16-bit cache: {DECODED} tokens decoded behind "
            f"the context, {threads} thread{'s' * (threads > 1)}, flash attention, random weights; "
            f"medians (and ranges) of {about['rounds']} interleaved rounds."
        ),
        "header": ["context", "model", "KV heads", "cache", "prefill, x", "decode, x"],
        "rows": [
            [
                f"{row['length']:,}",
                row["method"],
                heads[row["method"]],
                row["cache"],
                shown(row["prefill"]),
                shown(row["decode"]),
            ]
            for row in rows
        ],
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--caches", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pre", help="llama.cpp's pre-tokenizer, where its table has none")
    parser.add_argument("--output", type=Path, default=RESULTS / "llamacpp-cpu.json")
    arguments = parser.parse_args()
    source, load = resolve_source(arguments.model), os.getloadavg()
    dense = load_config(source)
    configs = {name: shaped(dense, name) for name in dict.fromkeys([DENSE, *arguments.methods])}
    heads = {name: f"{one.num_key_value_heads} of {one.head_dim}" for name, one in configs.items()}
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: export(source, config, Path(folder) / f"{number}.gguf", arguments.pre)
            for number, (name, config) in enumerate(configs.items())
        }
        rows = measure(files, arguments)
    asked = {name: value for name, value in vars(arguments).items() if name != "output"}
    about = provenance(**asked, load=load, xllamacpp=installed_version("xllamacpp"))
    result: dict[str, Any] = {"rows": rows, "provenance": about, "command": about["command"]}
    result["table"] = table(rows, heads, asked)
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
