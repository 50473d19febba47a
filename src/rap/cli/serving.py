"""`rap export`, `rap verify` and `rap serve`: a checkpoint in the engine that serves it."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.device import AUTO, say_device, working_device
from ..checkpoint.gguf import is_gguf
from ..checkpoint.provenance import provenance
from ..checkpoint.source import resolve_source
from ..model.errors import RapError
from ..serving.gguf.export import TYPE_NAMES, export_gguf
from ..serving.llamacpp.verify import verify_llamacpp
from ..serving.serve import Server, complete, free_port, running, runs_in, serve
from ..serving.stock import export_stock
from ..serving.verify import ENGINES, TOLERANCES, Verification, check_tolerance, verify
from . import options
from .options import console, print_json, print_table

ALL_ENGINES = (*ENGINES, "llamacpp")
# Data types of torch to how a GGUF file stores matrices.
GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
Devices = Annotated[int, typer.Option(min=1, help="Tensor-parallel devices.")]


def verify_command(
    model: options.Model,
    engine: Annotated[
        str, typer.Option(help=f"One of: {', '.join(ALL_ENGINES)}.")
    ] = "transformers",
    dtype: Annotated[
        str | None, typer.Option(help=f"One of: {', '.join(TOLERANCES)}.", show_default="float32")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest allowed difference of log-probabilities, in nats.")
    ] = None,
    device: options.Device = AUTO,
    tensor_parallel_size: Devices = 1,
    reference: Annotated[
        str | None, typer.Option(help="For a .gguf file: the checkpoint it was exported from.")
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Compare an engine's tokens and cache with the reference; exit code 1 if it fails."""
    if engine not in ALL_ENGINES:
        raise RapError(f"unknown engine {engine!r}: use one of {', '.join(ALL_ENGINES)}")
    check_tolerance(tolerance)
    if reference is not None:
        _check_reference(model, engine)
    if tensor_parallel_size > 1 and engine != "vllm":
        raise RapError(f"{engine} works on one device: remove --tensor-parallel-size")
    if is_gguf(model) and engine == "llamacpp" and dtype is not None:
        raise RapError("a .gguf file is compared as it is stored: remove --dtype")
    dtype = dtype or "float32"
    placed = working_device(device)
    if engine == "llamacpp":
        verdict = _in_llamacpp(model, reference, dtype, tolerance, device)
    else:
        verdict = verify(
            resolve_source(model),
            engine,
            dtype=dtype,
            tolerance=tolerance,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
        )
    say_device(placed)
    if as_json:
        settings = {"model": model, "tensor_parallel_size": tensor_parallel_size}
        settings["device"] = str(placed)
        report = {**asdict(verdict), "capacity_ratio": verdict.capacity_ratio}
        print_json({**report, "provenance": provenance(**settings)})
    else:
        print_table(f"{model} in {verdict.engine} {verdict.version}", ["", ""], _rows(verdict))
        console.print("passed" if verdict.passed else "FAILED")
    if not verdict.passed:
        raise typer.Exit(1)


def serve_command(
    model: options.Model,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After `--`: options passed to vLLM.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="API key that clients must send.")
    ] = None,
    tensor_parallel_size: Devices = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Request one completion on a free port, then shut down.")
    ] = False,
) -> None:
    """Serve MODEL with vLLM's OpenAI-compatible server."""
    extra = list(arguments or [])
    if tensor_parallel_size > 1:
        extra += ["--tensor-parallel-size", str(tensor_parallel_size)]
    server = Server(resolve_source(model), host, port, api_key, tuple(extra))
    found = runs_in(server.source)
    if check and any(name.split("=")[0] in ("--host", "--port") for name in extra):
        raise RapError("--check chooses its own address: remove --host and --port behind --")
    if check:
        server = replace(server, host="127.0.0.1", port=free_port())
    console.print(shlex.join(server.command), soft_wrap=True, markup=False)
    console.print(f"runs in {found}", soft_wrap=True, markup=False)
    if not check:
        serve(server)
    with running(server) as ready:
        choice = complete(ready, "Once upon a time")["choices"][0]
    console.print(f"completed {choice['text']!r}: the server works", markup=False)


