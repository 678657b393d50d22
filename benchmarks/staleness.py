"""
Stale completions: what asynchronous training loses with the age of its completions, by method.

    python -m benchmarks.staleness tune --jobs 2     # learning rates and each method's own field; half an hour
    python -m benchmarks.staleness run --jobs 2      # all missing runs, into runs/staleness; an hour
    python -m benchmarks.staleness collect           # what is finished → results/staleness.json.gz
    python -m benchmarks.staleness report            # → results/staleness.md and .png

`staleness_methods` defines the methods and a run. No server, and nothing that depends on time: a worker in the
training process writes completions with the policy of a given number of versions ago.
"""

import gzip
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .many_runs import read_command_line
from .record import origin
from .staleness_methods import METHODS, Run, train


RUNS = Path("runs/staleness")
RESULTS = Path(__file__).resolve().parent / "results"
RECORD = RESULTS / "staleness.json.gz"

STEPS = 60
LAGS = (0, 1, 4, 16, 64)
# Settings are chosen at these, and used at the lags that name them.
TUNED_AT = {0: 0, 1: 0, 4: 4, 16: 16, 64: 16}
LEARNING_RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)
TUNING_SEEDS = (71, 72, 73)  # every trial has the first; the best few have all
FEW = 3
SEEDS = tuple(range(81, 89))  # that no choice was based on
EVERYWHERE = ("OPO", "AsyncGRPO", "GSPO", "M2PO")  # at every lag; OPO's other anchors at one
ANCHORS_AT = 16
PASSES = {"OPO": (2, 4), "OPO, latest anchor": (2,), "AsyncGRPO": (2, 4)}  # at the lag below, with tuned settings
PASSES_AT = 16

Setting = tuple[float, float]  # learning rate, own field


def run_of(method: str, lag: int, setting: Setting, seed: int, passes: int = 1) -> Run:
    """A run of the benchmark."""
    words = "".join(c if c.isalnum() else "_" for c in method)
    name = f"{words}_L{lag}_lr{setting[0]:g}_own{setting[1]:g}_passes{passes}_seed{seed}"
    return Run(RUNS / name, method, lag, *setting, seed, STEPS, passes)


def settings_of(method: str) -> list[Setting]:
    """What is tried."""
    return list(itertools.product(LEARNING_RATES, METHODS[method].values))


def score(method: str, lag: int, setting: Setting, seeds: Sequence[int]) -> float:
    """Mean sampled accuracy over seeds."""
    return statistics.fmean(run_of(method, lag, setting, seed).result()["sampled"] for seed in seeds)


def best_few(method: str, lag: int) -> list[Setting]:
    """The best settings on the first seed."""
    ordered = sorted(settings_of(method), key=lambda s: score(method, lag, s, TUNING_SEEDS[:1]), reverse=True)
    return ordered[:FEW]


def chosen(method: str, lag: int) -> Setting:
    """The best of the few, on all tuning seeds."""
    at = TUNED_AT[lag]
    return max(best_few(method, at), key=lambda s: score(method, at, s, TUNING_SEEDS))


def tuned_cells() -> list[tuple[str, int]]:
    """Methods, and the lags at which they are tuned."""
    return [(m, at) for m in METHODS for at in sorted(set(TUNED_AT.values())) if m in EVERYWHERE or at == ANCHORS_AT]


def tune(jobs: int) -> None:
    """All trials."""
    cells = tuned_cells()
    run_missing([run_of(m, at, s, TUNING_SEEDS[0]) for m, at in cells for s in settings_of(m)], jobs)
    run_missing([run_of(m, at, s, seed) for m, at in cells for s in best_few(m, at) for seed in TUNING_SEEDS], jobs)


def runs() -> list[tuple[dict[str, Any], Run]]:
    """The runs that are compared, by seed."""
    found = []
    for seed in SEEDS:
        for method, lag in itertools.product(METHODS, LAGS):
            if method not in EVERYWHERE and lag != ANCHORS_AT:
                continue
            found.append(({"method": method, "lag": lag, "passes": 1}, run_of(method, lag, chosen(method, lag), seed)))
        for method, passes in [(method, passes) for method, several in PASSES.items() for passes in several]:
            run = run_of(method, PASSES_AT, chosen(method, PASSES_AT), seed, passes)
            found.append(({"method": method, "lag": PASSES_AT, "passes": passes}, run))
    return found


def run_missing(wanted: Sequence[Run], jobs: int) -> None:
    """Train what is not finished."""
    missing = list(dict.fromkeys(run for run in wanted if not run.is_done))
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.staleness_methods"])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for _ in tqdm(pool.imap_unordered(train, missing), total=len(missing), desc="runs"):
            pass


def collect() -> None:
    """Write the record of the finished runs."""
    tuning = [
        {
            "method": method,
            "lag": at,
            "learning_rate": setting[0],
            "own": setting[1],
            "sampled": [run.result()["sampled"] for run in trials if run.is_done],
            "chosen": setting == chosen(method, at),
        }
        for method, at in tuned_cells()
        for setting in settings_of(method)
        for trials in [[run_of(method, at, setting, seed) for seed in TUNING_SEEDS]]
    ]
    found = [
        {**cell, "seed": run.seed, "learning_rate": run.learning_rate, "own": run.own, **run.result()}
        for cell, run in runs()
        if run.is_done
    ]
    text = json.dumps({**origin(), "steps": STEPS, "tuning": tuning, "runs": found}, indent=1)
    RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(found)} of {len(runs())} runs; `run` resumes the others")


def report(folder: Path = RESULTS) -> None:
    """Write the page and the figure."""
    from .staleness_report import write_report

    write_report(json.loads(gzip.decompress(RECORD.read_bytes())), folder)


def main() -> int:
    arguments = read_command_line(__doc__, "tune", "run", "collect", "report")
    if arguments.command == "tune":
        tune(arguments.jobs)
    elif arguments.command == "run":
        run_missing([run for _, run in runs()], arguments.jobs)
    else:
        {"collect": collect, "report": report}[arguments.command]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
