"""
Stale completions on a pretrained language model: asynchronous OPO and AsyncGRPO's loss, without a server.

    pip install 'opo_trl[async]'
    python -m benchmarks.smollm2 --output runs/smollm2    # the model, in four-bit weights
    python -m benchmarks.real_async run --jobs 2          # what is missing of results/real_async.jsonl, in 16 GB
    python -m benchmarks.real_async report                # → results/real_async.md

Plan, written before the first run. `recipes/smollm2-135m/async/opo.yaml` on `addition`: 16 optimizer steps, each on 48
completions of a policy that is 0, 4 or 16 versions old, as far as there are as many: with 16, all are by the base
model. TRL fetches a micro-batch ahead, which makes some completions one version older. OPO with its defaults, and the
loss of AsyncGRPO (the clipped ratio of tokens, 0.2), in the same trainer, with the same generation and data. Seeds 522
to 524.

Nothing is tuned: both have the recipe's learning rate, 1e-5, and their default bound. So a difference says what these
settings do with age, not which objective is better at its best. Measured as in `real_model`, every four steps, on its
150 test problems. Three seeds give directions, not tests. All are reported.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from opo_trl import methods

from .many_runs import options
from .objectives.report import shown
from .pages import table
from .real_model import MODEL, RECIPES, jobs_to_run, measured_run
from .staged import read, run_missing


RECORD = Path(__file__).resolve().parent / "results" / "real_async.jsonl"
GRPO = methods.Method(
    "async_grpo", "AsyncGRPO's loss", "#0072b2", *methods.ASYNC, objective="benchmarks.objectives.published.GRPO"
)
METHODS = {"OPO": "async_opo", GRPO.label: GRPO.name}  # → trainer
LAGS, SEEDS, STEPS = (4, 16, 0), (522, 523, 524), 16
# Each process keeps as many policies of 0.5 GB as completions are old.
AT_ONCE = {0: 2, 4: 2, 16: 1}


@dataclass(frozen=True)
class Run:
    """A method with completions of an age, in versions of the policy."""

    method: str
    lag: int
    seed: int
    rollouts: int = STEPS
    tuning: bool = False

    def command_line(self, folder: Path) -> list[str]:
        """For `opo_trl.train`."""
        fields: dict[str, Any] = {
            "config": RECIPES / "async" / "opo.yaml",
            "output_dir": folder,
            "model_name_or_path": MODEL,
            "trainer": METHODS[self.method],
            "in_process_staleness": self.lag,
            "max_staleness": self.lag + 4,
            "max_steps": self.rollouts,
            "seed": self.seed,
        }
        return options(fields)


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(2 // AT_ONCE[run.lag])
    found, log = measured_run(run, GRPO)
    ages, ess = ([entry[name] for entry in log if name in entry] for name in ("opo/off_policy_steps", "opo/ratio/ess"))
    return found | {"oldest": max(ages, default=0.0), "ess": min(ess, default=1.0)}


def page(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a page; ages that are not complete are left out."""
    return "\n".join([_INTRODUCTION, *_rows(found)])


def _rows(found: dict[Run, dict[str, Any]]) -> Iterator[str]:
    rows = []
    for lag, method in product(sorted(LAGS), METHODS):
        runs = [found.get(Run(method, lag, seed)) for seed in SEEDS]
        if not all(runs):
            continue
        over_run, sampled, greedy = (
            shown([100 * run[name] for run in runs]) for name in ("over_run", "sampled", "greedy")
        )
        curve = " ".join(f"{100 * fmean(points):.0f}" for points in zip(*(run["curve"] for run in runs), strict=True))
        ess = f"{min(run['ess'] for run in runs):.2f}"
        opo = [found.get(Run("OPO", lag, seed)) for seed in SEEDS]
        gains = [
            f"{100 * (run['over_run'] - own['over_run']):+.1f}" for run, own in zip(runs, opo, strict=True) if own
        ]
        less = "" if method == "OPO" else ", ".join(gains).replace("-", "−")
        rows.append([str(lag), method, over_run, less, curve, sampled, greedy, ess])
    header = ["versions old", "", "over the run", "less OPO's, by seed", "before, every 4 steps", "sampled", "greedy"]
    yield table([*header, "least `opo/ratio/ess`"], rows) + "\n"


_INTRODUCTION = """# Stale completions on a pretrained language model

SmolLM2-135M-Instruct with four-bit weights, read into float32, learns `addition` from 768 completions, written by the
policy as many versions ago as the table says, or by the base model. Accuracies in % on 150 problems, ± half of the
95 % t interval over three seeds. Nothing was tuned; differences are directions. [Plan and code](../real_async.py);
[every run](real_async.jsonl).
"""


def main() -> int:
    jobs = jobs_to_run(__doc__, RECORD, lambda: page(read(Run, RECORD)))
    if jobs is None:
        return 0

    def missing(lag: int) -> list[Run]:
        done = read(Run, RECORD)
        return [run for run in (Run(name, lag, seed) for seed, name in product(SEEDS, METHODS)) if run not in done]

    failed = [run_missing([lambda lag=lag: missing(lag)], train, RECORD, min(jobs, AT_ONCE[lag])) for lag in LAGS]
    return max(failed)


if __name__ == "__main__":
    sys.exit(main())
