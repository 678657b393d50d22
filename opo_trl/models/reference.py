"""The models of a trainer: its policy, which a name may load, and the reference of a KL term, a copy of it."""

from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

from torch.nn import Parameter
from transformers.distributed.fsdp import is_fsdp_managed_module
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path

from ..trl import temporarily
from . import adapter
from .frozen_base import local_part


def given(model: Any) -> AbstractContextManager[None]:
    """
    Have TRL load a model by its name also if that is an adapter's, and take a loaded model as it is for its reference.
    It would read the files of the model's name again, without what has been merged, edited or trained since.
    """

    def copied(path: str, **options: Any) -> Any:
        if not (any(hasattr(weight, "ds_tensor") for weight in model.parameters()) or is_fsdp_managed_module(model)):
            # Weights by `clone`, since not every device copies storages; packed ones copy themselves.
            weights = [weight for weight in model.parameters() if type(weight) is Parameter]
            memo: Any = {id(weight): Parameter(weight.detach().clone(), requires_grad=False) for weight in weights}
            return deepcopy(model, memo | {id(own): own.clone() for own in model.buffers()}).eval()
        copy = create_model_from_path(path, **options)  # in the same shards, under ZeRO-3 and FSDP2
        for to, weight in zip(copy.parameters(), model.parameters(), strict=True):
            local_part(to).copy_(local_part(weight))
        return copy

    loader = adapter.load if isinstance(model, str) else copied
    return temporarily(grpo_trainer, create_model_from_path=loader)
