"""
The runs behind the comparisons with the paper: recipe, settings, versions, log and summary of each.

The archive in the folder of each experiment holds them as `EXPERIMENT/METHOD/seed-N/`.
"""

import tarfile
from pathlib import Path


EXPERIMENTS = ("experiment1", "experiment2", "experiment2_equal_sampling", "experiment2_forms")


def unpack(experiment: str, folder: Path) -> Path:
    """Extracts an experiment's runs into `folder`, and returns the folder of the experiment in it."""
    archive = Path(__file__).parent / experiment / "runs.tar.gz"
    with tarfile.open(archive) as runs:
        runs.extractall(folder, filter="data")
    return folder / experiment
