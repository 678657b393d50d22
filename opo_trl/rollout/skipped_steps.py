"""Optimizer steps by their gradient: which are skipped because it is not finite, and which moved the policy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR

from ..config import updates_in_backward
from .checkpoint import last_complete


logger = get_logger(__name__)


class SkippedSteps:
    """
    Counts steps whose gradient is not finite, and ends the run after too many in a row (`max_skipped_steps`).
    `moved_at` is the number of the last step with a gradient other than 0; 0 before the first.
    """

    def __init__(self, args: Any, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.total = self.in_a_row = self.moved_at = 0
        self._schedule_due = False  # whether the learning rate may have missed a skipped step

    def check(self, model: Any, norm: Any, *, step: int) -> Any:
        """Drop the gradient of a `step` if it is not finite; returns its `norm` for the log."""
        # The norm is over all processes, so they agree. DeepSpeed has already skipped the step, and kept another norm.
        if self.accelerator.state.deepspeed_plugin is not None:
            skipped = self.accelerator.optimizer_step_was_skipped
        else:
            norm = float(norm)  # read once: the log needs it, too
            skipped = not math.isfinite(norm)
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self._schedule_due = skipped
        if not skipped:
            if norm != 0 or updates_in_backward(self.args):
                self.moved_at = step
            return norm
        model.zero_grad()  # optimizers skip parameters without a gradient
        self.total += 1
        logger.warning(f"Step {step} is skipped: its gradient is not finite.")
        return math.nan

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
            said = f"max_skipped_steps={self.args.max_skipped_steps} is reached: gradients were not finite"
            fix = "Lower `learning_rate`, or use bfloat16 instead of float16"
            last = last_complete(self.args.output_dir)
            raise RuntimeError(f"{said}. The last complete checkpoint is {last}. {fix}.")

    def _step_schedule(self, scheduler: Any) -> None:
        """Advance the schedule over a skipped step, as Transformers does without gradient scaler and DeepSpeed."""
        held = self._schedule_due and self.accelerator.optimizer_step_was_skipped
        self._schedule_due = False
        if held and not isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)):
            getattr(scheduler, "scheduler", scheduler).step()  # unwraps that of DeepSpeed
