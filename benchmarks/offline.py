"""
Completions that exist already: what OPO learns from those of the base model, beside what others would use.

    python -m benchmarks.offline run --jobs 2     # what is missing of results/offline.jsonl: about an hour
    python -m benchmarks.offline report           # → results/offline.md

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
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.asynchronous.in_process import sample
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems
from opo_trl.objective import OPO

from .many_runs import read_command_line
from .objectives.grid import CELLS
from .objectives.published import TOPR
from .objectives.report import shown
from .pages import table
from .staged import Stages, holm, read, run_missing
from .staleness_methods import BATCH, GROUP, LEVEL, MAX_TOKENS, accuracies, common_fields, make_tokenizer


RECORD = Path(__file__).resolve().parent / "results" / "offline.jsonl"
PROMPTS = 480
RATES, EPOCHS = (2.5e-5, 5e-5, 1e-4, 2e-4), (1, 4)
TUNING_SEEDS, SEEDS = (411, 412, 413), tuple(range(401, 411))
GSPO = type("GSPO", (CELLS["advantage-clipped-none"],), {"clip": 0.2})
OBJECTIVES = {"OPO": OPO, "r − r̄, bounded": CELLS["reward-bounded-none"], "GSPO": GSPO, "TOPR": TOPR}
METHODS = (*OBJECTIVES, "SFT", "DPO")


@dataclass(frozen=True)
class Run:
    """A method with a learning rate and a number of epochs; a run that tunes is measured on other problems."""

    method: str
    learning_rate: float
    epochs: int
    seed: int
    tuning: bool


def record(seed: int) -> list[dict[str, Any]]:
    """The completions of the base model, with all that `rollouts` takes."""
    model = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base_model_path())
    problems = Dataset.from_list(make_problems("train", [LEVEL])).shuffle(seed=seed).select(range(PROMPTS)).to_list()
    repeated = [problem for problem in problems for _ in range(GROUP)]
    with torch.no_grad():
        tokens, logps = sample(
            model,
            [tokenizer(problem["problem"])["input_ids"] for problem in repeated],
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            eos=torch.tensor([tokenizer.eos_token_id]),
            pad=tokenizer.pad_token_id,
            generator=torch.Generator().manual_seed(seed),
        )
    rows = []
    for problem, ids, row in zip(repeated, tokens.tolist(), logps.tolist(), strict=True):
        n = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        text = tokenizer.decode(ids[:n], skip_special_tokens=True)
        known = {"completion_ids": ids[:n], "logprobs": row[:n], "temperature": 1.0}
        reward = arithmetic_reward([text], [problem["solution"]])[0]
        rows.append({"prompt": problem["problem"], "completion": text, **known, "reward": reward})
    return rows


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


def make_trainer(run: Run, rows: list[dict[str, Any]], folder: str) -> Any:
    """The trainer of a run."""
    named: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(base_model_path())}
    fields = common_fields(folder, run.learning_rate, run.seed, max_steps=run.epochs * PROMPTS * GROUP // BATCH)
    if run.method in OBJECTIVES:
        file = Path(folder) / "rollouts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind = type("OPOTrainer", (OPOTrainer,), {"objective_class": OBJECTIVES[run.method]})
        return kind(base_model_path(), args=OPOConfig(**fields, rollouts=str(file)), **named)
    own = {name: value for name, value in fields.items() if name not in ("num_generations", "max_completion_length")}
    own |= {"max_steps": -1, "num_train_epochs": run.epochs}
    if run.method == "SFT":
        right = [{name: row[name] for name in ("prompt", "completion")} for row in rows if row["reward"] > 0.5]
        return SFTTrainer(base_model_path(), SFTConfig(**own), train_dataset=Dataset.from_list(right), **named)
    own["per_device_train_batch_size"] = BATCH // 2  # pairs
    return DPOTrainer(base_model_path(), args=DPOConfig(**own), train_dataset=Dataset.from_list(pairs(rows)), **named)


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        rows = record(run.seed)
        began = time.process_time()
        trainer = make_trainer(run, rows, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = round(time.process_time() - began, 1)
        measured = accuracies(trainer.model, make_tokenizer(), for_tuning=run.tuning)
    return {**asdict(run), **measured, "steps": trainer.state.global_step, "seconds": seconds}


def stages(method: str) -> Stages:
    """The runs of a method."""
    return Stages(
        lambda setting, seed, tuning: Run(method, *setting, seed, tuning),
        list(product(RATES, EPOCHS)),
        TUNING_SEEDS,
        SEEDS,
    )


def page(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a page."""
    reports = {name: stages(name).reports(found) for name in METHODS}
    differences = {
        name: [100 * (mine["sampled"] - own["sampled"]) for mine, own in zip(runs, reports["OPO"], strict=True)]
        for name, runs in reports.items()
        if name != "OPO"
    }
    kept = holm({name: float(stats.ttest_1samp(gain, 0).pvalue) for name, gain in differences.items()})
    rows = []
    for name, runs in sorted(reports.items(), key=lambda item: -fmean(run["sampled"] for run in item[1])):
        rate, epochs = stages(name).chosen(found)
        row = [name, f"{rate:.2g}, {epochs}", *(shown([100 * r[m] for r in runs]) for m in ("sampled", "greedy"))]
        gain = shown(differences[name], signed=True) + (" \\*" if name in kept else "") if name != "OPO" else ""
        spent = [f"{fmean(run[name] for run in runs):.0f}" for name in ("steps", "seconds")]
        rows.append([*row, gain, *spent])
    header = ("", "learning rate, epochs", "sampled", "greedy", "sampled, less OPO's", "steps", "processor seconds")
    return "\n".join([_INTRODUCTION, table(header, rows), ""])


_INTRODUCTION = """# Training on completions that exist already

2,880 completions of the base model of the embedded arithmetic task, none generated in training. Accuracies in % on 500
test problems, ± half of the 95 % t interval over ten seeds; \\* marks differences that remain after Holm's correction.
[Plan and code](../offline.py); [every run](offline.jsonl).
"""


def main() -> int:
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read(Run, RECORD)))
        return 0

    def next_runs(method: str) -> list[Run]:
        return stages(method).next_runs(read(Run, RECORD))

    return run_missing([partial(next_runs, method) for method in METHODS], train, RECORD, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
