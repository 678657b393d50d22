"""The origin of results, resuming measurements, and peaks of GPU memory."""

import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from opo_trl.checks.files import read_json, write_json
from opo_trl.command.run_folder import git_commit


PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def origin() -> dict[str, Any]:
    """Command, date, hardware, versions and commit of this measurement."""
    on_gpu = torch.cuda.is_available()
    return {
        "command": " ".join(sys.orig_argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "device_memory": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(Path(__file__).parent),
    }


def device_name() -> str:
    """Name of the GPU, or `"cpu"`. A pretend GPU is called one, so that nobody takes its results for measurements."""
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name()
    return name if torch.version.cuda or torch.version.hip else f"pretend GPU ({name})"


def begin(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """
    The results in a file, to resume, or the beginning of new ones.

    Args:
        file (`Path`):
            File of the results.
        settings (`dict[str, Any]`):
            Settings of the measurement.

    Raises:
        `ValueError`: if the file has results of other settings, versions or hardware, or of another commit.
    """
    new = {"settings": settings, **origin()}
    results = read_json(file) or new
    for name in ("settings", "device", "versions", "git_commit"):
        if results[name] != new[name]:
            raise ValueError(
                f"{str(file)!r} holds results with {name}={results[name]}, and this would add some with {new[name]}. "
                "Choose another output."
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    return results


class Limit:
    """
    A time limit that starts now.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float):
        self._seconds, self._started = seconds, time.perf_counter()

    def is_too_near(self, duration: float) -> bool:
        """Whether the limit is less than `duration` seconds away; if so, print a message."""
        elapsed = time.perf_counter() - self._started
        if elapsed + duration > self._seconds:
            print(f"Stopped after {elapsed:.0f} s: the same command resumes.", flush=True)
            return True
        return False


def measure_missing(
    file: Path, settings: dict[str, Any], cases: Mapping[str, Callable[[], Any]], limit: Limit, *, first: float = 0
) -> dict[str, Any]:
    """
    Measure the missing cases of a file, one by one, while there is time. Results are written as they come.

    A case that runs out of memory has this as its result. One that raises any other error, or in which the process
    ends, does not stop the others; the next call tries it again, after those not yet tried.

    Args:
        file (`Path`), settings (`dict[str, Any]`):
            As in [`begin`].
        cases (`Mapping[str, Callable]`):
            Function of each case, the slowest first: the next case is estimated to take as long as the longest so far.
        limit ([`Limit`]):
            Time limit for all of them.
        first (`float`, *optional*, defaults to 0):
            Estimate for the first case, in seconds.

    Returns:
        `dict[str, Any]`: What the file holds: `cases` and the seconds that each `took`, the errors of those that
        `failed`, by name, besides what [`begin`] returns.
    """
    results: dict[str, Any] = {"cases": {}, "took": {}, "failed": {}, **begin(file, settings)}
    missing = [name for name in cases if name not in results["cases"]]
    for name in sorted(missing, key=results["failed"].__contains__):
        if limit.is_too_near(max(results["took"].values(), default=first)):
            break
        results["failed"][name] = "did not end"
        write_json(file, results)
        began = time.perf_counter()
        try:
            results["cases"][name] = cases[name]()
            del results["failed"][name]
        except torch.OutOfMemoryError:
            results["cases"][name] = "out of memory"
            del results["failed"][name]
        except Exception as error:
            traceback.print_exc()
            results["failed"][name] = f"{type(error).__name__}: {error}"
        results["took"][name] = round(time.perf_counter() - began, 1)
        write_json(file, results)
        print(name, results["cases"].get(name, "failed"), flush=True)
        gc.collect()  # a trainer has reference cycles
        torch.cuda.empty_cache()
    return results


def reset_peak_memory():
    """Start measuring the peak of allocated GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int | None:
    """Largest number of bytes allocated since [`reset_peak_memory`]; `None` without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
