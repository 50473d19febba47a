"""Every speed benchmark, one after the other, each in a process of its own.

    python benchmarks/all.py --device cuda

One that fails does not stop the others; the exit code says whether all went well. Afterwards
`rap report -o docs/results` puts the tables into the documentation.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("rope", "alignment", "attention", "memory", "decode")


def main() -> None:
    """Run them; arguments are passed on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        start = time.perf_counter()
        script = Path(__file__).with_name(f"{name}.py")
        command = [sys.executable, str(script), "--device", arguments.device]
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: {'failed' if code else 'done'} in {time.perf_counter() - start:.0f} s\n")
        failed += [name] if code else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
