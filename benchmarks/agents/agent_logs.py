"""
What a small agent learns from a log of games: more SFT, whole games, turn by turn, beside the game itself.

    python -m recipes.agent.prepare                       # the log and the start, to runs/agent
    python -m benchmarks.agents.agent_logs simulate       # how often the rule finds what is there
    python -m benchmarks.agents.agent_logs run            # what is missing of agent_logs.jsonl
    python -m benchmarks.agents.agent_logs report         # → agent_logs.md

Plan, committed before the first run that counts, with the game, its expert and the measure of success in the same
commit (`recipes/agent/storeroom.py`, `play.py`, `prepare.py`).

**Data.** `prepare` makes 8,000 games of the scripted expert, half of which fail, and the start: SFT of a model of 0.19
million parameters on all of them. The arms learn from the first 4,096 of these games, eight of each of 512 tasks.

| arm | | steps |
|---|---|---:|
| SFT | TRL's `SFTTrainer` on the assistant's turns of the games that were won, 64 games a step | 140 |
| rollouts | the recipe `rollouts`: TOPR with the bounds (1, 2, 0, 1) on all games; π_k is the start's | 54 |
| pivots | the recipe `pivots`, on the turns of the games that were won | 42 |
| online | the recipe `online`, in the game: the roof, not an alternative for who has only a log | 18 |

**Equal processor time**: the steps are those that take as long as 140 of SFT, 33 seconds of `trainer.train()`, in one
short pilot of each arm with seed 690, one after the other. Making the states of pivots, log-probabilities of the log
and tokens, once before training, is not counted for any arm. *Changed after SFT's trials and the first of its reports,
before any other run of an arm*: an earlier pilot, on a busy machine, gave the other arms 70, 55 and 23 steps, which
would have been a third more time than SFT's 140.

**Tuning**, alike for all: rates 1.25e-4 to 2e-3 in steps of 2 with seed 701, the best two also with 702; the best mean
share of games won over the four trained kinds decides, on 100 test tasks of each. The held-out kind is not looked at.
A rate at an edge is reported as such. **Reports**: seeds 711 to 720, each on test tasks of its own: 500 of the
held-out kind, 125 of each trained one. Games are sampled at temperature 1.

**Primary measure**: games won of the held-out kind `rare_short`, pivots less SFT, paired by seed. **Rule**: the
two-sided 95 % t interval of the mean. Above 0: the pages say that pivots gained over SFT here, and how much. Below 0:
they say that SFT is better here. Else: undecided, with the interval. Whatever it is, `opo-trl pivots` stays, as it is
others' method. All else is secondary and decides nothing: the other differences, the trained kinds, the start.

**Power**, by `simulate`: a gain of 5 points is found in 99.6, 79 or 42 % of cases if gains differ between seeds by a
standard deviation of 3, 5 or 8 points, one of 8 in 100, 99.5 or 80 %. The spread is not known before; chance in 500
games alone gives up to 3 points. So a true gain of less than 5 may well end as undecided.

**Budget**: 68 runs of about 100 seconds with playing, and ten of the start: two hours of one core. If time is short,
the last arms are left out, which are `online` and `rollouts`; never seeds.

Note after the trials of SFT, before any report of another arm, which changes nothing of the rule: the kind that is
held out stays. In the trained kinds there are always enough of its items, which a policy may learn: one run of the
recipe `online` with seed 42 won 27 % of it before training and 4 % after, and far more of the trained kinds. So the
measure says what an arm keeps outside of what it trains on, and `online` is no roof of it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from opo_trl.command.train import prepare
from opo_trl.reuse import to_pivots
from recipes.agent.play import Player, success
from recipes.agent.prepare import encode
from recipes.agent.storeroom import HELD_OUT, KINDS

from ..intervals import estimate
from ..losses.objectives.report import shown
from ..many_runs import options, read_command_line
from ..pages import table
from ..staged import Stages, read, run_missing


ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).resolve().with_name("agent_logs.jsonl")
START, TASKS = Path("runs/agent/base"), Path("runs/agent/tasks")
LOG, PIVOTS = Path("runs/agent_logs/log.jsonl"), Path("runs/agent_logs/pivots")
GAMES = 4096  # of the expert's log that the arms learn from

# Optimizer steps of each arm, such that they take the same processor time.
STEPS = {"SFT": 140, "pivots": 42, "rollouts": 54, "online": 18}
ARMS = tuple(STEPS)
RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)
TUNING_SEEDS, SEEDS = (701, 702), tuple(range(711, 721))
TUNING_TASKS, TRAINED_TASKS, HELD_OUT_TASKS = 100, 125, 500  # of each kind; the first for tuning

# What an arm changes in the recipe with its name.
CHANGES: dict[str, dict[str, Any]] = {
    "rollouts": {"rollouts": LOG, "rollouts_model": START, "num_train_epochs": 100},
    "pivots": {"dataset_name": PIVOTS},
    "online": {"dataset_name": TASKS, "save_rollouts": False},
}


@dataclass(frozen=True)
class Run:
    """An arm with a learning rate; one that tunes plays other tasks, and none of the kind that is held out."""

    arm: str
    learning_rate: float
    seed: int
    tuning: bool


STARTS = [Run("start", 0.0, seed, False) for seed in SEEDS]  # play without training


def stages(arm: str) -> Stages:
    """The runs of an arm."""
    return Stages(partial(Run, arm), RATES, TUNING_SEEDS, SEEDS, few=2, measure="trained")


def start_runs(found: Mapping[Run, Any]) -> list[Run]:
    """The missing games of the start."""
    return [run for run in STARTS if run not in found]


# A run


def train(run: Run) -> dict[str, Any]:
    """Train and play in this process, which must be a new one."""
    torch.set_num_threads(1)
    if run.arm == "start":
        return {**asdict(run), **play(START, run.seed), "steps": 0, "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        trainer = make_trainer(run, folder)
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        trainer.save_model(folder)
        won = play(folder, run.seed, tuning=run.tuning)
    return {**asdict(run), **won, "steps": trainer.state.global_step, "seconds": round(seconds, 1)}


def make_trainer(run: Run, folder: str) -> Any:
    """The trainer of a run: TRL's for SFT, else that of the arm's recipe."""
    common = {"output_dir": folder, "seed": run.seed, "learning_rate": run.learning_rate, "max_steps": STEPS[run.arm]}
    if run.arm == "SFT":
        return make_sft_trainer(common)
    fields = {**CHANGES[run.arm], **common, "model_name_or_path": START}
    recipe = ROOT / "recipes" / "agent" / f"{run.arm}.yaml"
    return prepare(["--config", str(recipe), *options(fields)]).trainer


def make_sft_trainer(common: Mapping[str, Any]) -> SFTTrainer:
    """TRL's trainer for the assistant's turns in the games of the log that were won."""
    tokenizer = AutoTokenizer.from_pretrained(START)
    games = [json.loads(line) for line in LOG.read_text().splitlines()]
    encoded = [encode(tokenizer, game["messages"]) for game in games if game["reward"] == 1]
    rows = [{"input_ids": ids, "assistant_masks": mask} for ids, mask in encoded]
    config = SFTConfig(
        **common,
        per_device_train_batch_size=64,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    return SFTTrainer(str(START), config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def play(model: str | Path, seed: int, *, tuning: bool = False) -> dict[str, float]:
    """Shares of games won, sampled at temperature 1, on test tasks that belong to this seed."""
    set_seed(seed)
    player = Player(model)
    sizes = dict.fromkeys(KINDS, TUNING_TASKS if tuning else TRAINED_TASKS)
    if not tuning:
        sizes[HELD_OUT] = HELD_OUT_TASKS
    won = {}
    for kind, n_tasks in sizes.items():
        games = [(kind, 1000 * seed + number, "test") for number in range(n_tasks)]
        won[kind] = round(success(player.play(games)), 4)
    return {**won, "trained": fmean(won[kind] for kind in KINDS)}


def make_data() -> None:
    """The log, and the states of the games in it that were won: once for all runs."""
    if PIVOTS.exists():
        return
    PIVOTS.mkdir(parents=True)
    lines = Path("runs/agent/expert.jsonl").read_text().splitlines(keepends=True)
    LOG.write_text("".join(lines[:GAMES]))
    states = to_pivots(str(LOG), AutoTokenizer.from_pretrained(START))["train"]
    states.to_parquet(PIVOTS / "train.parquet")


# The rule


def verdict(gains: Sequence[float]) -> str:
    """What the rule says of the gains of pivots over SFT on the held-out kind, in points, by seed."""
    low, high = estimate(gains).interval
    if low > 0:
        return "pivots win more games of the held-out kind than SFT on the successful games."
    if high < 0:
        return "pivots win fewer games of the held-out kind than SFT on the successful games."
    return "undecided, as the interval contains 0."


def simulate(gain: float, spread: float, trials: int = 4000) -> float:
    """Share of cases in which the rule finds a gain, if gains differ between seeds by a standard deviation."""
    random = np.random.default_rng(0)
    drawn = random.normal(gain, spread, (trials, len(SEEDS)))
    return fmean(estimate(gains).interval[0] > 0 for gains in drawn)


# The page


Found = Mapping[Run, Mapping[str, Any]]
Reports = Sequence[Mapping[str, Any]]  # of an arm's runs, in the order of the seeds


def page(found: Found) -> str:
    """The finished arms as a page, and what the rule says once pivots and SFT are finished."""
    done = {arm: stages(arm).reports(found) for arm in ARMS if not stages(arm).next_runs(found)}
    rows = [[arm, *_row(arm, reports, found)] for arm, reports in done.items()]
    if not start_runs(found):
        rows.insert(0, ["start", "", *_wins([found[run] for run in STARTS]), "", ""])
    header = ["", "rate", *KINDS, f"**{HELD_OUT}**", "steps", "processor seconds"]
    text = [_INTRODUCTION, table(header, rows), _DIFFERENCES]
    differences = []
    for arm, other in COMPARED:
        if arm in done and other in done:
            gains = [shown(gains_of(done[arm], done[other], of), signed=True) for of in (HELD_OUT, "trained")]
            differences.append([f"{arm} less {other}", *gains])
    text += [table(["", f"**{HELD_OUT}**", "trained kinds"], differences), ""]
    if "pivots" in done and "SFT" in done:
        text.append(f"**By the rule:** {verdict(gains_of(done['pivots'], done['SFT'], HELD_OUT))}\n")
    missing = [arm for arm in ARMS if arm not in done]
    if missing:
        text.append(f"Not finished: {', '.join(missing)}.\n")
    return "\n".join(text)


def gains_of(own: Reports, other: Reports, measure: str) -> list[float]:
    """How many points more one arm wins than another, by seed."""
    return [100 * (mine[measure] - its[measure]) for mine, its in zip(own, other, strict=True)]


def _row(arm: str, reports: Reports, found: Found) -> list[str]:
    """An arm's rate, its wins by kind, its steps and its processor time."""
    rate = stages(arm).chosen(found)
    edge = " (edge)" if rate in (RATES[0], RATES[-1]) else ""
    seconds = fmean(report["seconds"] for report in reports)
    return [f"{rate:g}{edge}", *_wins(reports), str(STEPS[arm]), f"{seconds:.0f}"]


