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
    figures/             drawn from log.jsonl and summary.json
    _lock                locked while a run writes here; names the process and machine of each that has
    report.html          the report: plan, accuracies, curves, diagnostics, completions
    checkpoint-*/, model.safetensors, …   as Transformers saves them
"""

import fcntl
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name

from ..checks import files, paths, strict_yaml
from ..checks.secrets import mask, mask_words


logger = logging.getLogger(__name__)

RECIPE, SETTINGS, ENVIRONMENT = "recipe.yaml", "settings.json", "environment.json"
REQUIREMENTS = "requirements.txt"
PLAN, LOG, COMPLETIONS, SUMMARY = "plan.txt", "log.jsonl", "completions.jsonl", "summary.json"
TRL_COMPLETIONS = "completions"  # of `log_completions`
LOCK = "_lock"  # files with a leading underscore are not pushed to the Hub

_PACKAGES = (
    *("opo_trl", "trl", "transformers", "torch", "accelerate", "datasets"),
    *("peft", "deepspeed", "vllm", "math-verify", "matplotlib", "bitsandbytes"),
)

# Never deleted, and so never absent: the next run replaces them.
_DESCRIPTION = (RECIPE, SETTINGS, ENVIRONMENT, REQUIREMENTS)

# All else that a run writes into its folder, and all that overwriting deletes: paths in the folder.
_WRITTEN = (
    r"_.+\.part",  # of a file that was being written
    r"plan\.txt|log\.jsonl|completions\.jsonl|summary\.json|report\.html",
    r"figures/(training|passes|time|accuracy)\.(png|svg)|completions/completions_\d+\.parquet",
    r"rollouts/\d+-\d+\.jsonl",
    r"skipped_step_\d+\.pt|_?checkpoint-\d+(-replaced(-\d+)?)?",  # with all that is in it
    # Transformers, PEFT and TRL
    r"(config|generation_config|adapter_config|trainer_state|(all|train|eval)_results)\.json",
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|vocab\.txt",
    r"(tokenizer|spiece)\.model|chat_template\.(jinja|json)|(processor|preprocessor)_config\.json",
    r"training_args\.bin|README\.md",
    # DeepSpeed, TensorBoard and CodeCarbon
    r"global_step\d+|latest|zero_to_fp32\.py|runs/.+/events\.out\.tfevents\..+|emissions\.csv",
)
_SHOWN = 8  # names of files that stay
_FOLDERS = ("figures", TRL_COMPLETIONS, "rollouts", "runs")  # of which only what `_WRITTEN` names is deleted


def is_run(folder: Path) -> bool:
    """Whether this folder describes a run."""
    return (folder / RECIPE).is_file() and ((folder / SETTINGS).is_file() or is_claimed(folder))


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder has ended."""
    return "after" in read_summary(folder)


def is_claimed(folder: Path) -> bool:
    """Whether a run has claimed this folder. Only this program writes such a lock, first of all and for good."""
    lock, owner = folder / LOCK, re.compile(r"^process \d+ on .+$", re.MULTILINE)
    return lock.is_file() and not lock.is_symlink() and owner.search(files.read_text(lock)) is not None


