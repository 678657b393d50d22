"""
Completions that exist already: what OPO learns from those of the base model, beside what others would use.

    pip install 'opo_trl[gym]'
    python -m benchmarks.losses.offline run --jobs 2     # what is missing of offline.jsonl: about an hour per task
    python -m benchmarks.losses.offline report           # → offline.md

Plan, written before the first run. The base model of the embedded task writes 6 completions of each of 480 prompts of
Level 3, once per seed. Every method trains on these 2,880, in steps of 48 completions (SFT: of right ones; DPO: pairs
of a right and a wrong completion of a prompt, each used once), without generating.

| method | |
|---|---|
| OPO | the default, `rollouts: FILE` |
| r − r̄, bounded | `reward-bounded-none` of the ablation, the simplest form that is level with OPO there |
| GSPO | clip range 0.2, the better of two with such completions |
| TOPR | of `objectives.published` |
| SFT | TRL's `SFTTrainer` on the right completions: rejection-sampling fine-tuning |
| DPO | TRL's `DPOTrainer`, β = 0.1 |

Each has eight trials: learning rates 2.5e-5, 5e-5, 1e-4 and 2e-4, and one or four epochs. They run with seed 411, the
best three also with 412 and 413, measured on the second 500 test problems; the best mean sampled accuracy decides.
Reports: seeds 401 to 410, on the first 500. Primary measure: sampled accuracy. Comparisons: OPO with each other
method, paired t tests, Holm at 5 % for all five.

A second task, planned when the first was finished and before any of its own runs: `reasoning_gym/spell_backward`,
level 2, with the embedded model that spells 17 % of these words right. Methods, trials, seeds and 480 prompts are the
same; tuning and reports are on 500 words each, none of them in the training split. Two things differ, for all methods
alike: the rates are 5e-5, 1e-4, 2e-4 and 4e-4, since this task's recipe, which is older, has 5e-4; and 16 epochs are
tried, too, since most methods did best with the most epochs on the first task. (The code that was committed before the
first run had them, its text still said that the region was the same.) So each method has 12 trials. With r − r̄, 2e-4
and 4e-4 had the same mean up to rounding, which decided. Some test words may be among those that the base model was
built with, for all methods alike. The reward is 1 for a right answer and 0 otherwise, as in the first task, so that no
method is told more than SFT; the task's own score counts the letters in place. Holm for the five comparisons of each
task. A form is *clearly better* than OPO on such completions if it is ahead on both.

Which part makes the difference? Planned when OPO and r − r̄ had finished on the second task, where the latter is about
ten points ahead: OPO without its pull-back (`escort-bounded-none`), r − r̄ with it (`reward-bounded-chi2`), and OPO
with μ = 0.1 and 0.03, each with the same trials, seeds and problems on both tasks. Directions, without a correction.

A default for recorded completions, planned when the first task showed that the pull-back makes the difference, before
any run with another μ on the second. If the mean of OPO with μ = 0.03 is above that with 0.3 on both tasks, ten fresh
seeds, 421 to 430, are run on both with the settings chosen above: μ = 0.03, 0.3, and r − r̄. If μ = 0.03 is then ahead
of 0.3 on both after Holm's correction for these four comparisons, two of which are with r − r̄, it becomes the default
of OPO with `rollouts`.

Few completions, several times in a row: planned when a test of the package with 576 completions, two passes over each
48 before the next, and the rate 2e-4 learned less with μ = 0.03 than with 0.3. The three of the confirmation, on 480
completions of the first task, with `num_iterations: 4` and one epoch; rates 5e-5, 1e-4 and 2e-4, all reported, seeds
421 to 430. If μ = 0.03 is more than 3 points behind 0.3 at any rate, it does not become the default, whatever the
confirmation says, but is documented.

A third task, a pretrained model, planned before any of its runs: `addition` of `few_shot` with SmolLM2-135M-Instruct
(`python -m benchmarks.models.smollm2 --output runs/smollm2` makes its folder), which is right in 13 % of samples. 768
completions, 6 of each of 128 prompts, as many as a run of `real_model` generates; all methods train on whole
completions, six tokens with whatever follows the answer. The six methods and OPO with μ = 0.03, which the pages advise
for recorded completions; rates 5e-6, 1e-5, 2e-5 and 4e-5, one or four epochs; trials with seed 411, the best two also
with 412, on the 150 problems for tuning; reports with seeds 401 to 406, on the 150 of the report. Products of matrices
are in bfloat16, as in `real_model`. Holm for the five comparisons, as before. From the last
runs of r − r̄ on, the code computes less, with the same gradient up to rounding: no groups of equal rewards where there
is no pull-back, then the head of completions only, and DPO's reference once. OPO with μ = 0.03 has not been run.
"""