def _wins(reports: Reports) -> list[str]:
    """Shares of games won, in %, by kind."""
    return [shown([100 * report[kind] for report in reports]) for kind in (*KINDS, HELD_OUT)]


COMPARED = (
    ("pivots", "SFT"),
    ("rollouts", "SFT"),
    ("pivots", "rollouts"),
    ("online", "SFT"),
    ("online", "pivots"),
)

_INTRODUCTION = """# What a small agent learns from a log

Games won in %, sampled at temperature 1, ± half of the 95 % t interval over ten seeds; every arm at its own rate, for
the same processor time. It is a toy: a game made for this, one model of 0.19 million parameters, one log and one
start, so the intervals say nothing of other starts and logs. [Plan, rule and code](agent_logs.py); [every
run](agent_logs.jsonl).
"""
_DIFFERENCES = """
Differences in points, paired by seed; only the first in bold decides.
"""


def main() -> int:
    arguments = read_command_line(__doc__, "simulate", "run", "report")
    if arguments.command == "simulate":
        for spread in (3, 5, 8):
            shares = [f"{simulate(gain, spread):.0%} of gains of {gain} points" for gain in (0, 3, 5, 8)]
            print(f"standard deviation {spread}: {', '.join(shares)}")
        return 0
    found = partial(read, Run, RECORD)
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(found()))
        return 0
    make_data()
    next_runs = [lambda: start_runs(found()), *(partial(_next_runs, arm) for arm in ARMS)]
    return run_missing(next_runs, train, RECORD, arguments.jobs)


def _next_runs(arm: str) -> list[Run]:
    return stages(arm).next_runs(read(Run, RECORD))


if __name__ == "__main__":
    sys.exit(main())
