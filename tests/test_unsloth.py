"""
Unsloth replaces `trl.GRPOTrainer` when it is imported. Before or after our import, a message ends it; nothing trains.

`scripts/unsloth` stands in for it: the same replacements, without the GPU.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from helpers import environment, even_tokens
from invariance.launch import launch, logs

from opo_trl import OPOConfig, OPOTrainer


SCRIPTS = Path(__file__).parent / "scripts"
REPLACED = (
    "ImportError: trl.GRPOTrainer has been replaced by UnslothGRPOTrainer.UnslothGRPOTrainer, as Unsloth does when it "
    "is imported."
)

BEFORE = """
from trl.trainer import grpo_config, grpo_trainer
theirs, configuration = grpo_trainer.GRPOTrainer, grpo_config.GRPOConfig
import unsloth, trl
# Without the check: a rewritten parent; or, imported later, TRL's class with other functions.
assert trl.GRPOTrainer.compute_loss is unsloth.compute_loss
assert not issubclass(trl.GRPOTrainer, theirs)
assert grpo_trainer.disable_gradient_checkpointing is unsloth.nothing
assert trl.GRPOConfig is not configuration
assert str(trl.GRPOConfig) == str(configuration)

from importlib import import_module
for module in ("opo_trl.trainer", "opo_trl.asynchronous.trainer"):
    try:
        import_module(module)
    except ImportError as error:
        print(f"ImportError: {error}")
from opo_trl import objective
from opo_trl.rewards import accuracy_reward
"""


def test_unsloth_before_us_ends_the_import_of_a_trainer():
    command, modules = (
        [sys.executable, "-c", BEFORE],
        environment(SCRIPTS),
    )  # where the stand-in has the name `unsloth`
    done = subprocess.run(command, env=modules, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(REPLACED) == done.stdout.count("see docs/migrating.md for alternatives") == 2


def after(model: str, folder: str) -> None:
    """In a process that has imported the package."""
    sys.path.insert(0, str(SCRIPTS))

    def make() -> OPOTrainer:
        options = {"use_cpu": True, "bf16": False, "report_to": "none"}
        args = OPOConfig(folder, num_generations=2, per_device_train_batch_size=2, **options)
        return OPOTrainer(model, even_tokens, args, Dataset.from_dict({"prompt": ["1+1="] * 4}))

    assert trl.GRPOTrainer in OPOTrainer.__mro__
    trainer = make()
    importlib.import_module("unsloth")
    assert trl.GRPOTrainer not in OPOTrainer.__mro__
    for attempt in (make, trainer.train):
        with pytest.raises(ImportError) as error:
            attempt()
        assert f"ImportError: {error.value}".startswith(REPLACED)


def test_unsloth_after_us_ends_the_next_trainer_and_the_training_of_an_earlier_one(tiny_model, tmp_path):
    assert launch(after, tiny_model, str(tmp_path), folder=tmp_path) == [0], logs(tmp_path)
