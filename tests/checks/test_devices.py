"""Each process trains on one device of its own."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import PartialState
from invariance.launch import launch

from opo_trl.checks import devices


def check() -> None:
    """In each of two processes, which see one device each."""
    dist.init_process_group("gloo")
    waits = []
    dist.barrier = lambda **named: waits.append(named)
    torch.cuda.device_count = lambda: 1
    devices.check_own(torch.device("cuda"))
    assert os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "true"
    PartialState(cpu=True).wait_for_everyone()
    assert waits[-1:] == [{"device_ids": [0]}]


def test_processes_that_see_one_device_each_wait_on_it(tmp_path: Path):
    assert not any(launch(check, config="multi_gpu", processes=2, folder=tmp_path, limit=120))


def test_process_that_sees_several_devices_uses_one():
    args = SimpleNamespace(n_gpu=2, model_init_kwargs=None)
    devices.use_one(args)
    assert (args._n_gpu, args.model_init_kwargs) == (1, {"device_map": {"": 0}})
    args = SimpleNamespace(n_gpu=1, model_init_kwargs={"device_map": "auto"})
    devices.use_one(args)
    assert args.model_init_kwargs == {"device_map": "auto"}
