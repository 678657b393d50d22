"""The folder that a run writes into: no run mixes its files with those of another, and they say how to repeat it."""

import fcntl
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name

from ..checks import files, paths, strict_yaml
from ..checks.secrets import mask, mask_words
from ..report.run_folder import ENVIRONMENT, LOCK, RECIPE, REQUIREMENTS, SETTINGS, is_run


logger = logging.getLogger(__name__)

_PACKAGES = (
    *("opo_trl", "trl", "transformers", "torch", "accelerate", "datasets"),
    *("peft", "deepspeed", "vllm", "math-verify", "matplotlib", "bitsandbytes"),
)


def check(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """
    A `ValueError` if a run that begins in a folder would write over something else, or cannot write.

    `resume`: it continues the run in this folder. `overwrite`: an earlier run there may be moved aside.
    """
    paths.check_folder("output_dir", folder)
    if (folder / LOCK).exists():
        _lock(folder, fcntl.LOCK_SH).close()  # shared: all processes of this run check at the same time
    if resume or _is_empty(folder):
        return
    said = f"output_dir={str(folder)!r} is not empty"
    if overwrite:
        if Path.cwd().is_relative_to(folder.resolve()):  # a relative path would lead to where it was moved
            raise ValueError(f"{said}, and contains the current folder. Start this command elsewhere.")
        if not is_run(folder):
            raise ValueError(f"{said}, and not a run of opo-trl. Choose another `output_dir`.")
        return
    raise ValueError(
        f"{said}. Choose another `output_dir`, continue that run with `--resume_from_checkpoint last`, or move it "
        "aside with `--overwrite`."
    )


def _is_empty(folder: Path) -> bool:
    """Whether it holds no file: TRL's trainer creates folders in it before the run begins."""
    return not any(path.is_file() and path.name != LOCK for path in folder.rglob("*"))


def claim(folder: Path, *, resume: bool, overwrite: bool) -> IO[str]:
    """
    After [`check`], lock a folder against other runs, and move an earlier run in it to the first of `folder-2`,
    `folder-3` … that is free. It stays locked until the returned file is closed, or this process ends for any reason.
    """
    check(folder, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, fcntl.LOCK_EX)
    if resume or _is_empty(folder):
        return lock
    place = folder.resolve()
    aside = next(each for n in count(2) if not os.path.lexists(each := place.with_name(f"{place.name}-{n}")))
    place.rename(aside)
    lock.close()
    for within in (place, *(place / entry.name for entry in aside.glob("completions"))):  # the trainer relies on it
        within.mkdir()
    logger.warning(f"The earlier run in {str(folder)!r} is now in {str(aside)!r}.")
    return _lock(folder, fcntl.LOCK_EX)


def _lock(folder: Path, kind: int) -> IO[str]:
    file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by another run, {file.read().strip()}. Choose another "
            "`output_dir`, or end that run first."
        ) from error
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error}): a second run could write into it, too.", stacklevel=2)
    if kind == fcntl.LOCK_EX:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
    return file


def write_description(folder: Path, *, recipe: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> None:
    """Write `settings.json`, `recipe.yaml`, `environment.json` and `requirements.txt`, without secrets."""
    files.write_json(folder / SETTINGS, mask(settings))  # first: from now on, it is a run's folder
    files.write(folder / RECIPE, strict_yaml.dump(mask(recipe)))
    files.write_json(folder / ENVIRONMENT, {"seed": seed, "command": mask_words(sys.argv), **environment()})
    # Without this package, which `environment.json` identifies by its commit.
    lines = [f"{name}=={number}\n" for name, number in sorted(_installed().items()) if name != "opo-trl"]
    files.write(folder / REQUIREMENTS, "".join(lines))


def environment() -> dict[str, Any]:
    """Commit, Python, platform, devices, and versions of the main packages, `None` if not installed."""
    import torch  # takes a second

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
    named = ((found.metadata["Name"], found.version) for found in reversed([*distributions()]))
    return {canonicalize_name(name): version for name, version in named if name}  # a broken one has none


def git_commit(folder: Path) -> str | None:
    """Commit of a folder's checkout, with `-dirty` appended if files differ; `None` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or a file system that is too slow for it
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
