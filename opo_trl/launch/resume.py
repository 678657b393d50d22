"""Whether a checkpoint belongs to the run that resumes it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.run_folder import SETTINGS, read_json
from ..report.settings import MODEL_PREFIX, kept_on_resume


def check_same_run(folder: str, settings: Mapping[str, Any], model: str) -> None:
    """
    Check that a checkpoint is resumed with the model, data and method that it was trained with.

    Args:
        folder (`str`):
            Folder of the checkpoint. Its settings are read from the run folder that contains it. Without one, only
            the base model of an adapter is known.
        settings (`Mapping[str, Any]`):
            Resolved settings of the run that resumes it.
        model (`str`):
            Base model of that run: folder, or id on the Hub.

    Raises:
        `ValueError`: names the fields that differ.
    """
    saved = read_json(Path(folder).resolve().parent / SETTINGS)
    asked = json.loads(json.dumps(settings, default=str))
    names = (*kept_on_resume(), *(name for name in asked if name.startswith(MODEL_PREFIX)))
    differing = [name for name in names if saved and saved.get(name) != asked.get(name)]
    if differing:
        lines = "\n".join(f"  {name}={saved.get(name)!r} there, {name}={asked.get(name)!r} here" for name in differing)
        raise ValueError(
            f"resume_from_checkpoint={folder!r} belongs to a run with other settings:\n{lines}\n"
            "Set the same values here, or choose another `output_dir` and start from the beginning."
        )
    base = read_json(Path(folder) / "adapter_config.json").get("base_model_name_or_path", model)
    if not saved and os.path.realpath(base) != os.path.realpath(model):
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is an adapter for {base!r}, but model_name_or_path={model!r}. Set "
            "`model_name_or_path` to the adapter's model."
        )