def check(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """
    A `ValueError` if another run writes into a folder, its content would be overwritten, or it is not writable.

    `resume`: the run in this folder is resumed, so its files stay. `overwrite`: an earlier run there may be deleted.
    """
    paths.check_folder("output_dir", folder)
    if (folder / LOCK).exists():
        _lock(folder, fcntl.LOCK_SH).close()  # shared: all processes of this run check at the same time
    wrong, instead = "", "Choose another `output_dir`"
    if resume:
        foreign = [name for name in (*_DESCRIPTION, PLAN, LOG, COMPLETIONS, SUMMARY) if (folder / name).exists()]
        if foreign and not (is_run(folder) or is_claimed(folder)):
            wrong = f"is not a run of opo-trl, and its {', '.join(foreign)} would be overwritten. {instead}."
    elif folder.exists() and any(not _is_from_startup(entry) for entry in folder.iterdir()):
        if not overwrite:
            continued = "continue that run with `--resume_from_checkpoint last`, or delete it with `--overwrite`"
            wrong = f"is not empty. {instead}, {continued}."
        elif not is_claimed(folder):
            wrong = f"is not empty and not a run of opo-trl (no {LOCK}), so it will not be deleted. {instead}."
    if wrong:
        raise ValueError(f"output_dir={str(folder)!r} {wrong}")


def _is_from_startup(entry: Path) -> bool:
    """Whether a run creates this entry before it claims the folder: the lock, and TRL's folder, still empty."""
    return entry.name == LOCK or (entry.name == TRL_COMPLETIONS and entry.is_dir() and not any(entry.iterdir()))


def claim(folder: Path, *, resume: bool, overwrite: bool) -> IO[str]:
    """
    Create the folder of a run, or delete the run in it, after [`check`], and lock it against other runs.

    Only what a run writes is deleted; whatever else is in the folder stays, and is named in a line of the log. The
    folder stays locked until the returned file is closed, or this process ends for any reason.
    """
    check(folder, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, fcntl.LOCK_EX)
    # Appended before anything is deleted: stopped at any point, the folder is still known as a run's.
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    if not resume:
        _delete_run(folder)
    return lock


def _delete_run(folder: Path) -> None:
    """Delete what a run has written, except the description, which the next one replaces, and what it starts with."""
    within = [folder / name for name in _FOLDERS if not (folder / name).is_symlink()]
    below = [path for place in within for path in place.rglob("*")]
    for path in [*folder.iterdir(), *below]:
        if not re.fullmatch("|".join(_WRITTEN), path.relative_to(folder).as_posix()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in [*reversed(below), *within]:
        if path.name != TRL_COMPLETIONS:  # the trainer, which exists by now, writes into it
            with suppress(OSError):  # not a folder, or not empty
                path.rmdir()
    stays = sorted(entry.name for entry in folder.iterdir() if not _is_from_startup(entry))
    if kept := [name for name in stays if name not in _DESCRIPTION]:
        shown = ", ".join(map(repr, kept[:_SHOWN])) + (f" and {len(kept) - _SHOWN} more" if kept[_SHOWN:] else "")
        logger.warning(f"The earlier run in {str(folder)!r} is deleted. What no run has written stays: {shown}.")


def _lock(folder: Path, kind: int) -> IO[str]:
    # Through a link, a file elsewhere would be locked and written.
    file = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = (file.read().splitlines() or ["which has just started"])[-1]
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by another run, {owner}. Choose another `output_dir`, or end "
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
    """Write `recipe.yaml`, `settings.json`, `environment.json` and `requirements.txt`, without secrets."""
    files.write(folder / RECIPE, strict_yaml.dump(mask(recipe)))
    files.write_json(folder / SETTINGS, mask(settings))
    files.write_json(folder / ENVIRONMENT, {"seed": seed, "command": mask_words(sys.argv), **environment()})
    # Without this package, which `environment.json` identifies by its commit.
    lines = [f"{name}=={number}\n" for name, number in sorted(_installed().items()) if name != "opo-trl"]
    files.write(folder / REQUIREMENTS, "".join(lines))


# Settings that make optimizer steps of a rollout.
ROLLOUT = ("generation_batch_size", "steps_per_generation", "num_iterations", "gradient_accumulation_steps")


def read_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run; empty if there are none."""
    return files.read_json(folder / SETTINGS)


def read_summary(folder: Path) -> dict[str, Any]:
    """The accuracies of a run; empty if there are none."""
    summary = files.read_json(folder / SUMMARY)
    return {name: value for name, value in summary.items() if value is not None}


def by_decoding(accuracies: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The accuracies of a summary before or after training by level and decoding, such as `"Level 3, greedy"`."""
    return {f"{level}, {way}": result for level, results in accuracies.items() for way, result in results.items()}


def read_environment(folder: Path) -> dict[str, Any]:
    """What a run was made with; empty if it is not known."""
    return files.read_json(folder / ENVIRONMENT)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log of a run, which may be gzipped (`log.jsonl.gz`); empty if there is none."""
    zipped = folder / f"{LOG}.gz"
    return _with_step(folder / LOG if not zipped.is_file() or (folder / LOG).exists() else zipped)


def read_completions(folder: Path) -> list[dict[str, Any]]:
    """The completions of the validation problems."""
    return _with_step(folder / COMPLETIONS)


def _with_step(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in files.read_lines(path) if type(entry.get("step")) is int]


def environment() -> dict[str, Any]:
    """Commit, Python, platform, devices, and versions of the main packages, `None` if not installed."""
    import torch  # takes a second, and reading a folder needs none of it

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
