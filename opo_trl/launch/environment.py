"""What a bug report needs to say about the machine; `opo-trl env` prints it."""

import os

import torch

from ..report.run_folder import environment


# Set on purpose or by a launcher, and no secrets.
_SHOWN = (
    "ACCELERATE_MIXED_PRECISION",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
)
# May hold tokens, paths or addresses: named, without their values.
_NAMED = ("ACCELERATE_", "FSDP_", "HF_", "NCCL_", "TORCH_", "TRACKIO_", "TRANSFORMERS_", "TRL_", "VLLM_", "WANDB_")


def describe() -> str:
    """Versions, devices and environment variables, as Markdown to paste; no value of a variable that may be secret."""
    found = environment()
    packages = found["packages"]
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    shown = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    named = sorted(name for name in os.environ if name.startswith(_NAMED) and name not in _SHOWN)
    lines = {
        "opo_trl": f"{packages.pop('opo_trl')}, commit {found['git_commit'] or 'unknown'}",
        "Python": f"{found['python']}, {found['platform']}",
        "torch": f"built for {build}",
        "devices": "; ".join(_devices()),
        "packages": ", ".join(f"{name} {number}" for name, number in packages.items() if number),
        "not installed": ", ".join(name for name, number in packages.items() if not number) or "–",
        "variables": ", ".join(shown) or "–",
        "variables set, values left out": ", ".join(named) or "–",
    }
    return "\n".join(f"- **{name}**: {text}" for name, text in lines.items())


def _devices() -> list[str]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = f"{os.cpu_count()} CPU cores with {memory / 2**30:.1f} GiB"
    return [*(f"{gpu.name} with {gpu.total_memory / 2**30:.1f} GiB" for gpu in gpus), host]
