"""The runs of the benchmark of reuse (see reuse.py)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .learning_curves import CurveRun
from .regime_design import COMMON, METHODS


RUNS = Path("runs/reuse")
TUNING_SEEDS = (41, 42, 43)
# Trials go on to the other seeds if their cost on the first is at most this many times that of their method's best.
# Two runs of a trial can differ by half: a smaller number would be a choice by luck.
STAY = 2.0
SEEDS = tuple(range(101, 111))  # that no choice was based on
FEW_SEEDS = SEEDS[:5]  # of the robustness checks
GOALS = (0.82, 0.88)  # sampled accuracies
TIMED_COMPLETIONS, TIMED_SEEDS = 960, (201, 202, 203)

Fields = Mapping[str, Any]

# 48 completions, 8 prompts × 6, make a rollout: one optimizer step per pass. A run ends with its budget.
TASK: Fields = {
    **COMMON,
    "steps_per_generation": 1,
    "max_steps": 100_000,
    "report_samples": 2,
}


@dataclass(frozen=True)
class Contender:
    """
    A method of the figure.

    Args:
        name (`str`): what the page calls it.
        fields (`Mapping[str, Any]`): its fields, whatever is tuned.
        trials (`tuple[Mapping[str, Any], ...]`): fields of each trial.
        budget (`int`): completions of a run.
        color (`str`): of its curves.
    """

    name: str
    fields: Fields
    trials: tuple[Fields, ...] = field(repr=False)
    budget: int
    color: str


def _grid(**values: tuple) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _clipped(name: str, usual: float, other: float) -> tuple[Fields, ...]:
    """Trials with two clip ranges. A single pass never clips: there the learning rate alone is tried."""
    return (
        *_grid(learning_rate=(1e-4, 2e-4, 4e-4), num_iterations=(1,)),
        *_grid(learning_rate=(1e-4, 2e-4), num_iterations=(2,), **{name: (usual, other)}),
        *_grid(learning_rate=(1e-4,), num_iterations=(4,), **{name: (other, usual)}),
        *_grid(learning_rate=(5e-5, 7e-5), num_iterations=(2, 4), **{name: (usual,)}),
        *_grid(learning_rate=(5e-5,), num_iterations=(8,), **{name: (other,)}),
        *_grid(learning_rate=(1e-4,), num_iterations=(2,), max_staleness=(32,), **{name: (usual,)}),
        *_grid(learning_rate=(5e-5,), num_iterations=(4,), max_staleness=(32,), **{name: (usual,)}),
    )


CONTENDERS = (
    Contender(
        "OPO",
        METHODS["OPO"],
        (
            *_grid(learning_rate=(1e-4, 2e-4), num_iterations=(2,), max_staleness=(32,)),
            *_grid(learning_rate=(5e-5, 1e-4), num_iterations=(4,), max_staleness=(8, 32)),
            *_grid(learning_rate=(3e-5, 5e-5, 7e-5, 1e-4), num_iterations=(8,), max_staleness=(32,)),
            *_grid(learning_rate=(5e-5,), num_iterations=(8,), max_staleness=(8, 64)),
            *_grid(learning_rate=(5e-5,), num_iterations=(8,), max_staleness=(32,), mu=(0.1, 1.0)),
            *_grid(learning_rate=(3e-5, 5e-5), num_iterations=(16,), max_staleness=(32,)),
        ),
        1500,
        "#d55e00",
    ),
    Contender("GRPO", METHODS["GRPO"], _clipped("epsilon", 0.2, 0.4), 3000, "#0072b2"),
    Contender("DAPO", METHODS["DAPO"], _clipped("epsilon_high", 0.28, 0.5), 4000, "#56b4e9"),
    Contender(
        "GSPO",
        {k: v for k, v in METHODS["GSPO"].items() if k != "epsilon_high"},
        _clipped("epsilon", 0.02, 3e-4),
        3000,
        "#b03a86",
    ),
    Contender("CISPO", {"trainer": "grpo", "loss_type": "cispo"}, _clipped("epsilon_high", 2.0, 5.0), 3000, "#009e73"),
)


def run_of(name: str, fields: Fields, budget: int, seed: int, **options: Any) -> CurveRun:
    """A run of some fields on the task."""
    folder = RUNS / f"{name} seed{seed}".replace(" ", "_").replace("=", "").replace(",", "")
    return CurveRun(folder, {**TASK, **fields, "seed": seed}, budget, **options)


def trial(contender: Contender, number: int, seed: int) -> CurveRun:
    """A run of a trial, by its number."""
    fields = {**contender.fields, **contender.trials[number]}
    return run_of(f"tuning/{contender.name} {number}", fields, contender.budget, seed, points=8, brief=True)


def first_trials() -> Iterator[CurveRun]:
    """Each trial of each contender, on the first of the tuning seeds."""
    for contender in CONTENDERS:
        for number in range(len(contender.trials)):
            yield trial(contender, number, TUNING_SEEDS[0])


@dataclass(frozen=True)
class Row:
    """
    A row of the page: runs that differ only in the seed.

    Args:
        name (`str`): what the page calls it.
        method (`str`): of [`CONTENDERS`], whose tuned fields it has.
        fields (`Mapping[str, Any]`): its other fields.
        budget (`int`): completions of a run.
        seeds (`tuple[int, ...]`): its seeds.
        points (`int`): points of a curve, at most.
    """

    name: str
    method: str
    fields: Fields = field(default_factory=dict)
    budget: int = 1500
    seeds: tuple[int, ...] = SEEDS
    points: int = 8

    def run(self, tuned: Fields, seed: int) -> CurveRun:
        """A run, with the tuned fields of its method."""
        return run_of(self.name, {**tuned, **self.fields}, self.budget, seed, points=self.points)


_ONE_PASS: Fields = {"num_iterations": 1, "max_staleness": 0}
_DYNAMIC: Fields = {"max_sampling_rounds": 4}

FIGURE = (
    Row("GRPO", "GRPO", budget=3000),
    Row("DAPO", "DAPO", budget=3600),
    Row("GSPO", "GSPO", budget=3000),
    Row("CISPO", "CISPO", budget=3000),
    Row("OPO", "OPO", budget=2400),
)
# Is it the loss, the replay or the sampling?
PARTS = (
    Row("OPO, one pass", "OPO", _ONE_PASS | {"learning_rate": 1e-4}, 2400, FEW_SEEDS),
    Row("OPO, passes over the current rollout only", "OPO", {"max_staleness": 0}, 1500, FEW_SEEDS),
    Row("OPO, dynamic sampling", "OPO", _DYNAMIC, 2000, FEW_SEEDS),
    Row("GRPO, replay as OPO's", "GRPO", {"num_iterations": 4, "max_staleness": 32}, 1500, FEW_SEEDS),
    Row("GRPO, dynamic sampling", "GRPO", _DYNAMIC, 3600, FEW_SEEDS),
    Row("DAPO, without dynamic sampling", "DAPO", {"max_sampling_rounds": 1}, 3000, FEW_SEEDS),
)


def _checks() -> Iterator[Row]:
    """Robustness checks: one thing differs from the figure's runs."""
    for rate in (2.5e-5, 2e-4, 4e-4):
        for method in ("GRPO", "OPO"):
            yield Row(
                f"{method}, learning rate {rate:g}", method, {"learning_rate": rate}, seeds=FEW_SEEDS[:3], points=3
            )
    for passes in (2, 8, 16, 32, 64):
        yield Row(f"OPO, {passes} passes", "OPO", {"num_iterations": passes}, seeds=FEW_SEEDS[:3], points=3)
    yield Row("OPO, 4 earlier rollouts", "OPO", {"max_staleness": 4}, seeds=FEW_SEEDS[:3], points=3)
    for name, fields in {
        "gradients clipped at norm 1": {"max_grad_norm": 1.0},
        "graded rewards": {"reward_funcs": "benchmarks.reuse_rewards.share_of_digits"},
        "64 prompts": {"fraction": 64 / 2048},
    }.items():
        for method in ("GRPO", "OPO"):
            yield Row(f"{method}, {name}", method, fields, seeds=FEW_SEEDS[:3], points=3)


