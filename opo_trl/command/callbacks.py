"""Accuracies of a run, and callbacks: log file, progress bar, accuracies before training, and validation."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from ..checks.files import append_lines, read_lines, write_json, write_lines
from ..evaluate import Decoding, evaluate
from ..report.run_files import CHANGED_RATE, COMPLETIONS, LOG, SUMMARY
from ..report.run_report import accuracies, accuracy_lines
from ..trainer import OPOTrainer


def measure(trainer: OPOTrainer, data: Mapping[str, Dataset], samples: int) -> dict[str, dict[str, dict]]:
    """Accuracy on each level's problems, greedy and sampled: level → decoding → [`Evaluation.summary`]."""
    samples_of: dict[Decoding, int] = {"greedy": 1, "sampled": samples}
    accuracies: dict[str, dict[str, dict]] = {}
    for level, problems in data.items():
        accuracies[level] = {}
        for decoding, count in samples_of.items():
            result = evaluate(trainer, problems, decoding=decoding, samples=count)
            accuracies[level][decoding] = result.summary()
    return accuracies


class LogFile(TrainerCallback):
    """Writes every log entry as a line of `log.jsonl` in the run's folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            for name in (LOG, COMPLETIONS):
                write_lines(self.folder / name, self._earlier_lines(name, state.global_step))

    def _earlier_lines(self, name: str, step: int) -> list[dict[str, Any]]:
        """
        The lines of a run's file that stay when it goes on from this optimizer step: those up to it, as the run writes
        the later ones again. None if it begins.
        """
        if step == 0:
            return []
        earlier = []
        for line in read_lines(self.folder / name, follow=True, bounded=False):
            # The line says that the learning rate changed here; a run that resumes at this step says that anew.
            is_changed_rate = CHANGED_RATE in line
            if line["step"] < step or (line["step"] == step and not is_changed_rate):
                earlier.append(line)
        return earlier

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            step = {"step": state.global_step}
            # The step comes first in the line, and wins over a `step` that the logs may have.
            append_lines(self.folder / LOG, [step | logs | step])


_SHOWN = {"reward": "reward", "validation/accuracy": "validation", "entropy": "entropy", "grad_norm": "grad"}


class ProgressBar(ProgressCallback):
    """A progress bar with the four metrics that people watch, instead of a dictionary of fifty per step."""

    def __init__(self):
        super().__init__()
        self.latest: dict[str, str] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the latest value of each metric beside the bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            for metric, label in _SHOWN.items():
                if logs.get(metric) is not None:
                    self.latest[label] = f"{logs[metric]:.3f}"
            self.training_bar.set_postfix(self.latest, refresh=False)


class NewRate(TrainerCallback):
    """Gives a resumed run a new `learning_rate`: the checkpoint's optimizer and schedule have the old one."""

    def __init__(self, trainer: OPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        """Scale the learning rate of the restored optimizer and schedule, if this run has another one, and say so."""
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate wraps it
        rates = {*getattr(schedule, "base_lrs", ())}  # the checkpoint's `learning_rate`, from which it is scheduled
        is_new_run = not state.global_step
        if is_new_run or len(rates) != 1 or args.learning_rate in rates:
            return
        (old,) = rates
        schedule.base_lrs = [args.learning_rate] * len(schedule.base_lrs)
        for group in optimizer.param_groups:
            group["lr"] *= args.learning_rate / old
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]  # which the next entry logs
        self.trainer.accelerator.print(
            f"learning_rate={args.learning_rate:g} from here on, in place of {old:g}: "
            "the run is no longer a single trajectory.",
            flush=True,
        )
        # Not TRL's `log`, which would flush the training metrics of an unfinished logging interval.
        Trainer.log(self.trainer, {CHANGED_RATE: args.learning_rate})


class ReportBefore(TrainerCallback):
    """
    Measures the base model's accuracies before the first step, writes them to `summary.json`, and prints them.

    This has to wait until training begins, because DeepSpeed and FSDP only then place and shard the model. A resumed
    run measures nothing: either the `summary`, the same on every process, has the accuracies, or the first step is
    over. `seconds` is the time that it took.
    """

    def __init__(self, trainer: OPOTrainer, data: Mapping[str, Dataset], samples: int, summary: dict[str, Any]):
        self.trainer, self.data, self.samples, self.summary = trainer, data, samples, summary
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Measure if nothing is trained yet, and write and print what has been measured."""
        started = time.perf_counter()
        if "before" not in self.summary and state.global_step == 0:
            self.summary["before"] = measure(self.trainer, self.data, self.samples)
        if state.is_world_process_zero:
            write_json(Path(args.output_dir) / SUMMARY, self.summary)
        if self.summary.get("before"):
            self.trainer.accelerator.print(*accuracy_lines(accuracies(self.summary)), sep="\n", flush=True)
        self.seconds = time.perf_counter() - started


class Validation(TrainerCallback):
    """
    Measures the policy's accuracy on held-out problems before the first step and after every `steps` optimizer steps.

    The result is logged under `validation/`: `accuracy`, `low` and `high` (95 % Wilson interval) and `unscorable`. The
    first completions of each validation go to `completions.jsonl` in the run's folder.
    """

    kept_completions = 8

    def __init__(self, trainer: OPOTrainer, dataset: Dataset, *, steps: int, decoding: Decoding, folder: Path):
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
        """
        Evaluate the policy on all processes, log its accuracy, and write the first completions to the run's folder.
        The seed of the sampling is the step.
        """
        result = evaluate(self.trainer, self.dataset, decoding=self.decoding, seed=state.global_step)
        summary = result.summary()
        metrics = {f"validation/{name}": summary[name] for name in ("accuracy", "low", "high", "unscorable")}
        # Not TRL's `log`, which would flush the training metrics of an unfinished logging interval.
        Trainer.log(self.trainer, metrics)
        if state.is_world_process_zero:
            first = result.samples[: self.kept_completions]
            append_lines(self.folder / COMPLETIONS, [{"step": state.global_step, **sample} for sample in first])