import functools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data import arithmetic, few_shot, gym
from opo_trl.data.arithmetic import EMBEDDED_MODELS
from opo_trl.objective import OPO

from ..many_runs import read_command_line
from ..pages import table
from ..staged import Stages, holm, read, run_missing
from . import real_model
from .objectives.grid import CELLS
from .objectives.published import TOPR
from .objectives.report import shown
from .sampling import sample, up_to_end
from .stale import BATCH, GROUP, LEVEL, MAX_TOKENS, TEST_PROBLEMS, common_fields


RECORD = Path(__file__).resolve().with_name("offline.jsonl")
PROMPTS, FEW_PROMPTS = 480, 80
TUNING_SEEDS, SEEDS = (411, 412, 413), tuple(range(401, 411))
GSPO = type("GSPO", (CELLS["advantage-clipped-none"],), {"clip": 0.2})
OBJECTIVES = {
    "OPO": OPO,
    "r − r̄, bounded": CELLS["reward-bounded-none"],
    "GSPO": GSPO,
    "TOPR": TOPR,
    "OPO, no pull-back": CELLS["escort-bounded-none"],
    "r − r̄, bounded, pull-back": CELLS["reward-bounded-chi2"],
    "OPO, μ = 0.1": OPO,
    "OPO, μ = 0.03": OPO,
}
# Groups of equal rewards have no gradient wherever the policy is, and are not computed.
WITHOUT_PULL_BACK = ("r − r̄, bounded", "GSPO", "TOPR")
MU = {"OPO, μ = 0.1": 0.1, "OPO, μ = 0.03": 0.03}
METHODS = ("OPO", "r − r̄, bounded", "GSPO", "TOPR", "SFT", "DPO")
CONFIRMED, FRESH = ("OPO", "OPO, μ = 0.03", "r − r̄, bounded"), tuple(range(421, 431))
PARTS = tuple(name for name in OBJECTIVES if name not in METHODS)

Rows = list[dict[str, Any]]
Reports = Sequence[Mapping[str, Any]]  # what the runs of a setting measured, in the order of the seeds


