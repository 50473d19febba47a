"""Several vLLM engines after each other in one process: `python -m cases.several_engines JOBS OUT`.

Most of what an engine of a tiny model costs is the import of vLLM. JOBS is a JSON file of jobs by
name, as `rap.serving.vllm.worker` takes them; OUT receives each job's result, or its `error`.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rap.serving.engine import Transcript, engine_environment


def run_several(jobs: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    """The result of every job by its name, from one process."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = engine_environment({"PYTHONPATH": os.pathsep.join(paths)})
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("jobs.json", "results.json")]
        files[0].write_text(json.dumps(jobs), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "cases.several_engines", *map(str, files)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert files[1].exists(), done.stderr[-3000:]
        return json.loads(files[1].read_text(encoding="utf-8"))


def transcripts(result: Mapping[str, Any]) -> list[Transcript]:
    """What one job's first round made of its prompts."""
    assert "error" not in result, result["error"]
    return [Transcript(**each) for each in result["rounds"][0]]


def main(jobs: Path, out: Path) -> None:
    """Run the jobs; what has been done is written down after each, for one may end the process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from rap.serving.vllm.worker import run

    results: dict[str, Any] = {}
    for name, job in json.loads(jobs.read_text(encoding="utf-8")).items():
        try:
            results[name] = run(job)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        out.write_text(json.dumps(results), encoding="utf-8")
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
