"""Trainers that record their rollouts and optimizer steps, and what their logs say."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from device_fields import SMALL
from named_tensors import snapshot
from scripted_rollouts import PROMPTS, Script
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer


@dataclass
class Step:
    """A recorded optimizer step: the policy before it, micro-batches and their losses, the gradient."""

    policy: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    losses: list[float]
    gradient: dict[str, Tensor]


def on_host(batch: dict) -> dict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}


class Recording:
    """Mixin that records, on the host, a trainer's rollouts (before they are divided) and optimizer steps."""

    def record(self, inject: Callable[[dict, GRPOTrainer], None] | None = None):
        self.inject = inject
        self.rollouts = []
        self.steps = []
        self._batches = []
        self._losses = []
        self.initial = snapshot(self.model)
        self.add_callback(_PreOptimizerStep(self))
        return self

    def _generate_and_score_completions(self, inputs):
        self._policy = snapshot(self.model)
        rollout = super()._generate_and_score_completions(inputs)
        return rollout if isinstance(self, OPOTrainer) else self._finish_rollout(rollout)

    def _finish_rollout(self, rollout):
        if isinstance(self, OPOTrainer):
            rollout = super()._finish_rollout(rollout)
        n = len(rollout["advantages"])
        # These columns travel with the samples, and identify them afterwards.
        device = self.accelerator.device
        first_row = n * self.accelerator.process_index
        rollout["row"] = torch.arange(n, device=device) + first_row
        rollout["rollout"] = torch.full((n,), len(self.rollouts), device=device)
        if self.inject is not None:
            self.inject(rollout, self)
        self.rollouts.append(SimpleNamespace(policy=self._policy, **on_host(rollout)))
        return rollout

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._batches.append(on_host(inputs))
        return inputs

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss.item())
        return loss

    def end_of_step(self):
        gradient = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.to("cpu", copy=True)
        step = Step(snapshot(self.model), self._batches, self._losses, gradient)
        self.steps.append(step)
        self._batches = []
        self._losses = []


class _PreOptimizerStep(TrainerCallback):
    def __init__(self, trainer: Recording):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.end_of_step()


class RecordingOPO(Recording, OPOTrainer):
    pass


class RecordingGRPO(Recording, GRPOTrainer):
    pass


def make_trainer(
    model: str | torch.nn.Module,
    folder: Path,
    *,
    script: Script | None = None,
    inject: Callable[[dict, GRPOTrainer], None] | None = None,
    trainer_class: type[Recording] = RecordingOPO,
    trainer_arguments: dict | None = None,
    **overrides,
) -> Recording:
    """
    A recording trainer in float32: 2 groups of 4 per rollout, one optimizer step of 2 micro-batches, SGD.

    SGD without clipping keeps the size of the gradient, which AdamW's division would hide.
    """
    script = Script() if script is None else script
    arguments = {
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "reward_funcs": script.reward_functions(),
        "rollout_func": script.rollout,
        **(trainer_arguments or {}),
    }
    options = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        **overrides,
    }
    if issubclass(trainer_class, OPOTrainer):
        options = {"skip_inert_rows": False, **options}  # the reference needs every sample
    config_class = OPOConfig if issubclass(trainer_class, OPOTrainer) else GRPOConfig
    return trainer_class(model=model, args=config_class(**options), **arguments).record(inject)


def trained(*args, **kwargs) -> Recording:
    """[`make_trainer`], trained."""
    trainer = make_trainer(*args, **kwargs)
    trainer.train()
    return trainer


def logged(trainer: Recording) -> list[dict]:
    """Log entries of the optimizer steps."""
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def metric(trainer: Recording, name: str) -> list:
    """The values of a metric at the optimizer steps."""
    return [entry[name] for entry in logged(trainer)]


def changed_weights(trainer: Recording) -> set[str]:
    """Names of the weights that training has changed."""
    weights = snapshot(trainer.accelerator.unwrap_model(trainer.model))
    return {name for name, weight in weights.items() if not torch.equal(weight, trainer.initial[name])}


def without_times(entry: dict) -> dict:
    """A log entry without times, and without `train_loss`, the mean over the latest call's steps."""
    times = re.compile(r"step_time|train_runtime|train_loss|opo/time/.*|.*per_second.*")
    return {name: value for name, value in entry.items() if not times.fullmatch(name)}
