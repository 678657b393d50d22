"""
Longer completions on a pretrained language model: log-ratios summed or averaged, with which μ, and the weights' ESS.

    python -m benchmarks.smollm2 --output runs/smollm2     # the model, in four-bit weights
    python -m benchmarks.real_length run --jobs 2          # what is missing of results/real_length.jsonl
    python -m benchmarks.real_length report                # → results/real_length.md

Plan, written before the first run. After two worked lines, the model adds a number again and again, as in

    from 16 by 9: 16 + 9 = 25, 25 + 9 = 34

Six steps take up to 69 tokens, twelve up to 147. The reward is the share of steps that are right before the first
wrong one; of the forms that were looked at, the base model was right in some steps with this one (8 problems, four
samples: 17 % with eight steps), and hardly with additions of a list, counting and sorting.
`recipes/smollm2-135m/opo.yaml` with 12 rollouts of 24 completions and two passes each: one over its own completions,
one with replay of nine rollouts, where ratios are not 1. Learning rate 1e-5, as in the recipe; seeds 531 to 533.

With six steps: sums with μ = 0.3, the default, and 0.03; averages with μ = 0.3, and with 20, about 0.3 per token of
a completion, as `docs/choosing.md` says. With twelve: sums and averages with μ = 0.3, and averages with 40. Nothing
is tuned. Measured every four rollouts on 60 other problems, two samples each: the mean reward, whose mean over the
run, without its beginning, is the primary measure; and, from the log of steps with replay, the mean and the least
`opo/ratio/ess`. Three seeds give directions, not tests. All are reported. Products of matrices are in bfloat16, as in
`real_model`.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from opo_trl.evaluate import Evaluation

from .many_runs import options
from .objectives.report import shown
from .pages import table
from .real_model import MODEL, RECIPES, jobs_to_run, measured_run, multiply_as_bfloat16
from .staged import read, run_missing


RECORD = Path(__file__).resolve().parent / "results" / "real_length.jsonl"
PROBLEMS = Path("runs/real_length")
SIZES = {"test": 60, "train": 200}  # problems of each length
WORKED = 2  # lines before a problem
TOKENS = {6: 69, 12: 147}  # steps → the longest solution with the end of its line
SETTINGS = [
    *((6, "sum", mu) for mu in (0.3, 0.03)),
    *((6, "mean", mu) for mu in (0.3, 20.0)),
    *((12, reduction, mu) for reduction, mu in (("sum", 0.3), ("mean", 0.3), ("mean", 40.0))),
]
DEFAULT = ("sum", 0.3)
SEEDS, ROLLOUTS, PASSES = (531, 532, 533), 12, 2
GROUP, PROMPTS = 6, 4  # of a rollout


def make_problems(steps: int) -> dict[str, list[dict[str, str]]]:
    """The rows of each split: all have the same worked lines, and no two the same numbers."""
    rng = random.Random(f"real_length, {steps}")
    numbers = rng.sample([*product(range(10, 61), range(2, 10))], WORKED + sum(SIZES.values()))
    asked = [(f"from {start} by {more}:", _work_out(start, more, steps)) for start, more in numbers]
    worked, rest = "".join(f"{problem} {solution}\n" for problem, solution in asked[:WORKED]), iter(asked[WORKED:])
    return {
        split: [
            {"problem": worked + problem, "level": str(steps), "type": "Steps", "solution": solution}
            for problem, solution in islice(rest, size)
        ]
        for split, size in SIZES.items()
    }


def _work_out(start: int, more: int, steps: int) -> str:
    totals = [start + more * step for step in range(steps + 1)]
    return ", ".join(f"{total} + {more} = {after}" for total, after in pairwise(totals))


def steps_reward(completions: Sequence[str], solution: list[str], **columns: Any) -> list[float]:
    """The share of steps of the first line that are right before the first wrong one; more steps than asked count."""
    return [_share(text.partition("\n")[0], right) for text, right in zip(completions, solution, strict=True)]


def _share(line: str, right: str) -> float:
    written, steps = line.strip().split(", "), right.split(", ")
    wrong = [mine != step for mine, step in zip(written, steps, strict=False)]
    return (wrong.index(True) if True in wrong else len(wrong)) / max(len(written), len(steps))


@dataclass(frozen=True)
class Run:
    """OPO with a form of the log-ratio and its χ² coefficient, on problems of some steps."""

    steps: int
    reduction: str
    mu: float
    seed: int
    rollouts: int = ROLLOUTS
    tuning: bool = False

    def command_line(self, folder: Path) -> list[str]:
        """For `opo_trl.train`."""
        fields: dict[str, Any] = {
            "config": RECIPES / "opo.yaml",
            "output_dir": folder,
            "model_name_or_path": MODEL,
            "dataset_name": PROBLEMS / str(self.steps),
            **dict.fromkeys(("levels", "validation_levels", "report_levels"), self.steps),
            "report_size": SIZES["test"],
            "reward_funcs": "benchmarks.real_length.steps_reward",
            "log_ratio_reduction": self.reduction,
            "mu": self.mu,
            "max_completion_length": TOKENS[self.steps],
            "num_generations": GROUP,
            "per_device_train_batch_size": 8,
            "num_iterations": PASSES,
            "max_completions": self.rollouts * GROUP * PROMPTS,
            "seed": self.seed,
        }
        return options(fields)


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    multiply_as_bfloat16()
    found, log = measured_run(run, score=_mean_reward)
    replayed = [entry for entry in log if entry.get("opo/pass", 0) > 1]
    ess = [entry["opo/ratio/ess"] for entry in replayed]
    return found | {"ess": fmean(ess), "least_ess": min(ess)}


def _mean_reward(evaluation: Evaluation) -> float:
    return fmean(sample["reward"] for sample in evaluation.samples)


def page(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a page; settings with fewer than two runs are left out."""
    return "\n".join([_INTRODUCTION, *_rows(found)])


