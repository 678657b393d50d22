"""Rewards as the outermost override returns them, and how many completions they fail to score."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from trl import GRPOTrainer

from ..rewards.errors import CountingReward, RewardError
from ..trl import temporarily


logger = get_logger(__name__)


@contextmanager
def recorded_rewards(trainer: GRPOTrainer) -> Iterator[list[tuple[torch.Tensor, list[list[int]]]]]:
    """
    Record the rewards over all processes, as the outermost override of `_calculate_rewards` returns them, and the
    tokens of this process's completions.
    """
    outermost = trainer._calculate_rewards
    recorded: list[tuple[torch.Tensor, list[list[int]]]] = []

    def calculate(inputs, prompts, completions, completion_ids_list, **named):
        rewards = outermost(inputs, prompts, completions, completion_ids_list, **named)
        if rewards.isinf().any():
            logger.warning("Infinite rewards count as unscored. Fix the function, or have it return None.")
            rewards = rewards.masked_fill(rewards.isinf(), torch.nan)
        recorded.append((rewards, completion_ids_list))
        return rewards

    with temporarily(trainer, _calculate_rewards=calculate):
        yield recorded


def count_failures(rewards: Sequence[Any], n_completions: int, accelerator: Accelerator) -> dict[str, int]:
    """
    Completions of a round of generation that isolated `rewards` could not score, by kind, over all processes; empty
    without such rewards. `RewardError` if these are half of them, or more.
    """
    isolated = [reward for reward in rewards if isinstance(reward, CountingReward)]
    if not isolated:
        return {}
    counts = [sum(r.timeouts for r in isolated), sum(r.errors for r in isolated), len(isolated) * n_completions]
    gathered = accelerator.gather(torch.tensor([counts], device=accelerator.device))
    timeouts, errors, n_scores = gathered.sum(dim=0).tolist()
    if 2 * (timeouts + errors) >= n_scores:
        said = f"{timeouts + errors} of {n_scores} completions could not be scored"
        raise RewardError(f"{said}: {timeouts} by running out of time, {errors} by errors. Warnings above say why.")
    return {"reward/timeouts": timeouts, "reward/errors": errors}