@dataclass(frozen=True)
class Task:
    """
    A task with a base model.

    Args:
        base (`str`): folder of the base model.
        max_tokens (`int`): longest completion.
        rates (`tuple[float, ...]`), epochs (`tuple[int, ...]`): that are tried.
        problems (`Callable`): gives those for training, for reports and for tuning.
        rewards (`Callable[[list[str], list[dict]], list[float]]`): 1 for completions that answer their problems.
        prompts (`int`): that completions are recorded of.
        in_a_row (`bool`): whether epochs are passes over 48 completions before the next 48.
        batch (`int`): completions that are sampled at a time.
        tuning_seeds, seeds (`tuple[int, ...]`): of trials and of reports.
        few (`int`): settings that are tried with all tuning seeds.
        parts (`tuple[str, ...]`): methods beside the six.
    """

    base: str
    max_tokens: int
    rates: tuple[float, ...]
    epochs: tuple[int, ...]
    problems: Callable[[], tuple[Rows, Rows, Rows]]
    rewards: Callable[[list[str], Rows], list[float]]
    prompts: int = PROMPTS
    in_a_row: bool = False
    batch: int = sys.maxsize
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    seeds: tuple[int, ...] = SEEDS
    few: int = 3
    parts: tuple[str, ...] = PARTS

    def complete(
        self, problems: list[dict[str, Any]], *, seed: int, temperature: Any = 1.0, weights: Any = None
    ) -> list[dict[str, Any]]:
        """A completion of each problem by the base model, or with other weights, with all that `rollouts` takes."""
        policy = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        policy.load_state_dict(weights or {}, strict=False)
        tokenizer, generator = AutoTokenizer.from_pretrained(self.base), torch.Generator().manual_seed(seed)
        sampled: list[tuple[list[int], list[float]]] = []
        for first in range(0, len(problems), self.batch):
            batch = problems[first : first + self.batch]
            prompts = [tokenizer(problem["problem"])["input_ids"] for problem in batch]
            with torch.no_grad():
                tokens, logps = sample(
                    policy,
                    prompts,
                    max_tokens=self.max_tokens,
                    temperature=temperature,
                    eos=torch.tensor([tokenizer.eos_token_id]),
                    generator=generator,
                )
            sampled += zip(tokens.tolist(), logps.tolist(), strict=True)
        rows = []
        for problem, (sampled_ids, row) in zip(problems, sampled, strict=True):
            ids = up_to_end(sampled_ids, tokenizer.eos_token_id)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            known = {"completion_ids": ids, "logprobs": row[: len(ids)], "temperature": temperature}
            rows.append({"prompt": problem["problem"], "completion": text, **known})
        rewards = self.rewards([row["completion"] for row in rows], problems)
        return [{**row, "reward": reward} for row, reward in zip(rows, rewards, strict=True)]

    def record(self, seed: int) -> list[dict[str, Any]]:
        """The completions of the base model that a run trains on."""
        problems = Dataset.from_list(self.problems()[0]).shuffle(seed=seed).select(range(self.prompts)).to_list()
        return self.complete([problem for problem in problems for _ in range(GROUP)], seed=seed)

    def accuracies(self, weights: Any, *, for_tuning: bool, draws: int = 7) -> dict[str, float]:
        """Sampled and greedy accuracy on test problems; `draws` is the seed of the former."""
        problems = self.problems()[2 if for_tuning else 1]
        return {
            name: fmean(row["reward"] for row in self.complete(problems, seed=draws, temperature=t, weights=weights))
            for name, t in (("sampled", 1.0), ("greedy", 1e-4))
        }


def _arithmetic_problems() -> tuple[Rows, Rows, Rows]:
    test = list(arithmetic.make_problems("test", [LEVEL]))
    return list(arithmetic.make_problems("train", [LEVEL])), test[:TEST_PROBLEMS], test[TEST_PROBLEMS:]


def _arithmetic_rewards(texts: list[str], problems: Rows) -> list[float]:
    return arithmetic.arithmetic_reward(texts, [problem["solution"] for problem in problems])


@functools.cache
def _spelling_problems() -> tuple[Rows, Rows, Rows]:
    def words(split: str) -> dict[str, dict[str, Any]]:
        drawn = gym.make_problems("reasoning_gym/spell_backward", split, ["2"], {"size": 4000})
        return {row["problem"]: row for row in drawn}

    train, test = words("train"), words("test")
    new = [row for word, row in test.items() if word not in train]
    return list(train.values()), new[:TEST_PROBLEMS], new[TEST_PROBLEMS : 2 * TEST_PROBLEMS]


def _spelling_rewards(texts: list[str], problems: Rows) -> list[float]:
    return [float(text == problem["solution"]) for text, problem in zip(texts, problems, strict=True)]


def _addition_problems() -> tuple[Rows, Rows, Rows]:
    train, test, validation = (few_shot.make_problems(s, ["addition"]) for s in ("train", "test", "validation"))
    return train, test, validation


