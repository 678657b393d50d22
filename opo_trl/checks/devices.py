"""The device that a process trains on, which no other process uses."""

import os
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import PartialState


def check_own(device: torch.device) -> None:
    """Where the launcher shows each process a single device, have accelerate use that one in DDP and in barriers."""
    if device.type == "cuda" and torch.cuda.device_count() == 1 and dist.is_initialized():
        # Otherwise accelerate would name it by the process's index on the machine.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        cast(Any, PartialState).wait_for_everyone = _wait


def _wait(state: PartialState) -> None:
    if state.use_distributed:
        dist.barrier(device_ids=[0])


def use_one(args: Any) -> None:
    """Have a process that sees several devices train on the first; TRL would split the model over all of them."""
    if args.n_gpu > 1:
        args.model_init_kwargs = {"device_map": {"": 0}, **(args.model_init_kwargs or {})}
        args._n_gpu = 1
