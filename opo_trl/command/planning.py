"""
The plan of a launch that this machine cannot make, such as that for four GPUs on a laptop.

The trainer is made in one process, on the CPU, without vLLM and with weights that have a shape only, so that a folder
with configuration and tokenizer is enough. Processes and sharding are those of accelerate's configuration.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel
from trl.trainer import grpo_trainer

from ..config import OPOConfig
from ..forecast.plan import Place, training_plan
from ..generation import rollouts
from ..models import adapter
from ..models.shape import shape
from ..patching import temporarily
from ..trainer import OPOTrainer
from . import packages, train


_HERE = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false")


class _PlannedTrainer(OPOTrainer):
    """A trainer that is only asked for its plan."""

    def _move_model_to_device(self, model, device):
        """Weights without values stay where they are."""

    def _wrap_vllm(self, options):
        """There is no vLLM."""


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
    with _without_devices(processes):
        trainer = train.prepare([*words, *_HERE]).trainer
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


@contextmanager
def _without_devices(processes: int) -> Iterator[None]:
    """A context in which a trainer is made as if it were in the first of some processes, but for devices and vLLM."""

    def is_there() -> bool:
        return True

    def check_models(*models: Any, **named: Any) -> None:
        """Weights without values have no files."""

    with ExitStack() as stack:
        stack.enter_context(temporarily(train, OPOTrainer=_PlannedTrainer))
        stack.enter_context(temporarily(packages, is_vllm_available=is_there))
        stack.enter_context(temporarily(adapter, create_model_from_path=_shape_of))
        stack.enter_context(temporarily(rollouts, check_models=check_models))
        stack.enter_context(temporarily(grpo_trainer, VLLMGeneration=SimpleNamespace))
        of_launch = {"world_size": property(lambda args: processes), "main_process_first": _alone}
        for name, value in of_launch.items():
            setattr(OPOConfig, name, value)
            stack.callback(delattr, OPOConfig, name)
        yield


@contextmanager
def _alone(args: OPOConfig, **named: Any) -> Iterator[None]:
    """There is no other process to wait for."""
    yield


def _shape_of(name: str, **options: Any) -> PreTrainedModel:
    """A model whose weights have no values, in place of one that is loaded."""
    return shape(name, options)
