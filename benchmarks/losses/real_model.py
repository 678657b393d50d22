"""
A pretrained language model: SmolLM2-135M-Instruct with OPO, a simpler objective, GSPO and GRPO, tuned alike.

    python -m benchmarks.models.smollm2 --output runs/smollm2      # the model, in four-bit weights
    python -m benchmarks.losses.real_model run --jobs 2            # what is missing of real_model.jsonl
    python -m benchmarks.losses.real_model report                  # → real_model.md

Plan, written before the first run. Two tasks of `few_shot`, in this order: `addition` (`23 + 45 =`) and `largest`
(`largest of 83, 912, 40, 377:`), each after three worked lines. Of five tasks that were looked at, on 16 problems with
four samples, they are those where the model was right in 10 to 60 % of samples and at least half of the groups held
right and wrong ones. Products up to 12 × 12 came near, with 64 %, but are too few for three disjoint sets.

| method | recipe in `recipes/smollm2-135m/` |
|---|---|
| OPO | `opo.yaml`: the default objective, four passes, the last three with replay of nine rollouts |
| Truncated REINFORCE | the same with the simplest form that is level in the ablation, `reward-bounded-none` there |
| GSPO | `gspo.yaml`: the same passes and replay, clip range 0.02 |
| GRPO | `grpo.yaml`: two passes, no replay |

Trials: learning rates 5e-6, 1e-5, 2e-5 and 4e-5 with seed 511, the best two also with 512; eight rollouts of 48
completions, measured on 150 problems for tuning. Reports: seeds 501 to 506, 16 rollouts (768 completions), on another
150; training has 400 more. The recipes were tried on some of those before (`./start real`), at one learning rate.

Measured every four rollouts: sampled accuracy, two completions per problem, whose random numbers depend on the seed of
the run and on the rollout, not on the method. Its mean over the run, without the beginning, chooses the learning rate,
and is the primary measure of the report; beside it stand accuracy at the end, sampled, greedy and pass@2, and the
processor seconds of training without these measurements. Comparisons: OPO with each other method on each task, paired
t tests over seeds, Holm at 5 % for all six. GRPO makes half of the optimizer steps and has no replay, as people run
it: that comparison is one of recipes, the others are of objectives. All seeds are reported. A chosen rate at the end
of its range is marked. No other seed, clip range or number of passes is tried.

Changed when six trials of OPO were finished, which are repeated with the change: every run multiplies its float32
matrices as bfloat16, as most people do on GPUs. Where the processor has instructions for it, a trial then takes 156
instead of 273 processor seconds.

LoRA once, planned when OPO's reports on the first task were finished: OPO's run with seed 501, adapters of rank 32
on all linear layers, as in other recipes, at 1e-4, ten times the rate that all weights got. One run, untuned.

Changed before any run on `largest`, whose prompts of 101 tokens cost more: GSPO and GRPO run there as losses of
`OPOTrainer`, which computes a group's prompt once. Their gradients are those of TRL's trainer (a test of
`objectives.published` compares them), in which they run on `addition`.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from scipy import stats
from transformers import TrainerCallback

from opo_trl.command.callbacks import Validation
from opo_trl.command.train import prepare
from opo_trl.evaluate import Evaluation, evaluate

from ..intervals import estimate
from ..many_runs import options, read_command_line
from ..pages import table
from ..staged import Stages, holm, read, run_missing
from .objectives import published
from .objectives.grid import CELLS
from .objectives.report import shown


HERE = Path(__file__).resolve().parent
RECORD, RECIPES = HERE / "real_model.jsonl", HERE.parents[1] / "recipes" / "smollm2-135m"
MODEL = Path("runs/smollm2")
TASKS = ("addition", "largest")
ACCURACIES = {"addition": (0.4, 0.45, 0.5), "largest": (0.35, 0.4, 0.45)}  # of the tables of seconds
METHODS = {"OPO": "opo", "Truncated REINFORCE": "opo", "GSPO": "gspo", "GRPO": "grpo"}  # → recipe
PASSES = {"opo": 4, "gspo": 4, "grpo": 2}
RATES, TUNING_SEEDS, SEEDS = (5e-6, 1e-5, 2e-5, 4e-5), (511, 512), tuple(range(501, 507))
COMPLETIONS, EVERY = 48, 4  # of a rollout; rollouts between measurements
TRIAL, REPORT = 8, 16  # rollouts of a run
LORA = "OPO, LoRA"
ADAPTERS = {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
MEASURES = ("over_run", "sampled", "greedy", "pass@2")


class GSPO(published.GSPO):
    """GSPO with the clip range of its recipe."""

    low = high = 0.02


# By OPOTrainer, with OPO's recipe.
TruncatedReinforce = CELLS["reward-bounded-none"]
LOSSES = {"GSPO": "benchmarks.losses.real_model.GSPO", "GRPO": "benchmarks.losses.objectives.published.GRPO"}


@dataclass(frozen=True)
class Run:
    """A method with a learning rate on a task; a run that tunes is shorter, and measured on other problems."""

    method: str
    task: str
    learning_rate: float
    seed: int
    tuning: bool

    @property
    def rollouts(self) -> int:
        """How many are trained on."""
        return TRIAL if self.tuning else REPORT

    def command_line(self, folder: Path) -> list[str]:
        """For `opo_trl.command.train`."""
        loss = LOSSES.get(self.method) if self.task == "largest" else None
        recipe = METHODS.get(self.method, "opo")
        fields: dict[str, Any] = {
            "config": RECIPES / f"{'opo' if loss else recipe}.yaml",
            "output_dir": folder,
            "model_name_or_path": MODEL,
            "levels": self.task,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "max_completions": self.rollouts * COMPLETIONS,
            "dataset_test_split": "validation" if self.tuning else "test",
            "report_levels": self.task,
        }
        if self.method == "Truncated REINFORCE":
            fields["objective"] = "benchmarks.losses.real_model.TruncatedReinforce"
        if loss:
            passes, staleness = PASSES[recipe], 8 if PASSES[recipe] > 2 else 0
            fields |= {"objective": loss, "num_iterations": passes, "max_staleness": staleness}
            fields["log_ratio_reduction"] = "mean"
        if self.method == LORA:
            fields |= ADAPTERS
        return options(fields)


WITH_LORA = Run(LORA, TASKS[0], 1e-4, SEEDS[0], tuning=False)


def stages(method: str, task: str) -> Stages:
    """The runs of a method on a task."""

    def run(rate: float, seed: int, tuning: bool) -> Run:
        return Run(method, task, rate, seed, tuning)

    return Stages(run, RATES, TUNING_SEEDS, SEEDS, few=2, measure="over_run")


class Measured(TrainerCallback):
    """Measures the policy before a run and every four rollouts, in `seconds` of the processor."""

    def __init__(self, trainer: Any, problems: Dataset, run: Run, score: Callable[[Evaluation], float]):
        self.trainer, self.problems, self.run, self.score = trainer, problems, run, score
        self.curve: list[float] = []
        self.at_end: dict[str, float] = {}
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._measure(rollouts=0)

    def on_step_end(self, args, state, control, **kwargs):
        rollouts, rest = divmod(state.global_step, args.num_iterations)
        if not rest and rollouts % EVERY == 0:
            self._measure(rollouts)

    def _measure(self, rollouts: int) -> None:
        began = time.process_time()
        seed = 100 * self.run.seed + rollouts
        sampled = evaluate(self.trainer, self.problems, seed=seed, samples=2)
        self.curve.append(self.score(sampled))
        if rollouts == self.run.rollouts and not self.run.tuning:
            greedy = evaluate(self.trainer, self.problems, decoding="greedy", seed=seed)
            at_end = {"sampled": self.score(sampled), "greedy": self.score(greedy)}
            twice = [right > 0 for right, scored in sampled.by_problem if scored == 2]
            self.at_end = at_end | {"pass@2": sum(twice) / len(twice)}
        self.seconds += time.process_time() - began


def jobs_to_run(description: str | None, record: Path, page: Callable[[], str]) -> int | None:
    """Read the command line of a benchmark on this model: `report` writes its page, `run` returns its `--jobs`."""
    arguments = read_command_line(description, "run", "report")
    if arguments.command == "report":
        record.with_suffix(".md").write_text(page())
        return None
    if not (MODEL / "config.json").exists():
        sys.exit(f"There is no model in {MODEL}. Run `python -m benchmarks.models.smollm2 --output {MODEL}` first.")
    return arguments.jobs


def measured_run(
    run: Any, *, score: Callable[[Evaluation], float] = lambda evaluation: evaluation.accuracy
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """
    Train and measure in this process, which must be a new one.

    Returns what was measured, and the entries of the log.
    """
    with tempfile.TemporaryDirectory() as place, (Path(place) / "log.txt").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        ready = prepare(run.command_line(Path(place) / "run"))
        (problems,) = ready.data.report.values()
        ready.trainer.remove_callback(Validation)  # the recipe's
        measured = Measured(ready.trainer, problems, run, score)
        ready.trainer.add_callback(measured)
        began = time.process_time()
        ready.trainer.train()
        seconds = round(time.process_time() - began - measured.seconds)
    curve = {"over_run": fmean(measured.curve[1:]), "curve": measured.curve}
    return {**asdict(run), **curve, **measured.at_end, "seconds": seconds}, ready.trainer.state.log_history


def multiply_as_bfloat16() -> None:
    """Multiply this process's float32 matrices as bfloat16. PyTorch's fused attention on CPUs is slow so."""
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.enable_flash_sdp(False)  # on CPUs, too


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    multiply_as_bfloat16()
    return measured_run(run)[0]


def differences(method: str, task: str, found: dict[Run, dict[str, Any]]) -> list[float]:
    """Points of sampled accuracy over the run that a method is ahead of OPO, by seed."""
    of_two = (stages(name, task).reports(found) for name in (method, "OPO"))
    return [100 * (own["over_run"] - opo["over_run"]) for own, opo in zip(*of_two, strict=True)]


def page(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a page; tasks that are not complete are left out."""
    return "\n".join([_INTRODUCTION, *_tasks(found)])


