"""Optimizer steps whose gradient is not finite: they are skipped, and their samples are kept."""

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR

from .wording import WordingTrainer


logger = get_logger(__name__)


class SkippingTrainer(WordingTrainer):
    """[`~transformers.Trainer`] that skips a step whose gradient is not finite, and ends after too many in a row."""

    args: Any  # with `max_skipped_steps`
    _metrics: Any  # TRL's
    _batches_of_step: list[Any]  # this process's micro-batches of the current optimizer step

    _skipped_steps = 0
    _skipped_in_a_row = 0
    _schedule_due = False  # whether the learning rate may have missed a skipped step

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # The norm is over all processes, so they agree. DeepSpeed has already skipped the step, and kept another norm.
        if self.is_deepspeed_enabled:
            skipped = self.accelerator.optimizer_step_was_skipped
        else:
            grad_norm = float(grad_norm)  # read once: the log needs it, too
            skipped = not math.isfinite(grad_norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._schedule_due = skipped
        if skipped:
            model.zero_grad()  # optimizers skip parameters without a gradient
            self._skipped_steps += 1
            kept = self._keep_samples_of_step()
            logger.warning(
                f"Step {self.state.global_step + 1} is skipped: its gradient is not finite. Its samples are kept in "
                f"{str(kept)!r}, those of other processes next to it."
            )
        return math.nan if skipped else grad_norm

    def _keep_samples_of_step(self) -> Path:
        path = Path(self.args.output_dir) / f"skipped_step_{self.accelerator.process_index}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.state.global_step + 1, "micro_batches": self._batches_of_step}, path)
        return path

    def _step_schedule(self) -> None:
        """
        Advance the learning rate's schedule over a skipped step.

        Transformers does, except where a gradient scaler (float16) or DeepSpeed reports that it has skipped the step.
        """
        held = self._schedule_due and self.accelerator.optimizer_step_was_skipped
        self._schedule_due = False
        if held and not isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR)):
            getattr(self.lr_scheduler, "scheduler", self.lr_scheduler).step()  # unwraps that of DeepSpeed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs:
            self._metrics["train"]["opo/skipped_steps"].append(self._skipped_steps)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args, **named):
        self._step_schedule()  # after the step's learning rate was read, and before it is saved
        too_many = self._skipped_in_a_row >= self.args.max_skipped_steps
        if too_many:
            self.control.should_log = self.control.should_save = True
        super()._maybe_log_save_evaluate(*args, **named)
        if too_many:
            raise RuntimeError(
                f"max_skipped_steps={self.args.max_skipped_steps} is reached: that many optimizer steps in a row had "
                f"a gradient that is not finite. The checkpoint of step {self.state.global_step} has the weights from "
                "before them. Look at the samples in `skipped_step_*.pt`; a lower `learning_rate`, or bfloat16 "
                "instead of float16, often helps."
            )
