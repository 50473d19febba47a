"""Every speed benchmark, one after the other, each in a process of its own.

    python benchmarks/all.py --device cuda [--minutes 10] [--only tests roofline fit] [--quick]
    python benchmarks/all.py --device cuda --minutes 120 --only alignment attention decode

On a GPU by default what ten minutes on an H100 suffice for: the tests of the compiled kernels,
decode at Llama-3-8B's attention shapes, and layer-wise distillation of a layer of it and of
SmolLM2. One that fails or runs out of time does not stop the others; the exit code says whether
all went well. Afterwards `rap report -o docs/results` puts the tables into the documentation.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# Arguments of Python for every benchmark; what is not the name of a file is that of a script.
TESTS = ["-m", "pytest", "-q", "-n", "8", "-m", "gpu", str(HERE.parent / "tests" / "gpu")]
COMMANDS = {
    "tests": TESTS,
    "roofline": ["roofline.py"],
    "fit": ["fit.py", "--whole"],
    **{name: [f"{name}.py"] for name in ("rope", "alignment", "attention", "memory", "decode")},
}
DEFAULT = {
    "cuda": ("tests", "roofline", "fit"),
    "cpu": ("roofline", "rope", "alignment", "attention", "memory", "decode"),
}
QUICK = ("roofline", "fit")  # those with tiny sizes, by --quick; others reject it
# At most this share of the time, so that the others have some.
SHARE = {"tests": 0.4, "roofline": 0.4}


def command(name: str, arguments: argparse.Namespace, seconds: float | None) -> list[str]:
    """The command of one benchmark, which has `seconds` left."""
    first, *rest = COMMANDS[name]
    if name == "tests":
        return [sys.executable, first, *rest]
    made = [sys.executable, str(HERE / first), *rest, "--device", arguments.device]
    made += ["--quick"] if arguments.quick and name in QUICK else []
    if name == "roofline" and seconds is not None:
        # It stops by itself, with its tables printed, a little before.
        made += ["--minutes", f"{0.8 * seconds / 60:.1f}"]
    if arguments.output:
        made += ["--output", str(arguments.output / f"{name}.json")]
    return made


def run(name: str, arguments: argparse.Namespace, left: float) -> str:
    """Run one benchmark within the seconds that are left; what became of it."""
    timeout = SHARE.get(name, 1.0) * 60 * arguments.minutes if arguments.minutes else None
    timeout = None if timeout is None else min(timeout, left)
    environment = os.environ | ({"TRITON_INTERPRET": "0"} if name == "tests" else {})
    code = exit_code(command(name, arguments, timeout), environment, timeout)
    return "out of time" if code is None else "failed" if code else "done"


def exit_code(made: list[str], environment: dict[str, str], timeout: float | None) -> int | None:
    """Of a command; None if it was ended, with all that it had started, for it took too long."""
    with subprocess.Popen(made, env=environment, start_new_session=True) as process:
        try:
            return process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def main() -> None:
    """Run them; arguments are passed on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(COMMANDS))
    parser.add_argument("--minutes", type=float, help="of all; default: 10 on a GPU, else no limit")
    parser.add_argument("--quick", action="store_true", help=f"tiny sizes of {' and '.join(QUICK)}")
    parser.add_argument("--output", type=Path, help="folder of results [benchmarks/results]")
    arguments = parser.parse_args()
    kind = "cpu" if arguments.device == "cpu" else "cuda"
    if arguments.minutes is None and kind == "cuda":
        arguments.minutes = 10.0
    begun, ended = time.monotonic(), {}
    for name in arguments.only or (QUICK if arguments.quick else DEFAULT[kind]):
        start = time.monotonic()
        left = 60 * (arguments.minutes or 0) - (start - begun)
        out = arguments.minutes is not None and left < 1
        ended[name] = "out of time" if out else run(name, arguments, left)
        print(f"{name}: {ended[name]} in {time.monotonic() - start:.0f} s\n", flush=True)
    bad = [f"{name} ({what})" for name, what in ended.items() if what != "done"]
    if bad:
        sys.exit(f"not done: {', '.join(bad)}")


if __name__ == "__main__":
    main()
