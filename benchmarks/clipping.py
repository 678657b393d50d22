"""
What clipping gradients at norm 1, TRL's default, does to OPO with `log_ratio_reduction: sum`, and to its choice of μ.

    python -m benchmarks.clipping run --jobs 2      # what is missing, into runs/clipping; 25 minutes on 2 cores
    python -m benchmarks.clipping report            # runs/clipping → results/clipping.json and clipping.md

OPOTrainer divides the loss by the mean completion length of the rollout. AdamW does not depend on that constant, and
clipping does: "undivided" clips at 1 ÷ 18, the mean length here, which is what norm 1 is to a loss that is not
divided.
Budget, task and outcome are those of `benchmarks.regime`; no choice was made on these seeds.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opo_trl.report.intervals import paired_difference

from .pages import table
from .record import origin
from .regime import COMMON, METHODS


RESULTS = Path(__file__).resolve().parent / "results"
RUNS = Path("runs/clipping")
LENGTH = 18  # tokens of a completion of Level 3, on average
CLIPPED = {"none": 0.0, "norm 1": 1.0, "norm 1, undivided": 1 / LENGTH}
STIFFNESSES = (0.1, 0.3, 1.0)
STEPS_PER_ROLLOUT = (8, 16)
SEEDS = (21, 22, 23, 24, 25)
RATE = 1e-4


def runs() -> Iterator[dict[str, Any]]:
    """All runs: a map for each seed before the next."""
    for seed, k, mu, clipped in itertools.product(SEEDS, STEPS_PER_ROLLOUT, STIFFNESSES, CLIPPED):
        yield {"seed": seed, "steps_per_rollout": k, "mu": mu, "clipped": clipped}


def folder(run: dict[str, Any]) -> Path:
    """Where a run's folder is."""
    return RUNS / f"{run['clipped'].replace(' ', '_')} k{run['steps_per_rollout']} mu{run['mu']:g} seed{run['seed']}"


def train(run: dict[str, Any]) -> int:
    """Run one, in a process of its own; its output goes beside its folder."""
    from opo_trl.train import main

    place = folder(run)
    place.parent.mkdir(parents=True, exist_ok=True)
    log = place.with_name(place.name + ".txt").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    fields = {
        **COMMON,
        **METHODS["OPO"],
        "mu": run["mu"],
        "max_grad_norm": CLIPPED[run["clipped"]],
        "steps_per_generation": run["steps_per_rollout"],
        "learning_rate": RATE,
        "seed": run["seed"],
        "output_dir": place,
        "overwrite": True,
    }
    return main(list(itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in fields.items())))


def is_done(run: dict[str, Any]) -> bool:
    """Whether a run's folder holds a finished run."""
    summary = folder(run) / "summary.json"
    return summary.exists() and "after" in json.loads(summary.read_text())


def run_missing(jobs: int) -> bool:
    """Run what is not finished; whether all of it succeeded."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opo_trl.train"])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        return not any(pool.imap_unordered(train, [run for run in runs() if not is_done(run)]))


def collect() -> dict[str, Any]:
    """What the report reads of each run."""
    lines = []
    for run in runs():
        log = [json.loads(line) for line in (folder(run) / "log.jsonl").read_text().splitlines()]
        after = json.loads((folder(run) / "summary.json").read_text())["after"]["Level 3"]
        norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
        bound = CLIPPED[run["clipped"]]
        lines.append(
            {
                **run,
                "sampled": after["sampled"]["accuracy"],
                "greedy": after["greedy"]["accuracy"],
                "median_norm": statistics.median(norms),
                "share_clipped": statistics.fmean(bound > 0 and norm > bound for norm in norms),
            }
        )
    return {**origin(), "runs": lines}


def report(results: dict[str, Any]) -> str:
    """The page."""
    rows = []
    for k, mu, clipped in itertools.product(STEPS_PER_ROLLOUT, STIFFNESSES, CLIPPED):
        found, plain = (
            [r for r in results["runs"] if (r["steps_per_rollout"], r["mu"], r["clipped"]) == (k, mu, c)]
            for c in (clipped, "none")
        )
        sampled, others = ([100 * r["sampled"] for r in group] for group in (found, plain))
        low, high = paired_difference(sampled, others).estimate.interval or (0.0, 0.0)
        rows.append(
            [
                str(k),
                f"{mu:g}",
                clipped,
                f"{statistics.fmean(sampled):.1f}",
                "" if clipped == "none" else f"[{low:+.1f}, {high:+.1f}]",
                f"{100 * statistics.fmean(r['greedy'] for r in found):.1f}",
                f"{statistics.median(r['median_norm'] for r in found):.2f}",
                f"{statistics.fmean(r['share_clipped'] for r in found):.0%}",
            ]
        )
    header = ("steps per rollout", "μ", "clipped", "sampled, %", "against none", "greedy, %", "norm", "steps clipped")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        "# OPO with clipped gradients\n\n"
        "`python -m benchmarks.clipping report` makes this page; the script's docstring says what is measured. "
        f"{len(SEEDS)} seeds,\n64 optimizer steps of 48 completions, learning rate {RATE:g}. Accuracies are means; "
        '"against none" is the 95 % interval of\nthe paired difference in points; the norm is the median before '
        "clipping.\n\n"
        f"{table(header, rows)}\n\nMeasured {results['date'][:10]} with {versions}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return int(not run_missing(arguments.jobs))
    results = collect()
    (RESULTS / "clipping.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "clipping.md").write_text(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