def _tasks(found: dict[Run, dict[str, Any]]) -> Iterator[str]:
    complete = [task for task in TASKS if not any(stages(name, task).next_runs(found) for name in METHODS)]
    others = [name for name in METHODS if name != "OPO"]
    p = {
        (name, task): float(stats.ttest_1samp(differences(name, task, found), 0).pvalue)
        for name, task in product(others, complete)
    }
    kept = holm(p, comparisons=len(others) * len(TASKS))
    for task in complete:
        rows = []
        for name in METHODS:
            gain = ""
            if name != "OPO":
                gain = shown(differences(name, task, found), signed=True) + (" \\*" if (name, task) in kept else "")
            rows.append(_row(name, task, gain, stages(name, task).reports(found)))
        header = ["", "optimizer steps", "learning rate", "over the run", "less OPO's", "before, every 4 rollouts"]
        yield f"\n## `{task}`\n"
        yield table([*header, "sampled", "greedy", "pass@2", "processor seconds"], rows) + "\n"
        yield _seconds_table(task, found)
        if task == WITH_LORA.task and (lora := found.get(WITH_LORA)):
            whole = stages("OPO", task).reports(found)[0]
            own, its = (", ".join(f"{100 * run[name]:.1f}" for name in MEASURES) for run in (lora, whole))
            yield (
                f"With LoRA of rank {ADAPTERS['lora_r']} at {WITH_LORA.learning_rate:.0e}, OPO reaches {own} (over "
                f"the run, sampled, greedy, pass@2)\nin one run; with all weights and the same seed {its}.\n"
            )