def _rows(found: dict[Run, dict[str, Any]]) -> Iterator[str]:
    rows = []
    for steps, reduction, mu in SETTINGS:
        pairs = [[Run(steps, *cell, seed) for cell in ((reduction, mu), DEFAULT)] for seed in SEEDS]
        done = [[found[run] for run in pair] for pair in pairs if found.keys() >= {*pair}]
        if len(done) < 2:
            continue
        mine, default = zip(*done, strict=True)
        over_run, ess = (shown([100 * run[name] for run in mine]) for name in ("over_run", "ess"))
        less = [100 * (run["over_run"] - other["over_run"]) for run, other in zip(mine, default, strict=True)]
        gain = "" if (reduction, mu) == DEFAULT else shown(less, signed=True)
        curve = " ".join(f"{100 * fmean(points):.0f}" for points in zip(*(run["curve"] for run in mine), strict=True))
        least = f"{100 * min(run['least_ess'] for run in mine):.0f}"
        rows.append([str(TOKENS[steps]), reduction, f"{mu:g}", str(len(done)), over_run, gain, curve, ess, least])
    header = ["tokens", "log-ratio", "μ", "seeds", "over the run", "less the default's", "before, every 4 rollouts"]
    yield table([*header, "mean ESS", "least ESS"], rows) + "\n"


_INTRODUCTION = """# Longer completions of a pretrained language model

SmolLM2-135M-Instruct with four-bit weights, read into float32, adds a number step by step. 288 completions, half of
the 24 optimizer steps with replay. Mean rewards (the share of right steps before the first wrong one), in % on 60
problems, ± half of the 95 % t interval over seeds; `opo/ratio/ess` in % of the completions of a step with
replay. Nothing was tuned; differences are directions. [Plan and code](../real_length.py);
[every run](real_length.jsonl).
"""


def main() -> int:
    jobs = jobs_to_run(__doc__, RECORD, lambda: page(read(Run, RECORD)))
    if jobs is None:
        return 0
    for steps in TOKENS:
        for split, rows in make_problems(steps).items():
            file = PROBLEMS / str(steps) / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def missing(steps: int) -> list[Run]:
        done, settings = read(Run, RECORD), [setting for setting in SETTINGS if setting[0] == steps]
        return [run for seed in SEEDS for setting in settings if (run := Run(*setting, seed)) not in done]

    return run_missing([partial(missing, steps) for steps in TOKENS], train, RECORD, jobs)


if __name__ == "__main__":
    sys.exit(main())
