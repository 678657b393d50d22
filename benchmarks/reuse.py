"""
Reuse of completions: accuracy over completions generated, for OPO with replay and for GRPO, DAPO and CISPO.

    python -m benchmarks.reuse run --jobs 2         # all missing runs, into runs/reuse
    python -m benchmarks.reuse collect              # runs/reuse → benchmarks/results/reuse.json.gz
    python -m benchmarks.reuse report               # results/reuse.json.gz → results/reuse.md and reuse_*.png
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .learning_curves import CurveRun, run_missing
from .reuse_design import CONTENDERS, FINALISTS, GOALS, TUNING_SEEDS, Contender, first_trials, trial


def completions_to(goal: float, points: Sequence[Mapping[str, Any]], axis: str = "completions") -> float | None:
    """Where a curve first reaches a sampled accuracy, between its points by linear interpolation; `None` if never."""
    for before, after in itertools.pairwise(points):
        if after["sampled"] >= goal:
            share = (goal - before["sampled"]) / (after["sampled"] - before["sampled"])
            return before[axis] + share * (after[axis] - before[axis])
    return None


def cost(run: CurveRun) -> float:
    """What tuning minimizes: completions to both goals together; a goal that is not reached counts 1.5 budgets."""
    points = json.loads((run.folder / "curve.json").read_text())["points"]
    reached = [completions_to(goal, points) for goal in GOALS]
    return sum(1.5 * run.budget if at is None else at for at in reached)


def finalists(contender: Contender) -> list[int]:
    """The best trials on the first tuning seed."""
    costs = {n: cost(trial(contender, n, TUNING_SEEDS[0])) for n in range(len(contender.trials))}
    return sorted(costs, key=lambda n: costs[n])[:FINALISTS]


def best_trial(contender: Contender) -> int:
    """The best finalist, over all tuning seeds."""
    costs = {
        n: statistics.fmean(cost(trial(contender, n, seed)) for seed in TUNING_SEEDS) for n in finalists(contender)
    }
    return min(costs, key=lambda n: costs[n])


def tune(jobs: int) -> int:
    """Run the trials, then the finalists on further seeds."""
    if status := run_missing(list(first_trials()), jobs):
        return status
    further = [trial(c, n, seed) for c in CONTENDERS for n in finalists(c) for seed in TUNING_SEEDS[1:]]
    return run_missing(further, jobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "collect", "report"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    return tune(arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
