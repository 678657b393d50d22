"""
Stale completions of a pretrained model: two forms against what a user of TRL would pick.

    python -m benchmarks.models.smollm2 --output runs/smollm2
    python -m benchmarks.losses.stale_pretrained run --jobs 1     # what is missing of stale_pretrained.jsonl
    python -m benchmarks.losses.stale_pretrained report           # → stale_pretrained.md

Plan, committed before the first run. Where completions are 16 versions old, the weights of whole completions were 5 to
8 points ahead of plain GRPO, sampled, on the embedded task (`objectives`). A user of TRL would correct for stale
completions by its truncated importance sampling; it was in no comparison but as AReaL's loss.

**Task**: SmolLM2-135M-Instruct with four-bit weights, `addition` and `largest` of `few_shot`, with splits of their
own: 2,000 problems for training, 150 for tuning, 300 for reports. 48 rollouts of 8 prompts × 6 completions, up to the
end of the first line, one optimizer step each. The policy of 16 versions ago has written them, and one version more
passes until they are trained on (`stale`); the first 18 rollouts are the base model's. Gradients are clipped at 1.

**Arms**: GRPO, with the clip range that its trials choose; GRPO with truncated importance sampling as TRL computes it,
per token or per completion, whichever is better in its trials on a task; truncated REINFORCE; (1, 2, 0, 1) with the
escort push. In the second, the policy is recomputed for each rollout, which serves one step: its ratio is 1 there, and
no clip range acts.

**Tuning**, alike for all: rates 2.5e-6 to 4e-5 in steps of 2, for plain GRPO with the clip ranges 0.2, 0.4 and 0.8,
with seed 701; the best two also with 702; on the 150 problems. Where an edge of rates or clip ranges is chosen, one
beyond it is added, at most three times. **Reports**: seeds 711 to 722 for all arms, on the 300. Primary: sampled
accuracy, paired by seed.

**Rule**. Truncated REINFORCE or (1, 2, 0, 1) is recommended for stale completions only if, on both tasks, the lower
bounds of the 95 % t intervals of its sampled accuracy less plain GRPO's and less that of GRPO with truncated
importance sampling are above 0, and its mean greedy accuracy is at most 3 points behind either's. If both forms pass,
the one with the higher mean sampled accuracy over the two tasks is. If none passes, none is recommended. All must hold
at once, so nothing is corrected. With this and `cliff`, comparisons of losses end.

**Corrected** before the first report, when GRPO's trials were finished and others were not: chosen is the best of all
settings that have both seeds, on both. It was the better of the best two on seed 701, which are others when the region
grows: GRPO's choice was then 3 points below its best, and its clip range was extended to 6.4, which is not used.

**Order and cost**: `addition` first, its trials, then its reports seed by seed for all arms, so that arms have the
same seeds wherever time ends; then `largest`, unless neither form has passed on `addition`: none can then be
recommended, and the comparison ends. 96 reports and about 106 trials of about 200 processor seconds, by parts that
were timed on a busy machine: 11 to 12 hours of one process with one thread, and at most 16. If time is short,
`largest` stays unfinished, and nothing is decided; no arm or seed is left out.
"""

import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback

from opo_trl import OPOConfig
from opo_trl.data.few_shot import first_line_reward

from ..intervals import estimate
from ..many_runs import read_command_line
from ..pages import table
from ..staged import Stages, extended, read, run_missing
from . import bounds, offline, real_model, shared_beginning
from .bounds import Arm, Found, Run
from .objectives import published
from .objectives.report import shown
from .stale import StaleTrainer, Written, common_fields


RECORD = Path(__file__).resolve().with_name("stale_pretrained.jsonl")
BEGINNINGS = Path("runs/stale_pretrained")  # of what the base model has written, by task and seed
TASKS = ("addition", "largest")
ROLLOUTS, AGE, SPLITS_SEED, AT_A_TIME = 48, 17, 67, 300
RATES = tuple(2.5e-6 * 2**i for i in range(5))
TUNING_SEEDS, SEEDS, EXTENSIONS = (701, 702), tuple(range(711, 723)), 3
BEHIND = 3.0  # points of greedy accuracy

