"""
The folder of a run: its recipe, environment, log and results.

    recipe.yaml          the recipe as run, with command-line overrides: `opo-trl train --config` repeats the run
    settings.json        every setting with its resolved value
    environment.json     versions of all packages, hardware, seed, git commit, command
    plan.txt             the plan printed when training started
    log.jsonl            one line per logged step: all metrics
    completions.jsonl    completions of the validation problems, over training
    summary.json         accuracies before and after, with intervals
    report.html          the report: accuracies, verdicts and plan
    checkpoint-*/, model.safetensors, …   as Transformers saves them
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checks import files
from ..checks.text import one_line


RECIPE, SETTINGS, ENVIRONMENT = "recipe.yaml", "settings.json", "environment.json"
PLAN, LOG, COMPLETIONS, SUMMARY = "plan.txt", "log.jsonl", "completions.jsonl", "summary.json"


def is_run(folder: Path) -> bool:
    """Whether this folder describes a run."""
    return (folder / SETTINGS).is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder has ended."""
    return "after" in read_summary(folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run; empty if there are none."""
    return files.read_json(_file(folder, SETTINGS))


def read_summary(folder: Path) -> dict[str, Any]:
    """The accuracies of a run; empty if there are none."""
    return {name: value for name, value in files.read_json(_file(folder, SUMMARY)).items() if value is not None}


def by_decoding(accuracies: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The accuracies of a summary before or after training by level and decoding, such as `"Level 3, greedy"`."""
    return {f"{level}, {way}": result for level, results in accuracies.items() for way, result in results.items()}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log of a run, which may be gzipped (`log.jsonl.gz`); empty if there is none."""
    is_zipped = not os.path.lexists(folder / LOG) and (folder / f"{LOG}.gz").is_file()
    return files.read_lines(_file(folder, f"{LOG}.gz" if is_zipped else LOG))


def read_plan(folder: Path) -> str:
    """The plan of a run; empty if training had not begun."""
    return files.read_text(_file(folder, PLAN))


def _file(folder: Path, name: str) -> Path:
    """A file in a folder of somebody else's: neither a link to a private one nor a pipe that never ends."""
    path = folder / name
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{str(path)!r} is a link, or not a regular file. Put the file itself there, or remove it.")
    return path


@contextmanager
def as_a_run_leaves_it(*folders: Path) -> Iterator[None]:
    """A `ValueError` that names the folders if their files hold values of other kinds than a run writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        named, said = ", ".join(map(str, folders)), one_line(str(error))
        raise ValueError(f"{named}: not as a run leaves it: {type(error).__name__}: {said}.") from error
