"""
Runs a script with TRL's classes and with this package's, and compares all that is not the loss.

A script is a function that is called with the class of a configuration, the class of a trainer, and what it would
otherwise have loaded; it returns the trainer. Nothing else tells the two runs apart.
"""

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import USE_CPU
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer


CLASSES = {"trl": (GRPOConfig, GRPOTrainer), "opo": (OPOConfig, OPOTrainer)}

SMALL = {
    "use_cpu": USE_CPU,
    "bf16": False,
    "max_completion_length": 12,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "report_to": "none",
    "disable_tqdm": True,
}

# What GRPO's clipped loss logs: OPO does not clip. `loss`, `grad_norm` and, after the first step, `entropy` differ.
OF_THE_CLIPPED_LOSS = "clip_ratio/"

# What a rollout has logged before any loss is computed, by the beginning of its name.
OF_THE_ROLLOUT = ("reward", "frac_reward", "completions/", "num_tokens", "learning_rate", "tools/", "epoch")

# What is handed to every reward function besides the dataset's columns.
ALWAYS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
OBJECTS = {"trainer_state", "log_extra", "log_metric", "environments"}


@dataclass
class Run:
    """A script's run."""

    folder: Path  # where the script writes
    trainer: Any = None  # what it returns
    # Name and arguments of each call of a recorded reward function, with the step in which it was made.
    calls: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)

    def record(self, *rewards: Callable) -> list[Callable]:
        """The reward functions, with their names, recorded."""
        return [self._recorded(reward) for reward in rewards]

    def _recorded(self, reward: Callable) -> Callable:
        def note(named: dict[str, Any]) -> None:
            kept = {name: value if name in OBJECTS else copy.deepcopy(value) for name, value in named.items()}
            self.calls.append((reward.__name__, kept, named["trainer_state"].global_step))

        @functools.wraps(reward)
        def call(**named):
            note(named)
            return reward(**named)

        @functools.wraps(reward)
        async def call_async(**named):
            note(named)
            return await reward(**named)

        return call_async if inspect.iscoroutinefunction(reward) else call

    def given(self, name: str) -> list[dict[str, Any]]:
        """Arguments of each call of a reward function."""
        return [named for called, named, _ in self.calls if called == name]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Log entries of optimizer steps."""
        return [entry for entry in self.trainer.state.log_history if "grad_norm" in entry]

    @property
    def files(self) -> set[str]:
        found = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}
        return {re.sub(r"events\.out\..*", "events.out", name) for name in found}


def side_by_side(script: Callable, folder: Path, *arguments: Any, learns: bool = True) -> tuple[Run, Run]:
    """
    Run a script on both sides, and check that they agree on all that is not the loss.

    Args:
        learns: whether the script's rewards differ between completions, so that parameters must move.
    """
    trl, opo = (Run(folder / side / "out") for side in CLASSES)
    for made, classes in zip((trl, opo), CLASSES.values(), strict=True):
        made.folder.mkdir(parents=True)
        made.trainer = script(*classes, made, *arguments)
    assert [(name, {*named}, step) for name, named, step in trl.calls] == [
        (name, {*named}, step) for name, named, step in opo.calls
    ]
    for (name, of_trl, step), (_, of_opo, _) in zip(trl.calls, opo.calls, strict=True):
        assert of_trl.keys() >= ALWAYS
        if step == 0:  # the same policy has generated: afterwards the losses differ
            for argument in of_trl.keys() - OBJECTS:
                assert of_trl[argument] == of_opo[argument], f"{argument} of {name}"
    check_logs(trl.trainer.state.log_history, opo.trainer.state.log_history)
    assert trl.files <= opo.files
    for name in ("global_step", "max_steps", "epoch", "is_world_process_zero"):
        assert getattr(trl.trainer.state, name) == getattr(opo.trainer.state, name), name
    if learns:
        assert all(entry["grad_norm"] > 0 for made in (trl, opo) for entry in made.entries[:1])
    return trl, opo


def check_logs(of_trl: list[dict[str, Any]], of_opo: list[dict[str, Any]]) -> None:
    """
    Check that whatever reads a log of GRPO can read that of OPO: the same entries, with all their names.

    Except that GRPO logs what it generates for every evaluation dataset under the same names, without the dataset's.
    """
    assert len(of_trl) == len(of_opo)
    for one, other in zip(of_trl, of_opo, strict=True):
        dataset = {name.removesuffix("loss").removeprefix("eval_") for name in other if name.endswith("_loss")} - {""}
        one = {name if name in other else name.replace("eval_", f"eval_{''.join(dataset)}"): one[name] for name in one}
        missing = {name for name in one.keys() - other.keys() if OF_THE_CLIPPED_LOSS not in name}
        assert not missing, missing
        # TRL logs None for its own metrics, such as the mean of a reward that has scored nothing.
        assert all(isinstance(value, int | float) for name, value in other.items() if name not in one)
        for name in one:
            if one["step"] <= 1 and name.startswith(OF_THE_ROLLOUT):
                same = one[name] == other[name] or math.isclose(one[name], other[name], rel_tol=1e-6)
                assert same, (name, one[name], other[name])