CANDIDATES = ("truncated REINFORCE", "(1, 2, 0, 1)")
_TRL = {"objective": "grpo"}  # the loss of the package, which has the fields of TRL
TRUNCATED = {
    "GRPO, truncated sampling of tokens": Arm(published.TruncatedSampling, _TRL),
    "GRPO, truncated sampling of completions": Arm(published.TruncatedSamplingOfCompletions, _TRL),
}
ARMS = {
    "GRPO": Arm(published.GRPO, {"log_ratio_reduction": "mean"}, "low high", (0.2, 0.4, 0.8)),
    **TRUNCATED,
    **{name: bounds.ARMS[name] for name in CANDIDATES},
}


# Which runs


class Trials(Stages):
    """Whose choice is the best on all tuning seeds, also if others are now the best few on the first of them."""

    def chosen(self, found: Found) -> Any:
        def is_finished(setting: Any) -> bool:
            return all(self.run(setting, seed, True) in found for seed in self.tuning_seeds)

        tried = filter(is_finished, self.settings)
        return max(tried, key=lambda setting: fmean(self.scores(setting, found)))


def trials(arm: str, task: str, found: Found) -> Stages:
    """The trials of an arm, as far as they are known."""
    region = Trials(
        lambda setting, seed, tuning: Run(arm, task, *setting, seed, tuning),
        [(rate, own) for rate in RATES for own in ARMS[arm].values],
        TUNING_SEEDS,
        seeds=(),
        few=len(TUNING_SEEDS),
    )
    return extended(region, found, EXTENSIONS)


def is_at_edge(own: Stages, found: Found) -> bool:
    """Whether the largest or smallest of several rates or clip ranges is chosen."""
    columns = zip(own.chosen(found), zip(*own.settings, strict=True), strict=True)
    return any(min(column) < max(column) and chosen in (min(column), max(column)) for chosen, column in columns)


def tuned(arm: str, task: str, found: Found) -> float | None:
    """Mean accuracy of the best trial; `None` as long as one is missing."""
    own = trials(arm, task, found)
    return None if own.next_runs(found) else fmean(own.scores(own.chosen(found), found))


def reporting(task: str, found: Found) -> list[str]:
    """The arms that report: of the two with truncated sampling, the better in its trials, once that is known."""
    arms = [arm for arm in ARMS if arm not in TRUNCATED]
    scores = {arm: score for arm in TRUNCATED if (score := tuned(arm, task, found)) is not None}
    if len(scores) == len(TRUNCATED):
        arms.insert(1, max(scores, key=scores.__getitem__))
    return arms


def reports(arm: str, task: str, found: Found) -> list[Run]:
    """The runs of an arm that report, once its trials are finished."""
    own = trials(arm, task, found)
    if own.next_runs(found) or arm not in reporting(task, found):
        return []
    return [own.run(own.chosen(found), seed, False) for seed in SEEDS]


def next_trials(task: str) -> list[Run]:
    """The missing trials of all arms of a task, as far as they are known, once earlier tasks are finished."""
    found = read(Run, RECORD)
    earlier = TASKS[: TASKS.index(task)]
    if is_decided(found) or not all(is_finished(name, found) for name in earlier):
        return []
    return [run for arm in ARMS for run in trials(arm, task, found).next_runs(found)]


def next_reports(task: str) -> list[Run]:
    """The missing reports of a task's arms, seed by seed, once all are tuned."""
    found = read(Run, RECORD)
    if is_decided(found) or any(tuned(arm, task, found) is None for arm in ARMS):
        return []
    by_arm = [reports(arm, task, found) for arm in reporting(task, found)]
    return [run for of_seed in zip(*by_arm, strict=True) for run in of_seed if run not in found]


# A run


@cache
def task_of(level: str) -> offline.Task:
    """A task with problems of its own."""
    problems = partial(bounds.problems_of, level, SPLITS_SEED)
    return replace(bounds.RECORDED[bounds.PRETRAINED], problems=problems, batch=AT_A_TIME)


class Stale(StaleTrainer):
    """
    Samples with the beginning of all prompts computed once. What the base model writes is the same in all runs of a
    task and seed: the first of them keeps it in the folder `beginning`, with the state of the generator behind it.
    """

    sample = staticmethod(shared_beginning.sample)
    beginning: Path

    def _write(self) -> Written:
        if self._n_taken:  # by another policy than the base model
            return super()._write()
        file = self.beginning / f"{self._n_written}.pt"
        if file.exists():
            written, state = torch.load(file, weights_only=False)
            self._generator.set_state(state)
            return written
        written = super()._write()
        self.beginning.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")  # another process may write the same
        torch.save((written, self._generator.get_state()), unfinished)
        unfinished.rename(file)
        return written


