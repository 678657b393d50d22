"""
Reuse of completions: accuracy over completions generated, for OPO with replay and for tuned GRPO and DAPO.

    python -m benchmarks.reuse tune --jobs 2        # trials of each method, into runs/reuse
    python -m benchmarks.reuse run --jobs 2         # every row of the page that is missing
    python -m benchmarks.reuse time                 # seconds, one run at a time, beside TRL's own GRPOTrainer
    python -m benchmarks.reuse collect              # runs/reuse → benchmarks/results/reuse.json.gz
    python -m benchmarks.reuse report               # results/reuse.json.gz → results/reuse.md and reuse.png

Rows on other tasks and with a larger model need base models in runs/gym: those of `benchmarks.gym_tasks`, and that of
`python -m benchmarks.arithmetic_base --size 5m --output runs/gym/arithmetic_5m`.

Tuning minimizes the completions to both goals together. Each trial runs on one seed, and unless it is hopeless there,
on two more; the rows are on other seeds. `reuse_design` has the fields of each run.
"""

import argparse
import gzip
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .learning_curves import CurveRun, completions_to, run_missing
from .many_runs import options
from .record import origin
from .reuse_design import (
    CONTENDERS,
    FIGURE,
    GOALS,
    ROWS,
    STAY,
    TASK,
    TIMED_COMPLETIONS,
    TIMED_SEEDS,
    TUNING_SEEDS,
    Contender,
    Row,
    first_trials,
    trial,
)
from .reuse_report import write_report


RESULTS = Path(__file__).resolve().parent / "results"
RECORD = RESULTS / "reuse.json.gz"
TIMES = Path("runs/reuse/times.json")


def curve_of(run: CurveRun) -> dict[str, Any]:
    """What a finished run has measured."""
    return json.loads((run.folder / "curve.json").read_text())


def cost(run: CurveRun) -> float:
    """What tuning minimizes: completions to both goals together; a goal that is not reached counts 1.5 budgets."""
    points = curve_of(run)["points"]
    reached = [completions_to(goal, points) for goal in GOALS]
    return sum(1.5 * run.budget if at is None else at for at in reached)


def finalists(contender: Contender) -> list[int]:
    """The trials that go on to the other tuning seeds."""
    costs = {n: cost(trial(contender, n, TUNING_SEEDS[0])) for n in range(len(contender.trials))}
    return [n for n, found in costs.items() if found <= STAY * min(costs.values())]


def best_trial(contender: Contender) -> int:
    """The best finalist, over all tuning seeds."""
    costs = {
        n: statistics.fmean(cost(trial(contender, n, seed)) for seed in TUNING_SEEDS) for n in finalists(contender)
    }
    return min(costs, key=lambda n: costs[n])


def tuned(name: str) -> dict[str, Any]:
    """Fields of a contender, with those of its best trial: of the trials made here, or of the committed ones."""
    contender = next(contender for contender in CONTENDERS if contender.name == name)
    made_here = trial(contender, 0, TUNING_SEEDS[0]).is_done
    best = best_trial(contender) if made_here else committed()["tuning"][name]["best"]
    return {**contender.fields, **contender.trials[best]}


def committed() -> dict[str, Any]:
    """The committed record."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


def tune(jobs: int) -> int:
    """Run the trials, then the finalists on further seeds."""
    if status := run_missing(list(first_trials()), jobs):
        return status
    further = [trial(c, n, seed) for c in CONTENDERS for n in finalists(c) for seed in TUNING_SEEDS[1:]]
    return run_missing(further, jobs)


def runs_of(row: Row) -> dict[int, CurveRun]:
    """Seed → run of a row."""
    return {seed: row.run(tuned(row.method), seed) for seed in row.seeds}


def seconds_per_completion(name: str, seed: int) -> float:
    """Seconds of training per completion generated; TRL's own trainer runs GRPO's fields."""
    from trl import GRPOTrainer

    from opo_trl.train import prepare

    fields = TASK | tuned("GRPO" if name == "TRL" else name)
    fields |= {"output_dir": f"runs/reuse/times/{name}", "seed": seed, "overwrite": True}
    steps = TIMED_COMPLETIONS // 48 * fields["num_iterations"]
    ready = prepare(options({**fields, "max_steps": steps}))
    trainer: Any = ready.trainer
    if name == "TRL":
        trainer = GRPOTrainer(
            model=trainer.model,
            reward_funcs=trainer.reward_funcs,
            args=trainer.args,
            train_dataset=ready.data.training,
        )
    began = time.perf_counter()
    with ready.lock:
        trainer.train()
    seconds = time.perf_counter() - began
    generated = TIMED_COMPLETIONS if name == "TRL" else ready.trainer.completions_generated
    return seconds / generated


def measure_times() -> int:
    """Measure the seconds of each method, one run at a time, each in a process of its own."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opo_trl.train"])
    cases = [(name, seed) for seed in TIMED_SEEDS for name in ("TRL", *(row.name for row in FIGURE))]
    with context.Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(seconds_per_completion, cases, chunksize=1)
    TIMES.parent.mkdir(parents=True, exist_ok=True)
    times = [{"name": name, "seed": seed, "seconds": s} for (name, seed), s in zip(cases, found, strict=True)]
    TIMES.write_text(json.dumps(times))
    return 0


def collect() -> None:
    """Write the record: the finished rows and trials of this machine, and the committed ones for what it lacks."""
    before = committed()
    rows = dict(before["rows"])
    for row in ROWS:
        done = {str(seed): curve_of(run) for seed, run in runs_of(row).items() if run.is_done}
        if len(done) == len(row.seeds):
            rows[row.name] = done
    missing = [row.name for row in ROWS if row.name not in rows]
    tuning = before["tuning"] | {
        contender.name: {
            "best": best_trial(contender),
            "costs": [
                {
                    str(seed): round(cost(trial(contender, n, seed)))
                    for seed in TUNING_SEEDS
                    if trial(contender, n, seed).is_done
                }
                for n in range(len(contender.trials))
            ],
        }
        for contender in CONTENDERS
        if trial(contender, 0, TUNING_SEEDS[0]).is_done
    }
    times = json.loads(TIMES.read_text()) if TIMES.exists() else before["times"]
    text = json.dumps({**origin(), "tuning": tuning, "times": times, "rows": rows})
    RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(rows)} rows; without a finished run for each seed: {', '.join(missing) or 'none'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tune", "run", "time", "collect", "report"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    if arguments.command == "tune":
        return tune(arguments.jobs)
    if arguments.command == "run":
        return run_missing([run for row in ROWS for run in runs_of(row).values()], arguments.jobs)
    if arguments.command == "time":
        return measure_times()
    if arguments.command == "collect":
        collect()
    else:
        write_report(committed(), RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
