"""The models of a trainer: its policy, which a name may load, and the reference of a KL term, a copy of it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

from torch.nn import Parameter
from transformers.distributed.fsdp import is_fsdp_managed_module
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path, use_adapter

from ..patching import temporarily
from . import adapter
from .frozen_base import local_part


def loading(model: Any) -> AbstractContextManager[None]:
    """
    Within this context, TRL loads a model by its name also if that is an adapter's, and takes a copy of a loaded model
    as its reference. TRL would read the files of the model's name again, without what has been merged, edited or
    trained since.
    """

    def copy_of_model(path: str, **options: Any) -> Any:
        """A frozen copy of the policy, in place of the model that TRL would load from `path`."""
        # `ds_tensor` is ZeRO-3's shard of a weight.
        is_sharded = any(hasattr(weight, "ds_tensor") for weight in model.parameters())
        if not is_sharded and not is_fsdp_managed_module(model):
            return _frozen_copy(model)
        reference = create_model_from_path(path, **options)  # in the same shards, under ZeRO-3 and FSDP2
        for target, source in zip(reference.parameters(), model.parameters(), strict=True):
            local_part(target).copy_(local_part(source))
        return reference

    loader = adapter.load if isinstance(model, str) else copy_of_model
    return temporarily(grpo_trainer, create_model_from_path=loader)


def _frozen_copy(model: Any) -> Any:
    """A copy of a model in evaluation mode, whose weights are not trained."""
    # `deepcopy` takes these copies in place of its own. They are made by `clone`, since not every device copies
    # storages; packed weights, of another class, copy themselves.
    copies: dict[int, Any] = {}
    for weight in model.parameters():
        if type(weight) is Parameter:
            copies[id(weight)] = Parameter(weight.detach().clone(), requires_grad=False)
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.clone()
    return deepcopy(model, copies).eval()


@contextmanager
def active(trainer: Any) -> Iterator[Any]:
    """
    The reference model of a TRL trainer. A policy with adapters has none of its own: then it is the policy itself,
    which within this context computes what the reference does.
    """
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    # Of an adapter that was trained before, TRL keeps the copy "ref". Without one, the reference is the base model:
    # `None` switches all adapters off.
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        yield trainer.model