def rewards(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    """Whether the first line is the solution."""
    return first_line_reward(completions, solution)


def make_trainer(run: Run, folder: str, rollouts: int = ROLLOUTS) -> Any:
    """The trainer of a run."""
    real_model.multiply_as_bfloat16()
    shared_beginning.apply(in_one_pass=True)
    offline.trl.trainer.utils._use_triton = lambda device: True  # the head computes completions only, as on GPUs
    task, arm = task_of(run.regime), ARMS[run.arm]
    tokenizer = AutoTokenizer.from_pretrained(task.base)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    ends = [tokenizer.eos_token_id, *(token for token, text in enumerate(texts) if "\n" in text)]
    rows = [{"prompt": row["problem"], "solution": row["solution"]} for row in task.problems()[0]]
    fields = common_fields(folder, run.learning_rate, run.seed, max_steps=rollouts) | arm.options
    fields |= {"max_completion_length": task.max_tokens, "max_grad_norm": 1.0, "shuffle_dataset": False}
    own = {"objective_class": arm.kind, "beginning": BEGINNINGS / f"{run.regime}-{run.seed}"}
    kind = type("Stale", (Stale,), own)
    trainer = kind(
        task.base,
        rewards,
        args=OPOConfig(**fields),
        age=AGE,
        problems=Dataset.from_list(rows).shuffle(seed=run.seed),
        tokenizer=tokenizer,
        ends=ends,
    )
    for name in arm.own.split():
        setattr(trainer.policy_objective, name, run.own)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        trainer = make_trainer(run, folder)
        trainer.train()
    measured = accuracies(run, trainer.model.state_dict())
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        **asdict(run),
        **measured,
        "rewards": [round(entry["reward"], 3) for entry in entries],
        "seconds": round(time.process_time() - began, 1),
    }


def accuracies(run: Run, weights: Any) -> dict[str, float]:
    """Sampled and greedy accuracy on test problems, whose prompts are computed once for both (`shared_beginning`)."""
    task, temperatures = task_of(run.regime), {"sampled": 1.0, "greedy": 1e-4}
    problems = [problem for problem in task.problems()[2 if run.tuning else 1] for _ in temperatures]
    rows = task.complete(problems, seed=run.seed, temperature=[*temperatures.values()], weights=weights)
    reached = [row["reward"] for row in rows]
    return {name: fmean(reached[place :: len(temperatures)]) for place, name in enumerate(temperatures)}


# The rule and the page


def gains(arm: str, other: str, task: str, found: Found, measure: str = "sampled") -> list[float]:
    """Points that an arm is ahead of another, by seed."""
    of_two = ([found[run][measure] for run in reports(name, task, found)] for name in (arm, other))
    return [100 * (own - its) for own, its in zip(*of_two, strict=True)]


def is_finished(task: str, found: Found) -> bool:
    """Whether all arms of a task have reported."""
    arms = reporting(task, found)
    wanted = [run for arm in arms for run in reports(arm, task, found)]
    n_expected = (len(CANDIDATES) + 2) * len(SEEDS)
    return len(wanted) == n_expected and all(run in found for run in wanted)


def is_recommended(arm: str, task: str, found: Found) -> bool:
    """Whether a candidate is ahead of GRPO with and without truncated sampling on a task, and not behind greedy."""
    for other in reporting(task, found):
        if other in CANDIDATES:
            continue
        sampled = estimate(gains(arm, other, task, found))
        greedy = estimate(gains(arm, other, task, found, "greedy"))
        assert sampled.interval
        if sampled.interval[0] <= 0 or greedy.mean < -BEHIND:
            return False
    return True


def passing(found: Found) -> list[str]:
    """The candidates that pass on each task that is finished."""
    finished = [task for task in TASKS if is_finished(task, found)]
    return [arm for arm in CANDIDATES if all(is_recommended(arm, task, found) for task in finished)]


def is_decided(found: Found) -> bool:
    """Whether no candidate can pass any more, or both tasks are finished."""
    return not passing(found) or all(is_finished(task, found) for task in TASKS)


def recommended(found: Found) -> str:
    """The form that the rule recommends, of a comparison that is decided; empty if it recommends none."""
    passed = passing(found)

    def mean(arm: str) -> float:
        return fmean(found[run]["sampled"] for task in TASKS for run in reports(arm, task, found))

    return max(passed, key=mean, default="")


