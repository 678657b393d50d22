"""Rewards as the outermost override returns them, and how many completions they fail to score."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from trl import GRPOTrainer

from ..config import OPOConfig
from ..rewards.errors import CountingReward, RewardError
from ..trl import temporarily


logger = get_logger(__name__)

# Weight of a round of generation in the moving average of reward failures: about ten rounds count.
_FAILURE_WEIGHT = 0.1


@contextmanager
def recorded_rewards(trainer: GRPOTrainer) -> Iterator[list[tuple[torch.Tensor, list[list[int]]]]]:
    """
    Record the rewards over all processes, as the outermost override of `_calculate_rewards` returns them, and the
    tokens of this process's completions.
    """
    outermost = trainer._calculate_rewards
    recorded: list[tuple[torch.Tensor, list[list[int]]]] = []

    def calculate(inputs, prompts, completions, completion_ids_list):
        rewards = outermost(inputs, prompts, completions, completion_ids_list)
        if rewards.isinf().any():
            logger.warning("Infinite rewards count as unscored. Fix the function, or have it return None.")
            rewards = rewards.masked_fill(rewards.isinf(), torch.nan)
        recorded.append((rewards, completion_ids_list))
        return rewards

    with temporarily(trainer, _calculate_rewards=calculate):
        yield recorded


class RewardFailures:
    """Counts completions that isolated rewards fail to score, and ends a run with too many."""

    def __init__(self, args: OPOConfig, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.counts: dict[str, float] = {}  # by kind, over all processes, since they were last taken
        self.rate = 0.0  # moving average, over all processes

    def count(self, rewards: Sequence[Any], n_completions: int) -> None:
        """Count the failures of isolated `rewards` in a round of generation; `RewardError` if there are too many."""
        isolated = [reward for reward in rewards if isinstance(reward, CountingReward)]
        if not isolated:
            return
        counts = [sum(r.timeouts for r in isolated), sum(r.errors for r in isolated), len(isolated) * n_completions]
        gathered = self.accelerator.gather(torch.tensor([counts], device=self.accelerator.device))
        timeouts, errors, n_scores = gathered.sum(dim=0).tolist()
        for kind, count in (("reward/timeouts", timeouts), ("reward/errors", errors)):
            self.counts[kind] = self.counts.get(kind, 0) + count
        self.rate += _FAILURE_WEIGHT * ((timeouts + errors) / n_scores - self.rate)
        limit = self.args.max_reward_failure_rate
        if self.rate > limit:
            raise RewardError(
                f"max_reward_failure_rate={limit} is exceeded: {self.rate:.1%} of the latest completions could not be "
                f"scored; of {n_scores} in the last round, {timeouts} by running out of time and {errors} by errors. "
                "The warnings above say why."
            )

    def take(self) -> dict[str, float]:
        """Failures by kind since the last call, for the log."""
        taken, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Numbers for `load_state_dict`."""
        return {"counts": self.counts, "rate": self.rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self.counts, self.rate = dict(state["counts"]), state["rate"]
