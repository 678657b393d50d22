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

# Entries that the model's forward pass takes besides the tokens: images and the like.
MULTIMODAL_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def optimizer_step_of_rows(n_rows: int, n_steps: int, *, seed: int, rollout: int) -> np.ndarray:
    """
    Choose the optimizer step of each sample of a rollout, over all processes.

    Every `n_steps` consecutive samples go to different steps. Each process holds consecutive samples, so it has as
    many for each step, however many processes there are; and the completions of a prompt are spread evenly.

    Args:
        n_rows (`int`):
            Samples of the rollout, a multiple of `n_steps`.
        n_steps (`int`):
            Optimizer steps that share the samples of the rollout.
        seed (`int`):
            Seed of the run.
        rollout (`int`):
            Number of the rollout in the run, from 0.

    Returns:
        `np.ndarray`: `[n_rows]`, in `0 … n_steps − 1`.
    """
    # The steps are permuted within each block: a permutation of all samples could give a process more samples of a
    # step than its micro-batches have places for. Seeded by the rollout, the generator has no state to save, and all
    # processes draw the same steps without communication.
    blocks = np.tile(np.arange(n_steps), (n_rows // n_steps, 1))
    return np.random.default_rng((seed, rollout)).permuted(blocks, axis=1).reshape(-1)


def rows_of_steps(
    rollout: Mapping[str, Any],
    *,
    steps_per_generation: int,
    gradient_accumulation_steps: int,
    seed: int,
    index: int,
    process: int,
    processes: int,
) -> list[dict[str, Any]]:
    """
    Split this process's samples of a rollout by optimizer step.

    Args:
        rollout (`Mapping[str, Any]`):
            Samples of this process, in the order of the prompts: TRL's tensors and lists.
        steps_per_generation (`int`):
            Number of micro-batches that the rollout will be cut into.
        gradient_accumulation_steps (`int`):
            Micro-batches per optimizer step. Where it does not divide `steps_per_generation`, samples stay together in
            the longest runs of micro-batches that divide both.
        seed (`int`), index (`int`):
            Seed of the run, and number of the rollout in it.
        process (`int`), processes (`int`):
            Index of this process, and their number.

    Returns:
        `list[dict[str, Any]]`: the same number of samples each.
    """
    rows = split_pixel_values_by_grid(dict(rollout))
    n_local = len(rows["completion_ids"])
    # TRL's shuffle, drawn only to advance the random state, so that the same seed samples as in GRPOTrainer.
    torch.randperm(n_local)
    # Optimizer steps of the rollout. Where they do not divide it, windows of accumulation begin at every multiple of
    # the gcd, so only runs of that length serve a single step.
    n_steps = steps_per_generation // math.gcd(steps_per_generation, gradient_accumulation_steps)
    # Drawn for the samples of all processes, so that the result does not depend on how many there are.
    step_of_row = optimizer_step_of_rows(n_local * processes, n_steps, seed=seed, rollout=index)
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
        return accelerator.gather(accelerator.pad_across_processes(value, dim=1, pad_first=name in PROMPT_COLUMNS))

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
