"""Weights while they are sent to vLLM: sharded as in training, and those of a LoRA run's frozen base restored."""

from collections.abc import Iterable
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
        self._copies_of_bases: list[tuple[nn.Parameter, Tensor]] | None = None  # of the weights that a merge changes

    def __enter__(self) -> None:
        """Shard again what FSDP2 has left gathered, and copy the base weights to the host the first time."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._copies_of_bases is None:  # the first time, when training has placed the weights where they stay
            self._copies_of_bases = [(base, _host_copy(local_part(base))) for base in self._bases()]

    def _bases(self) -> Iterable[nn.Parameter]:
        """The frozen weights below adapters, each once."""
        # By identity: an output layer with an adapter may share its weights with embeddings that have none.
        bases: dict[int, nn.Parameter] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if ".base_layer." in name and not parameter.requires_grad:
                bases[id(parameter)] = parameter
        return bases.values()

    @torch.no_grad()
    def __exit__(self, *error) -> None:
        """Write the copies back, so that the base weights are what they were, to the bit."""
        for parameter, copy in self._copies_of_bases or ():
            local_part(parameter).copy_(copy, non_blocking=True)


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory: of a GPU's tensor in pinned memory, from where it returns several times as fast."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
