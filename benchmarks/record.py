"""The origin of results, resuming measurements, and peaks of GPU memory."""

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from opo_trl.checks.files import read_json, write_json
from opo_trl.report.run_folder import git_commit


PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def origin() -> dict[str, Any]:
    """Command, date, hardware, versions and commit of this measurement."""
    on_gpu = torch.cuda.is_available()
    return {
        "command": " ".join(sys.orig_argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "device_memory": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(Path(__file__).parent),
    }


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
    file: Path, settings: dict[str, Any], cases: Mapping[str, Callable[[], Any]], *, seconds: float
) -> None:
    """
    Measure the missing cases of a file, one by one, while there is time.

    Args:
        file (`Path`), settings (`dict[str, Any]`):
            As in [`begin`].
        cases (`Mapping[str, Callable]`):
            Function of each case, the slowest first: the next case is estimated to take as long as the longest so far.
        seconds (`float`):
            Time limit for all of them.
    """
    limit = Limit(seconds)
    results: dict[str, Any] = {"cases": {}, "took": {}, **begin(file, settings)}
    for name, measure in cases.items():
        if name in results["cases"]:
            continue
        if limit.is_too_near(max(results["took"].values(), default=0)):
            break
        began = time.perf_counter()
        try:
            results["cases"][name] = measure()
        except torch.OutOfMemoryError:
            results["cases"][name] = "out of memory"
        gc.collect()  # a trainer has reference cycles
        torch.cuda.empty_cache()
        results["took"][name] = round(time.perf_counter() - began, 1)
        write_json(file, results)
        print(name, results["cases"][name], flush=True)


def reset_peak_memory():
    """Start measuring the peak of allocated GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int | None:
    """Largest number of bytes allocated since [`reset_peak_memory`]; `None` without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
