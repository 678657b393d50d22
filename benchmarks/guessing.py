"""
Does OPO learn in an environment with several turns? The recipe of the guessing game, with several seeds.

    python -m benchmarks.guessing run --jobs 2   # all missing runs, into runs/guessing-seeds
    python -m benchmarks.guessing collect        # runs/guessing-seeds → results/guessing.json
    python -m benchmarks.guessing report         # results/guessing.json → results/guessing.md

A game of the training split is never one of the report, nor is its range. Nothing was tuned on these seeds.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from opo_trl.data.guessing.game import SPLIT_SIZES
from opo_trl.report.intervals import estimate
from opo_trl.report.run_folder import read_json, read_lines

from .many_runs import options, read_command_line, run_missing
from .pages import table
from .record import origin


RESULTS = Path(__file__).resolve().parent / "results"
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "guessing" / "opo.yaml"
RUNS = Path("runs/guessing-seeds")
SEEDS = (1, 2, 3, 4, 5, 6)
AVERAGED = 5  # rollouts at the beginning and at the end
LOGGED = {"reward": "conversations that find the number, %", "tools/call_frequency": "calls per conversation"}


def folder(seed: int) -> Path:
    """Folder of a run."""
    return RUNS / f"seed-{seed}"


def read(seed: int) -> dict[str, Any]:
    """Accuracies before and after a run, what it logged at first and last, and what it took."""
    summary = read_json(folder(seed) / "summary.json")
    rollouts = [entry for entry in read_lines(folder(seed) / "log.jsonl") if "reward" in entry]
    logged = {
        name: [statistics.fmean(e[name] for e in part) for part in (rollouts[:AVERAGED], rollouts[-AVERAGED:])]
        for name in LOGGED
    }
    accuracy = {
        f"{level}, {decoding}": [summary[when][level][decoding]["accuracy"] for when in ("before", "after")]
        for level, results in summary["after"].items()
        for decoding in results
    }
    took = {"completions": rollouts[-1]["completions/generated"], "seconds": summary["train_seconds"]}
    return {"seed": seed, "accuracy": accuracy, "logged": logged, **took}


def signed(number: float) -> str:
    """A gain or loss, with its sign."""
    return f"{number:+.1f}".replace("-", "−")


def report(record: dict[str, Any]) -> str:
    """The page."""
    runs = record["runs"]

    def row(name: str, values: list[list[float]], scale: float) -> list[str]:
        before, after = (statistics.fmean(scale * value[i] for value in values) for i in range(2))
        gain = estimate([scale * (value[1] - value[0]) for value in values])
        low, high = gain.interval
        return [name, f"{before:.1f}", f"{after:.1f}", signed(gain.mean), f"[{signed(low)}, {signed(high)}]"]

    held_out = [row(f"{name}, %", [run["accuracy"][name] for run in runs], 100) for name in runs[0]["accuracy"]]
    logged = [
        row(what, [run["logged"][name] for run in runs], 100 if name == "reward" else 1)
        for name, what in LOGGED.items()
    ]
    seconds = [run["seconds"] for run in runs]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    return (
        "# Learning in an environment with several turns\n\n`python -m benchmarks.guessing report` makes this page; "
        "the script's docstring says what is measured.\n"
        f"`recipes/guessing/opo.yaml`, seeds {', '.join(str(run['seed']) for run in runs)}: "
        f"{runs[0]['completions']:,.0f} conversations each, {min(seconds):.0f} to {max(seconds):.0f}\nseconds of "
        f"training on a busy machine with {record['cpu_cores']} CPU cores. Intervals are 95 % t intervals over "
        "seeds.\n\n"
        f"On {SPLIT_SIZES['test']} held-out games per level, whose ranges are not in the training split; training is "
        f"on Level 4 only:\n\n{table(('', 'before', 'after', 'gain', '95 %'), held_out)}\n\n"
        f"In training, the first and the last {AVERAGED} rollouts:\n\n"
        f"{table(('', 'first', 'last', 'gain', '95 %'), logged)}\n\n"
        f"Measured {record['date'][:10]} with {versions}.\n"
    )


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    record = RESULTS / "guessing.json"
    if arguments.command == "run":
        lines = {
            folder(seed): ["--config", str(RECIPE), *options({"output_dir": folder(seed), "seed": seed})]
            for seed in SEEDS
        }
        return run_missing(lines, arguments.jobs)
    if arguments.command == "collect":
        record.write_text(json.dumps({**origin(), "runs": [read(seed) for seed in SEEDS]}, indent=1) + "\n")
    else:
        (RESULTS / "guessing.md").write_text(report(json.loads(record.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
