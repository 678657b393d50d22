"""What an earlier run left: whether its checkpoint belongs to the run that resumes it, and its accuracies."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from ..fields import DATA, INHERITED, MODEL, REWARDS, SAMPLING, deciding
from ..methods import config_classes
from ..report.run_folder import SUMMARY, is_claimed, is_finished, is_run, read_settings, read_summary


MODEL_PREFIX = "lora_"


def continues(folder: Path, asked: Any, checkpoint: str | None) -> bool:
    """
    Whether the run in a folder goes on, so that its files stay.

    It does from its own checkpoint; if it has none, and so starts over, or began with the same checkpoint of another
    run, only unless it is finished.
    """
    if checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve():
        return True
    if not (is_run(folder) or is_claimed(folder)) or is_finished(folder):
        return False
    if checkpoint is None:
        return asked == "auto"
    began_with = read_settings(folder).get("resume_from_checkpoint")
    return os.path.realpath(str(began_with)) == os.path.realpath(checkpoint)


def fields_deciding(*topics: str) -> tuple[str, ...]:
    """Fields of recipes, of all methods, that decide one of these topics. Imports TRL."""
    from trl import ModelConfig  # takes seconds

    from ..arguments import OPOScriptArguments

    kinds = (OPOScriptArguments, ModelConfig, *config_classes())
    return tuple(dict.fromkeys(name for topic in topics for kind in kinds for name in deciding(kind, topic)))


def kept_on_resume() -> tuple[str, ...]:
    """
    Fields that a run keeps when it resumes from a checkpoint: all but its length, what it saves, logs, validates and
    reports, and how it is executed. A checkpoint restores optimizer and scheduler, which would hide new values.
    """
    return (*fields_deciding(*INHERITED), "seed")


def check_same_run(folder: str, settings: Mapping[str, Any]) -> None:
    """
    Check that a checkpoint is resumed with the model, data and method that it was trained with, as far as the run
    folder that contains it tells.
    """
    named, saved = f"resume_from_checkpoint={folder!r}", read_settings(Path(folder).resolve().parent)
    names = (*kept_on_resume(), *(name for name in settings if name.startswith(MODEL_PREFIX)))
    differing = [name for name in names if saved and saved.get(name) != settings.get(name)]
    lines = [f"  {name}={saved.get(name)!r} there, {name}={settings.get(name)!r} here" for name in differing]
    if lines:
        fix = "Set the same values here, or choose another `output_dir` and start from the beginning."
        raise ValueError("\n".join([f"{named} belongs to a run with other settings:", *lines, fix]))


def known_accuracies(folder: Path, checkpoint: str | None) -> dict[str, Any]:
    """
    What `summary.json` holds when a run starts or resumes.

    Broadcast from the first process, because another one might read the file after the first has updated it.
    """
    summary = read_summary(folder)
    if checkpoint is not None and "before" not in summary:  # the checkpoint may be in the folder of another run
        summary = read_summary(Path(checkpoint).resolve().parent)
    # The rest is that of an end that this run may not reach.
    return broadcast_object_list([{name: summary[name] for name in summary if name == "before"}])[0]


def forget_if_changed(folder: Path, settings: Mapping[str, Any]) -> None:
    """Delete the accuracies that an earlier run has left in a folder, if they depend on other settings."""
    saved = read_settings(folder)
    names = (*fields_deciding(DATA, MODEL, SAMPLING, REWARDS), "report_levels", "report_size", "report_samples")
    if any(saved.get(name) != settings.get(name) for name in names):
        (folder / SUMMARY).unlink(missing_ok=True)
