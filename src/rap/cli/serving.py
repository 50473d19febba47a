"""`rap verify`, `rap serve` and `rap export`: a checkpoint in the engine that serves it."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.provenance import provenance
from ..checkpoint.source import resolve_source
from ..serving.serve import Server, complete, free_port, running, serve
from ..serving.stock import export_stock
from ..serving.verify import ENGINES, TOLERANCES, Verification, verify
from . import options
from .options import console, print_json, print_table

export_app = typer.Typer(no_args_is_help=True, help="Write a checkpoint in another form.")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("verify")(verify_command)
    app.command("serve")(serve_command)
    app.add_typer(export_app, name="export")


def verify_command(
    model: options.Model,
    engine: Annotated[str, typer.Option(help=f"One of: {', '.join(ENGINES)}.")] = "transformers",
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(TOLERANCES)}.")] = "float32",
    tolerance: Annotated[
        float | None, typer.Option(help="Largest |delta log-probability| that passes, in nats.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the heads.")] = 1,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Compare an engine's tokens and cache with the reference; exit code 1 if it fails."""
    source = resolve_source(model)
    verdict = verify(
        source,
        engine,
        dtype=dtype,
        tolerance=tolerance,
        tensor_parallel_size=tensor_parallel_size,
    )
    if as_json:
        settings = {"model": model, "tensor_parallel_size": tensor_parallel_size}
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
        list[str] | None, typer.Argument(help="After `--`: more flags for vLLM, as they are.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Key that clients must send.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the heads.")] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Send one completion on a free port and shut down.")
    ] = False,
) -> None:
    """Serve MODEL with vLLM's OpenAI-compatible server."""
    extra = list(arguments or [])
    if tensor_parallel_size > 1:
        extra += ["--tensor-parallel-size", str(tensor_parallel_size)]
    server = Server(resolve_source(model), host, port, api_key, tuple(extra))
    if not check:
        console.print(shlex.join(server.command), soft_wrap=True, markup=False)
        serve(server)
    server = replace(server, host="127.0.0.1", port=free_port())
    console.print(shlex.join(server.command), soft_wrap=True, markup=False)
    with running(server) as ready:
        choice = complete(ready, "Once upon a time")["choices"][0]
    console.print(f"completed {choice['text']!r}: the server works", markup=False)


@export_app.command("stock")
def export_stock_command(
    model: options.Model,
    output: options.Output,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Write MODEL, of the stock profile, as a plain checkpoint that every engine runs."""
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
    ]