CHECKS = (*_checks(),)


@dataclass(frozen=True)
class Transfer:
    """
    Another task or model, with the fields tuned on arithmetic.

    Args:
        name (`str`): begins the names of its rows.
        heading (`str`), text (`str`): of its section on the page.
        fields (`Mapping[str, Any]`): what differs from arithmetic.
        budget (`int`): completions of a run.
        seeds (`tuple[int, ...]`): its seeds.
        points (`int`): points of a curve, at most.
    """

    name: str
    heading: str
    text: str
    fields: Fields
    budget: int = 1500
    seeds: tuple[int, ...] = FEW_SEEDS
    points: int = 4

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row per method."""
        return tuple(
            Row(f"{self.name}, {method}", method, self.fields, self.budget, self.seeds, self.points)
            for method in ("GRPO", "GSPO", "OPO")
        )


def _gym(task: str, reward: str, length: int) -> Fields:
    """Fields of a task of benchmarks/gym_tasks.py, built into runs/gym."""
    return {
        "model_name_or_path": f"runs/gym/{task}",
        "dataset_name": f"runs/gym/{task}/data",
        "reward_funcs": f"benchmarks.gym_tasks.{reward}",
        "max_completion_length": length,
        "report_levels": task,
        "levels": task,
    }


_GYM_TEXT = "Of reasoning-gym (`benchmarks/gym_tasks.py`)"
TRANSFERS = (
    Transfer("ab", "Somebody else's task: ab", _GYM_TEXT, _gym("ab", "ab_reward", 56)),
    Transfer(
        "palindrome_generation",
        "Somebody else's task: palindrome_generation",
        _GYM_TEXT,
        _gym("palindrome_generation", "palindrome_reward", 16),
    ),
    Transfer(
        "ab_long",
        "Long completions: ab_long",
        "As `ab`, in solutions of 211 tokens on average (`benchmarks/gym_tasks.py`)",
        _gym("ab_long", "ab_reward", 280),
        budget=960,
        points=2,
    ),
    Transfer(
        "arithmetic_5m",
        "A larger model: arithmetic_5m",
        "The embedded task with a base model of 5.3 million parameters, the small one widened and trained on "
        "(`benchmarks/arithmetic_base.py`)",
        {"model_name_or_path": "runs/gym/arithmetic_5m"},
    ),
)
ROWS = (*FIGURE, *PARTS, *(row for transfer in TRANSFERS for row in transfer.rows), *CHECKS)
