"""
Resuming on another number of processes, or with other micro-batches: what a checkpoint's processes hold is put
together in their order, which is that of the rollout, and divided again. Optimizer steps keep their completions.

A micro-step, which is a call of `training_step`, has `per_device_train_batch_size` completions on each process. So six
micro-steps of two processes with eight completions each are three of four such processes:

>>> two = {"processes": 2, "per_device_train_batch_size": 8}
>>> four = {"processes": 4, "per_device_train_batch_size": 8}
>>> converted(6, saved=two, current=four)
3
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
_OF_MICRO_BATCH = {"opo_skipped", "opo_source", "opo_completion", "opo_shape"}


def converted(micro_steps: int, saved: Cut, current: Cut) -> int:
    """How many micro-steps of the current cut have as many completions as some of the saved one, rounded down."""
    n_completions = micro_steps * _per_micro_step(saved)
    return n_completions // _per_micro_step(current)


def completions_of(cut: Cut) -> tuple[int, int]:
    """Completions per optimizer step and per rollout, over all processes."""
    per_micro_step = _per_micro_step(cut)
    return per_micro_step * cut["gradient_accumulation_steps"], per_micro_step * cut["steps_per_generation"]


def _per_micro_step(cut: Cut) -> int:
    """Completions per micro-step, over all processes."""
    return cut["processes"] * cut["per_device_train_batch_size"]


def fitting(saved: Cut, current: Cut) -> dict[str, int]:
    """
    The `gradient_accumulation_steps` and `steps_per_generation` with which the current processes and micro-batches
    have as many completions per optimizer step and per rollout as a checkpoint. A `ValueError` if there are none.
    """
    settings = {name: converted(saved[name], saved, current) for name in OF_STEPS}
    if completions_of({**current, **settings}) != completions_of(saved):
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
    state = dict(states[0])
    losses = torch.stack([of_process["pending_loss"] for of_process in states])
    state["pending_loss"] = losses.mean()  # as the log has the mean over processes
    state["position"] = converted(state["position"], state["settings"], current)
    n_processes = current["processes"]
    if state["replay"]:
        parts_of_rollouts = zip(*(of_process["replay"]["rollouts"] for of_process in states), strict=True)
        rollouts = [_share_of_rollout(parts, n_processes, process) for parts in parts_of_rollouts]
        state["replay"] = {**state["replay"], "rollouts": rollouts}
    if state["micro_batches"] is not None:
        steps = _remaining_steps(states)
        state["micro_batches"] = [_share_of_step(micro_batches, n_processes, process) for micro_batches in steps]
    return state


def _share_of_rollout(parts: Sequence[Batch], n_processes: int, process: int) -> Batch:
    """A process's completions of a rollout, from the parts that all processes of a checkpoint have of it."""
    rollout = concatenate(parts)
    shares = np.array_split(np.arange(len(rollout["advantages"])), n_processes)
    return take(rollout, shares[process])


def _remaining_steps(states: Sequence[Mapping[str, Any]]) -> Iterator[list[Batch]]:
    """The micro-batches of all processes of a checkpoint, for each optimizer step that is left of a pass."""
    saved = states[0]["settings"]
    calls_per_pass = saved["steps_per_generation"]
    # Calls of `training_step` in a row that serve a single optimizer step
    calls_per_step = math.gcd(saved["gradient_accumulation_steps"], calls_per_pass)
    calls_made = states[0]["position"] % calls_per_pass
    for first in range(calls_made, calls_per_pass, calls_per_step):
        micro_batches = []
        for state in states:
            for micro_batches_of_call in state["micro_batches"][first : first + calls_per_step]:
                micro_batches.extend(micro_batches_of_call)
        yield micro_batches


def _share_of_step(micro_batches: Sequence[Batch], n_processes: int, process: int) -> Batch:
    """A process's completions of an optimizer step, from the micro-batches of all processes of a checkpoint."""
    names = micro_batches[0].keys() - _OF_MICRO_BATCH  # without entries that are not of its completions
    computed = concatenate([{name: batch[name] for name in names} for batch in map(dict, micro_batches)])
    counts_of_computed = computed.get("opo_counts", computed["opo_valid"])
    # Of the completions that were left out, only this is known: whether each counts in the log.
    counts_of_left_out = [batch["opo_skipped"] for batch in micro_batches if "opo_skipped" in batch]
    counts = torch.cat([counts_of_computed, *counts_of_left_out])
    n_computed = len(counts_of_computed)
    is_filler = torch.ones_like(counts)
    # A run that leaves no completion out has no entry of fillers.
    is_filler[:n_computed] = computed.get("opo_filler", False)
    # The first completion stands in for each that was left out.
    with_stand_ins = np.zeros(len(counts), dtype=int)
    with_stand_ins[:n_computed] = np.arange(n_computed)
    rows = take(computed, with_stand_ins)
    rows |= {"opo_counts": counts, "opo_filler": is_filler, "opo_valid": rows["opo_valid"] & ~is_filler}
    # Dealt out to the processes in turn, beginning with those that are trained: so each process gets the same number
    # of these, or one fewer.
    trained_first = np.argsort(is_filler.numpy(), kind="stable")
    return take(rows, trained_first[process::n_processes])