def seconds_to(accuracy: float, run: Mapping[str, Any]) -> float:
    """Processor seconds until a run has a sampled accuracy, between measurements on a line; NaN if it never has."""
    for place, (before, after) in enumerate(pairwise(run["curve"])):
        if after >= accuracy:
            part = (accuracy - before) / (after - before)  # of the way to the next measurement
            n_parts = len(run["curve"]) - 1
            return (place + part) / n_parts * run["seconds"]
    return math.nan


def _seconds_table(task: str, found: dict[Run, dict[str, Any]]) -> str:
    rows = []
    for accuracy in ACCURACIES[task]:
        own, trl = ([seconds_to(accuracy, r) for r in stages(name, task).reports(found)] for name in ("OPO", "GRPO"))
        both = [(a, b) for a, b in zip(own, trl, strict=True) if not math.isnan(a + b)]
        ratio = [math.log(a / b) for a, b in both]
        log_ratio = estimate(ratio)
        mean, low, high = (math.exp(value) for value in (log_ratio.mean, *log_ratio.interval))
        interval = f"{mean:.2f} [{low:.2f}, {high:.2f}]"
        cells = (f"{fmean(value for value in each if not math.isnan(value)):.0f}" for each in (own, trl))
        rows.append([f"{accuracy:.0%}", *cells, interval, f"{len(both)} of {len(own)}"])
    header = ["sampled accuracy", "OPO with replay", "GRPO", "ratio", "seeds that reach it"]
    return f"\n{_SECONDS[task]}\n\n{table(header, rows)}\n"


