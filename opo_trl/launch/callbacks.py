"""Callbacks of `opo_trl.train`: log file, progress bar, accuracies before training, and validation."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from ..evaluate import Decoding, Evaluation, evaluate
from ..report.run_folder import COMPLETIONS, LOG, SUMMARY, append_lines, rewind, write_json
from ..rollout.trainer import RolloutTrainer


class LogFile(TrainerCallback):
    """
    Writes every log entry as a line of `log.jsonl`.

    Args:
        folder (`Path`):
            Folder of the run.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            for name in (LOG, COMPLETIONS):
                rewind(self.folder / name, state.global_step if state.global_step else -1)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            append_lines(self.folder / LOG, [{"step": state.global_step, **logs}])


class ProgressBar(ProgressCallback):
    """A progress bar with the four metrics that people watch, instead of a dictionary of fifty per step."""

    _shown = (
        ("reward", "reward"),
        ("validation/accuracy", "validation"),
        ("entropy", "entropy"),
        ("grad_norm", "grad"),
    )

    def __init__(self):
        super().__init__()
        self.latest: dict[str, str] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.latest |= {label: f"{logs[key]:.3f}" for key, label in self._shown if logs.get(key) is not None}
            self.training_bar.set_postfix(self.latest, refresh=False)


class ReportBefore(TrainerCallback):
    """
    Measures the base model's accuracies before the first step, and writes them to `summary.json`.

    This has to wait until training begins, because DeepSpeed and FSDP only then place and shard the model. A resumed
    run measures nothing: either the summary has the accuracies, or the first step is over.

    Args:
        summary (`dict`):
            Content of `summary.json` so far, the same on every process; `before` is filled in here.
        measure (`Callable[[], dict]`):
            Measures the accuracies; called on every process.
        folder (`Path`):
            Folder of the run.
        show (`Callable[[dict], None]`):
            Prints the accuracies, `{}` if they are unknown.

    Attributes:
        seconds (`float`): duration of the measurement.
    """

    def __init__(
        self,
        summary: dict[str, Any],
        *,
        measure: Callable[[], dict[str, Any]],
        folder: Path,
        show: Callable[[dict[str, Any]], None],
    ):
        self.summary, self.measure, self.folder, self.show = summary, measure, folder, show
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        started = time.perf_counter()
        if "before" not in self.summary and state.global_step == 0:
            self.summary["before"] = self.measure()
        if state.is_world_process_zero:
            write_json(self.folder / SUMMARY, self.summary)
        self.show(self.summary.get("before", {}))
        self.seconds = time.perf_counter() - started


class Validation(TrainerCallback):
    """
    Measures the policy's accuracy on held-out problems before the first step and after every `steps` steps.

    The result is logged under `validation/`: `accuracy`, `low` and `high` (95 % Wilson interval) and `unscorable`.

    Args:
        trainer ([`RolloutTrainer`]):
            Trainer of the policy.
        dataset (`datasets.Dataset`):
            The problems.
        steps (`int`):
            Optimizer steps between two validations.
        decoding (`str`):
            `"greedy"` or `"sampled"`.
        folder (`Path`):
            Folder of the run; the first completions of each validation go to its `completions.jsonl`.
    """

    kept_completions = 8

    def __init__(self, trainer: RolloutTrainer, dataset: Dataset, *, steps: int, decoding: Decoding, folder: Path):
        self.trainer, self.dataset, self.steps, self.decoding, self.folder = trainer, dataset, steps, decoding, folder

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._validate(state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            should_log = control.should_log
            self._validate(state)
            control.should_log = should_log  # logging clears the flag, and the step's own entry is still to come

    def _validate(self, state):
        result = evaluate(self.trainer, self.dataset, decoding=self.decoding, seed=state.global_step)
        summary = result.summary()
        metrics = {f"validation/{name}": summary[name] for name in ("accuracy", "low", "high", "unscorable")}
        # Not TRL's `log`, which would flush the training metrics of an unfinished logging interval.
        Trainer.log(self.trainer, metrics)
        if state.is_world_process_zero:
            append_lines(self.folder / COMPLETIONS, self._lines(result, state.global_step))

    def _lines(self, result: Evaluation, step: int) -> list[dict]:
        return [{"step": step, **sample} for sample in result.samples[: self.kept_completions]]
