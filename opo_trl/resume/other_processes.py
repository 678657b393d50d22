"""
Resuming on another number of processes, or with other micro-batches: what a checkpoint's processes hold is put
together in their order, which is that of the rollout, and divided again. Optimizer steps keep their completions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..batch import Batch, concatenate, take


Cut = Mapping[str, Any]  # values of [`CUT`], among others

# Settings that cut a rollout into micro-steps.
OF_MACHINE = ("processes", "per_device_train_batch_size")
OF_STEPS = ("gradient_accumulation_steps", "steps_per_generation")
CUT = (*OF_MACHINE, *OF_STEPS)

# Entries that belong to a micro-batch, not to its completions.
_OF_MICRO_BATCH = {"opo_skipped", "opo_source", "opo_segment", "opo_shape"}


def converted(micro_steps: int, saved: Cut, current: Cut) -> int:
    """Micro-steps of a checkpoint's cut in those of the current one, rounded down to a whole number."""
    return micro_steps * _per_micro_step(saved) // _per_micro_step(current)


def completions_of(cut: Cut) -> tuple[int, int]:
    """Completions per optimizer step and per rollout, over all processes."""
    per_micro_step = _per_micro_step(cut)
    return per_micro_step * cut["gradient_accumulation_steps"], per_micro_step * cut["steps_per_generation"]


def _per_micro_step(cut: Cut) -> int:
    return cut["processes"] * cut["per_device_train_batch_size"]


def fitting(saved: Cut, current: Cut) -> dict[str, int]:
    """
    The `gradient_accumulation_steps` and `steps_per_generation` with which the current processes and micro-batches
    have as many completions per optimizer step and per rollout as a checkpoint. A `ValueError` if there are none.
    """
    settings = {name: converted(saved[name], saved, current) for name in OF_STEPS}
    if any(converted(settings[name], current, saved) != saved[name] for name in settings):
        per_step, per_rollout = completions_of(saved)
        raise ValueError(
            f"per_device_train_batch_size={current['per_device_train_batch_size']} on {current['processes']} processes"
            f" does not divide the checkpoint's {per_step} completions per optimizer step and {per_rollout} per "
            f"rollout. Choose both such that their product divides {math.gcd(per_step, per_rollout)}."
        )
    return settings


def divide(states: Sequence[Mapping[str, Any]], current: Cut, process: int) -> dict[str, Any]:
    """
    The state of a process with the current cut, from those of all processes of a checkpoint.

    Its `micro_batches` are this process's completions of each remaining optimizer step of the pass. Completions that
    were left out of a step are gone: fillers, which are not trained, take their places
    ([`~updates.planner.Planner.micro_batches`]).
    """
    state, saved = dict(states[0]), states[0]["settings"]
    position = state["position"]
    losses = torch.stack([other["pending_loss"] for other in states])
    state["pending_loss"] = losses.mean()
    state["position"] = converted(position, saved, current)
    n_processes = current["processes"]
    if state["replay"]:
        parts_of_rollouts = zip(*(other["replay"]["rollouts"] for other in states), strict=True)
        rollouts = [_share_of_rollout(parts, n_processes, process) for parts in parts_of_rollouts]
        state["replay"] = {**state["replay"], "rollouts": rollouts}
    if state["micro_batches"] is not None:
        calls_per_pass = saved["steps_per_generation"]
        # Calls of `training_step` in a row that serve a single optimizer step
        calls_per_step = math.gcd(saved["gradient_accumulation_steps"], calls_per_pass)
        steps = []
        for first in range(position % calls_per_pass, calls_per_pass, calls_per_step):
            micro_batches = []
            for other in states:
                for call in other["micro_batches"][first : first + calls_per_step]:
                    micro_batches.extend(call)
            steps.append(_share_of_step(micro_batches, n_processes, process))
        state["micro_batches"] = steps
    return state


def _share_of_rollout(parts: Sequence[Batch], processes: int, process: int) -> Batch:
    """A process's completions of a rollout, from the parts that all processes of a checkpoint have of it."""
    rollout = concatenate(parts)
    shares = np.array_split(np.arange(len(rollout["advantages"])), processes)
    return take(rollout, shares[process])


def _share_of_step(micro_batches: Sequence[Batch], processes: int, process: int) -> Batch:
    """A process's completions of an optimizer step, from the micro-batches of all processes of a checkpoint."""
    names = micro_batches[0].keys() - _OF_MICRO_BATCH
    rows = concatenate([{name: batch[name] for name in names} for batch in map(dict, micro_batches)])
    left_out = [batch["opo_skipped"] for batch in micro_batches if "opo_skipped" in batch]
    counts = torch.cat([rows.get("opo_counts", rows["opo_valid"]), *left_out])
    fillers = torch.ones_like(counts)
    n_computed = len(rows["opo_valid"])
    fillers[:n_computed] = rows.get("opo_filler", False)  # there are none in a run that leaves no completion out
    # The first completion stands in for each that was left out.
    stand_ins = np.zeros(len(counts) - n_computed, dtype=int)
    rows = take(rows, np.append(np.arange(n_computed), stand_ins))
    rows |= {"opo_counts": counts, "opo_filler": fillers, "opo_valid": rows["opo_valid"] & ~fillers}
    trained_first = np.argsort(fillers.numpy(), kind="stable")
    return take(rows, trained_first[process::processes])  # each process gets as many that are trained
