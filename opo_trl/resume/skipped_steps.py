"""Optimizer steps by their gradient: which are skipped because it is not finite, and which moved the policy."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR

from .checkpoint import last_complete


logger = get_logger(__name__)

# Optimizers, by package and class, that leave the weights as they are as long as every gradient is 0.
REST_WITHOUT_GRADIENT = {
    "torch.SGD",
    "torch.Adam",
    "torch.AdamW",
    "torch.Adagrad",
    "torch.RMSprop",
    "transformers.Adafactor",
    "deepspeed.FusedAdam",
    "deepspeed.DeepSpeedCPUAdam",
}


class SkippedSteps:
    """
    Counts steps whose gradient is not finite, and ends the run after too many in a row (`max_skipped_steps`).
    `moved_at` is the number of the last step that may have moved the policy; 0 before the first.
    """

    def __init__(self, args: Any, accelerator: Accelerator, optimizer: Any):
        self.args = args
        self.accelerator = accelerator
        self.total = 0  # skipped steps of the run
        self.in_a_row = 0  # skipped steps since the last one that was not
        self.moved_at = 0  # number of the last optimizer step that may have moved the policy, counted from 1
        # Whether the optimizer may hold momentum, which moves the policy also in steps without a gradient
        self.had_gradient = optimizer is not None and _has_state(optimizer)
        self._schedule_may_be_behind = False  # whether the learning rate may have missed a skipped step

    def state_dict(self) -> dict[str, Any]:
        """Numbers, for [`~SkippedSteps.load_state_dict`]."""
        return {
            "total": self.total,
            "in_a_row": self.in_a_row,
            "moved_at": self.moved_at,
            "had_gradient": self.had_gradient,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of [`~SkippedSteps.state_dict`]."""
        self.total = state["total"]
        self.in_a_row = state["in_a_row"]
        self.moved_at = state["moved_at"]
        self.had_gradient = state["had_gradient"]

    def check(self, model: Any, optimizer: Any, norm: Any, *, step: int) -> Any:
        """
        Drop the gradient of the optimizer step number `step` if its `norm` is not finite, and count the step. Returns
        the norm for the log, NaN for a skipped step.
        """
        # The norm is over all processes, so they agree. DeepSpeed has already skipped the step, and kept another norm.
        if self.accelerator.state.deepspeed_plugin is not None:
            is_skipped = self.accelerator.optimizer_step_was_skipped
        else:
            norm = float(norm)  # read once: the log needs it, too
            is_skipped = not math.isfinite(norm)
        self._schedule_may_be_behind = is_skipped  # `_step_schedule` makes up for it
        if is_skipped:
            model.zero_grad()  # optimizers skip parameters without a gradient
            self.in_a_row += 1
            self.total += 1
            logger.warning(f"Step {step} is skipped: its gradient is not finite.")
            return math.nan
        self.in_a_row = 0
        self.had_gradient = self.had_gradient or norm != 0  # so the optimizer may hold momentum from now on
        if self._may_move(optimizer):
            self.moved_at = step
        return norm

    def _may_move(self, optimizer: Any) -> bool:
        """
        Whether the step that the optimizer is about to take can change a weight: with a learning rate, and by a
        gradient of this or an earlier step (momentum), by weight decay, or in a way of its own.
        """
        while hasattr(optimizer, "optimizer"):  # wrapped by Accelerate or DeepSpeed
            optimizer = optimizer.optimizer
        kind = type(optimizer)
        # Optimizers of other names may move weights even if every gradient is 0.
        name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        groups = [group for group in optimizer.param_groups if group["lr"] != 0]
        decays = any(group.get("weight_decay") for group in groups)
        return bool(groups) and (self.had_gradient or decays or name not in REST_WITHOUT_GRADIENT)

    @contextmanager
    def end_of_step(self, trainer: Trainer) -> Iterator[None]:
        """Log and save a step inside this context, which then raises a `RuntimeError` if too many were skipped."""
        self._step_schedule(trainer.lr_scheduler)  # after the step's learning rate was read, and before it is saved
        too_many = self.in_a_row >= self.args.max_skipped_steps
        if too_many:
            trainer.control.should_log = trainer.control.should_save = True
            self.in_a_row = 0  # a run resumed from this checkpoint has as many attempts
        yield
        if too_many:
            last = last_complete(self.args.output_dir)
            raise RuntimeError(
                f"max_skipped_steps={self.args.max_skipped_steps} is reached: gradients were not finite. The last "
                f"complete checkpoint is {last}. Lower `learning_rate`, or use bfloat16 instead of float16."
            )

    def _step_schedule(self, scheduler: Any) -> None:
        """
        Advance the schedule of the learning rate over a skipped step. Transformers does so itself, except where a
        gradient scaler or DeepSpeed has skipped the step: then every run has the same schedule.
        """
        was_held = self._schedule_may_be_behind and self.accelerator.optimizer_step_was_skipped
        self._schedule_may_be_behind = False
        follows_metric = isinstance(scheduler, (ReduceLROnPlateau, GreedyLR))
        if was_held and not follows_metric:
            getattr(scheduler, "scheduler", scheduler).step()  # unwraps that of DeepSpeed


def _has_state(optimizer: Any) -> bool:
    """
    Whether an optimizer holds anything from steps with a gradient, such as momentum: a tensor that is not all 0,
    besides its count of steps.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor) and bool(value.any()):
                return True
    return False
