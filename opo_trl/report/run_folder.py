"""
The folder of a run: its recipe, environment, log and results.

    recipe.yaml          the recipe as run, with command-line overrides: `opo-trl train --config` repeats the run
    settings.json        every setting with its resolved value
    environment.json     main versions, hardware, seed, git commit, command
    requirements.txt     all versions, for `pip install -r`
    plan.txt             the plan printed when training started
    log.jsonl            one line per logged step: all metrics
    completions.jsonl    completions of the validation problems, over training
    summary.json         accuracies before and after, with intervals
    evaluation.json      what `opo-trl evaluate` measured, with both verdicts on each problem; evaluation.md: its table
    figures/             drawn from log.jsonl and summary.json
    _lock                locked while a run writes here; contains its process and machine
    report.html          the report: plan, accuracies, curves, diagnostics, completions
    checkpoint-*/, model.safetensors, …   as Transformers saves them
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from packaging.utils import canonicalize_name

from ..checks import files, paths


RECIPE, SETTINGS, ENVIRONMENT = "recipe.yaml", "settings.json", "environment.json"
REQUIREMENTS = "requirements.txt"
PLAN, LOG, COMPLETIONS, SUMMARY = "plan.txt", "log.jsonl", "completions.jsonl", "summary.json"
TRL_COMPLETIONS = "completions"  # of `log_completions`
LOCK = "_lock"  # files with a leading underscore are not pushed to the Hub

_PACKAGES = (
    "opo_trl",
    "trl",
    "transformers",
    "torch",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "vllm",
    "math-verify",
    "matplotlib",
    "bitsandbytes",
)


def is_run(folder: Path) -> bool:
    """Whether a run has started in this folder."""
    return (folder / RECIPE).is_file()


def check(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """
    Check that a run may write into a folder, without writing or deleting anything.

    `resume`: the run in this folder is resumed, so its files stay. `overwrite`: an earlier run there may be deleted.

    Raises:
        `ValueError`: another run writes into the folder, its content would be overwritten, or it is not writable.
    """
    paths.check_folder("output_dir", folder)
    if (folder / LOCK).exists():
        _lock(folder, fcntl.LOCK_SH).close()  # shared: all processes of this run check at the same time
    if not resume and folder.exists() and any(not _is_from_startup(entry) for entry in folder.iterdir()):
        if not overwrite:
            raise ValueError(
                f"output_dir={str(folder)!r} is not empty. Choose another `output_dir`, continue that run with "
                "`--resume_from_checkpoint last`, or delete it with `--overwrite`."
            )
        if not is_run(folder):
            raise ValueError(
                f"output_dir={str(folder)!r} is not empty and contains no {RECIPE}, so it is not a run of this "
                "program and will not be deleted. Choose another `output_dir`."
            )


def _is_from_startup(entry: Path) -> bool:
    """Whether a run creates this entry before it claims the folder: the lock, and TRL's folder, still empty."""
    return entry.name == LOCK or (entry.name == TRL_COMPLETIONS and entry.is_dir() and not any(entry.iterdir()))


def claim(folder: Path, *, resume: bool, overwrite: bool) -> IO[str]:
    """
    Create the folder of a run, or empty it, after [`check`], and lock it against other runs.

    Returns:
        `IO[str]`: the open lock file. The folder stays locked until it is closed, or this process ends for any reason.
    """
    check(folder, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, fcntl.LOCK_EX)
    for entry in folder.iterdir() if not resume else ():
        if _is_from_startup(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
            if entry.name == TRL_COMPLETIONS:  # the trainer, which exists by now, writes into it
                entry.mkdir()
        else:
            entry.unlink()
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock


def _lock(folder: Path, kind: int) -> IO[str]:
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by another run, {file.read()}. Choose another `output_dir`, or end "
            "that run first."
        ) from error
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error}): a second run could write into it, too.", stacklevel=2)
    return file


@contextmanager
def left_as_found(folder: Path) -> Iterator[None]:
    """If the block fails, remove the empty folders on the way to `folder` that it has created."""
    absent = [path for path in (folder / TRL_COMPLETIONS, folder, *folder.parents) if not path.exists()]
    try:
        yield
    except Exception:
        for path in absent:
            with suppress(OSError):
                path.rmdir()
        raise


def write_description(folder: Path, *, recipe: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> None:
    """Write `recipe.yaml`, `settings.json`, `environment.json` and `requirements.txt`."""
    files.write(folder / RECIPE, yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True))
    files.write_json(folder / SETTINGS, settings)
    files.write_json(folder / ENVIRONMENT, {"seed": seed, "command": sys.argv, **environment()})
    # Without this package, which `environment.json` identifies by its commit.
    lines = [f"{name}=={number}\n" for name, number in sorted(_installed().items()) if name != "opo-trl"]
    files.write(folder / REQUIREMENTS, "".join(lines))


def environment() -> dict[str, Any]:
    """Commit, Python, platform, devices, and versions of the main packages, `None` if not installed."""
    installed = _installed()
    return {
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "packages": {name: installed.get(canonicalize_name(name)) for name in _PACKAGES},
    }


def _installed() -> dict[str, str]:
    """Versions of the installed distributions; if one is installed twice, that of the imported one."""
    return {canonicalize_name(found.name): found.version for found in reversed([*distributions()])}


def git_commit(folder: Path) -> str | None:
    """Commit of a folder's checkout, with `-dirty` appended if files differ; `None` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
