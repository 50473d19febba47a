"""What a batch takes at a context: prefill and decode, dense and pruned, and the largest that fits.

    python benchmarks/memory.py [--device cuda] [--context 8192] [--retain 0.7] [--batches 1 4 8 16]

The paper's table `serving`: resident cache per token and peak memory, each model alone in a process
of its own. On a GPU the allocator's peak, Llama-3-8B's shape in bfloat16, and the largest batch by
doubling, then halving the gap. On a CPU (Linux) the process's peak beyond loading, scaled-down
shape in float32. Prompts are read in pieces of 1,024 tokens, as servers do.
"""

import json
import subprocess
import sys
from typing import Any

import torch
from speed import config_of, dtype_of, figure, is_cuda, parser, resident_peak, write

from rap.evaluation.cost.footprint import footprint
from rap.evaluation.cost.latency import synchronize
from rap.evaluation.cost.random_models import random_model, uniform_config
from rap.model.kernels.growing_cache import GrowingCache

PIECE, STEPS = 1024, 4
BATCHES = {"cpu": [1, 2, 4], "cuda": [1, 4, 8, 16]}


def build(job: dict[str, Any]) -> Any:
    """The dense or pruned model of a job."""
    config = config_of(job["device"])
    if job["retain"] is not None:
        config = uniform_config(config, job["retain"])
    model = random_model(config, dtype=dtype_of(job["device"]), device=job["device"])
    model.set_attn_implementation("rap")
    return model


@torch.no_grad()
def serve(model: Any, batch: int, context: int) -> None:
    """Read a prompt of `context` tokens in pieces, then decode a few."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(batch, context, dtype=torch.long, device=device)
    cache = GrowingCache(model.config, capacity=context + STEPS)
    for piece in [*ids.split(PIECE, dim=1), *ids[:, :STEPS].split(1, dim=1)]:
        model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
    synchronize(device)


def cuda_peak(model: Any, batch: int, context: int) -> int | None:
    """The allocator's peak, or None where memory did not suffice."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        serve(model, batch, context)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


def largest_batch(model: Any, context: int) -> int:
    """The largest batch that fits, 0 if none does."""
    fits, fails = 0, 1
    while cuda_peak(model, fails, context) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if cuda_peak(model, middle, context) is None:
            fails = middle
        else:
            fits = middle
    return fits


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One process: a model, and the peaks of its batches."""
    model = build(job)
    found: dict[str, Any] = {"kv_bytes_per_token": footprint(model).kv_bytes_per_token}
    if is_cuda(job["device"]):
        context = job["context"]
        found["peaks"] = {str(b): cuda_peak(model, b, context) for b in job["batches"]}
        found["largest"] = largest_batch(model, context)
        return found
    loaded = resident_peak()
    # The high-water mark never falls, so batches come in ascending order.
    found["peaks"] = {}
    for batch in sorted(job["batches"]):
        serve(model, batch, job["context"])
        found["peaks"][str(batch)] = resident_peak() - loaded
    return found


def run_worker(job: dict[str, Any]) -> dict[str, Any]:
    """`work` in a fresh process."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure dense and pruned, print, write."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--context", type=int, default=8192)
    options.add_argument("--retain", type=float, default=0.7)
    options.add_argument("--batches", type=int, nargs="+")
    options.add_argument("--job", help="internal")
    arguments = options.parse_args()
    if arguments.job:
        print(json.dumps(work(json.loads(arguments.job))))
        return
    kind = "cuda" if is_cuda(arguments.device) else "cpu"
    batches = arguments.batches or BATCHES[kind]
    job = {"device": arguments.device, "context": arguments.context, "batches": batches}
    found = {
        "dense": run_worker({**job, "retain": None}),
        f"rap {arguments.retain}": run_worker({**job, "retain": arguments.retain}),
    }
    what = "Peak memory of the allocator" if kind == "cuda" else "Peak memory beyond loading"
    table = {
        "title": f"Memory at {arguments.context:,} tokens of context ({kind.upper()})",
        "note": f"{what}, prompt in pieces of {PIECE:,} tokens and {STEPS} steps, in GiB by batch.",
        "header": ["", "KV KiB/token", *(f"batch {batch}" for batch in batches), "largest batch"],
        "rows": [
            [
                name,
                figure(one["kv_bytes_per_token"] / 2**10, ".1f"),
                *(
                    figure(one["peaks"][str(b)] and one["peaks"][str(b)] / 2**30, ".2f")
                    for b in batches
                ),
                one.get("largest", "-"),
            ]
            for name, one in found.items()
        ],
    }
    write("memory", {"models": found, "table": table}, arguments)


if __name__ == "__main__":
    main()
