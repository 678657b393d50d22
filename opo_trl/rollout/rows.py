"""
A rollout on its way to the optimizer: in which order prompts are drawn, and which optimizer step a completion serves.

Both are functions of the seed and of the position in the run alone. Transformers and TRL draw them from random states
that depend on the number of processes and are lost when a run is resumed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer.utils import (
    RepeatSampler,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ..config import RolloutConfig


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


def check_enough_prompts(available: int, args: RolloutConfig) -> None:
    """
    Check that a data set fills one rollout. TRL's sampler leaves an incomplete one out, and would train for no step.

    Raises:
        `ValueError`: names how many prompts are needed.
    """
    needed = args.generation_batch_size // args.num_generations
    if available < needed:
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} with num_generations={args.num_generations} needs "
            f"{needed} prompts for one rollout, but the data set has {available}. Give at least {needed}, or set "
            "`per_device_train_batch_size`, `steps_per_generation` or `gradient_accumulation_steps` lower."
        )


class EpochSampler(RepeatSampler):
    """
    TRL's sampler, with its order, which can start in any epoch.

    TRL's own starts with the first epoch's order again when a run is resumed in a later one.

    Attributes:
        epoch (`int`): epoch of the next iteration, from 0.
    """

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


def optimizer_step_of_rows(n_rows: int, n_steps: int, *, seed: int, rollout: int) -> np.ndarray:
    """
    Choose the optimizer step of each row of a rollout, over all processes.

    Every `n_steps` consecutive rows go to different steps. Each process holds consecutive rows, so each brings
    equally many to every step, however many processes there are; and the completions of a prompt are spread evenly.

    Args:
        n_rows (`int`):
            Rows of the rollout, a multiple of `n_steps`.
        n_steps (`int`):
            Optimizer steps that share the rollout's rows.
        seed (`int`):
            Seed of the run.
        rollout (`int`):
            Number of the rollout in the run, from 0.

    Returns:
        `np.ndarray`: `[n_rows]`, in `0 … n_steps − 1`.
    """
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
    Give each optimizer step its rows of a rollout, of those that this process holds.

    Args:
        rollout (`Mapping[str, Any]`):
            Rows of this process, in the order of the prompts: TRL's tensors and lists.
        steps_per_generation (`int`):
            Number of micro-batches that the rollout will be cut into.
        gradient_accumulation_steps (`int`):
            Micro-batches per optimizer step. Where it does not divide `steps_per_generation`, rows are kept together
            in the largest runs of micro-batches that divide both.
        seed (`int`), index (`int`):
            Seed of the run, and number of the rollout in it.
        process (`int`), processes (`int`):
            Index of this process, and their number.

    Returns:
        `list[dict[str, Any]]`: equally many rows each.
    """
    rows = split_pixel_values_by_grid(dict(rollout))
    n_local = len(rows["completion_ids"])
    # TRL's shuffle. Drawn for the random state alone, so that the same seed samples what it does in GRPOTrainer.
    torch.randperm(n_local)
    n_steps = steps_per_generation // math.gcd(steps_per_generation, gradient_accumulation_steps)
    step_of_row = optimizer_step_of_rows(n_local * processes, n_steps, seed=seed, rollout=index)
    order = np.argsort(step_of_row[process * n_local : (process + 1) * n_local], kind="stable")
    steps: list[Any] = split_tensor_dict(_in_order(rows, order), n_steps)
    return [unsplit_pixel_values_by_grid(step) for step in steps]


def micro_batches(rows: Mapping[str, Any], n_batches: int) -> list[dict[str, Any]]:
    """Cut the rows of an optimizer step into micro-batches of equally many rows, in their order."""
    split: Any = split_pixel_values_by_grid(dict(rows))
    batches: list[Any] = split_tensor_dict(split, n_batches)
    return [unsplit_pixel_values_by_grid(batch) for batch in batches]


def take_rows(rows: Mapping[str, Any], order: np.ndarray) -> dict[str, Any]:
    """Some rows of a rollout, in a given order; values of the whole rollout stay."""
    return unsplit_pixel_values_by_grid(_in_order(split_pixel_values_by_grid(dict(rows)), order))


def gather_rows(rows: Mapping[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """The rows of all processes, which have equally many, padded to the longest of them all; lists stay."""

    def gathered(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return accelerator.gather(accelerator.pad_across_processes(value, dim=1, pad_first=name in PROMPT_COLUMNS))

    # In one order on all processes, however the entries came about: each is a collective call.
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
