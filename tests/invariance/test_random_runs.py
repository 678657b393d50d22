"""
Random configurations: planned runs against unplanned ones, resumed against whole ones, two processes against one.

A seed determines the configuration: how a rollout is cut, passed over and replayed, the terms of the objective, which
completions are truncated, unscored or partly written by a tool, and where the run is resumed. Completions and rewards
are scripted.
"""

import functools
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from launched_processes import launch, logs
from named_tensors import distance, snapshot
from recording_trainers import Recording, logged, make_trainer, without_times
from scripted_rollouts import PROMPTS, Script

from opo_trl import OPOConfig
from opo_trl.resume.checkpoint import load_state


ROWS = 4  # completions per micro-step, over all processes
TOLERANCE = 1e-3  # of parameters, relative to the distance that they moved

Options = dict[str, Any]


def draw_run(draw: random.Random, steps: int) -> tuple[Options, Script]:
    """Fields of `OPOConfig`, which may not fit together, and the script of the completions."""
    iterations = draw.choice([1, 1, 2, 3])
    options = {
        "steps_per_generation": draw.choice([1, 2, 3, 4, 6]),
        "gradient_accumulation_steps": draw.choice([1, 2, 3, 4]),
        "num_iterations": iterations,
        "max_staleness": draw.choice([0, 1, 2]) if iterations > 1 else 0,
        "max_steps": steps,
        "learning_rate": 0.005,
        "alpha": draw.choice([0.0, 0.4]),
        "mu": draw.choice([0.3, 1.0]),
        "beta": draw.choice([0.0, 0.0, 0.1]),
        "drive_scaling": draw.choice(["none", "group", "batch"]),
        "anchor_correction": draw.choice(["absorbed", "length_normalized", "sequence"]),
        "positivity": draw.choice(["none", "clip", "project", "stiffen"]),
        "log_ratio_reduction": draw.choice(["sum", "mean"]),
        "ratio_form": draw.choice(["truncated", "log", "exact"]),
        "adaptive_temperature": draw.random() < 0.3,
        "top_entropy_quantile": draw.choice([1.0, 1.0, 0.5]),
        "entropy_coef": draw.choice([0.0, 0.0, 0.01]),
        "off_policy_mask_threshold": draw.choice([None, None, 0.05]),
        "mask_truncated_completions": draw.random() < 0.5,
        "max_sampling_rounds": draw.choice([1, 1, 3]),
        "max_tokens_per_micro_batch": draw.choice([None, None, 40]),
        "skip_inert_rows": True,
    }
    options["use_bias_correction_kl"] = options["beta"] > 0 and draw.random() < 0.5
    if draw.random() < 0.3:
        options |= {"mu": None, "chi2_radius": 0.5}
    n_completions = ROWS * options["steps_per_generation"]
    rewards = []
    for _ in range(n_completions):
        is_unscored = draw.random() < 0.1
        rewards.append(None if is_unscored else float(draw.choice([0, 1, 1, 2])))
    if draw.random() < 0.5:
        rewards[:4] = [1.0] * 4  # a zero-variance group
    tools = {1: (1,)} if draw.random() < 0.5 else {}
    truncated = range(2, n_completions, 5)
    return options, Script(rewards=rewards, truncated=truncated, tool_tokens=tools, seed=draw.randrange(1000))


@functools.cache
def run_of(seed: int) -> tuple[Options, Script, int]:
    """The first configuration of a seed that is not rejected, its script, and a step before its last."""
    for attempt in itertools.count():
        draw = random.Random(f"{seed} {attempt}")
        steps = draw.choice([5, 7])
        options, script = draw_run(draw, steps)
        try:
            OPOConfig("…", per_device_train_batch_size=ROWS, num_generations=4, use_cpu=True, bf16=False, **options)
        except ValueError:
            continue
        return options, script, draw.randrange(1, steps)
    raise AssertionError


