"""
The regime map: what every method reaches, over optimizer steps per rollout and learning rate, and OPO over its fields.

    python -m benchmarks.regime run --jobs 2        # all missing runs, into runs/regime; about 2.5 hours on 2 cores
    python -m benchmarks.regime collect             # runs/regime → benchmarks/results/regime.jsonl.gz
    python -m benchmarks.regime report              # results/regime.jsonl.gz → results/regime.md and regime_*.png

Every run has the same budget: 64 optimizer steps of 48 completions (8 prompts × 6) of the arithmetic task's Level 3,
from the embedded base model. Only the number k of optimizer steps per rollout differs: each rollout has 48·k
completions. DAPO generates more, because of its dynamic sampling; the report says how many. The outcome is the sampled
accuracy on 250 test problems after training, two completions each, which means the same for every k.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from .many_runs import is_done, read_command_line, run_missing
from .record import origin
from .regime_design import command_line, folder, runs
from .regime_report import write_report


RESULTS = Path(__file__).resolve().parent / "results"


def summarize(run: dict[str, Any]) -> dict[str, Any]:
    """What the report reads of a run, and its curves."""
    log = [json.loads(line) for line in (folder(run) / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if "grad_norm" in entry]
    summary = json.loads((folder(run) / "summary.json").read_text())
    before, after = (next(iter(summary[time].values())) for time in ("before", "after"))  # of the only level
    return {
        **run,
        "accuracy": after["sampled"]["accuracy"],
        "greedy": after["greedy"]["accuracy"],
        "before": before["sampled"]["accuracy"],
        "seconds": summary["train_seconds"],
        "completions": max(entry.get("completions/generated", 0) for entry in steps),
        "reward": [
            round(entry["rewards/arithmetic_reward/mean"], 4)
            for entry in steps
            if "rewards/arithmetic_reward/mean" in entry
        ],
        **{name: [float(f"{entry[name]:.4g}") for entry in steps] for name in ("grad_norm", "entropy")},
    }


def collect() -> None:
    """Write a line on where and when, and one per run; every run must be finished."""
    missing = [run for run in runs() if not is_done(folder(run))]
    if missing:
        raise SystemExit(f"{len(missing)} runs are not finished. `python -m benchmarks.regime run` resumes them.")
    lines = [{"origin": origin()}, *map(summarize, runs())]
    RESULTS.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (RESULTS / "regime.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(lines) - 1} runs")


def read() -> list[dict[str, Any]]:
    """The collected runs."""
    lines = map(json.loads, gzip.decompress((RESULTS / "regime.jsonl.gz").read_bytes()).splitlines())
    return [line for line in lines if "method" in line]


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    if arguments.command == "run":
        return run_missing({folder(run): command_line(run) for run in runs()}, arguments.jobs)
    if arguments.command == "collect":
        collect()
    else:
        write_report(read(), RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
