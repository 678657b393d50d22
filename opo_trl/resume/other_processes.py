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

# What cuts a rollout into micro-steps.
CUT = ("processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")

# Entries that belong to a micro-batch, not to its samples.
_OF_MICRO_BATCH = {"opo_skipped", "opo_source", "opo_segment", "opo_shape"}


def moved(micro_steps: int, saved: Cut, own: Cut) -> int:
    """Micro-steps of a checkpoint's cut, in those of another cut; rounded down if they are not a whole number."""
    before, now = (cut["processes"] * cut["per_device_train_batch_size"] for cut in (saved, own))
    return micro_steps * before // now


def completions(cut: Cut) -> tuple[int, int]:
    """Completions per optimizer step and per rollout, over all processes."""
    per_micro_step = cut["processes"] * cut["per_device_train_batch_size"]
    return per_micro_step * cut["gradient_accumulation_steps"], per_micro_step * cut["steps_per_generation"]


def fitting(saved: Cut, own: Cut) -> dict[str, int]:
    """
    The `gradient_accumulation_steps` and `steps_per_generation` with which the processes and micro-batches of `own`
    have as many completions per optimizer step and per rollout as a checkpoint. A `ValueError` if there are none.
    """
    found = {name: moved(saved[name], saved, own) for name in CUT[2:]}
    if any(moved(found[name], own, saved) != saved[name] for name in found):
        step, rollout = completions(saved)
        said = f"per_device_train_batch_size={own['per_device_train_batch_size']} on {own['processes']} processes"
        said += f" does not divide the checkpoint's {step} completions per optimizer step and {rollout} per rollout"
        raise ValueError(f"{said}. Choose both such that their product divides {math.gcd(step, rollout)}.")
    return found


def divide(states: Sequence[Mapping[str, Any]], own: Cut, process: int) -> dict[str, Any]:
    """
    The state of a process, with the cut of `own`, from those of all processes of a checkpoint.

    Its `buffer` holds this process's samples of each remaining optimizer step of the pass. Samples that were left out
    of a step are gone: fillers, which are not trained, take their places ([`~rollout.planner.Planner.micro_batches`]).
    """
    found, saved = dict(states[0]), states[0]["settings"]
    found["pending_loss"] = torch.stack([state["pending_loss"] for state in states]).mean()
    found["position"] = moved(position := found["position"], saved, own)
    if found["replay"]:
        replayed = zip(*(state["replay"]["rollouts"] for state in states), strict=True)
        rollouts = [concatenate(parts) for parts in replayed]
        places = [np.array_split(np.arange(len(rows["advantages"])), own["processes"])[process] for rows in rollouts]
        found["replay"] = found["replay"] | {"rollouts": [*map(take, rollouts, places)]}
    if found["buffer"] is not None:
        calls = math.gcd(*(saved[name] for name in CUT[2:]))  # of `training_step` in a row that serve a single step
        begins = range(position % saved["steps_per_generation"], saved["steps_per_generation"], calls)
        steps = (
            [batch for state in states for call in state["buffer"][begin : begin + calls] for batch in call]
            for begin in begins
        )
        found["buffer"] = [_own_samples(step, own["processes"], process) for step in steps]
    return found


def _own_samples(micro_batches: Sequence[Batch], processes: int, process: int) -> Batch:
    """A process's samples of an optimizer step, from the micro-batches of all processes of a checkpoint."""
    names = micro_batches[0].keys() - _OF_MICRO_BATCH
    rows = concatenate([{name: batch[name] for name in names} for batch in map(dict, micro_batches)])
    skipped = [batch["opo_skipped"] for batch in micro_batches if "opo_skipped" in batch]
    counts = torch.cat([rows.get("opo_counts", rows["opo_valid"]), *skipped])
    fillers = torch.ones_like(counts)
    n_computed = len(rows["opo_valid"])
    fillers[:n_computed] = rows.get("opo_filler", False)  # there are none in a run that leaves no sample out
    rows = take(rows, np.append(np.arange(n_computed), np.zeros(len(counts) - n_computed, dtype=int)))
    rows |= {"opo_counts": counts, "opo_filler": fillers, "opo_valid": rows["opo_valid"] & ~fillers}
    trained_first = np.argsort(fillers.numpy(), kind="stable")
    return take(rows, trained_first[process::processes])  # of those that are trained as many each
