"""
The family of anchored regressions: what in OPO makes reuse of completions work, and which neighbours share it.

    python -m benchmarks.anchored_regressions run --jobs 1    # all missing runs, into runs/anchored
    python -m benchmarks.anchored_regressions collect         # runs/anchored → results/anchored_regressions.json.gz
    python -m benchmarks.anchored_regressions report          # → results/anchored_regressions.md and .png
"""

import argparse
import sys

from .anchored_design import runs
from .learning_curves import run_missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "collect", "report"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    return run_missing(list(runs()), arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