def _addition_rewards(texts: list[str], problems: Rows) -> list[float]:
    return few_shot.first_line_reward(texts, [problem["solution"] for problem in problems])


PRETRAINED = "addition"
_ARITHMETIC = Task(
    EMBEDDED_MODELS["arithmetic"],
    MAX_TOKENS,
    (2.5e-5, 5e-5, 1e-4, 2e-4),
    (1, 4),
    _arithmetic_problems,
    _arithmetic_rewards,
)
_SPELLING = Task(
    EMBEDDED_MODELS["spelling"],
    16,
    (5e-5, 1e-4, 2e-4, 4e-4),
    (1, 4, 16),
    _spelling_problems,
    _spelling_rewards,
)
_ADDITION = Task(
    str(real_model.MODEL),
    6,
    real_model.RATES,
    (1, 4),
    _addition_problems,
    _addition_rewards,
    prompts=128,
    batch=BATCH,
    tuning_seeds=TUNING_SEEDS[:2],
    seeds=SEEDS[:6],
    few=2,
    parts=("OPO, μ = 0.03",),
)
TASKS = {
    "arithmetic": _ARITHMETIC,
    "spell_backward": _SPELLING,
    PRETRAINED: _ADDITION,
}


EMBEDDED = tuple(task for task in TASKS if task != PRETRAINED)
FEW = "arithmetic, few"
_WITH_FEW = TASKS | {
    FEW: replace(TASKS["arithmetic"], rates=(5e-5, 1e-4, 2e-4), epochs=(4,), prompts=FEW_PROMPTS, in_a_row=True)
}


@dataclass(frozen=True)
class Run:
    """A method on a task, with a learning rate and a number of epochs; one that tunes has other test problems."""

    task: str
    method: str
    learning_rate: float
    epochs: int
    seed: int
    tuning: bool


def pairs(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Right and wrong completions of the same prompt, each used once."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for row in rows:
        found[row["prompt"]][row["reward"] < 0.5].append(row["completion"])
    return [
        {"prompt": prompt, "chosen": right, "rejected": wrong}
        for prompt, of_prompt in found.items()
        for right, wrong in zip(*of_prompt, strict=False)
    ]


def recorded(task: str, seed: int) -> list[dict[str, Any]]:
    """What a run trains on, from a file after the first time."""
    file = Path("runs/offline", f"{task}, {seed}.json")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(_WITH_FEW[task].record(seed)))
        own.replace(file)
    return json.loads(file.read_text())


