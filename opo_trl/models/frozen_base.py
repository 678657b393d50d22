"""Weights while they are sent to vLLM: sharded as in training, and those of a LoRA run's frozen base restored."""

from contextlib import ContextDecorator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_part(parameter: nn.Parameter) -> Tensor:
    """This process's part of a parameter: its shard under ZeRO-3 and FSDP2, otherwise all of it. Shares its memory."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.data
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FrozenBase(ContextDecorator):
    """
    Leaves the base weights below LoRA's adapters as they were, bitwise, in whatever is done within this context.

    To pass its weights to vLLM, TRL merges the adapter into the base and takes it out again. In bfloat16 W + Δ − Δ is
    not W, and the error adds up with every synchronization. The first use copies the weights that a merge changes to
    host memory, once they are where training has placed them.

    Besides, FSDP2 leaves the last layers gathered after a forward pass without a backward one, as in an evaluation.
    They are sharded again: TRL tells parameters to gather by their type, and gathered ones may have another dtype.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._kept: list[tuple[nn.Parameter, Tensor]] | None = None

    def __enter__(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._kept is None:
            # By identity: an output layer with an adapter may share its weights with embeddings that have none.
            named = self._model.named_parameters(remove_duplicate=False)
            bases = {id(p): p for name, p in named if ".base_layer." in name and not p.requires_grad}
            parts = ((base, local_part(base)) for base in bases.values())
            # From pinned memory, they return several times as fast.
            self._kept = [(p, torch.empty_like(t, device="cpu", pin_memory=t.is_cuda).copy_(t)) for p, t in parts]

    @torch.no_grad()
    def __exit__(self, *error) -> None:
        for parameter, kept in self._kept or ():
            local_part(parameter).copy_(kept, non_blocking=True)