def _row(name: str, task: str, gain: str, runs: list[Any]) -> list[str]:
    rate, passes = runs[0]["learning_rate"], PASSES[METHODS[name]]
    tried = f"{rate:.0e}" + (" (end of the range)" if rate in (min(RATES), max(RATES)) else "")
    steps = f"{REPORT * passes}{', replay' if passes > 2 else ''}"
    over_run, *at_end = (shown([100 * run[measure] for run in runs]) for measure in MEASURES)
    measurements = zip(*(run["curve"] for run in runs), strict=True)
    curve = " ".join(f"{100 * fmean(of_runs):.0f}" for of_runs in measurements)
    seconds = f"{fmean(run['seconds'] for run in runs):.0f}"
    return [name, steps, tried, over_run, gain, curve, *at_end, seconds]


_SECONDS = {
    "addition": """### Processor seconds to an accuracy

On one core, with generation, scoring and updates, without the measurements; between these, accuracy is taken to rise
on a line. GRPO ran here with TRL's loss and padded rows, with the learning rate that its trials chose and two passes
over each rollout. Computed after the runs, from their curves, at accuracies that were chosen after them; the ratio is
a geometric mean over seeds, with its 95 % interval.""",
    "largest": """### Processor seconds to an accuracy, same update

As above, but GRPO ran here in `OPOTrainer`, which computes a prompt once for its group: what differs is the objective
with its passes and replay.""",
}

_INTRODUCTION = """# A pretrained language model

SmolLM2-135M-Instruct with four-bit weights, read into float32, trained on 768 completions. Accuracies in % on 150
problems, ± half of the 95 % t interval over six seeds of training and sampling, on the same problems; \\* marks
differences that remain after Holm's correction for all six comparisons of the plan. The primary measure is the mean
over the run, without its beginning. GRPO's row is that of another recipe, the others differ in the objective only.
[Plan and code](real_model.py); [every run](real_model.jsonl)."""


def main() -> int:
    jobs = jobs_to_run(__doc__, RECORD, lambda: page(read(Run, RECORD)))
    if jobs is None:
        return 0

    def next_runs(task: str, method: str) -> list[Run]:
        return stages(method, task).next_runs(read(Run, RECORD))

    def lora() -> list[Run]:
        return [] if WITH_LORA in read(Run, RECORD) else [WITH_LORA]

    every = [partial(next_runs, *each) for each in product(TASKS, METHODS)]
    return run_missing([*every[: len(METHODS)], lora, *every[len(METHODS) :]], train, RECORD, jobs)


if __name__ == "__main__":
    sys.exit(main())
