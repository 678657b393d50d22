"""
What `import unsloth` does to TRL, without the GPU that Unsloth needs, as its `models/rl.py` says (commit 015bdef):

1. A class is made from the rewritten source of `GRPOTrainer`, another one below it, and a subclass of `GRPOConfig`.
2. They take the place of TRL's at `trl`, `trl.trainer` and the module of each; the configuration also takes its name.
3. `disable_gradient_checkpointing` and `unwrap_model_for_generation` are replaced wherever a module of TRL has them,
   so TRL's own class calls the replacements, too.

What it rewrites is reduced to one method, whose loss is visibly another one.
"""

import inspect
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trl
from trl.trainer import grpo_config, grpo_trainer


PRISTINE_CONFIG = grpo_config.GRPOConfig


def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return sum(parameter.sum() for parameter in model.parameters()) * 0.0


@dataclass
class UnslothGRPOConfig(PRISTINE_CONFIG):
    vllm_sampling_params: Any | None = field(default=None, metadata={"help": "vLLM SamplingParams"})
    unsloth_num_chunks: int | None = field(default=-1, metadata={"help": "Chunks of the loss"})


def make_trainer() -> type:
    module = types.ModuleType("UnslothGRPOTrainer")
    vars(module).update({name: value for name, value in vars(grpo_trainer).items() if not name.startswith("__")})
    source = inspect.getsource(grpo_trainer.GRPOTrainer)
    exec(source.replace("class GRPOTrainer(", "class _UnslothGRPOTrainer(", 1), vars(module))
    module._UnslothGRPOTrainer.compute_loss = compute_loss
    exec("class UnslothGRPOTrainer(_UnslothGRPOTrainer):\n    pass", vars(module))
    made = module.UnslothGRPOTrainer
    rewritten = made._generate_and_score_completions

    def wrapped(self, *args, **kwargs):
        return rewritten(self, *args, **kwargs)

    made._generate_and_score_completions = wrapped
    sys.modules["UnslothGRPOTrainer"] = module
    return made


@contextmanager
def nothing(model, gradient_checkpointing_kwargs=None):
    yield


@contextmanager
def unwrapped(model, *args, **kwargs):
    yield model


def replace() -> None:
    trainer = make_trainer()
    for owner in (trl, trl.trainer, grpo_trainer):
        owner.GRPOTrainer, owner.GRPOConfig = trainer, UnslothGRPOConfig
    grpo_config.GRPOConfig = UnslothGRPOConfig
    UnslothGRPOConfig.__module__ = PRISTINE_CONFIG.__module__
    UnslothGRPOConfig.__qualname__ = UnslothGRPOConfig.__name__ = "GRPOConfig"
    for name, module in list(sys.modules.items()):
        for function, replacement in (
            ("disable_gradient_checkpointing", nothing),
            ("unwrap_model_for_generation", unwrapped),
        ):
            if name.startswith("trl.") and function in vars(module):
                setattr(module, function, replacement)


replace()
