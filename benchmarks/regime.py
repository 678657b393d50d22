"""
The regime map: what every method reaches, over optimizer steps per rollout and learning rate, and OPO over its fields.

    python -m benchmarks.regime run --jobs 2        # runs that the record lacks, into runs/regime; all take 2.5 hours
    python -m benchmarks.regime collect             # runs/regime → benchmarks/results/regime.jsonl.gz, the record
    python -m benchmarks.regime report              # results/regime.jsonl.gz → results/regime.md and regime_reuse.png

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
RECORD = RESULTS / "regime.jsonl.gz"


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


def lines() -> list[dict[str, Any]]:
    """The record: runs, and before them on which machine and when they were made."""
    return [json.loads(line) for line in gzip.decompress(RECORD.read_bytes()).splitlines()] if RECORD.exists() else []


def read() -> list[dict[str, Any]]:
    """The collected runs."""
    return [line for line in lines() if "method" in line]


def missing() -> list[dict[str, Any]]:
    """The runs that the record lacks."""
    collected = {folder(run) for run in read()}
    return [run for run in runs() if folder(run) not in collected]


def collect() -> None:
    """Add the finished runs to the record."""
    finished = [run for run in missing() if is_done(folder(run))]
    text = "".join(json.dumps(line) + "\n" for line in [*lines(), {"origin": origin()}, *map(summarize, finished)])
    RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(finished)} runs more; `python -m benchmarks.regime run` makes the other {len(missing())}")


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    if arguments.command == "run":
        return run_missing({folder(run): command_line(run) for run in missing()}, arguments.jobs)
    if arguments.command == "collect":
        collect()
    else:
        write_report(read(), RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
