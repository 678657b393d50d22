"""
What clipping gradients at norm 1, TRL's default, does to OPO with `log_ratio_reduction: sum`, and to its choice of μ.

    python -m benchmarks.clipping run --jobs 2      # all missing runs, into runs/clipping; 25 minutes on 2 cores
    python -m benchmarks.clipping report            # runs/clipping → results/clipping.json and clipping.md

OPOTrainer divides the loss by the mean completion length of the rollout. AdamW does not depend on that constant, but
clipping does: "undivided" clips at 1 ÷ 18, the mean length here, which corresponds to norm 1 for an undivided loss.
Budget, task and outcome are those of `benchmarks.regime`; no choice was based on these seeds.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .intervals import paired_difference
from .many_runs import options, read_command_line, run_missing
from .pages import table
from .record import origin
from .regime_design import COMMON, METHODS


RESULTS = Path(__file__).resolve().parent / "results"
RUNS = Path("runs/clipping")
LENGTH = 18  # tokens of a completion of Level 3, on average
CLIPPED = {"none": 0.0, "norm 1": 1.0, "norm 1, undivided": 1 / LENGTH}
STIFFNESSES = (0.1, 0.3, 1.0)
STEPS_PER_ROLLOUT = (8, 16)
SEEDS = (21, 22, 23, 24, 25)
RATE = 1e-4


def runs() -> Iterator[dict[str, Any]]:
    """All runs, seed by seed."""
    for seed, k, mu, clipped in itertools.product(SEEDS, STEPS_PER_ROLLOUT, STIFFNESSES, CLIPPED):
        yield {"seed": seed, "steps_per_rollout": k, "mu": mu, "clipped": clipped}


def folder(run: dict[str, Any]) -> Path:
    """Folder of a run."""
    return RUNS / f"{run['clipped'].replace(' ', '_')} k{run['steps_per_rollout']} mu{run['mu']:g} seed{run['seed']}"


def command_line(run: dict[str, Any]) -> list[str]:
    """Command line of a run for `opo_trl.train`."""
    return options(
        {
            **COMMON,
            **METHODS["OPO"],
            "mu": run["mu"],
            "max_grad_norm": CLIPPED[run["clipped"]],
            "steps_per_generation": run["steps_per_rollout"],
            "learning_rate": RATE,
            "seed": run["seed"],
            "output_dir": folder(run),
        }
    )


def collect() -> dict[str, Any]:
    """What the report reads of each run, with versions and date."""
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
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "run":
        return run_missing({folder(run): command_line(run) for run in runs()}, arguments.jobs)
    results = collect()
    (RESULTS / "clipping.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "clipping.md").write_text(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
