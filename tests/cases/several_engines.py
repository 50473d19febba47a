"""Several vLLM engines after each other in one process: `python -m cases.several_engines JOBS OUT`.

Most of what an engine of a tiny model costs is the import of vLLM. JOBS is a JSON file of jobs by
name, as `rap.serving.vllm.worker` takes them; OUT receives each job's result, or its `error`.

On several ranks every rank is such a process, started as torchrun would: each runs an engine of its
own with its part of the heads, and all take the same steps.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rap.serving.engine import Transcript, engine_environment


def run_several(jobs: Mapping[str, Any], *, timeout: float, ranks: int = 1) -> dict[str, Any]:
    """The result of every job by its name, from one process, or one process a rank."""
    if ranks > 1:
        jobs = {name: _divided(job, ranks) for name, job in jobs.items()}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "jobs.json"
        source.write_text(json.dumps(jobs), encoding="utf-8")
        started = [_start(source, rank, ranks) for rank in range(ranks)]
        try:
            _wait(started, time.monotonic() + timeout)
        finally:
            for one in started:
                one.kill()
        results = source.with_name("results-0.json")
        last = source.with_name("log-0").read_text(encoding="utf-8", errors="replace")[-3000:]
        assert results.exists(), last
        found = json.loads(results.read_text(encoding="utf-8"))
    never = {"error": f"the process ended before this job did:\n{last}"}
    return {name: found.get(name, never) for name in jobs}


def _divided(job: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The job on several ranks, which meet at a port of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"}
    return {**job, "engine": {**job["engine"], **engine}, "port": port}


def _start(source: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths)}
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        settings |= {name: str(value) for name, value in place.items()}
        settings |= {
            "MASTER_ADDR": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks)),
        }
    out = source.with_name(f"results-{rank}.json")
    with source.with_name(f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cases.several_engines", str(source), str(out)],
            env=engine_environment(settings),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(started: list[subprocess.Popen[bytes]], until: float) -> None:
    """Wait for all; where one fails the others would wait for it for ever."""
    while any(one.poll() is None for one in started):
        if any(one.poll() for one in started):
            return
        assert time.monotonic() < until, "the engines took too long"
        time.sleep(0.2)


def transcripts(result: Mapping[str, Any]) -> list[Transcript]:
    """What one job's first round made of its prompts."""
    assert "error" not in result, result["error"]
    return [Transcript(**each) for each in result["rounds"][0]]


def _name_shared_memory(prefix: str) -> None:
    """Name what the ranks share after their port.

    vLLM names it after the address that ranks meet at, `env://` for all engines of an external
    launcher: another test's engines would meet it, and so would those behind a killed run.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    named = shared.__dict__.get("named", shared.make_group_name)
    shared.named = staticmethod(named)
    shared.make_group_name = staticmethod(lambda group: prefix + named(group).lstrip("/"))


def main(jobs: Path, out: Path) -> None:
    """Run the jobs; what has been done is written down after each, for one may end the process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from rap.serving.vllm.worker import run

    results: dict[str, Any] = {}
    for name, job in json.loads(jobs.read_text(encoding="utf-8")).items():
        if "port" in job:
            os.environ["MASTER_PORT"] = str(job["port"])
            _name_shared_memory(f"port-{job['port']}-")
        try:
            results[name] = run(job)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        out.write_text(json.dumps(results), encoding="utf-8")
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
