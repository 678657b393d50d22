"""Weights that must be restored bitwise: those of a LoRA run's frozen base."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(parameter: nn.Parameter) -> Tensor:
    """This process's part of a parameter: its shard under ZeRO-3 and FSDP2, otherwise all of it. Shares its memory."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.data
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FrozenBase:
    """
    The base weights below LoRA's adapters, kept in host memory; nothing is kept of a model without adapters.

    To pass its weights to vLLM, TRL merges the adapter into the base and takes it out again. In bfloat16 W + Δ − Δ is
    not W, and the error adds up with every synchronization: after a run, the saved adapter would sit on another base
    than the one it was trained on.
    """

    def __init__(self, model: nn.Module):
        self._kept = [
            (parameter, local_part(parameter).to("cpu", copy=True))
            for name, parameter in model.named_parameters()
            if ".base_layer." in name and not parameter.requires_grad
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the base bitwise."""
        for parameter, kept in self._kept:
            local_part(parameter).copy_(kept)
