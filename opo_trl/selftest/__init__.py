"""
`opo-trl selftest`: whether the installed releases train what they are told, on a CPU, against float64.

[`selftest.reference`] computes rollouts and gradients from rewards and tokens, and nothing by TRL, which may have
changed both.
"""

import os
import re
import subprocess
import sys


# Variables that place a process in a launch or a job, or that configure one.
_OF_CLUSTERS = re.compile(
    r"(\w+_)?(RANK|WORLD_SIZE|LOCAL_SIZE)|(MASTER|SLURM|SBATCH|SRUN|ACCELERATE|FSDP|TORCHELASTIC|OMPI|PMI|PMIX|MV2)_\w+"
)


def environment() -> dict[str, str]:
    """
    This process's environment variables without those of a cluster or launcher, and with settings that hide GPUs, turn
    the Hub off and silence TRL's warnings of experimental parts.
    """
    elsewhere = {name: value for name, value in os.environ.items() if not _OF_CLUSTERS.fullmatch(name)}
    return elsewhere | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def run() -> int:
    """Run the test in a process of its own; returns the exit status, 1 if anything is wrong."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    process = subprocess.run(command, env=environment())
    return 0 if process.returncode == 0 else 1
