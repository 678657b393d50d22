"""
Started by `test_device.py` in processes with pretend CUDA devices: trains OPOTrainer and GRPOTrainer, counts how often
the host waits for the device and processes gather, and resumes a run. The first process writes what it found.

    python tests/on_device.py MODEL FOLDER
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path


sys.modules["bitsandbytes"] = None  # what it needs of CUDA, a pretend device does not have

import pytest  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from helpers import even_tokens, snapshot  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from opo_trl import OPOConfig, OPOTrainer  # noqa: E402


MODEL, FOLDER = sys.argv[1], Path(sys.argv[2])
WARM, COUNTED = 2, 4  # optimizer steps
REPLAY = {"num_iterations": 2, "max_staleness": 2}
SETTINGS = {"plain": {}, "two passes": {"num_iterations": 2}, "replay": REPLAY}
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
        to = kwargs.get("device")
        return to is not None and not kwargs.get("non_blocking") and on_device(args[0]) != (to.type == "cuda")
    if operation is aten.copy_:
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return blocks and on_device(args[0]) != on_device(args[1])
    if operation in INDEXING and on_device(args[0]):
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) or not index.is_cuda for index in indices)
    return False


class Counting(TorchDispatchMode):
    """Counts, while `on`: `waits`, except those of generation, which depend on the lengths, and `gathers`."""

    def __init__(self):
        super().__init__()
        self.found, self.on, self.generates = Counter(), False, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.add("waits", waits(function.overloadpacket, args, kwargs or {}))
        return function(*args, **kwargs or {})

    def add(self, name: str, number: int = 1) -> None:
        self.found[name] += self.on and number and not (name == "waits" and self.generates)

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


def make_trainer(trainer_class: type[GRPOTrainer], folder: Path, **options) -> GRPOTrainer:
    config = OPOConfig if issubclass(trainer_class, OPOTrainer) else GRPOConfig
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "disable_tqdm": True,
        **options,
    }
    return trainer_class(
        model=MODEL,
        args=config(output_dir=str(folder), **options),
        train_dataset=Dataset.from_dict({"prompt": [f"What is {i}+{i}?" for i in range(64)]}),
        reward_funcs=even_tokens,
    )


def count(trainer_class: type[GRPOTrainer], options: dict) -> dict[str, float]:
    """Per optimizer step, waits and gathers."""
    counting = Counting()

    class Counted(trainer_class):
        def _generate_and_score_completions(self, inputs):
            counting.generates = True
            rollout = super()._generate_and_score_completions(inputs)
            counting.generates = False
            return rollout

    trainer = make_trainer(Counted, FOLDER / "counted", max_steps=WARM + COUNTED, **options)
    trainer.add_callback(FromStep(counting))
    calls = [(owner, name, "waits") for owner, name in WAITS] + [(owner, name, "gathers") for owner, name in GATHERS]
    with counting, pytest.MonkeyPatch.context() as patch:
        for owner, name, kind in calls:
            patch.setattr(owner, name, counting.counted(getattr(owner, name), kind))
        trainer.train()
    return {name: n / COUNTED for name, n in counting.found.items()}


class WithHostEntry(OPOTrainer):
    """Leaves an entry of the rollout on the host."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        return {**rollout, "difficulty": torch.arange(len(rollout["advantages"]))}


def resumed_equals_uninterrupted() -> bool:
    """With replay, resumed before a rollout that is replayed together with that of the checkpoint."""
    folder = FOLDER / "resumed"
    whole = make_trainer(
        WithHostEntry,
        folder,
        max_steps=4,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        **REPLAY,
    )
    whole.train()
    again = make_trainer(WithHostEntry, folder, max_steps=4, gradient_accumulation_steps=2, **REPLAY)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    wanted = snapshot(whole.model)
    return all(torch.equal(value, wanted[name]) for name, value in snapshot(again.model).items())


def main() -> None:
    assert torch.cuda.is_available()
    found = {setting: {"OPOTrainer": count(OPOTrainer, options)} for setting, options in SETTINGS.items()}
    for setting in ("plain", "two passes"):
        found[setting]["GRPOTrainer"] = count(GRPOTrainer, SETTINGS[setting])
    found["replay"]["GRPOTrainer"] = found["two passes"]["GRPOTrainer"]  # it has no replay
    found["resumed"] = resumed_equals_uninterrupted()
    if int(os.environ.get("RANK", "0")) == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))


main()