def _check_reference(model: str, engine: str) -> None:
    """RapError where nothing would be compared with a reference of its own."""
    if not is_gguf(model):
        raise RapError("--reference is for a .gguf file: a checkpoint is its own reference")
    if engine != "llamacpp":
        raise RapError(f"--reference is not read by {engine}: remove it, or add --engine llamacpp")


def _in_llamacpp(
    model: str, reference: str | None, dtype: str, tolerance: float | None, device: str
) -> Verification:
    """A GGUF file as it is, a checkpoint as one that is made for the occasion."""
    if dtype not in GGUF_TYPES:
        raise RapError(f"unknown dtype {dtype!r}: use one of {', '.join(GGUF_TYPES)}")
    if is_gguf(model):
        against = resolve_source(reference) if reference is not None else None
        return verify_llamacpp(model, reference=against, tolerance=tolerance, device=device)
    kind = GGUF_TYPES[dtype]
    return verify_llamacpp(resolve_source(model), kind=kind, tolerance=tolerance, device=device)


def _rows(verdict: Verification) -> list[tuple[str, str]]:
    return [
        ("tokens compared", str(verdict.num_tokens)),
        ("greedy tokens that differ", str(verdict.mismatched_tokens)),
        ("max |delta log-probability|", f"{verdict.max_logprob_error:.1e}"),
        ("tolerance", f"{verdict.tolerance:.1e}"),
        ("KV cache, tokens per GiB", f"{verdict.tokens_per_gib:,}"),
        ("the dense model's", f"{verdict.dense_tokens_per_gib:,}"),
        ("ratio", f"{verdict.capacity_ratio:.3f}"),
        ("1 / kept fraction", f"{1 / verdict.kept_fraction:.3f}"),
        *(("tokenized differently", repr(text)) for text in verdict.tokenizer_differences),
    ]


export_app = typer.Typer(no_args_is_help=True, help="Write a checkpoint in another form.")


@export_app.command("stock")
def export_stock_command(
    model: options.Model,
    output: options.Output,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Write MODEL, of uniform layout, as a plain checkpoint."""
    stock = export_stock(resolve_source(model), output, force=force)
    report = {
        "output": str(Path(output)),
        "model_type": stock.config.model_type,
        "head_dim": stock.config.head_dim,
    }
    if as_json:
        print_json({**report, "provenance": provenance(model=model)})
    else:
        console.print(
            f"wrote {output}: a plain {report['model_type']} with heads of {report['head_dim']} "
            "channels"
        )


@export_app.command("gguf")
def export_gguf_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, FILE.gguf.")],
    kind: Annotated[
        str, typer.Option("--type", help=f"Data type of matrices: {', '.join(TYPE_NAMES)}.")
    ] = "f16",
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-from", help="GGUF file of the dense model whose tokenizer to copy."
        ),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option("--pre", help="llama.cpp's name of the pre-tokenizer."),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Apply a Hadamard rotation to values, for an 8-bit or 4-bit cache."
        ),
    ] = False,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Write MODEL, dense or of uniform layout, as a GGUF file for llama.cpp."""
    for given in (model, tokenizer_from):
        if given and output.exists() and Path(given).is_file() and output.samefile(given):
            raise RapError(f"{output} would replace what it is made from; choose another output")
    written = export_gguf(
        resolve_source(model),
        output,
        kind=kind,
        tokenizer_from=tokenizer_from,
        pre=pre,
        rotate=rotate,
        force=force,
        progress=not as_json,
    )
    if as_json:
        settings = {"model": model, "type": kind, "pre": pre, "rotate": rotate}
        print_json({**asdict(written), "provenance": provenance(**settings)})
        return
    for warning in written.warnings:
        console.print(f"warning: {warning}", style="yellow")
    checked = ["rap", "verify", str(output), "--engine", "llamacpp", "--reference", model]
    console.print(
        f"wrote {output}: {written.num_bytes / 2**20:,.0f} MiB as {kind}, heads of "
        f"{written.head_dim} channels; `{shlex.join(checked)}`"
    )
