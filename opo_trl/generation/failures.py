"""Rewards as the outermost override returns them, and how many completions they fail to score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..rewards.errors import CountingReward, RewardError


logger = get_logger(__name__)


class RewardRecorder:
    """
    In place of a trainer's `_calculate_rewards`, its outermost override, remembers its latest call: the `rewards` over
    all processes that it has returned, `[N, number of functions]`, of which infinite ones count as unscored, and the
    tokens of this process's completions, `completion_ids`.
    """

    rewards: torch.Tensor
    completion_ids: list[list[int]]

    def __init__(self, calculate: Callable[..., torch.Tensor]):
        self._calculate = calculate

    def __call__(self, inputs, prompts, completions, completion_ids_list, **named):
        """
        TRL's `_calculate_rewards`: rewards over all processes, `[N, number of functions]`. They are noted, with the
        tokens of this process's completions; infinite ones become NaN, with a warning.
        """
        rewards = self._calculate(inputs, prompts, completions, completion_ids_list, **named)
        if rewards.isinf().any():
            logger.warning("Infinite rewards count as unscored. Fix the function, or have it return None.")
            rewards = rewards.masked_fill(rewards.isinf(), torch.nan)
        self.rewards = rewards
        self.completion_ids = completion_ids_list
        return rewards


@dataclass
class RewardFailures:
    """Completions that isolated rewards could not score, over all processes, since the last entry of the log."""

    counts: dict[str, int] = field(default_factory=dict)  # by kind; empty without isolated rewards

    def add(self, rewards: Sequence[Any], n_completions: int, accelerator: Accelerator) -> None:
        """
        Add the failures of a round of generation, over all processes: each isolated reward of these `rewards` has
        counted its own, of this process's `n_completions`. `RewardError` if half of the scores have failed, or more.
        """
        isolated = [reward for reward in rewards if isinstance(reward, CountingReward)]
        if not isolated:
            return
        timeouts = sum(reward.timeouts for reward in isolated)
        errors = sum(reward.errors for reward in isolated)
        counts = torch.tensor([[timeouts, errors, len(isolated) * n_completions]], device=accelerator.device)
        timeouts, errors, n_scores = accelerator.gather(counts).sum(dim=0).tolist()
        if 2 * (timeouts + errors) >= n_scores:
            raise RewardError(
                f"{timeouts + errors} of {n_scores} completions could not be scored: {timeouts} by running out of "
                f"time, {errors} by errors. Warnings above say why."
            )
        for kind, count in (("reward/timeouts", timeouts), ("reward/errors", errors)):
            self.counts[kind] = self.counts.get(kind, 0) + count

    def take(self) -> dict[str, int]:
        """The counts since the last call, by name of their metric. They begin at 0 again."""
        counts = self.counts
        self.counts = dict.fromkeys(counts, 0)
        return counts

    def state_dict(self) -> dict[str, int]:
        """Numbers, for [`~RewardFailures.load_state_dict`]."""
        return self.counts

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state of [`~RewardFailures.state_dict`]."""
        self.counts = dict(state)
