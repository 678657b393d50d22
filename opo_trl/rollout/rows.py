"""
Which optimizer step a completion serves, and how the samples of a rollout are split.

The step is a function of the seed and of the position in the run. TRL draws it from random states that depend on the
number of processes and are lost on resumption.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from ..objective import token_mean


# Entries of a rollout with a column per token: of prompts, padded on the left, and of completions, on the right.
PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
COMPLETION_COLUMNS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


def optimizer_step_of_rows(n_rows: int, n_steps: int, *, seed: int, rollout: int, passed: int = 0) -> np.ndarray:
    """
    Choose the optimizer step, in `0 … n_steps − 1`, of each sample of a rollout, over all processes: `[n_rows]`.

    Every `n_steps` consecutive samples go to different steps. Each process holds consecutive samples, so it has as
    many for each step, however many processes there are; and the completions of a prompt are spread evenly.
    `n_rows` is a multiple of `n_steps`; `rollout` is the number of the rollout in the run, `passed` that of the passes
    over it so far, both from 0.
    """
    # The steps are permuted within each block: a permutation of all samples could give a process more samples of a
    # step than its micro-batches have places for. Seeded by the rollout, the generator has no state to save, and all
    # processes draw the same steps without communication.
    blocks = np.tile(np.arange(n_steps), (n_rows // n_steps, 1))
    return np.random.default_rng((seed, rollout, passed)).permuted(blocks, axis=1).reshape(-1)


def rows_of_steps(
    rollout: Mapping[str, Any],
    *,
    steps_per_generation: int,
    gradient_accumulation_steps: int,
    seed: int,
    index: int,
    passed: int,
    process: int,
    processes: int,
) -> list[dict[str, Any]]:
    """
    Split this process's samples of a rollout by optimizer step, the same number for each.

    The samples, TRL's tensors and lists, are in the order of the prompts. Where `gradient_accumulation_steps` does not
    divide `steps_per_generation`, samples stay together in the longest runs of micro-batches that divide both. `index`
    is the number of the rollout in the run, `passed` that of the passes over it so far.
    """
    rows = split_pixel_values_by_grid(dict(rollout))
    n_local = len(rows["completion_ids"])
    # Optimizer steps of the rollout. Where they do not divide it, windows of accumulation begin at every multiple of
    # the gcd, so only runs of that length serve a single step.
    n_steps = steps_per_generation // math.gcd(steps_per_generation, gradient_accumulation_steps)
    # Drawn for the samples of all processes, so that the result does not depend on how many there are.
    step_of_row = optimizer_step_of_rows(n_local * processes, n_steps, seed=seed, rollout=index, passed=passed)
    # Every step has the same number of this process's samples, so equal slices of the sorted ones are the steps.
    # Stable: within a step, samples stay in the order of the prompts.
    order = np.argsort(step_of_row[process * n_local : (process + 1) * n_local], kind="stable")
    steps: list[Any] = split_tensor_dict(_in_order(rows, order), n_steps)
    return [unsplit_pixel_values_by_grid(step) for step in steps]


def micro_batches(rows: Mapping[str, Any], n_batches: int) -> list[dict[str, Any]]:
    """Cut the samples of an optimizer step into micro-batches of equal size, in their order."""
    split: Any = split_pixel_values_by_grid(dict(rows))
    batches: list[Any] = split_tensor_dict(split, n_batches)
    return [unsplit_pixel_values_by_grid(batch) for batch in batches]


def take_rows(rows: Mapping[str, Any], order: np.ndarray) -> dict[str, Any]:
    """Some samples of a rollout, in a given order; values that are not per sample stay."""
    return unsplit_pixel_values_by_grid(_in_order(split_pixel_values_by_grid(dict(rows)), order))


def gather_rows(rows: Mapping[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """The samples of all processes, which have the same number each, padded to the longest; lists stay."""

    def gathered(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        padded = accelerator.pad_across_processes(value, dim=1, pad_first=name in PROMPT_COLUMNS)
        # Accelerate's padding makes bools integers, but only on the processes that need any.
        return accelerator.gather(padded.to(value.dtype))

    # Sorted: each entry is a collective call, and processes may have inserted the entries in different orders.
    return {name: gathered(name, rows[name]) for name in sorted(rows)}


def _in_order(rows: Mapping[str, Any], order: np.ndarray) -> dict[str, Any]:
    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [value[i] for i in order]
        return value[torch.from_numpy(order)] if isinstance(value, torch.Tensor) and value.ndim else value

    return {name: taken(value) for name, value in rows.items()}


def completion_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Bool mask `[B, T]` of the tokens that the model wrote: no padding, no tool output, no truncated completion."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def gather_samples(
    rollout: Mapping[str, Any], logps: torch.Tensor | None, accelerator: Accelerator
) -> tuple[torch.Tensor, ...]:
    """
    Gather the inputs of a rollout's target, in complete groups, by one collective call.

    On the host and in float64: N numbers cost nothing there, and the target is the same on every device. `logps` are
    the log-probabilities of tokens under the behaviour policy, `[B, T]`; `None` counts as 0.

    Returns:
        `tuple[torch.Tensor, ...]`: advantages, number of tokens that count, log-probability of the completion, summed
        and per token, `[N]` each; rewards, `[N, number of reward functions]`.

    Raises:
        `ValueError`: the advantages are not one number per sample.
    """
    advantages = rollout["advantages"]
    if advantages.ndim != 1:
        raise ValueError(
            f"The rollout has advantages of shape {tuple(advantages.shape)}, but OPO's target is one number per "
            "completion. Return them with shape [B] from `_generate_and_score_completions`."
        )
    mask = completion_tokens(rollout)
    logps = torch.zeros_like(mask, dtype=torch.float32) if logps is None else logps
    # A rollout that an override made from scratch may have advantages but no rewards.
    rewards = rollout.get("rewards_per_func", torch.zeros_like(advantages).unsqueeze(1))
    columns = [advantages, mask.sum(dim=1), torch.where(mask, logps, 0.0).sum(dim=1), token_mean(logps, mask)]
    table = torch.cat([torch.stack([column.float() for column in columns], dim=1), rewards.float()], dim=1)
    gathered = accelerator.gather(table).cpu().double()
    return (*gathered[:, : len(columns)].T, gathered[:, len(columns) :])


def own_samples(rollout: Mapping[str, Any], column: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """Of a column of all processes' samples, `[N]`, those of this process's rollout, `[B]`; numbers in float32."""
    n_own = len(rollout["advantages"])
    own = column[n_own * accelerator.process_index :][:n_own]
    return (own if own.dtype == torch.bool else own.float()).to(rollout["advantages"].device)
