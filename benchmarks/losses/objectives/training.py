"""One run of an objective on the embedded arithmetic task, with completions of a given age, or with replay."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data.arithmetic import base_model_path
from opo_trl.objective import Objective

from ..stale import (
    BATCH,
    StaleTrainer,
    accuracies,
    arithmetic_rewards,
    common_fields,
    make_tokenizer,
    of_arithmetic,
    training_problems,
)


@dataclass(frozen=True)
class Regime:
    """
    How old completions are, and how often they are trained on. Optimizer steps are of 48 completions.

    Args:
        rollouts (`int`): of 8 prompts × 6 completions.
        lag (`int`): versions of the policy that completions are old when the trainer takes them up. It trains on them
            one version later, as an asynchronous trainer does, which fetches a rollout ahead.
        passes (`int`): over each rollout.
        replay (`int`): earlier rollouts that the passes after the first draw from; 0 for completions of an age.
    """

    rollouts: int
    lag: int = 0
    passes: int = 1
    replay: int = 0

    @property
    def described(self) -> str:
        """In words, for a page."""
        passes = {1: "once", 2: "in two optimizer steps", 4: "in four passes"}[self.passes]
        age = "by the current policy" if not self.lag else f"by the policy {self.lag} versions ago"
        if self.replay:
            age = f"by the current policy, and in all passes but the first from up to {self.replay} earlier rollouts"
        elif self.lag >= self.rollouts:
            age = "by the base model"
        return f"{self.rollouts * BATCH:,} completions {age}, trained on {passes}"


REGIMES = {
    "lag64": Regime(60, lag=64),
    "lag16x2": Regime(60, lag=16, passes=2),
    "replay": Regime(24, passes=4, replay=32),
    "lag16": Regime(60, lag=16),
    "fresh": Regime(60),
}


@dataclass(frozen=True)
class Run:
    """
    A run.

    Args:
        objective (`str`): of the table's entries.
        regime (`str`): of [`REGIMES`].
        learning_rate (`float`), own (`float`): what is tuned; `own` is 0 for an objective without a field of its own.
        seed (`int`): of the order of prompts and of the completions.
        tuning (`bool`): whether it is measured on the problems for tuning.
    """

    objective: str
    regime: str
    learning_rate: float
    own: float
    seed: int
    tuning: bool


class ScaledRate(TrainerCallback):
    """
    A learning rate that is multiplied by a power of the effective sample size of the step's importance ratios, as in
    VCPO (2602.17616); the schedule sets it anew for the next step.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        share = self.trainer._metrics["train"]["opo/ratio/ess"][-1]
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= share**self.trainer.policy_objective.power


class GatedSteps(TrainerCallback):
    """
    Drops the gradient of a step in which that of the output layer is more than `ceiling` times as long as it was on
    average in the steps before (weights 0.9^k, dropped steps left out), in the spirit of DGG (2605.19425).
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.usual: float | None = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        norm = self.trainer.model.get_output_embeddings().weight.grad.norm().item()
        if self.usual is not None and norm > self.trainer.policy_objective.ceiling * self.usual:
            kwargs["optimizer"].zero_grad()  # an optimizer leaves parameters without a gradient as they are
        else:
            self.usual = norm if self.usual is None else 0.9 * self.usual + 0.1 * norm


def train(
    run: Run,
    objective_class: type[Objective],
    field: str,
    options: dict[str, Any],
    callback: Callable[[Any], TrainerCallback] | None = None,
    draws: int = 7,
) -> dict[str, Any]:
    """
    Train and measure in this process, which must be a new one.

    Args:
        objective_class: the objective.
        field: its own field, of the configuration or of the objective; several names for several that are equal.
        options: other fields of the configuration.
        callback: makes a callback from the trainer.
        draws: seed of the evaluation.

    Returns:
        The run's fields, its accuracies, the mean entropy of the last five optimizer steps, and processor seconds.
    """
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        return _train(run, objective_class, field, options, callback, folder, draws)


def _train(
    run: Run,
    objective_class: type[Objective],
    field: str,
    options: dict[str, Any],
    callback: Any,
    folder: str,
    draws: int = 7,
):
    torch.set_num_threads(1)
    regime, began = REGIMES[run.regime], time.process_time()
    names = field.split()
    in_configuration = {name: run.own for name in names if name in OPOConfig.__dataclass_fields__}
    fields: dict[str, Any] = {
        **common_fields(folder, run.learning_rate, run.seed, max_steps=regime.rollouts * regime.passes),
        "num_iterations": regime.passes,
        **options,
        **in_configuration,
    }
    trainer = (_with_replay if regime.replay else _of_age)(regime, objective_class, fields)
    for name in names:
        if name not in in_configuration:
            setattr(trainer.policy_objective, name, run.own)
    trainer.remove_callback(PrinterCallback)
    if callback is not None:
        trainer.add_callback(callback(trainer))
    trainer.train()
    entropies = [entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry][-5:]
    return {
        **asdict(run),
        **accuracies(trainer.model, make_tokenizer(), for_tuning=run.tuning, draws=draws),
        "entropy": round(sum(entropies) / len(entropies), 4),
        "seconds": round(time.process_time() - began, 1),
    }


def _of_age(regime: Regime, objective_class: type[Objective], fields: dict[str, Any]) -> Any:
    # The problems are shuffled already. Some objectives need a whole optimizer step in a micro-batch.
    args = OPOConfig(**fields, shuffle_dataset=False, plan_micro_batches=False)
    kind = type("StaleTrainer", (StaleTrainer,), {"objective_class": objective_class})
    return kind(args=args, age=regime.lag + 1, **of_arithmetic(args))


def _with_replay(regime: Regime, objective_class: type[Objective], fields: dict[str, Any]) -> Any:
    args = OPOConfig(**fields, max_staleness=regime.replay, plan_micro_batches=False)
    kind = type("OPOTrainer", (OPOTrainer,), {"objective_class": objective_class})
    return kind(
        base_model_path(),
        arithmetic_rewards,
        args=args,
        train_dataset=training_problems(args.seed),
        processing_class=make_tokenizer(),
    )
