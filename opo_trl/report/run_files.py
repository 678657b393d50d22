"""
The folder of a run: its recipe, environment, log and results.

    recipe.yaml          the recipe as run, with command-line overrides: `opo-trl train --config` repeats the run
    settings.json        every setting with its resolved value
    environment.json     versions of all packages, hardware, seed, git commit, command
    plan.txt             the plan printed when training started
    log.jsonl            one line per logged step: all metrics
    completions.jsonl    completions of the validation problems, over training
    summary.json         accuracies before and after, with intervals
    report.html          the report: accuracies, verdicts, a few completions and plan
    checkpoint-*/, model.safetensors, …   as Transformers saves them
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checks import files
from ..metrics.log import number


RECIPE, SETTINGS, ENVIRONMENT = "recipe.yaml", "settings.json", "environment.json"
PLAN, LOG, COMPLETIONS, SUMMARY = "plan.txt", "log.jsonl", "completions.jsonl", "summary.json"
CHANGED_RATE = "resumed/learning_rate"  # metric: the learning rate of a run from here on, if another than before


def is_run(folder: Path) -> bool:
    """Whether this folder describes a run."""
    return (folder / SETTINGS).is_file()


def another_run(folder: str) -> ValueError:
    """The error, to be raised, of a new run whose output folder describes another one already."""
    fix = "continue it with `--resume_from_checkpoint last`, or move it aside with `--overwrite`"
    return ValueError(f"output_dir={folder!r} holds another run. Choose another `output_dir`, {fix}.")


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder has ended."""
    return "after" in read_summary(folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run; empty if there are none."""
    return files.read_json(folder / SETTINGS)


def read_summary(folder: Path) -> dict[str, Any]:
    """The accuracies and sizes in a run's `summary.json`, without those that are `None`; empty if it has none."""
    return {name: value for name, value in files.read_json(folder / SUMMARY).items() if value is not None}


def by_decoding(accuracies: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The accuracies of a summary before or after training by level and decoding, such as `"Level 3, greedy"`."""
    return {f"{level}, {way}": result for level, results in accuracies.items() for way, result in results.items()}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """
    The entries of a run's `log.jsonl`, which may be gzipped; empty if it has none. A `ValueError` if one has no number
    as its `step`.
    """
    log = files.read_lines(folder / LOG) or files.read_lines(folder / f"{LOG}.gz")
    for place, entry in enumerate(log, 1):
        if math.isnan(number(entry, "step")):
            raise ValueError(f"The log in {str(folder)!r} cannot be read: entry {place} has no number as its `step`.")
    return log
