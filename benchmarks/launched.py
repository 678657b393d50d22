"""Several processes on one machine without a GPU, by the same launchers and configurations as on GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
ACCELERATE = ROOT / "recipes" / "accelerate"


def launch(
    module: str, task: dict[str, Any], folder: str, *, sharding: str, processes: int, precision: str = "no"
) -> dict[str, Any]:
    """
    Run `python -m module TASK` in several processes, with one thread each.

    Args:
        module (`str`):
            The module to run.
        task (`dict[str, Any]`):
            Its argument, sent as JSON.
        folder (`str`):
            Folder where its main process writes `result.json`.
        sharding (`str`):
            `"none"` for a single process, `"ddp"`, `"multi_gpu"`, or the name of a file in `recipes/accelerate`.
        processes (`int`):
            Number of processes.
        precision (`str`, *optional*, defaults to `"no"`):
            Accelerate's mixed precision.

    Returns:
        `dict[str, Any]`: The content of `result.json`.

    Raises:
        `RuntimeError`: if a process failed; the message has the end of its output.
    """
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / f"{sharding}.yaml")]
    launcher += ["--num_processes", str(processes), "--mixed_precision", precision]
    if sharding in ("ddp", "multi_gpu"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    elif sharding == "none":
        launcher = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, "-m", module, json.dumps(task)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    result = Path(folder) / "result.json"
    if done.returncode or not result.is_file():
        raise RuntimeError(f"{module} with {task} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(result.read_text())


def allow_cpu(sharding: str):
    """Lift the checks that restrict FSDP2 and DeepSpeed's bfloat16 to GPUs, and keep DeepSpeed from compiling."""
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if sharding.startswith("zero"):
        import deepspeed

        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its own all-reduce; gloo has one
    if sharding == "fsdp2":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
