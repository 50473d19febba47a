"""Run the faults of tests/reliability, and keep how each ended: some twenty minutes of two cores.

    python experiments/reliability/reliability.py --share 1

Nothing is written if a test fails: then a command did not end as it should. A run that is stopped
keeps in runs/ what it has seen, and goes on from there if the commit is the same.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def main() -> None:
    """Run them in a process of their own, which writes the file when all have passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="how much of the cases to run")
    result = (HERE / "reliability.json").resolve()
    share = parser.parse_args().share
    environment = {"RAP_FAULT_CASES": str(result), "RAP_FAULT_SHARE": f"{share:g}"}
    # Each case has a copy of everything: ten GB by the end, if those that passed stayed.
    tidy = ["-o", "tmp_path_retention_policy=failed"]
    arguments = ["-m", "pytest", "-q", "-m", "", *tidy, "tests/reliability"]
    os.chdir(REPOSITORY)
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | environment)


if __name__ == "__main__":
    main()
