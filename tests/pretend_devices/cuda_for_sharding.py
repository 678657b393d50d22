"""
What FSDP2 and DeepSpeed use of CUDA and NCCL besides, and the pretend device lacks. Import it where there is one.

It also compares the calls of the processes: a collective that is not the same on all of them, in kind, order, shapes
and types, is an error that names both, where NCCL would hang or mix up numbers.
"""

from types import SimpleNamespace

import fakecuda
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _create_process_group_wrapper


if "FAKENCCL" not in dist.Backend._plugins:
    fakecuda.install_collectives()

Group = dist.Backend._plugins["FAKENCCL"].creator_fn
UntypedStorage, Tensor = torch.UntypedStorage, torch.Tensor

group_init, resize = Group.__init__, UntypedStorage.resize_
all_gather, reduce_scatter = Group._allgather_base, Group._reduce_scatter_base


def init_group(group, store, rank, size, timeout):
    group_init(group, store, rank, size, timeout)
    group.gloo = _create_process_group_wrapper(group.gloo, "calls", store, rank, size, timeout)


def reduce_scatter_in_place(group, output, tensor, options):
    """The output may be a part of the input, as in ZeRO-3; `fakecuda` would write the input back over it."""
    return reduce_scatter(group, output, tensor.clone(), options)


def of_each(collective):
    def coalesced(group, outputs, tensors, options):
        return [collective(group, *pair, options) for pair in zip(outputs, tensors, strict=True)][-1]

    return coalesced


def free_or_keep(storage, size):
    """FSDP2 frees gathered weights, and takes the memory again: what is freed here stays, but holds NaN."""
    if storage.device.type != "cuda":
        return resize(storage, size)
    if size not in (0, storage.nbytes()):
        raise NotImplementedError(f"a storage of {storage.nbytes()} bytes on the pretend device cannot have {size}")
    if size == 0:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)
    return storage


Group.__init__ = init_group
Group._set_group_name = lambda group, name: setattr(group, "given_name", name)
Group.group_name = property(lambda group: group.given_name)
Group._device_types = property(
    lambda group: [torch.device(name) for name in (("cpu", "cuda") if group.takes_host else ("cuda",))]
)
Group._reduce_scatter_base = Group.reduce_scatter_single = reduce_scatter_in_place
Group.all_gather_single_coalesced = of_each(all_gather)
Group.reduce_scatter_single_coalesced = of_each(reduce_scatter_in_place)

UntypedStorage.resize_ = free_or_keep
Tensor.record_stream = lambda tensor, stream: None
torch.cuda.Stream.is_capturing = lambda stream: False
torch.accelerator.current_stream = torch.cuda.current_stream
torch.cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda message: 0, rangePop=lambda: 0)