def make(model: str, folder: Path, seed: int, *, calls: Sequence = (), **changes: Any) -> tuple[Recording, Script]:
    """The trainer of a seed, with `changes`, whose script has been called as often as there are `calls`."""
    options, script, _ = run_of(seed)
    script = Script(**{**vars(script), "calls": [*calls]})
    data = Dataset.from_dict({"prompt": PROMPTS * 2})
    options = {"per_device_train_batch_size": ROWS, **options, **changes}
    return make_trainer(model, folder, script=script, trainer_arguments={"train_dataset": data}, **options), script


def error(trainer: Recording, other: dict[str, torch.Tensor]) -> float:
    """Distance of the parameters from others, relative to how far those moved."""
    distance_moved = distance(other, trainer.initial)
    if distance_moved <= 1e-6:
        return 0.0
    return distance(snapshot(trainer.model), other) / distance_moved


def compare_in_one_process(model: str, folder: Path, seed: int) -> list[str]:
    """Train whole, unplanned and resumed; says what differs."""
    whole, script = make(model, folder / "whole", seed, save_strategy="steps", save_steps=1)
    whole.train()
    expected = snapshot(whole.model)
    differing = []
    unplanned = {"plan_micro_batches": False, "skip_inert_rows": False, "max_tokens_per_micro_batch": None}
    other, _ = make(model, folder / "unplanned", seed, **unplanned)
    other.train()
    if not error(other, expected) < TOLERANCE:
        differing.append(f"unplanned, by {error(other, expected):.1e}")

    _, _, step = run_of(seed)
    saved = folder / "whole" / f"checkpoint-{step}"
    n_completions = load_state(saved, process=0)["completions_generated"]
    totals = itertools.accumulate(map(len, script.calls))
    calls_before = [call for call, total in zip(script.calls, totals, strict=True) if total <= n_completions]
    resumed, _ = make(model, folder / "resumed", seed, calls=calls_before)
    resumed.train(resume_from_checkpoint=str(saved))
    for name, weight in snapshot(resumed.model).items():
        if not torch.equal(weight, expected[name]):
            differing.append(f"resumed, {name}")
    if log_text(whole) != log_text(resumed):
        differing.append("resumed, the log")
    return differing


def log_text(trainer: Recording) -> str:
    """A run's log without times as text, in which NaN equals NaN."""
    entries = [without_times(entry) for entry in logged(trainer)]
    return json.dumps(entries, sort_keys=True)


def train_in_processes(model: str, folder: str, seeds: Sequence[int]) -> None:
    """In each of two processes: train each seed; the main process writes its parameters."""
    for seed in seeds:
        trainer, _ = make(model, Path(folder), seed, per_device_train_batch_size=ROWS // 2, ddp_backend="gloo")
        trainer.train()
        if trainer.accelerator.is_main_process:
            torch.save(snapshot(trainer.model), Path(folder) / f"{seed}.pt")


def compare_with_two_processes(model: str, folder: Path, seeds: Sequence[int]) -> list[str]:
    """Train seeds in one process and in two; says which differ."""
    status = launch(train_in_processes, model, str(folder), seeds, config="multi_gpu", processes=2, folder=folder)
    assert status == [0, 0], logs(folder)
    differing = []
    for seed in seeds:
        trainer, _ = make(model, folder / "one", seed)
        trainer.train()
        difference = error(trainer, torch.load(folder / f"{seed}.pt"))
        if not difference < TOLERANCE:
            differing.append(f"seed {seed}: two processes, by {difference:.1e}")
    return differing


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_planned_and_resumed_runs_are_the_plain_one(tiny_model: str, tmp_path: Path, seed: int):
    assert compare_in_one_process(tiny_model, tmp_path, seed) == []


@pytest.mark.slow
def test_runs_in_two_processes_are_those_in_one(tiny_model: str, tmp_path: Path):
    assert compare_with_two_processes(tiny_model, tmp_path, range(12)) == []


def test_another_configuration_differs(tiny_model: str, tmp_path: Path):
    one, _ = make(tiny_model, tmp_path, 0)
    one.train()
    other, _ = make(tiny_model, tmp_path, 0, alpha=0.9)
    other.train()
    assert error(other, snapshot(one.model)) > 10 * TOLERANCE
