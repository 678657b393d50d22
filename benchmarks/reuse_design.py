"""The runs of the benchmark of reuse (see reuse.py)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .learning_curves import CurveRun
from .regime_design import COMMON


RUNS = Path("runs/reuse")
TUNING_SEEDS = (41, 42, 43)  # of which the first one decides who goes on to the others
FINALISTS = 2
SEEDS = tuple(range(101, 111))  # that no choice was based on
FEW_SEEDS = SEEDS[:5]  # of the robustness checks
GOALS = (0.82, 0.88)  # sampled accuracies

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


def _clipped(name: str, widths: tuple[float, float]) -> tuple[Fields, ...]:
    """A single pass never clips: there the learning rate alone is tried."""
    return (
        *_grid(learning_rate=(1e-4, 2e-4, 4e-4), num_iterations=(1,)),
        *_grid(learning_rate=(1e-4, 2e-4), num_iterations=(2,), **{name: widths}),
        *_grid(learning_rate=(1e-4,), num_iterations=(4,), **{name: widths[1:]}),
    )


CONTENDERS = (
    Contender("GRPO", {"trainer": "grpo", "loss_type": "grpo"}, _clipped("epsilon", (0.2, 0.4)), 3000, "#0072b2"),
    Contender(
        "DAPO",
        {
            "trainer": "grpo",
            "loss_type": "dapo",
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "mask_truncated_completions": True,
            "max_sampling_rounds": 4,
        },
        _clipped("epsilon_high", (0.28, 0.5)),
        4000,
        "#56b4e9",
    ),
    Contender(
        "CISPO", {"trainer": "grpo", "loss_type": "cispo"}, _clipped("epsilon_high", (2.0, 5.0)), 3000, "#009e73"
    ),
    Contender(
        "OPO",
        # Zero-gradient samples are computed for their entropy.
        {"trainer": "opo", "skip_inert_rows": False},
        (
            *_grid(learning_rate=(5e-5, 1e-4, 2e-4), num_iterations=(4,), max_staleness=(8, 32)),
            *_grid(learning_rate=(5e-5,), num_iterations=(8,), max_staleness=(32,)),
            *_grid(learning_rate=(2e-4,), num_iterations=(2,), max_staleness=(16,)),
        ),
        1500,
        "#d55e00",
    ),
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