def page(found: Found) -> str:
    """The finished tasks as a page, and the decision once there is one."""
    finished = [task for task in TASKS if is_finished(task, found)]
    missing = " and ".join(f"`{task}`" for task in TASKS if task not in finished)
    text = [_INTRODUCTION]
    for task in finished:
        parts = [make(task, found) for make in (_accuracies, _clip_ranges, _differences)]
        text.append("\n\n".join([f"## `{task}`", *parts]) + "\n")
    if is_decided(found):
        form = recommended(found)
        said = f"**{form}** is recommended for stale completions." if form else "**No form is recommended.**"
        unknown = f" As neither passes here, {missing} was not run, as planned." if missing else ""
        text.append(f"## The decision\n\n{said}{unknown}\n")
    else:
        text.append(f"**Not finished**, so nothing is decided: {missing}.\n")
    return "\n".join(text)


def _accuracies(task: str, found: Found) -> str:
    rows = []
    for arm in reporting(task, found):
        runs = reports(arm, task, found)
        clip_range = f", {runs[0].own:g}" if ARMS[arm].own else ""
        edge = " (edge)" if is_at_edge(trials(arm, task, found), found) else ""
        cells = [arm, f"{runs[0].learning_rate:.2g}{clip_range}{edge}"]
        for measure in ("sampled", "greedy"):
            accuracies = [100 * found[run][measure] for run in runs]
            cells.append(shown(accuracies))
        rows.append(cells)
    return table(["", "learning rate, clip range", "sampled", "greedy"], rows)


def _clip_ranges(task: str, found: Found) -> str:
    """GRPO's best trial with each clip range, on the first seed of tuning."""
    best: dict[float, float] = {}
    for rate, clip_range in trials("GRPO", task, found).settings:
        reached = found[Run("GRPO", task, rate, clip_range, TUNING_SEEDS[0], True)]["sampled"]
        best[clip_range] = max(reached, best.get(clip_range, 0.0))
    named = ", ".join(f"{100 * reached:.1f} at {clip_range:g}" for clip_range, reached in sorted(best.items()))
    return f"GRPO's best trials by clip range, one seed: {named}."


def _differences(task: str, found: Found) -> str:
    rows = []
    for other, arm in combinations(reporting(task, found), 2):
        both = (shown(gains(arm, other, task, found, m), signed=True) for m in ("sampled", "greedy"))
        rows.append([f"{arm} less {other}", *both])
    return table(["", "sampled", "greedy"], rows)


_INTRODUCTION = """# Stale completions of a pretrained model

SmolLM2-135M-Instruct with four-bit weights, trained on 48 rollouts with one optimizer step each. The policy of 16
versions ago has written them, and one version more passed until they were trained on; the first 18 are the base
model's. Accuracies in % on 300 problems, ± half of the 95 % t interval over twelve seeds, uncorrected; differences are
paired by seed. The rates are those of trials with two other seeds; no interval contains that choice. A form is
recommended if, on both tasks, it is surely ahead of both GRPO's, sampled, and at most 3 points behind, greedy. [Plan,
rule and code](stale_pretrained.py); [every run](stale_pretrained.jsonl).

GRPO is TRL's with `loss_type="grpo"`; with a clip range of 1 or more, its wrong completions are never clipped.
Truncated sampling is the same with a recomputed policy and TRL's `token_truncate` or `sequence_truncate`, with a cap
of 2, whichever is better in its trials. TRL's default, which leaves out completions whose ratio is above 3, was not
run. The other two forms weight whole completions by [bounds of their
ratio](../../docs/reuse.md#topr-and-bounds-of-the-weight), and divide a sum over tokens by the mean length of
completions. Truncated REINFORCE has the weight of `sequence_truncate`; unlike it, GRPO divides the push by the group's
standard deviation, and each completion's sum by its own length.

Of the settings that were tried with both seeds of tuning, the one with the best mean is chosen. The rule was corrected
before the first report: its former choice for GRPO was 3 points lower in trials (plan).
"""


def main() -> int:
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read(Run, RECORD)))
        return 0
    stages = []
    for task in TASKS:
        stages += [partial(next_trials, task), partial(next_reports, task)]
    return run_missing(stages, train, RECORD, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