def make_trainer(run: Run, rows: list[dict[str, Any]], folder: str) -> Any:
    """The trainer of a run."""
    task = _WITH_FEW[run.task]
    model = task.base
    named: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(model)}
    fields = common_fields(folder, run.learning_rate, run.seed, max_steps=run.epochs * task.prompts * GROUP // BATCH)
    fields["max_completion_length"] = task.max_tokens
    if run.method in OBJECTIVES:
        file = Path(folder) / "rollouts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        parts = {"objective_class": OBJECTIVES[run.method]}
        if run.task == PRETRAINED and run.method in WITHOUT_PULL_BACK:
            parts["_left_out"] = lambda self, rows, on_policy: rows["opo_target"] == 0
        kind = type("OPOTrainer", (OPOTrainer,), parts)
        own = {
            "mu": MU.get(run.method, 0.3),
            "rollouts": str(file),
            "num_iterations": run.epochs if task.in_a_row else 1,
        }
        return kind(model, args=OPOConfig(**fields, **own), **named)
    own = {name: value for name, value in fields.items() if name not in ("num_generations", "max_completion_length")}
    own |= {"max_steps": -1, "num_train_epochs": run.epochs}
    if run.method == "SFT":
        right = [{name: row[name] for name in ("prompt", "completion")} for row in rows if row["reward"] > 0.5]
        return SFTTrainer(model, SFTConfig(**own), train_dataset=Dataset.from_list(right), **named)
    own |= {"per_device_train_batch_size": BATCH // 2, "precompute_ref_log_probs": True}  # pairs
    return DPOTrainer(model, args=DPOConfig(**own), train_dataset=Dataset.from_list(pairs(rows)), **named)


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        if run.task == PRETRAINED:
            real_model.multiply_as_bfloat16()
            trl.trainer.utils._use_triton = lambda device: True  # the head computes completions only, as on GPUs
        task = _WITH_FEW[run.task]
        rows = recorded(run.task, run.seed)
        began = time.process_time()
        trainer = make_trainer(run, rows, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = round(time.process_time() - began, 1)
        measured = task.accuracies(trainer.model.state_dict(), for_tuning=run.tuning)
    return {**asdict(run), **measured, "steps": trainer.state.global_step, "seconds": seconds}


def stages(task: str, method: str) -> Stages:
    """The runs of a method on a task."""
    its = TASKS[task]
    settings = list(product(its.rates, its.epochs))
    return Stages(
        lambda setting, seed, tuning: Run(task, method, *setting, seed, tuning),
        settings,
        its.tuning_seeds,
        its.seeds,
        its.few,
    )


def fresh_runs(task: str, method: str, found: dict[Run, dict[str, Any]]) -> list[Run]:
    """The runs that confirm a default, once its trials are finished."""
    own = stages(task, method)
    return [] if own.next_runs(found) else [own.run(own.chosen(found), seed, False) for seed in FRESH]


FEW_RUNS = {
    (name, rate): [Run(FEW, name, rate, _WITH_FEW[FEW].epochs[0], seed, False) for seed in FRESH]
    for name, rate in product(CONFIRMED, _WITH_FEW[FEW].rates)
}


def page(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a page; tasks that are not complete are left out."""
    complete = [task for task in TASKS if not any(stages(task, name).next_runs(found) for name in METHODS)]
    text = [_INTRODUCTION]
    for task in complete:
        text.append(f"## {task}\n\n{_PRETRAINED if task == PRETRAINED else ''}{_table(task, found)}\n")
    runs = {each: fresh_runs(*each, found) for each in product(EMBEDDED, CONFIRMED)}
    if all(own and all(run in found for run in own) for own in runs.values()):
        text.append(_confirmation({each: [found[run] for run in own] for each, own in runs.items()}))
    if all(run in found for own in FEW_RUNS.values() for run in own):
        text.append(_few(found))
    return "\n".join(text)


def _few(found: dict[Run, dict[str, Any]]) -> str:
    rates = _WITH_FEW[FEW].rates
    reached = {each: [100 * found[run]["sampled"] for run in runs] for each, runs in FEW_RUNS.items()}
    cells = {each: shown(own) for each, own in reached.items()}
    for name, rate in product(CONFIRMED[1:], rates):
        behind = [its - own for its, own in zip(reached["OPO", rate], reached[name, rate], strict=True)]
        cells[name, rate] += f"; OPO {shown(behind, signed=True)}"
    rows = [[name, *(cells[name, rate] for rate in rates)] for name in CONFIRMED]
    said = (
        "480 completions of arithmetic, four passes over each 48 of them before the next 48; sampled accuracy by "
        "learning rate, ten\nseeds, and how far OPO is ahead, without a correction."
    )
    return (
        f"## Few completions, several times in a row\n\n{said}\n\n{table(['', *map('{:.2g}'.format, rates)], rows)}\n"
    )


def _points_ahead(runs: Reports, others: Reports) -> list[float]:
    """By how many points of sampled accuracy runs are ahead of others, paired by seed."""
    return [100 * (run["sampled"] - other["sampled"]) for run, other in zip(runs, others, strict=True)]


def _kept(differences: Mapping[Any, list[float]]) -> Collection[Any]:
    """The comparisons whose mean difference is not 0, after Holm's correction."""
    return holm({each: float(stats.ttest_1samp(gain, 0).pvalue) for each, gain in differences.items()})


def _marked(gain: list[float], is_kept: bool) -> str:
    """A mean difference with its interval, and a star if it stays after the correction."""
    return shown(gain, signed=True) + (" \\*" if is_kept else "")


def _accuracies(runs: Reports) -> list[str]:
    """Sampled and greedy accuracy of runs, in %."""
    return [shown([100 * run[measure] for run in runs]) for measure in ("sampled", "greedy")]


def _confirmation(measured: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    new = CONFIRMED[1]
    differences = {}
    for task, other in product(EMBEDDED, CONFIRMED):
        if other != new:
            differences[task, other] = _points_ahead(measured[task, new], measured[task, other])
    kept = _kept(differences)
    rows = []
    for task, name in product(EMBEDDED, CONFIRMED):
        gain = "" if name == new else _marked(differences[task, name], (task, name) in kept)
        rows.append([task, name, *_accuracies(measured[task, name]), gain])
    header = ("", "", "sampled", "greedy", f"{new}, less this, sampled")
    said = f"Seeds {FRESH[0]} to {FRESH[-1]}; \\* after Holm's correction for these four comparisons."
    return f"## The default with `rollouts`\n\n{said}\n\n{table(header, rows)}\n"


def _table(task: str, found: dict[Run, dict[str, Any]]) -> str:
    finished = [*METHODS, *(name for name in TASKS[task].parts if not stages(task, name).next_runs(found))]
    reports = {name: stages(task, name).reports(found) for name in finished}
    others = [name for name in finished if name != "OPO"]
    differences = {name: _points_ahead(reports[name], reports["OPO"]) for name in others}
    kept = _kept({name: gain for name, gain in differences.items() if name in METHODS})
    shown_cost = {"steps": "steps", "seconds": "processor seconds"}
    if task == PRETRAINED:  # its code became faster between the runs
        del shown_cost["seconds"]
    rows = []
    mean = {name: fmean(run["sampled"] for run in runs) for name, runs in reports.items()}
    for name in sorted(reports, key=mean.__getitem__, reverse=True):
        runs = reports[name]
        rate, epochs = stages(task, name).chosen(found)
        gain = "" if name == "OPO" else _marked(differences[name], name in kept)
        spent = [f"{fmean(run[cost] for run in runs):.0f}" for cost in shown_cost]
        rows.append([name, f"{rate:.2g}, {epochs}", *_accuracies(runs), gain, *spent])
    header = ["", "learning rate, epochs", "sampled", "greedy", "sampled, less OPO's", *shown_cost.values()]
    return table(header, rows)


_INTRODUCTION = """# Training on completions that exist already

2,880 completions of the base model of each task, none generated in training. Accuracies in % on 500 test problems, ±
half of the 95 % t interval over ten seeds; \\* marks differences that remain after Holm's correction for the five
comparisons of a task. "r − r̄, bounded" is truncated REINFORCE. OPO with another μ or without its pull-back, and r − r̄
with one, show which part matters; their differences are directions. [Plan and code](offline.py); [every
run](offline.jsonl).
"""
_PRETRAINED = """SmolLM2-135M-Instruct with four-bit weights: 768 completions, 150 test problems, six seeds.

"""


def main() -> int:
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read(Run, RECORD)))
        return 0

    def next_runs(task: str, method: str) -> list[Run]:
        return stages(task, method).next_runs(read(Run, RECORD))

    def fresh(task: str, method: str) -> list[Run]:
        found = read(Run, RECORD)
        return [run for run in fresh_runs(task, method, found) if run not in found]

    every = [partial(next_runs, task, name) for task in TASKS for name in (*METHODS, *TASKS[task].parts)]
    every += [lambda: [run for own in FEW_RUNS.values() for run in own if run not in read(Run, RECORD)]]
    every += [partial(fresh, *each) for each in product(EMBEDDED, CONFIRMED)]
    return run_missing(every, train, RECORD, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
