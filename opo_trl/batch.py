"""
Which optimizer step a completion serves, a function of seed and position in the run; and how samples are split.

Nothing here makes the host wait for a GPU, except where it reads the numbers of a rollout (`gather_samples`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from .config import OPOConfig
from .objective import token_mean
from .trl import KNOWN_KEYS, MULTIMODAL_KEYS


# Entries with a column per token of the prompt, padded on the left. All others are padded on the right.
PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")

# Units of float32's rounding in a sum of rewards over functions, and in the mean over a group.
ROUNDING_ERRORS = 8


def optimizer_step_of_rows(n_rows: int, n_steps: int, *, seed: int, rollout: int, passed: int = 0) -> np.ndarray:
    """
    Choose the optimizer step, in `0 … n_steps − 1`, of each sample of a rollout, over all processes: `[n_rows]`.

    Every `n_steps` consecutive samples go to different steps. Each process holds consecutive samples, so it has as
    many for each step, however many processes there are; and the completions of a prompt are spread evenly. `rollout`
    is the number of the rollout in the run, `passed` that of the passes over it so far.
    """
    # The steps are permuted within each block: a permutation of all samples could give a process more samples of a
    # step than its micro-batches have places for. Seeded by the rollout, the generator has no state to save, and all
    # processes draw the same steps without communication.
    blocks = np.tile(np.arange(n_steps), (n_rows // n_steps, 1))
    return np.random.default_rng((seed, rollout, passed)).permuted(blocks, axis=1).reshape(-1)


def rows_of_steps(
    rollout: Mapping[str, Any], args: OPOConfig, accelerator: Accelerator, *, index: int, passed: int
) -> list[dict[str, Any]]:
    """
    Split this process's samples of a rollout by optimizer step, the same number for each.

    The samples, TRL's tensors and lists, are in the order of the prompts. `index` is the number of the rollout in the
    run, `passed` that of the passes over it so far.
    """
    n_local, process = len(rollout["completion_ids"]), accelerator.process_index
    # Where steps do not divide the rollout, windows of accumulation begin at every multiple of the gcd, so only runs
    # of that length serve a single step.
    n_steps = args.steps_per_generation // math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
    # Drawn for the samples of all processes, so that the result does not depend on how many there are.
    n_rows = n_local * accelerator.num_processes
    step_of_row = optimizer_step_of_rows(n_rows, n_steps, seed=args.seed, rollout=index, passed=passed)
    # Every step has the same number of this process's samples, so equal slices of the sorted ones are the steps.
    # Stable: within a step, samples stay in the order of the prompts.
    order = np.argsort(step_of_row[process * n_local : (process + 1) * n_local], kind="stable")
    return [take_rows(rollout, of_step) for of_step in np.split(order, n_steps)]


def carried(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout of TRL without entries of a later release that cannot travel with the samples, a row for each."""
    n_samples = len(rollout["completion_ids"])
    return {
        name: value
        for name, value in rollout.items()
        if name in KNOWN_KEYS or (isinstance(value, torch.Tensor) and value.shape[:1] == (n_samples,))
    }


def take_rows(rows: Mapping[str, Any], order: np.ndarray) -> dict[str, Any]:
    """Some samples of a rollout, in a given order; values that are not per sample stay."""
    indices: dict[torch.device, torch.Tensor] = {}  # on the device: as an index, NumPy's would be copied per entry

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [value[i] for i in order]
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.device not in indices:
            indices[value.device] = to_device(torch.from_numpy(order), value.device)
        return value[indices[value.device]]

    split = split_pixel_values_by_grid(dict(rows))
    return unsplit_pixel_values_by_grid({name: taken(value) for name, value in split.items()})


def exchange_rows(rows: Mapping[str, Any], samples: np.ndarray, accelerator: Accelerator) -> dict[str, Any]:
    """
    Some of the samples of all processes, in a given order, by one collective call. The processes' rows have the same
    number of samples and tensors of the same names, types and shapes.
    """
    packed = {name: rows[name].contiguous() for name in sorted(rows) if rows[name].ndim}
    columns = [value.reshape(len(value), -1).view(torch.uint8) for value in packed.values()]
    gathered = accelerator.gather(torch.cat(columns, dim=1))
    gathered = gathered[to_device(torch.from_numpy(samples), gathered.device)]
    split = gathered.split([column.size(1) for column in columns], dim=1)
    return dict(rows) | {
        name: part.clone(memory_format=torch.contiguous_format).view(value.dtype).view(len(samples), *value.shape[1:])
        for (name, value), part in zip(packed.items(), split, strict=True)
    }


def can_exchange(rows: Mapping[str, Any]) -> bool:
    """Whether samples can be exchanged between processes: not with images, of which one may have none, or lists."""
    return not rows.keys() & {*MULTIMODAL_KEYS} and all(isinstance(value, torch.Tensor) for value in rows.values())


