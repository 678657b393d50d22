"""
Does OPO learn the tasks with an embedded model, other than the arithmetic one? Their recipes, with several seeds.

    python -m benchmarks.embedded_tasks run --jobs 2   # all missing runs, into runs/embedded_tasks
    python -m benchmarks.embedded_tasks collect        # runs/embedded_tasks → results/{guessing,spelling}.json
    python -m benchmarks.embedded_tasks report         # each record → its page

`guessing` is a game of several turns, in TRL's form of an environment; `spelling` is a task of reasoning-gym, which
`pip install 'opo_trl[gym]'` installs. A problem of the training split is never one of the report. Nothing was tuned on
these seeds.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opo_trl.checks.files import read_json, read_lines

from .intervals import estimate
from .many_runs import options, read_command_line, run_missing
from .pages import table
from .record import origin


RESULTS = Path(__file__).resolve().parent / "results"
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
RUNS = Path("runs/embedded_tasks")
AVERAGED = 5  # rollouts at the beginning and at the end


@dataclass(frozen=True)
class Task:
    """
    A task and what its page says.

    Args:
        recipe: path within the recipes.
        seeds: of the runs.
        title: of the page.
        held_out: what accuracies are measured on.
        logged: metric → what it is; of the reward, in percent.
    """

    recipe: str
    seeds: Sequence[int]
    title: str
    held_out: str
    logged: Mapping[str, str]


TASKS = {
    "guessing": Task(
        recipe="guessing/opo.yaml",
        seeds=range(1, 7),
        title="Learning in an environment with several turns",
        held_out="On 400 held-out games per level, whose ranges are not in the training split; training is on Level 4 "
        "only:",
        logged={
            "reward": "conversations that find the number, %",
            "tools/call_frequency": "calls per conversation",
        },
    ),
    "spelling": Task(
        recipe="reasoning_gym/opo.yaml",
        seeds=range(1, 6),
        title="Learning a task of reasoning-gym",
        held_out="On up to 500 words per level of the curriculum, none of them in the training split; training is on "
        "level 2 only, words of 3 to 7 letters:",
        logged={"reward": "mean score, %"},
    ),
}


def folder(task: str, seed: int) -> Path:
    """Folder of a run."""
    return RUNS / task / f"seed-{seed}"


def read(task: str, seed: int) -> dict[str, Any]:
    """Accuracies before and after a run, what it logged at first and last, and what it took."""
    summary = read_json(folder(task, seed) / "summary.json")
    rollouts = [entry for entry in read_lines(folder(task, seed) / "log.jsonl") if "reward" in entry]
    logged = {
        name: [statistics.fmean(e[name] for e in part) for part in (rollouts[:AVERAGED], rollouts[-AVERAGED:])]
        for name in TASKS[task].logged
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


def report(task: str, record: dict[str, Any]) -> str:
    """The page."""
    about, runs = TASKS[task], record["runs"]

    def row(name: str, values: list[list[float]], scale: float) -> list[str]:
        before, after = (statistics.fmean(scale * value[i] for value in values) for i in range(2))
        gain = estimate([scale * (value[1] - value[0]) for value in values])
        low, high = gain.interval
        return [name, f"{before:.1f}", f"{after:.1f}", signed(gain.mean), f"[{signed(low)}, {signed(high)}]"]

    held_out = [row(f"{name}, %", [run["accuracy"][name] for run in runs], 100) for name in runs[0]["accuracy"]]
    logged = [
        row(what, [run["logged"][name] for run in runs], 100 if name == "reward" else 1)
        for name, what in about.logged.items()
    ]
    seconds = [run["seconds"] for run in runs]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    return (
        f"# {about.title}\n\n`python -m benchmarks.embedded_tasks report` makes this page; the script's docstring "
        "says what is measured.\n"
        f"`recipes/{about.recipe}`, seeds {', '.join(str(run['seed']) for run in runs)}: "
        f"{runs[0]['completions']:,.0f} completions each, {min(seconds):.0f} to {max(seconds):.0f}\nseconds of "
        f"training on a busy machine with {record['cpu_cores']} CPU cores. Intervals are 95 % t intervals over "
        "seeds.\n\n"
        f"{about.held_out}\n\n{table(('', 'before', 'after', 'gain', '95 %'), held_out)}\n\n"
        f"In training, the first and the last {AVERAGED} rollouts:\n\n"
        f"{table(('', 'first', 'last', 'gain', '95 %'), logged)}\n\n"
        f"Measured {record['date'][:10]} with {versions}.\n"
    )


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    if arguments.command == "run":
        lines = {
            folder(task, seed): [
                "--config",
                str(RECIPES / about.recipe),
                *options({"output_dir": folder(task, seed), "seed": seed}),
            ]
            for task, about in TASKS.items()
            for seed in about.seeds
        }
        return run_missing(lines, arguments.jobs)
    for task, about in TASKS.items():
        record = RESULTS / f"{task}.json"
        if arguments.command == "collect":
            runs = [read(task, seed) for seed in about.seeds]
            record.write_text(json.dumps({**origin(), "runs": runs}, indent=1) + "\n")
        else:
            (RESULTS / f"{task}.md").write_text(report(task, json.loads(record.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
