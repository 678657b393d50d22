"""The folder that a run writes into: what an earlier run has left there, and files that say how to repeat this one."""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import yaml

from ..checks import files
from ..checks.secrets import mask, mask_words
from ..config import CONTENT, OPTIMIZER, OPOConfig
from ..report.run_files import ENVIRONMENT, RECIPE, SETTINGS, another_run, is_finished, is_run, read_settings
from ..resume.checkpoint import LAST, fault, last_complete, load_state, resolve
from ..resume.other_processes import OF_STEPS, fitting


logger = logging.getLogger(__name__)

# Fields that a run keeps when it resumes from a checkpoint, besides those of LoRA: all but its length, its learning
# rate, what it saves, logs, validates and reports, and how it is executed. A checkpoint would hide new values of
# optimizer and schedule.
KEPT = (
    *("model_name_or_path", "model_revision", "dtype", "load_in_8bit", "load_in_4bit", "use_peft", "use_dora"),
    *("use_rslora", *OPTIMIZER, "lr_scheduler_type", "seed", *CONTENT),
)


def same_completions(values: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """
    The `gradient_accumulation_steps` and `steps_per_generation` with which a recipe that resumes, perhaps on another
    number of processes, keeps its completions per optimizer step and rollout; they replace `generation_batch_size`.
    Empty if there is nothing to resume, or the recipe has other values of these fields than the stored one. `values`
    are those of all fields, `recipe` has those that are set.
    """
    # Each process looks for itself: how processes are connected depends on these values.
    checkpoint, output_dir = values["resume_from_checkpoint"], values["output_dir"] or "trainer_output"
    folder = Path(str(last_complete(output_dir) if checkpoint in LAST else checkpoint))
    if fault(folder):  # no complete checkpoint
        return {}
    stored_recipe = yaml.safe_load(files.read_text(folder.resolve().parent / RECIPE, follow=True))
    if not stored_recipe:
        return {}
    for name in (*OF_STEPS, "generation_batch_size"):
        if stored_recipe.get(name) != recipe.get(name):
            return {}
    processes = int(os.environ.get("WORLD_SIZE", 1))
    sizes = fitting(load_state(folder, 0)["settings"], {**values, "processes": processes})
    return {**sizes, "generation_batch_size": None}


def find_checkpoint(args: OPOConfig, settings: Mapping[str, Any], *, overwrite: bool) -> str | None:
    """
    The folder of the checkpoint that a run resumes from; `None` if it begins. `settings` are all settings of this run;
    `overwrite`: an earlier run in its folder may be moved aside.

    Raises:
        `ValueError`: it was trained with another model, data or method, or the folder holds another run.
    """
    checkpoint = resolve(args.resume_from_checkpoint, args.output_dir)
    saved = read_settings(Path(checkpoint).resolve().parent) if checkpoint else {}
    names = [*KEPT, *(name for name in settings if name.startswith("lora_"))]
    # These schedules set the rate by what has happened, so it cannot be scaled to another one.
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        names.append("learning_rate")
    differences = []
    for name in names:
        there, here = saved.get(name), settings.get(name)
        if saved and there != here:
            differences.append(f"  {name}={there!r} there, {name}={here!r} here\n")
    if differences:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} belongs to a run with other settings:\n{''.join(differences)}"
            "Set the same values here, or start a new `output_dir` from its weights: set `model_name_or_path` to it."
        )
    if is_run(Path(args.output_dir)) and not (overwrite or _run_there_goes_on(args, checkpoint)):
        raise another_run(args.output_dir)
    return checkpoint


def _run_there_goes_on(args: OPOConfig, checkpoint: str | None) -> bool:
    """
    Whether this run is the one in its output folder, and goes on: from a checkpoint there, or, with `"auto"`, from the
    beginning of an unfinished run that has none yet.
    """
    folder = Path(args.output_dir)
    if checkpoint is None:
        return args.resume_from_checkpoint == "auto" and not is_finished(folder)
    return Path(checkpoint).resolve().parent == folder.resolve()


def claim(args: OPOConfig, checkpoint: str | None) -> None:
    """
    Make the output folder of a run. An earlier run in it, unless this one continues it, is moved aside, to the first
    of `folder-2`, `folder-3` … that is free.
    """
    folder = Path(args.output_dir)
    if is_run(folder) and not _run_there_goes_on(args, checkpoint):
        aside = files.free(folder)
        folder.rename(aside)
        logger.warning(f"The earlier run in {str(folder)!r} is now in {str(aside)!r}.")
    folder.mkdir(parents=True, exist_ok=True)
    if args.log_completions:
        (folder / "completions").mkdir(exist_ok=True)  # TRL's trainer made one, which is now aside


def write_description(folder: Path, *, recipe: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> None:
    """
    Write `settings.json`, `recipe.yaml` and `environment.json`, without secrets. The last has what else this run
    depends on: seed, command, commit, devices and versions.
    """
    files.write_json(folder / SETTINGS, mask(settings))  # written first, because it makes this folder a run's
    files.write(folder / RECIPE, yaml.safe_dump(mask(recipe), sort_keys=False, allow_unicode=True))
    environment = {
        "seed": seed,
        "command": mask_words(sys.argv),
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "packages": _versions(),
    }
    files.write_json(folder / ENVIRONMENT, environment)


def _versions() -> dict[str, str]:
    """Version of each installed package, by name."""
    versions = {package.name: package.version for package in distributions() if package.name}
    return dict(sorted(versions.items()))


def git_commit(folder: Path) -> str | None:
    """
    Commit of a folder's checkout by git, with `-dirty` appended if files differ; `None` outside a checkout, or if git
    is missing or takes more than 10 seconds.
    """
    # Without tags: `--exclude=*` leaves the bare commit.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or a file system that is too slow for it
        return None
    return git.stdout.strip() or None if git.returncode == 0 else None