def resize(rows: Mapping[str, Any], *, prompt: int, completion: int) -> dict[str, Any]:
    """Samples with these numbers of columns for the tokens of prompts and completions: cut, or padded with zeros."""
    # All entries as wide as the completions are theirs, including those of a subclass. A weight per sequence has a
    # single column.
    others, full = rows.keys() - {*MULTIMODAL_KEYS, "rewards_per_func"}, rows["completion_mask"].size(1)
    wide = [name for name in others if isinstance(rows[name], torch.Tensor) and rows[name].shape[1:2] == (full,)]
    widths = dict.fromkeys(wide, completion) | dict.fromkeys(PROMPT_COLUMNS, prompt)
    return dict(rows) | {name: to_width(name, rows[name], width) for name, width in widths.items()}


def to_width(name: str, value: torch.Tensor, width: int) -> torch.Tensor:
    """An entry `[B, T, …]` of a rollout with `width` columns: cut, or padded with zeros, on its side."""
    missing, left = width - value.size(1), name in PROMPT_COLUMNS
    if missing <= 0:
        return value[:, -missing:] if left else value[:, :width]
    # `pad` counts dimensions from the last one; there may be some after the tokens'.
    return pad(value, (*(0, 0) * (value.ndim - 2), *((missing, 0) if left else (0, missing))))


def concatenate(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of several rollouts with the same entries, padded to the widest."""
    rows: dict[str, Any] = {}
    for name, value in rollouts[-1].items():
        columns = [rollout[name] for rollout in rollouts]
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            width = max(column.size(1) for column in columns)
            columns = [to_width(name, column, width) for column in columns]
        if isinstance(value, torch.Tensor) and value.ndim:
            rows[name] = torch.cat(columns)
        else:
            rows[name] = list(itertools.chain(*columns)) if isinstance(value, list) else value
    return rows


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def completion_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Bool mask `[B, T]` of the tokens that the model wrote: no padding, no tool output, no truncated completion."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def have_spread(
    values: torch.Tensor, counts: torch.Tensor, num_generations: int, rounding: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """
    Groups whose `values`, `[N]`, differ by more than `rounding`, `[N / num_generations]`, among those that count (bool
    `[N]`): bool, `[N / num_generations]`.
    """
    values, counts = values.view(-1, num_generations), counts.view(-1, num_generations)
    # Not a standard deviation near zero: its rounding errors would depend on the size of the values.
    highest = values.masked_fill(~counts, -torch.inf).amax(dim=1)
    lowest = values.masked_fill(~counts, torch.inf).amin(dim=1)
    return highest > lowest + rounding


def equal_rewards(
    rewards: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, num_generations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Samples of groups whose rewards are all equal, bool `[N]`: the weighted sums of `rewards`, `[N, number of
    functions]` with NaN for no score, of the samples that count (bool `[N]`) differ by no more than rounding.

    Besides, that rounding, `[N]`: how far such a sum, or its difference to the group's mean, may be off.
    """
    terms = rewards * weights
    largest = terms.abs().nansum(dim=1).view(-1, num_generations).amax(dim=1)
    rounding = ROUNDING_ERRORS * torch.finfo(torch.float32).eps * largest
    differ = have_spread(terms.nansum(dim=1), counts, num_generations, rounding)
    return (~differ).repeat_interleave(num_generations), rounding.repeat_interleave(num_generations)


def gather_samples(
    rollout: Mapping[str, Any], logps: torch.Tensor | None, accelerator: Accelerator
) -> tuple[torch.Tensor, ...]:
    """
    Gather the inputs of a rollout's target, in complete groups, by one collective call.

    On the host and in float64: N numbers cost nothing there, and the target is the same on every device. `logps` are
    the log-probabilities of tokens under the behaviour policy, `[B, T]`; `None` counts as 0. Returns advantages,
    number of tokens that count, log-probability of the completion, summed and per token, `[N]` each; rewards, `[N,
    number of reward functions]`.
    """
    advantages, mask = rollout["advantages"], completion_tokens(rollout)
    logps = torch.zeros_like(mask, dtype=torch.float32) if logps is None else logps
    # A rollout that an override made from scratch may have advantages but no rewards.
    rewards = rollout.get("rewards_per_func", torch.zeros_like(advantages).unsqueeze(1))
    columns = [advantages, mask.sum(dim=1), torch.where(mask, logps, 0.0).sum(dim=1), token_mean(logps, mask)]
    table = torch.cat([torch.stack([column.float() for column in columns], dim=1), rewards.float()], dim=1)
    gathered = accelerator.gather(table).cpu().double()
    return (*gathered[:, : len(columns)].T, gathered[:, len(columns) :])


def own_samples(
    rollout: Mapping[str, Any], columns: Mapping[str, torch.Tensor], accelerator: Accelerator
) -> dict[str, torch.Tensor]:
    """Of columns of all processes' samples, `[N]`, this process's, `[B]`, in float32 on the device of its rollout."""
    n_own = len(rollout["advantages"])
    own = slice(n_own * accelerator.process_index, n_own * (accelerator.process_index + 1))
    table = torch.stack([column[own].float() for column in columns.values()])
    return dict(zip(columns, to_device(table, rollout["advantages"].device), strict=True))
