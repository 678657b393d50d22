"""Verdicts while a run trains, in any trainer of Transformers or TRL."""

from typing import Any

from transformers import TrainerCallback

from .diagnostics import conclusion, judge
from .logs import entries, numbers


class Diagnose(TrainerCallback):
    """
    Prints the verdicts on a GRPO run, those that are not healthy each in a line: `trainer.add_callback(Diagnose())`.

    Args:
        steps (`int`, *optional*, defaults to `50`): optimizer steps between the verdicts; the last are at the end.
    """

    def __init__(self, steps: int = 50):
        self.steps = steps

    def on_train_begin(self, args, state, control, **kwargs):
        self.printed = state.global_step

    def on_log(self, args, state, control, **kwargs):
        if state.global_step - self.printed >= self.steps:
            self._print(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step > self.printed:
            self._print(args, state)

    def _print(self, args: Any, state: Any) -> None:
        """Print, on the main process, the verdict on the run so far, and a line for each one that is not healthy."""
        self.printed = state.global_step
        if state.is_world_process_zero:
            verdicts = judge(entries([numbers(row) for row in state.log_history]), vars(args))
            poor = [verdict.line for verdict in verdicts if verdict.healthy is False]
            print(f"Step {state.global_step:,}. {conclusion(verdicts)}", *poor, sep="\n", flush=True)
