"""
The plan of a launch that this machine cannot make, such as that for four GPUs on a laptop.

The trainer is made in one process, on the CPU, without weights and vLLM (`command.weightless`). Processes and sharding
are those of accelerate's configuration.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ..forecast.plan import Place, training_plan
from .train import prepare


# What this machine may lack: GPUs, their number formats, and trackers.
_HERE = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--report_to", "none")


def plan_if_elsewhere(words: Sequence[str], values: Mapping[str, Any], processes: int | None) -> str | None:
    """
    The plan of a run on GPUs that this machine does not have; `None` if it has them, or the run needs none.

    Args:
        words (`Sequence[str]`):
            The command line: recipe and fields.
        values (`Mapping[str, Any]`):
            What they say, by field.
        processes (`int`, *optional*):
            Number of processes, if the command line names it.
    """
    if values["accelerate_config"] is None:
        return None
    config = read_config(values["accelerate_config"])
    processes = processes or config.get("num_processes", 1)
    if values["use_cpu"] or config.get("use_cpu") or torch.cuda.device_count() >= processes:
        return None
    autocast = values["bf16"] or values["fp16"] or config.get("mixed_precision", "no") != "no"
    place = Place(_sharding(config, processes), bool(autocast), on_gpu=True, device_bytes=None)
    trainer = prepare([*words, *_HERE], processes_elsewhere=processes).trainer
    line_of_data = trainer.plan.splitlines()[-1]
    return f"{trainer._name} training plan\n{training_plan(trainer, place)}\n{line_of_data}"


def read_config(path: str) -> dict[str, Any]:
    """A configuration of accelerate."""
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))


def _sharding(config: Mapping[str, Any], processes: int) -> str:
    """How a configuration of accelerate divides a run between processes, as `memory.Run.sharding`."""
    kind = config.get("distributed_type", "NO")
    if kind == "DEEPSPEED":
        return f"zero{config['deepspeed_config']['zero_stage']}"
    if kind == "FSDP":
        return "fsdp2"
    return "none" if processes == 1 else "ddp"
