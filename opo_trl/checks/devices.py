"""The device that a process trains on, which no other process uses."""

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from .text import quoted


def check_number(*, on_cpu: bool) -> None:
    """
    Check that a machine has a device for each of its processes, before anything initializes a device.

    A process that sees a single device may have got it from its launcher, as each of the others has got another:
    [`check_own`] tells later.
    """
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.accelerator.device_count()
    if 1 < devices < processes and not on_cpu:
        raise _too_many(processes, f"{devices} devices")


def check_own(device: torch.device) -> None:
    """
    Where each process of this machine sees a single device, have accelerate use it in DDP and in barriers, and check
    that they do not share it.
    """
    if device.type != "cuda" or torch.cuda.device_count() > 1 or not dist.is_initialized():
        return
    # Otherwise accelerate would name it by the process's index on the machine.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    cast(Any, PartialState).wait_for_everyone = _wait
    # Not every launcher tells how many processes there are on the machine.
    processes, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    local = range(dist.get_rank() - rank, dist.get_rank() - rank + processes)
    if processes == 1 or local.stop > dist.get_world_size():
        return
    mine = str(getattr(torch.cuda.get_device_properties(0), "uuid", rank))
    found: list[Any] = [None] * processes
    # Over Gloo, because NCCL fails where processes share a device; among the processes of this machine only, because
    # another one may be launched otherwise. Where Gloo finds no network, NCCL tells.
    with suppress(RuntimeError):
        group = dist.new_group(local, timeout=timedelta(minutes=2), backend="gloo", use_local_synchronization=True)
        dist.all_gather_object(found, mine, group=group)
    if found.count(mine) > 1:
        raise _too_many(processes, "devices: several see the same one")


def _wait(state: PartialState) -> None:
    if state.use_distributed:
        dist.barrier(device_ids=[0])


def _too_many(processes: int, devices: str) -> ValueError:
    said = f"num_processes={processes} on this machine is more than its {devices}"
    return ValueError(f"{said}. Launch at most one process per device, or set `use_cpu` to true.")


def use_one(args: Any) -> None:
    """
    Have a process that sees several devices train on the first, where TRL would split the model over all of them, and
    check that `model_init_kwargs` does not ask for a split model, which fails in TRL's losses.
    """
    if args.n_gpu < 2:
        return
    options = {"device_map": {"": 0}, **(args.model_init_kwargs or {})}
    if options["device_map"] in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(
            f"model_init_kwargs={quoted(options)} would split the model over the {args.n_gpu} devices that this "
            "process sees, and the loss must be computed on one device. Remove `device_map`: the model is then "
            f"trained on one device, and with `--num_processes {args.n_gpu}` a copy of it on each."
        )
    args.model_init_kwargs, args._n_gpu = options, 1


def check_whole(model: Any) -> None:
    """Check that a loaded model is not split over devices."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()} - {"cpu", "disk"}
    if len(devices) > 1:
        said = f"The model is split over the devices {', '.join(sorted(devices))}, so a loss cannot be computed"
        raise ValueError(f"{said}. Load it without `device_map`.")


def check_placed(trainer: Any) -> None:
    """Check that a trainer's model is on its device, where it can generate; otherwise raise a `RuntimeError`."""
    model, device = trainer.model, trainer.accelerator.device
    if trainer.is_deepspeed_enabled:
        ready, missing = trainer.deepspeed is not None, "DeepSpeed has not taken the model over"
    elif trainer.is_fsdp_enabled:
        ready = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
        missing = "FSDP has not sharded the model"
    else:
        ready = trainer.is_model_parallel or next(model.parameters()).device.type == device.type
        missing = f"the model is not on {device}"
    if not ready:
        raise RuntimeError(
            f"Nothing can be generated yet: {missing}, which `train()` does. Call `evaluate` after `train()`, or "
            "during it: from a callback's `on_train_begin` for the accuracy before the first step."
        )
