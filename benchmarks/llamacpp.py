"""Prefill and decode in llama.cpp by width of heads and bits of the cache, over dense heads.

    python benchmarks/llamacpp.py [MODEL] [--widths 32,48] [--length 2048] [--rounds 5]
        [--threads 1] [--output FILE]

Models of MODEL's config with random weights and narrower heads, as F16 files: speed does not depend
on the values. Every round measures all of them in turns; medians of the rounds' ratios to dense
heads with a 16-bit cache.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rap.checkpoint.files import write_json
from rap.checkpoint.load import load_config, load_tokenizer
from rap.checkpoint.provenance import installed_version, provenance
from rap.checkpoint.source import resolve_source
from rap.serving.engine import EngineError
from rap.serving.gguf.export import export_gguf
from rap.serving.layout import dense_head_dim
from rap.serving.llamacpp.verify import Asked, run_llamacpp
from rap.studies.report.report import markdown_table

CACHES = ("f16", "q8_0", "q4_0")
DECODED = 64
RESULTS = Path(__file__).parent / "results"


def narrow(source: str, width: int, folder: Path, pre: str | None) -> Path:
    """A file of random weights in the shape of `source`, with heads of `width` channels."""
    fields = load_config(source).to_dict() | {"head_dim": width}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder / "model")
    load_tokenizer(source).save_pretrained(folder / "model")
    file = folder / f"{width}.gguf"
    export_gguf(folder / "model", file, kind="f16", pre=pre)
    return file


def measure(files: dict[int, Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a width and cache: medians and ranges of ratios, dense being the first file."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 1000, (arguments.length,), generator=generator).tolist()
    asked = Asked(prompts=[prompt], max_tokens=DECODED, alternatives=0)
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for number in range(arguments.rounds):
        for width, file in files.items():
            for cache in CACHES:
                settings: dict[str, Any] = {"cache": cache, "threads": arguments.threads}
                settings |= {"context": arguments.length + DECODED + 1}
                try:
                    run = run_llamacpp(file, asked, flash_attention="enabled", **settings)
                except EngineError:
                    continue  # widths that no quantized cache takes
                found.setdefault((width, cache), []).append(run.completions[0].timings)
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    dense = next(iter(found.values()))
    return [
        {"width": width, "cache": cache, **ratios(timings, dense)}
        for (width, cache), timings in found.items()
    ]


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


def table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row a width and cache, as `rap report` reads it."""

    def shown(value: dict[str, float]) -> str:
        return f"{value['median']:.2f} ({value['lowest']:.2f} to {value['highest']:.2f})"

    return {
        "title": f"llama.cpp by width and cache, {arguments.model} (CPU)",
        "note": (
            f"Throughput over dense heads with a 16-bit cache: {arguments.length:,} tokens read, "
            f"{DECODED} decoded behind them, {arguments.threads} thread, flash attention, random "
            f"weights; medians (and ranges) of {arguments.rounds} interleaved rounds."
        ),
        "header": ["head width", "cache", "prefill, x", "decode, x"],
        "rows": [
            [str(row["width"]), row["cache"], shown(row["prefill"]), shown(row["decode"])]
            for row in rows
        ],
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--widths", default="32,48")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pre", help="llama.cpp's pre-tokenizer, where its table has none")
    parser.add_argument("--output", type=Path, default=RESULTS / "llamacpp-cpu.json")
    arguments = parser.parse_args()
    source = resolve_source(arguments.model)
    dense = dense_head_dim(load_config(source))
    widths = [dense, *(int(width) for width in arguments.widths.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        files = {width: narrow(source, width, Path(folder), arguments.pre) for width in widths}
        rows = measure(files, arguments)
    asked = {name: value for name, value in vars(arguments).items() if name != "output"}
    about = provenance(**asked, xllamacpp=installed_version("xllamacpp"))
    result: dict[str, Any] = {"rows": rows, "provenance": about, "command": about["command"]}
    result["table"] = table(rows, arguments)
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
