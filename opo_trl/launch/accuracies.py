"""Accuracies of a run before and after training: measured, stored in `summary.json`, and printed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset

from ..evaluate import evaluate
from ..fields import DATA, MODEL, REWARDS, SAMPLING
from ..report import run_folder
from ..report.settings import fields_deciding
from ..rollout.trainer import RolloutTrainer


def measure(trainer: RolloutTrainer, data: Mapping[str, Dataset], samples: int) -> dict[str, dict[str, dict]]:
    """Accuracy on each level's problems, greedy and sampled: level → decoding → [`Evaluation.summary`]."""
    return {
        level: {
            "greedy": evaluate(trainer, problems, decoding="greedy").summary(),
            "sampled": evaluate(trainer, problems, decoding="sampled", samples=samples).summary(),
        }
        for level, problems in data.items()
    }


def table(before: Mapping[str, Any], after: Mapping[str, Any] | None = None) -> str:
    """Accuracies with their intervals as text, one line per level and decoding; blank where unknown."""
    after = after or {}
    rows = dict.fromkeys((level, way) for results in (before, after) for level in results for way in results[level])

    def cell(results: Mapping[str, Any], level: str, decoding: str) -> str:
        result = results.get(level, {}).get(decoding)
        return f"{result['accuracy']:6.1%} [{result['low']:.1%}, {result['high']:.1%}]" if result else ""

    lines = [f"{'accuracy (95 % interval)':<26}{'before':<26}{'after' if after else ''}"]
    for row in rows:
        lines.append(f"{', '.join(row):<26}{cell(before, *row):<26}{cell(after, *row)}")
    return "\n".join(line.rstrip() for line in lines)


def known(folder: Path, checkpoint: str | None) -> dict[str, Any]:
    """
    What `summary.json` holds when a run starts or resumes.

    Broadcast from the first process, because another one might read the file after the first has updated it.
    """
    summary = run_folder.read_json(folder / run_folder.SUMMARY)
    if checkpoint is None:  # it starts over
        summary = {name: summary[name] for name in summary if name == "before"}
    elif "before" not in summary:  # the checkpoint may be in the folder of another run
        there = run_folder.read_json(Path(checkpoint).resolve().parent / run_folder.SUMMARY)
        summary |= {name: there[name] for name in there if name == "before"}
    return broadcast_object_list([summary])[0]


def forget_if_changed(folder: Path, settings: Mapping[str, Any]) -> None:
    """Delete the accuracies that an earlier run has left in a folder, if they depend on other settings."""
    asked, saved = json.loads(json.dumps(settings, default=str)), run_folder.read_json(folder / run_folder.SETTINGS)
    names = (*fields_deciding(DATA, MODEL, SAMPLING, REWARDS), "report_levels", "report_size", "report_samples")
    if any(saved.get(name) != asked.get(name) for name in names):
        (folder / run_folder.SUMMARY).unlink(missing_ok=True)
