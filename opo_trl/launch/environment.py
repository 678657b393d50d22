"""What a bug report needs; `opo-trl env` prints it."""

import io
import os
import re
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from trl.scripts.env import print_env

from .. import __version__
from .output_dir import git_commit


# Set on purpose or by a launcher, and not secret.
_SHOWN = (
    *("ACCELERATE_MIXED_PRECISION", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "WORLD_SIZE"),
)
# May contain tokens, paths or addresses: named, without values.
_NAMED = ("ACCELERATE_", "FSDP_", "HF_", "NCCL_", "TORCH_", "TRACKIO_", "TRANSFORMERS_", "TRL_", "VLLM_", "WANDB_")

# What is shown of accelerate's configuration: its other fields may contain addresses, names or paths.
_ACCELERATE = re.compile(
    r"compute_environment|distributed_type|mixed_precision|use_cpu|debug|num_\w+|machine_rank|rdzv_backend|same_network"
    r"|downcast_bf16|enable_cpu_affinity|gpu_ids|main_training_function"
)


def describe() -> str:
    """`trl env`, with this package's version and commit, and the environment variables that matter, as Markdown."""
    with redirect_stdout(io.StringIO()) as printed:
        print_env()
    facts = [line for line in printed.getvalue().splitlines() if line.startswith(("- ", "  - "))]
    for place, line in enumerate(facts):
        name = line[4:].partition(":")[0]
        if line.startswith("  - ") and not _ACCELERATE.fullmatch(name):
            facts[place] = f"  - {name}: hidden"
    memory = [f"{os.cpu_count()} CPU cores with {psutil.virtual_memory().total / 2**30:.1f} GiB"]
    for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        memory.append(f"{gpu.name} with {gpu.total_memory / 2**30:.1f} GiB")
    shown = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    named = sorted(name for name in os.environ if name.startswith(_NAMED) and name not in _SHOWN)
    return "\n".join(
        [
            f"- OPO version: {__version__}, commit {git_commit(Path(__file__).parent) or 'unknown'}",
            *facts,
            f"- memory: {', '.join(memory)}",
            f"- Math-Verify version: {version('math-verify')}",
            f"- environment variables: {', '.join(shown) or 'none'}",
            f"- environment variables set, values hidden: {', '.join(named) or 'none'}",
        ]
    )
