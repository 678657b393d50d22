"""How often the host waits for the device and processes gather, in an optimizer step."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from device_fields import SMALL
from scripted_rollouts import even_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer


# Optimizer steps: first those that are not counted.
WARM = 2
COUNTED = 2
WAITS = [(owner, "synchronize") for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream)]
GATHERS = [(torch.distributed, name) for name in ("all_gather", "all_gather_into_tensor", "all_gather_object")]

aten = torch.ops.aten
VALUES_DECIDE_SHAPE = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive}
VALUES_DECIDE_SHAPE |= {aten.equal, aten.bincount, aten.repeat_interleave}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def on_device(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def waits(operation, args: tuple, kwargs: dict) -> bool:
    """Whether an operation makes the host wait for the device."""
    if operation is aten._local_scalar_dense or operation in VALUES_DECIDE_SHAPE:
        return on_device(args[0])
    if operation is aten._to_copy:
        target = kwargs.get("device")
        if target is None or kwargs.get("non_blocking"):
            return False
        return on_device(args[0]) != (target.type == "cuda")
    if operation is aten.copy_:
        target, source, *others = args
        non_blocking = others[0] if others else kwargs.get("non_blocking")
        return not non_blocking and on_device(target) != on_device(source)
    if operation in INDEXING and on_device(args[0]):
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) or not index.is_cuda for index in indices)
    return False


class Counting(TorchDispatchMode):
    """Counts, while `on`: `waits`, except those of generation, which depend on the lengths, and `gathers`."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.on = False
        self.generates = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if waits(function.overloadpacket, args, kwargs):
            self.add("waits")
        return function(*args, **kwargs)

    def add(self, name: str) -> None:
        in_generation = name == "waits" and self.generates
        if self.on and not in_generation:
            self.counts[name] += 1

    def counted(self, function, name: str):
        def call(*args, **kwargs):
            self.add(name)
            return function(*args, **kwargs)

        return call


class FromStep(TrainerCallback):
    def __init__(self, counting: Counting):
        self.counting = counting

    def on_step_begin(self, args, state, control, **kwargs):
        self.counting.on = state.global_step >= WARM


def count(trainer_class: type[GRPOTrainer], model: str, folder: Path, **options) -> dict[str, float]:
    """Per optimizer step, waits and gathers."""
    counting = Counting()

    class Counted(trainer_class):
        def _generate_and_score_completions(self, inputs):
            counting.generates = True
            rollout = super()._generate_and_score_completions(inputs)
            counting.generates = False
            return rollout

    settings = {
        **SMALL,
        "use_cpu": False,
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": WARM + COUNTED,
        **options,
    }
    config_class = OPOConfig if issubclass(trainer_class, OPOTrainer) else GRPOConfig
    prompts = [f"What is {i}+{i}?" for i in range(16)]
    trainer = Counted(
        model=model,
        args=config_class(**settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=even_tokens,
    )
    trainer.add_callback(FromStep(counting))
    with counting, pytest.MonkeyPatch.context() as patch:
        for kind, functions in {"waits": WAITS, "gathers": GATHERS}.items():
            for owner, name in functions:
                function = getattr(owner, name)
                patch.setattr(owner, name, counting.counted(function, kind))
        trainer.train()
    assert (counting.counts["gathers"] > 0) == torch.distributed.is_initialized()
    return {kind: counting.counts[kind] / COUNTED for kind in ("waits", "gathers")}


def assert_no_more_than_grpo(model: str, folder: Path, *, num_iterations: int, **replay: int) -> None:
    """Neither waits nor gathers; GRPOTrainer has no replay."""
    of_opo = count(OPOTrainer, model, folder, num_iterations=num_iterations, **replay)
    of_grpo = count(GRPOTrainer, model, folder, num_iterations=num_iterations)
    assert of_grpo["waits"] > 20  # the count sees something
    for kind, number in of_opo.items():
        assert number <= of_grpo[kind], (of_opo, of_grpo)
