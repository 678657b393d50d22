"""
A run's folder: what was asked for, what it ran on, what happened, and what came out.

    recipe.yaml          the recipe as run, command-line overrides merged in: `opo-trl train --config` repeats the run
    settings.json        every setting with its resolved value
    environment.json     main versions, hardware, seed, git commit, command
    requirements.txt     all versions, as `pip install -r` takes them
    plan.txt             the plan printed when training started
    log.jsonl            one line per logged step: all metrics
    completions.jsonl    completions of the validation problems, as training went on
    summary.json         accuracies before and after, with intervals
    figures/             drawn from log.jsonl and summary.json
    _lock                locked while a run writes here; holds its process and machine
    report.html          all of it for reading: plan, accuracies, curves, diagnostics, completions
    checkpoint-*/, model.safetensors, …   as Transformers saves them
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from packaging.utils import canonicalize_name

from ..checks import paths


RECIPE, SETTINGS, ENVIRONMENT = "recipe.yaml", "settings.json", "environment.json"
REQUIREMENTS = "requirements.txt"
PLAN, LOG, COMPLETIONS, SUMMARY = "plan.txt", "log.jsonl", "completions.jsonl", "summary.json"
TRL_COMPLETIONS = "completions"  # of `log_completions`
LOCK = "_lock"  # files whose names begin so are not pushed to the Hub

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
    """Whether a run has begun in this folder."""
    return (folder / RECIPE).is_file()


def check(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """
    Make sure that a run may write into a folder.

    Args:
        folder (`Path`):
            Folder of the run.
        resume (`bool`):
            Whether a run in this folder goes on: then what it holds stays.
        overwrite (`bool`):
            Whether an earlier run in this folder may be deleted.

    Raises:
        `ValueError`: another run writes into the folder, or it holds something that this run would overwrite, or
            cannot be written to. Nothing has been written or deleted then.
    """
    paths.check_folder("output_dir", folder)
    if (folder / LOCK).exists():
        _lock(folder, fcntl.LOCK_SH).close()  # shared: all processes of this run look at the same time
    if not resume and folder.exists() and any(not _is_of_start(entry) for entry in folder.iterdir()):
        if not overwrite:
            raise ValueError(
                f"output_dir={str(folder)!r} is not empty. Choose another `output_dir`, continue that run with "
                "`--resume_from_checkpoint last`, or delete it with `--overwrite`."
            )
        if not is_run(folder):
            raise ValueError(
                f"output_dir={str(folder)!r} is not empty and holds no {RECIPE}, so it is not a run of this program "
                "and will not be deleted. Choose another `output_dir`."
            )


def _is_of_start(entry: Path) -> bool:
    """Whether a run makes this entry of its folder before it claims it: the lock, and TRL's folder, still empty."""
    return entry.name == LOCK or (entry.name == TRL_COMPLETIONS and entry.is_dir() and not any(entry.iterdir()))


def claim(folder: Path, *, resume: bool, overwrite: bool) -> IO[str]:
    """
    Create the folder of a run, or empty it, after [`check`], and keep other runs out of it.

    Returns:
        `IO[str]`: an open file. Until it is closed, or this process ends in whatever way, the folder cannot be claimed
        again.
    """
    check(folder, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, fcntl.LOCK_EX)
    for entry in folder.iterdir() if not resume else ():
        if _is_of_start(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
            if entry.name == TRL_COMPLETIONS:  # which the trainer, made by now, writes into
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
        warnings.warn(f"{folder} cannot be locked ({error}): nothing keeps a second run out of it.", stacklevel=2)
    return file


@contextmanager
def left_as_found(folder: Path) -> Iterator[None]:
    """Remove the empty folders that the block has made on the way to `folder`, if it fails."""
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
    (folder / RECIPE).write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True))
    write_json(folder / SETTINGS, settings)
    write_json(folder / ENVIRONMENT, {"seed": seed, "command": sys.argv, **environment()})
    (folder / REQUIREMENTS).write_text("".join(f"{line}\n" for line in _requirements()))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is either the old one or the whole new one, whenever the process is stopped."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, default=str) + "\n")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; an absent one is empty."""
    return json.loads(path.read_text()) if path.exists() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file; a last line that was cut short by a kill is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def append_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file."""
    with path.open("a") as file:
        file.writelines(json.dumps(line, default=str, ensure_ascii=False) + "\n" for line in lines)


def rewind(path: Path, step: int) -> None:
    """Drop the lines of a JSONL file that lie after `step`, which a resumed run is about to write again."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    path.unlink(missing_ok=True)
    append_lines(path, kept)


def environment() -> dict[str, Any]:
    """What a run is made with: commit, Python, platform, devices, and the packages that matter, `None` if absent."""
    return {
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _requirements() -> list[str]:
    """Every installed distribution but this one, whose commit says more; of two, the one that is imported."""
    installed = {canonicalize_name(found.name): found.version for found in reversed([*distributions()])}
    return [f"{name}=={number}" for name, number in sorted(installed.items()) if name != "opo-trl"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """Commit of a folder's checkout, with `-dirty` behind it when files differ; `None` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
