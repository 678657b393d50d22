"""Where tests train: on the CPU, on the GPUs that are here, or on pretend ones; and the fields that say so."""

import os
from pathlib import Path

import pytest
import yaml


# With `pytest --on-device`, the names of the GPUs or pretend ones; none on the CPU. A process sees the first, except
# where several are launched.
DEVICES = [name for name in os.environ.get("OPO_TRL_ON_DEVICE", "").split(",") if name]
USE_CPU = not DEVICES
PRETEND = "FAKE_CUDA_DEVICES" in os.environ
BACKEND = "gloo" if USE_CPU else None
ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
ONE_PROCESS = "cpu.yaml" if USE_CPU else "single_gpu.yaml"

DEVICE_FIELDS = {  # of a recipe
    "use_cpu": USE_CPU,
    "accelerate_config": str(RECIPES / "accelerate" / ONE_PROCESS),
}

SMALL = {  # fields of a short run in float32, which writes nothing but its log
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": USE_CPU,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}

# By default, continuous batching takes half of the memory.
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
}


def devices_for(processes: int) -> dict[str, str]:
    """Environment in which each process of a launch has a device, with `pytest --on-device`."""
    if USE_CPU:
        return {}
    if processes > len(DEVICES):
        pytest.skip(f"needs {processes} devices")
    return {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES[:processes])}


def several_processes(folder: Path, sharding: str) -> list[str]:
    """
    Arguments that adapt a configuration of `recipes/accelerate` to small models and the device of these tests.

    With `use_cpu`, DeepSpeed is off, and without a backend accelerate sees a single process.
    """
    shipped = RECIPES / "accelerate" / f"{sharding}.yaml"
    config = yaml.safe_load(shipped.read_text())
    config["mixed_precision"] = "no"
    path = folder / f"{sharding}.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = ["--accelerate_config", str(path)]
    if USE_CPU and sharding.startswith("zero"):
        return [*arguments, "--ddp_backend", "gloo"]
    return [*arguments, "--use_cpu", str(USE_CPU)]
