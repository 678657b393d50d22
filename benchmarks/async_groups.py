"""
Whether asynchronous training saves completions by dropping zero-variance groups where they complete.

    python -m benchmarks.async_groups run --jobs 2     # what is missing of results/async_groups.jsonl
    python -m benchmarks.async_groups report           # → results/async_groups.md

DAPO's dynamic sampling, without a pause: a group whose rewards are all equal is not queued, and the next ones take its
place. Both ways generate 1,920 completions, 48 at a time, by the policy four versions ago, on two levels of the
embedded task, with each of two learning rates on five seeds. With dropping, fewer optimizer steps are taken, and each
is fuller. Nothing was tuned, and no default depends on it. All 40 runs take about ten minutes of one core.
"""

import argparse
import json
import multiprocessing
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
from opo_trl.asynchronous.in_process import InProcessLoop

from . import staleness_methods
from .pages import table


RESULTS = Path(__file__).resolve().parent / "results"
RECORD, PAGE = RESULTS / "async_groups.jsonl", RESULTS / "async_groups.md"
LEVELS, RATES, SEEDS = ("Level 2", "Level 3"), (5e-5, 1e-4), range(401, 406)
COMPLETIONS, LAG = 1_920, 4
BATCH = staleness_methods.BATCH
RUNS = [*product(LEVELS, RATES, SEEDS, (False, True))]


class Dropping(InProcessLoop):
    """Queues no group whose rewards are all equal; its samples have the target 0."""

    async def _score_group(self, group):
        samples = await super()._score_group(group)
        return samples if any(sample.advantage for sample in samples) else []


class Budget(TrainerCallback):
    """Ends a run when its completions have been generated."""

    def __init__(self, worker: Any):
        self.worker, self.generated = worker, 0
        self.produce, worker.rollout_buffer.produce = worker.rollout_buffer.produce, self.counted

    def counted(self) -> Any:
        self.generated += BATCH
        return self.produce()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self.generated >= COMPLETIONS


def train(run: tuple[str, float, int, bool]) -> dict[str, Any]:
    """Train and measure."""
    torch.set_num_threads(1)
    level, rate, seed, drops = run
    staleness_methods.LEVEL = level
    with tempfile.TemporaryDirectory() as folder:
        args = AsyncOPOConfig(
            **staleness_methods.common_fields(folder, rate, seed, max_steps=COMPLETIONS // BATCH),
            ratio_form="log",
            token_budget=0,
            max_staleness=64,
        )
        loop = Dropping if drops else InProcessLoop
        trainer = staleness_methods.make_trainer(AsyncOPOTrainer, args, LAG, loop)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Budget(trainer.rollout_worker))
        trainer.train()
        measured = staleness_methods.accuracies(trainer.model, staleness_methods.make_tokenizer())
    names = dict(zip(("level", "learning_rate", "seed", "drops"), run, strict=True))
    return {**names, **measured, "steps": trainer.state.global_step}


def read() -> dict[tuple[str, float, int, bool], dict[str, Any]]:
    """The finished runs."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    found = [json.loads(line) for line in lines]
    return {(line["level"], line["learning_rate"], line["seed"], line["drops"]): line for line in found}


def shown(values: Any, signed: bool = False) -> str:
    """Mean ± half of the 95 % t interval, in %."""
    values = 100 * np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{'+' if signed else ''}.1f} ± {half:.1f}".replace("-", "−")


def page() -> str:
    """The results as a page."""
    found, rows = read(), []
    for level, rate in product(LEVELS, RATES):
        kept, dropped = ([found[level, rate, seed, drops] for seed in SEEDS] for drops in (False, True))
        steps = f"{np.mean([run['steps'] for run in kept]):.0f}, {np.mean([run['steps'] for run in dropped]):.0f}"
        row = [level, f"{rate:.0e}", steps]
        for measure in ("sampled", "greedy"):
            pairs = np.array([[run[measure] for run in runs] for runs in (kept, dropped)])
            row += [shown(pairs[0]), shown(pairs[1] - pairs[0], signed=True)]
        rows.append(row)
    header = ("level", "learning rate", "steps, all and dropped", "sampled, all", "dropped", "greedy, all", "dropped")
    return "\n".join([_INTRODUCTION, table(header, rows), ""])


_INTRODUCTION = """# Zero-variance groups in asynchronous training: trained or dropped

Accuracy in % on 500 test problems after 1,920 completions, mean ± half of the 95 % t interval over five seeds; under
*dropped*, the paired difference. [How](../async_groups.py).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    if arguments.command == "report":
        PAGE.write_text(page())
        return
    missing = [run for run in RUNS if run not in read()]
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.staleness_methods"])
    with context.Pool(arguments.jobs, maxtasksperchild=1) as pool, RECORD.open("a") as lines:
        for line in tqdm(pool.imap_unordered(train, missing), total=len(missing)):
            lines.write(json.dumps(line) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
