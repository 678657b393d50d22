"""Each process trains on one device of its own."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from invariance.launch import launch, logs

from opo_trl import OPOConfig
from opo_trl.checks import devices


@pytest.mark.parametrize(("seen", "use_cpu"), [(0, False), (1, False), (8, False), (2, True)])
def test_processes_that_may_have_a_device_each_are_accepted(monkeypatch, seen: int, use_cpu: bool):
    """A launcher that binds a device to each process shows it only that one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    assert OPOConfig("…", use_cpu=use_cpu, bf16=False).use_cpu is use_cpu


def test_more_processes_than_devices_are_rejected(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"num_processes=8 on this machine is more than its 4 devices.*`use_cpu`"):
        OPOConfig("…", bf16=False)


def check(same: bool) -> None:
    """In each of two processes, which see one device each."""
    dist.init_process_group("gloo")
    waits = []
    dist.barrier = lambda **named: waits.append(named)
    uuid = 0 if same else dist.get_rank()
    torch.cuda.device_count, torch.cuda.get_device_properties = lambda: 1, lambda _: SimpleNamespace(uuid=uuid)
    try:
        devices.check_own(torch.device("cuda"))
    except ValueError as error:
        print(error)
        sys.exit(2)
    assert os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "true"
    PartialState(cpu=True).wait_for_everyone()
    assert waits[-1:] == [{"device_ids": [0]}]


@pytest.mark.parametrize("same", [False, True])
def test_processes_that_share_their_device_are_rejected(tmp_path: Path, same: bool):
    status = launch(check, same, config="multi_gpu", processes=2, folder=tmp_path, limit=120)
    assert (2 in status, any(status)) == (same, same)
    assert ("num_processes=2 on this machine is more than its devices" in logs(tmp_path)) == same


def test_process_that_sees_several_devices_uses_one():
    args = SimpleNamespace(n_gpu=2, model_init_kwargs=None)
    devices.use_one(args)
    assert (args._n_gpu, args.model_init_kwargs) == (1, {"device_map": {"": 0}})
    args = SimpleNamespace(n_gpu=2, model_init_kwargs={"dtype": "bfloat16", "device_map": None})
    devices.use_one(args)
    assert args.model_init_kwargs == {"dtype": "bfloat16", "device_map": None}
    args = SimpleNamespace(n_gpu=1, model_init_kwargs={"device_map": "auto"})
    devices.use_one(args)
    assert args.model_init_kwargs == {"device_map": "auto"}


def test_split_models_are_rejected():
    args = SimpleNamespace(n_gpu=2, model_init_kwargs={"device_map": "auto"})
    with pytest.raises(ValueError, match=r"'device_map': 'auto'.* over the 2 devices.*`--num_processes 2`"):
        devices.use_one(args)
    with pytest.raises(ValueError, match=r"split over the devices 0, 1.*`device_map`"):
        devices.check_whole(SimpleNamespace(hf_device_map={"model.layers.0": 0, "lm_head": 1, "rest": "cpu"}))
    devices.check_whole(SimpleNamespace(hf_device_map={"": 0}))
    devices.check_whole("a path")
