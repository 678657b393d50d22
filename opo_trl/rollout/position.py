"""
The position in a run: what a checkpoint holds of it for each process, and which run can take it up.

A resumed run is bitwise identical to an uninterrupted one. The `trainer` of these functions is a `OPOTrainer`.
"""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import has_length

from ..config import OPOConfig
from ..fields import DATA, OBJECTIVE, REWARDS, SAMPLING, deciding
from . import checkpoint
from .frozen_base import local_part


# Fields that cut a rollout, and topics of those that decide what it holds.
CUT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
CONTENT = (DATA, SAMPLING, REWARDS, OBJECTIVE)
# Fields that decide what else a checkpoint holds, in the middle of a rollout or not.
STATE = ("optim", "sync_ref_model")


# The state


def state_of(trainer: Any) -> dict[str, Any]:
    """
    What this process needs to resume exactly, besides weights, optimizer, schedule and random states: tensors, numbers
    and text, which `torch.load` reads with `weights_only=True`.
    """
    args, logs = trainer.args, trainer._logs
    rollout, position = divmod(trainer._step, args.micro_steps_per_rollout)
    replays = args.max_staleness > 0 or position > 0
    return {
        "rollout": rollout,
        "position": position,
        # Later passes are cut from the samples; this one has been cut.
        "replay": trainer._replay.state_dict() if args.num_iterations > 1 and replays else {},
        "buffer": trainer._buffered_inputs if position % args.steps_per_generation else None,
        "pending_loss": trainer._tr_loss,
        # JSON keeps floats exactly. Anything else that a reward function has logged becomes text, because
        # `torch.load` would reject it.
        "plain": json.dumps(
            {
                "settings": settings(trainer),
                "numbers": {name: getattr(trainer, name) for name in trainer._saved_numbers},
                "parts": {name: part.state_dict() for name, part in _parts(trainer).items()},
                "metrics": trainer._metrics,
                "logs": {n: logs[n] for n in logs if n != "images"} if trainer.log_completions else {},
            },
            default=_plain,
        ),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Resume from a state of [`state_of`]."""
    args, device = trainer.args, trainer.accelerator.device
    trainer._step = state["rollout"] * args.micro_steps_per_rollout + state["position"]
    trainer._buffered_inputs = send_to_device(state["buffer"], device)
    trainer._replay.load_state_dict(send_to_device(state["replay"], device))
    # The steps since the last log entry count in the next entry, but not in this call's mean loss.
    trainer._tr_loss = state["pending_loss"].to(args.device)
    trainer._total_loss_scalar = -trainer._tr_loss.item()
    plain = json.loads(state["plain"])
    for name, value in plain["numbers"].items():
        # Without the controller, the coefficient is a field, which may change at the end of a rollout.
        if name != "entropy_coef" or args.use_adaptive_entropy:
            setattr(trainer, name, value)
    for name, part in _parts(trainer).items():
        if name in plain["parts"]:
            part.load_state_dict(plain["parts"][name])
    for mode, metrics in plain["metrics"].items():
        trainer._metrics[mode].update(metrics)
    logs: Any = trainer._logs  # name → values of the latest rollout, or name → column → values
    for name, kept in plain["logs"].items():
        if isinstance(kept, dict):
            for column, values in kept.items():
                logs[name][column].extend(values)
        else:
            logs[name].extend(kept)


def _parts(trainer: Any) -> dict[str, Any]:
    parts = {"skipped": trainer._skipped, "reward_failures": trainer._reward_failures}
    return parts | ({"prompts": trainer._prompt_stream} if trainer.args.max_sampling_rounds > 1 else {})


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    return value.item() if hasattr(value, "item") else str(value)


def has_spent_budget(trainer: Any, folder: Path) -> bool:
    """Whether a checkpoint ends a run that has generated `max_completions`."""
    limit = trainer.args.max_completions
    if limit is None or checkpoint.is_foreign(folder):
        return False
    state = checkpoint.load_state(folder, trainer.accelerator.process_index)
    generated = json.loads(state["plain"])["numbers"]["completions_generated"]
    return generated >= limit and needs_rollout(trainer.args, state["position"])


def place_in_stream(trainer: Any, folder: Path) -> tuple[int, int] | None:
    """Passes over a stream before that of a checkpoint, and micro-steps of that; `None` if it does not tell."""
    if has_length(trainer.train_dataset) or checkpoint.is_foreign(folder):
        return None
    state = checkpoint.load_state(folder, trainer.accelerator.process_index)
    begun = json.loads(state["plain"])["numbers"]["_pass"]
    rollouts = state["rollout"] - begun["rollouts"]
    return begun["number"], rollouts * trainer.args.micro_steps_per_rollout + state["position"]


def needs_rollout(args: OPOConfig, micro_steps: int) -> bool:
    """Whether the optimizer step after so many micro-steps needs a new rollout: it may begin inside the last one."""
    return -micro_steps % args.micro_steps_per_rollout < args.gradient_accumulation_steps


# Which run can resume


def settings(trainer: Any) -> dict[str, Any]:
    """Settings that determine the rest of a rollout and of a checkpoint, as read from JSON."""
    args, data = trainer.args, trainer.train_dataset
    kind: Any = type(args)
    # `loss_type` is another way to set `objective`.
    content = [name for topic in CONTENT for name in deciding(kind, topic) if name != "loss_type"]
    found = {
        "processes": trainer.accelerator.num_processes,
        **{name: getattr(args, name) for name in (*CUT, *STATE, *content, "max_staleness", "seed", "use_vllm")},
        "trainer": trainer._name,
        "reward_funcs": trainer.reward_func_names,
        "tools": [getattr(tool, "__name__", type(tool).__name__) for tool in trainer.tools],
        "train_dataset.column_names": sorted(getattr(data, "column_names", None) or ()),
        "the content of `rollouts` (SHA-256)": trainer._recorded_digest,
    }
    return json.loads(json.dumps(found, default=str))


def check_resumable(trainer: Any, folder: str) -> None:
    """
    Check that a trainer's run can resume a checkpoint: inside a rollout, or with earlier rollouts that it replays,
    only if it would make and cut them in the same way. A `ValueError` names the field that differs.
    """
    if checkpoint.is_foreign(Path(folder)):
        return
    args = trainer.args
    state = checkpoint.load_state(Path(folder), trainer.accelerator.process_index)
    saved, own = json.loads(state["plain"])["settings"], settings(trainer)
    shards = ["processes"] if args.sync_ref_model and MovingReference(trainer).is_sharded else []
    checks = [([*STATE, *shards], "", "start from its weights: set the model (`model_name_or_path`) to this folder")]
    if state["position"] > 0:
        checks += [([*own], "in the middle of a rollout ", "resume from a checkpoint at the end of a rollout")]
    elif args.max_staleness and state["replay"]:
        checks += [([*own], "with earlier rollouts, made ", "set `max_staleness` to 0")]
    for name, how, instead in ((name, how, instead) for names, how, instead in checks for name in names):
        if saved.get(name) != own[name]:
            there, here = (f"{name}={each.get(name)!r:.200}" for each in (saved, own))
            said = f"{folder!r} was saved {how}with {there}, but this run has {here}"
            raise ValueError(f"{said}. Set {there}, or {instead}.")


class MovingReference:
    """A reference model that follows the policy (`sync_ref_model`): this process's shard of it, or all of it."""

    def __init__(self, trainer: Any):
        parameters = [*trainer.ref_model.parameters()]
        self.parts = [local_part(parameter) for parameter in parameters]
        self.is_sharded = trainer.is_fsdp_enabled or any(hasattr(parameter, "ds_tensor") for parameter in parameters)
        self._writes = self.is_sharded or trainer.args.should_save
        self._file = f"reference_{trainer.accelerator.process_index}.pt" if self.is_sharded else "reference.pt"

    def save(self, folder: Path) -> None:
        """Write what this process has to write into a checkpoint."""
        if self._writes:
            torch.save(self.parts, folder / self._file)

    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint."""
        for part, saved in zip(self.parts, checkpoint.read(folder / self._file), strict=True):
            part.copy_(saved)
