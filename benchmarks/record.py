"""What a result of these benchmarks says about where it comes from, and what a GPU has had to hold."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


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
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Commit of the checkout; `None` for a copy without its history."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def reset_peak_memory():
    """Begin to watch the peak of allocated GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int | None:
    """Largest number of bytes allocated since [`reset_peak_memory`]; `None` without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
